"""Apply the realistic slips of a list one by one, and see which test notices each.

    PYTHONPATH=. python benchmarks/slips.py tests/slips/first.yaml --only 3 17    # `make slips`

A slip is what somebody may do in a change: an option that is no longer passed on, `any` for `all`,
state that is kept over a second call. A row has the file, the `old` and the `new` text, and the
tests near it, which run in a copy of the tree until one fails. The list is written anew with what
caught each; `nothing` stands where all of them passed.
"""

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

import yaml

from copies import copy_tree
from process_group import run_python

FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def run_tests(tests: list[str], folder: Path) -> tuple[int | None, str]:
    """Run tests in the copy until one fails; commands that they start import the copy too."""
    words = ("-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *tests)
    return run_python(folder, *words, PYTHONPATH=str(folder / "template"))


def what_catches(slip: dict[str, Any], folder: Path) -> str:
    """Return the test that fails with a slip in the copy and passes without, or `nothing`."""
    path = folder / slip["file"]
    right = path.read_text()
    if right.count(slip["old"]) != 1:
        return f"not applied: the old text stands {right.count(slip['old'])} times in the file"
    path.write_text(right.replace(slip["old"], slip["new"]))
    status, output = run_tests(slip["tests"], folder)
    path.write_text(right)
    if status == 0:
        return "nothing"
    found = FAILED.search(output)
    if found is None:
        return f"status {status}: {output[-300:]}"
    if run_tests([found[1].split("[")[0]], folder)[0] != 0:
        return f"fails without the slip too: {found[1].replace('::', ' ')}"
    return found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("list", type=Path)
    parser.add_argument("--only", type=int, nargs="*", help="rows by their number, from 1 on")
    options = parser.parse_args()
    slips = yaml.safe_load(options.list.read_text())
    with tempfile.TemporaryDirectory(prefix="slips-") as name:
        copy_tree(Path(name))
        for number, slip in enumerate(slips, start=1):
            if options.only and number not in options.only:
                continue
            slip["caught"] = what_catches(slip, Path(name))
            print(f"{number}: {slip['kind']}, {slip['file']}: {slip['caught']}", flush=True)
            text = yaml.safe_dump(slips, sort_keys=False, width=100, allow_unicode=True)
            options.list.write_text(text)
    caught = sum("::" in slip.get("caught", "") for slip in slips)
    print(f"{caught} of {len(slips)} caught")


if __name__ == "__main__":
    main()
