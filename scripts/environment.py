"""Check what a script needs before an import fails with a traceback.

Each script declares its requirements in its PEP 723 block and calls `require` first:

    import environment
    environment.require(__file__)

Standard library only, and no syntax newer than Python 3.8: it runs where requirements are missing.
Proof: `python -m pytest tests/cli/test_environment.py`.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).resolve().parent.parent / "template"
BLOCK = re.compile(r"^# /// script$\n(?P<content>(?:^#(?: .*)?$\n)+?)^# ///$", re.MULTILINE)
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(?P<specifiers>.*)")
SPECIFIER = re.compile(r"(?P<operator>>=|<|!=)\s*(?P<version>\d+(?:\.\d+)*)(?P<wildcard>\.\*)?")


def require(script: str | Path) -> None:
    """Make template/ importable, or exit with status 2 and the command that installs the rest.

    template/ goes before the folder of the scripts, where curry_train.py has the package's name.
    """
    script = Path(script)
    declared = declaration(script.read_text(encoding="utf-8"), name=script.name)
    problem = wrong_python(declared["requires-python"]) or missing(declared["dependencies"])
    if problem:
        sys.stderr.write(f"{script.name} needs {problem}\n")
        raise SystemExit(2)
    sys.path[:] = [str(TEMPLATE), *(entry for entry in sys.path if entry != str(TEMPLATE))]


def declaration(text: str, *, name: str) -> dict[str, Any]:
    """Read the PEP 723 block of a script's text: `requires-python` and `dependencies`."""
    found = BLOCK.search(text)
    if found is None:
        raise ValueError(
            f"{name} has no PEP 723 block: open it with '# /// script', its requirements, "
            "and '# ///'"
        )
    content = "".join(line[2:] or "\n" for line in found["content"].splitlines(keepends=True))
    # Read by hand: tomllib came with Python 3.11, and an older Python must be reported too.
    python = re.search(r'^requires-python\s*=\s*"([^"]*)"', content, re.MULTILINE)
    dependencies = re.search(r"^dependencies\s*=\s*\[(.*?)\]", content, re.MULTILINE | re.DOTALL)
    if python is None or dependencies is None:
        raise ValueError(
            f"the PEP 723 block of {name} must hold requires-python and dependencies: "
            "add what is missing"
        )
    return {"requires-python": python[1], "dependencies": re.findall(r'"([^"]*)"', dependencies[1])}


def wrong_python(specifiers: str) -> str | None:
    """Return which Python is needed if the running one does not fit."""
    running = ".".join(map(str, sys.version_info[:3]))
    if satisfies(running, specifiers):
        return None
    return f"Python {specifiers}, and {sys.executable} is {running}: run it with a Python that fits"


def missing(requirements: list[str]) -> str | None:
    """Return the absent or wrong distributions, with the command that installs them."""
    names = []
    wanted = []
    for requirement in requirements:
        parts = REQUIREMENT.fullmatch(requirement)
        if parts is None:
            raise ValueError(
                f"cannot read the requirement {requirement!r}: write it as 'name>=1.2'"
            )
        try:
            version = metadata.version(parts["name"])
        except metadata.PackageNotFoundError:
            names.append(parts["name"])
            wanted.append(requirement)
            continue
        if not satisfies(version, parts["specifiers"]):
            names.append(f"{parts['name']}{parts['specifiers']} (found {version})")
            wanted.append(requirement)
    if not wanted:
        return None
    return (
        f"{', '.join(names)}: pip install {' '.join(repr(requirement) for requirement in wanted)}"
    )


def satisfies(version: str, specifiers: str) -> bool:
    """Return whether a version meets `>=`, `<` and `!=`; suffixes do not count."""
    release = _numbers(re.split(r"[^\d.]", version)[0].rstrip("."))
    for specifier in filter(None, (part.strip() for part in specifiers.split(","))):
        parts = SPECIFIER.fullmatch(specifier)
        if parts is None or (parts["wildcard"] and parts["operator"] != "!="):
            raise ValueError(
                f"cannot read the specifier {specifier!r}: use >=1.2, <2, !=1.4.1 or !=1.4.*"
            )
        bound = _numbers(parts["version"])
        length = len(bound) if parts["wildcard"] else max(len(release), len(bound))
        here, there = _padded(release, length), _padded(bound, length)
        if not {">=": here >= there, "<": here < there, "!=": here != there}[parts["operator"]]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))


def _padded(release: tuple[int, ...], length: int) -> tuple[int, ...]:
    return (release + (0,) * length)[:length]
