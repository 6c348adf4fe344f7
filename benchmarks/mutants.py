"""Count the small changes of a technique's modules that its gates and tests catch.

    make mutants ARGS=sac
    make mutants ARGS='grad-accum --function windows'

mutmut makes the mutants and runs the tests that reach each one, in forks of a server that has
imported them. It works in a copy of the checkout, whose mutants can be read with `mutmut show NAME`
in the folder that is printed. The tests are those named after the technique or one of its modules,
and the files that a module names as its proof; those in `tests/gates` run the gates. All tests that
reach a mutant would take minutes for each, so only what survives these meets all tests of its room:
mutmut does not see which tests reach it in a process of their own, as those of two ranks do, or
in compiled code.
Two seconds a mutant on a core. A second run with the same folder goes on where the first stopped.
"""

import argparse
import collections
import re
import shutil
import sys
from pathlib import Path

from copies import ROOT, copy_tree
from process_group import run_python

# The modules of each technique in which mutants are made.
TECHNIQUES = {
    "grad-accum": ["primitives/grad_accum.py"],
    "sac": ["primitives/sac.py"],
    "regions": ["primitives/regions.py"],
    "recompute": ["primitives/recompute.py", "primitives/rerun.py"],
    "offload": ["primitives/offload.py"],
    "chunked-loss": ["primitives/chunked_loss.py", "primitives/cross_entropy.py"],
    "snn-timesteps": ["primitives/snn_timesteps.py", "primitives/rerun.py"],
    "grad-flow": ["primitives/grad_flow.py", "primitives/grad_flow_probe.py"],
    "loss-spike": ["runs/spike.py"],
    "checkpoint-policy": ["runs/retention.py", "runs/random_state.py", "runs/lock.py"],
    "bench": ["bench/steps.py"],
}
# Tests of whole rooms, where a mutant that has survived the nearer ones may be seen.
ROOMS = {
    "primitives": ["tests/primitives", "tests/peers"],
    "runs": ["tests/runs", "tests/trainer"],
    "bench": ["tests/bench"],
}
# Tests of a room take up to two minutes; with a changed lock some wait without end.
MOST_ROOM_SECONDS = 300
# The copy has no project to begin with. The compiler does not trace the function by which mutmut
# chooses a mutant, and modules with all mutants have more lines than a copy may have.
NO_PROJECT = "not test_project"
DESELECTED = f"(bench or not compile) and not closures and {NO_PROJECT}"
COPIED = [
    "benchmarks",
    "conftest.py",
    "evidence",
    "README.md",
    "scripts",
    "skills",
    "template",
    "tests",
]
CONFIGURATION = """
[tool.mutmut]
source_paths = ["curry_train"]
only_mutate = {modules}
also_copy = {copied}
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = ["-k", "{deselected}"]
process_isolation = "forkserver"
"""


def tests_of(technique: str, modules: list[str]) -> list[str]:
    """List the tests named after a technique or one of its modules, and those of their proofs."""
    names = {technique.replace("-", "_"), *(Path(module).stem for module in modules)}
    paths = {
        path.relative_to(ROOT).as_posix()
        for name in names
        for folder in ("tests/*", "template/tests")
        for start in ("test_", "test_*_")
        for path in ROOT.glob(f"{folder}/{start}{name}*.py")
    }
    for module in modules:
        text = (ROOT / "template/curry_train" / module).read_text()
        paths |= set(re.findall(r"tests/\w+/\w+[.]py", text.split('"""')[1]))
    return sorted(paths)


def copy_checkout(folder: Path, modules: list[str], tests: list[str]) -> None:
    """Copy what the tests need, with the package on top, where mutmut finds it by its name."""
    copy_tree(folder)
    shutil.move(folder / "template" / "curry_train", folder)
    text = (ROOT / "pyproject.toml").read_text()
    # mutmut looks at one process.
    text = re.sub(r'"--numprocesses=\d+",', "", text)
    configuration = CONFIGURATION.format(
        modules=[f"curry_train/{module}" for module in modules],
        copied=COPIED,
        tests=tests,
        deselected=DESELECTED,
    )
    (folder / "pyproject.toml").write_text(text + configuration)


def room_fails(folder: Path, name: str, *, mutant: str = "") -> bool:
    """Run the tests of the room of a mutant's module until one fails, or hangs, with it.

    The mutant stands in the module itself, where compiled code and other processes find it too.
    """
    package, room, module, _ = name.split(".")
    path = folder / package / room / f"{module}.py"
    text = path.read_text()
    if mutant:
        run_python(folder, "-m", "mutmut", "apply", mutant)
    words = ("-m", "pytest", "-x", "-k", NO_PROJECT, *ROOMS[room])
    status, _ = run_python(folder, *words, seconds=MOST_ROOM_SECONDS, PYTHONPATH=str(folder))
    path.write_text(text)
    return status != 0


def main() -> int:
    """Run mutants of a technique, and print what survives; status 1 if none ran."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("technique", choices=TECHNIQUES)
    parser.add_argument("--function", help="mutate this function alone")
    options = parser.parse_args()
    technique = options.technique
    folder = ROOT / ".venv" / "mutants" / technique
    if not folder.exists():
        modules = TECHNIQUES[technique]
        copy_checkout(folder, modules, tests_of(technique, modules))
    chosen = [f"*{options.function}__mutmut_*"] if options.function else []
    _, output = run_python(folder, "-m", "mutmut", "run", *chosen)
    _, listed = run_python(folder, "-m", "mutmut", "results", "--all", "true")
    # Killed, survived, timeout or the like, by the name of the mutant.
    found = dict(re.findall(r"^\s+(\S+__mutmut_\d+): (.+)$", listed, re.MULTILINE))
    counts = collections.Counter(found.values())
    run = counts.total() - counts["not checked"]
    seen = ("killed", "timeout", "segfault", "not checked")
    left = sorted(name for name, fate in found.items() if fate not in seen)
    if left and room_fails(folder, left[0]):
        sys.exit(f"tests of the room of {technique} fail without a mutant: see {folder}")
    survived = [name for name in left if not room_fails(folder, name, mutant=name)]
    if not run:
        print(output[-2000:], file=sys.stderr)
    for name in survived:
        print(f"survived: {name}")
    print(f"{technique}: {run - len(survived)} of {run} mutants are caught")
    print(f"{counts['not checked']} mutants did not run")
    print(f"show one: cd {folder} && {sys.executable} -m mutmut show NAME")
    return not run


if __name__ == "__main__":
    sys.exit(main())
