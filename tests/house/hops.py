"""Count the files of the package that one call executes, and the modules that a gate loads.

Both are measured in a fresh process, so that nothing that other tests imported is counted.
`entry_calls.py` holds the calls and says what is counted. Run it for a look at the files:

    python tests/house/hops.py

Proof: `python -m pytest tests/house/test_hops.py`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tree import PACKAGE_NAME, ROOT, modules

CHILD = Path(__file__).with_name("entry_calls.py")
PLANNED_MODEL = "transformer"
GATE_MODEL = "mlp"  # the quickest; the gates load the same modules for each model
SECONDS_AT_MOST = 280
# A test replaces it by a python that has imported torch, but nothing of the package.
CHILD_PYTHON = sys.executable

# Files that may execute in each entry call, and modules that a gate may load.
MOST_FILES = {"apply_sac_and_step": 6, "save_and_resume": 16, "plan_memory": 33}
MOST_LOADED_MODULES = 45
GATE = "recompute"


def executed_files(root: Path, entry: str, *, model: str = PLANNED_MODEL) -> list[str]:
    """Return the package files that execute in an entry call."""
    return _run(root, entry, model)


def loaded_modules(root: Path, *, gate: str = GATE) -> list[str]:
    """Return the modules of the package that the command for gates loads with one gate."""
    rooms = {module.room for name, module in modules(root).items() if name != "__main__"}
    command = "validate" if "cli" in rooms else "gates"  # the name in the first edition
    options = ["--gate", gate, "--model", GATE_MODEL, "--device", "cpu"]
    return _run(root, "command", command, *options)


def over_budget(found: list[str], most: int, *, what: str) -> str | None:
    """Return the message when more was found than the budget allows."""
    if len(found) <= most:
        return None
    listed = "\n".join(f"  {name}" for name in found)
    return f"{what}: {len(found)}, and {most} is the most; merge some, or do without:\n{listed}"


def _run(root: Path, *arguments: str) -> list[str]:
    """Run the child on the package of `root` and return what it prints."""
    entry, *rest = arguments
    command = [CHILD_PYTHON, str(CHILD), entry, str(root / "template"), *rest]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=SECONDS_AT_MOST
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed in {root}:\n{done.stderr}")
    found: list[str] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print what each entry call executes and what the gate loads."""
    for entry, most in MOST_FILES.items():
        found = executed_files(ROOT, entry)
        print(f"{entry}: {len(found)} files execute, at most {most}", *found, sep="\n  ")
    found = loaded_modules(ROOT)
    print(f"gate {GATE} loads {len(found)} modules of {PACKAGE_NAME}", *found, sep="\n  ")


if __name__ == "__main__":
    main()
