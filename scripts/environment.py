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

TEMPLATE = Path(__file__).resolve().parent.parent / "template"
BLOCK = re.compile(r"# /// script\n(?:#.*\n)+?# ///\n")
# A name and a lower bound, which is all that pyproject.toml asks for; Python has no name.
REQUIREMENT = re.compile(r'"([\w.-]*)(?:>=)?([^"]*)"')


def require(script: str | Path) -> None:
    """Make template/ importable, or exit with status 2 and the command that installs the rest.

    template/ goes before the folder of the scripts, where curry_train.py has the package's name.
    """
    script = Path(script)
    block = BLOCK.match(script.read_text(encoding="utf-8"))
    if block is None:
        raise ValueError(
            f"{script.name} has no PEP 723 block: open it with '# /// script', its requirements, "
            "and '# ///'"
        )
    # Read by hand: tomllib came with Python 3.11, and an older Python must be reported too.
    (_, python), *requirements = REQUIREMENT.findall(block[0])
    problem = wrong_python(python) or missing(requirements)
    if problem:
        sys.stderr.write(f"{script.name} needs {problem}\n")
        raise SystemExit(2)
    sys.path[:] = [str(TEMPLATE), *(entry for entry in sys.path if entry != str(TEMPLATE))]


def wrong_python(least: str) -> str | None:
    """Return which Python is needed if the running one is older."""
    running = ".".join(map(str, sys.version_info[:3]))
    if _numbers(running) >= _numbers(least):
        return None
    return f"Python >={least}, and {sys.executable} is {running}: run it with a Python that fits"


def missing(requirements: list[tuple[str, str]]) -> str | None:
    """Return the absent or older distributions, with the command that installs them."""
    names = []
    wanted = []
    for name, least in requirements:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            names.append(name)
        else:
            # Without a suffix, such as that of torch's CUDA.
            if _numbers(re.split(r"[^\d.]", version)[0].rstrip(".")) >= _numbers(least):
                continue
            names.append(f"{name}>={least} (found {version})")
        wanted.append(f"'{name}>={least}'")
    return f"{', '.join(names)}: pip install {' '.join(wanted)}" if wanted else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))
