"""Play an agent from a script: apply a recorded solution of an eval case, or do nothing.

    python -I benchmarks/evals_scripted.py reference grad-accum-uneven-lengths

Solutions are `tests/evals/solutions/<case>.yaml`; an agent under test does not get that folder.
Proof: `python -m pytest tests/evals/test_evals.py`.
"""

import sys
from pathlib import Path
from typing import Any

import yaml

SOLUTIONS = Path(__file__).resolve().parents[1] / "tests/evals/solutions"
IDLE = "idle"
NOTES = "notes"


def solutions(case: str) -> dict[str, dict[str, Any]]:
    """Return the solutions of a case by name: `reference`, and each that begins with `wrong-`."""
    return {name: one for name, one in _read(case).items() if name != NOTES}


def notes(case: str) -> dict[str, Any]:
    """Return the notes of a hard case: the commands that solve it, and what happened without."""
    return _read(case)[NOTES]


def _read(case: str) -> dict[str, dict[str, Any]]:
    return yaml.safe_load((SOLUTIONS / f"{case}.yaml").read_text())


def apply(solution: dict[str, Any], folder: Path) -> None:
    """Change the files of a folder as a solution says; each text to replace stands there once."""
    for name, changes in solution.get("edits", {}).items():
        text = (folder / name).read_text()
        for change in changes:
            found = text.count(change["old"])
            if found != 1:
                raise ValueError(f"{name} has {found} times {change['old']!r}: name one place")
            text = text.replace(change["old"], change["new"])
        (folder / name).write_text(text)
    for name, text in solution.get("files", {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def main() -> int:
    """Work in the current folder as the named agent does."""
    agent, case = sys.argv[1:3]
    if agent != IDLE:
        apply(solutions(case)[agent], Path.cwd())
    print(f"{agent}: done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
