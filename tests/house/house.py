"""The rules of the house: functions from the root of the tree to the violations in it, each saying what to do.

A public function of a house_* module is a rule by being there; tests/house/test_house.py asks for a planted violation of
each. Run: `python tests/house/house.py`, which ends with status 1 when a rule is broken.
"""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import house_imports
import house_layout
import house_skills
import house_text

Rule = Callable[[Path], list[str]]

RULES: dict[str, Rule] = {
    name: rule
    for module in (house_layout, house_imports, house_text, house_skills)
    for name, rule in inspect.getmembers(module, inspect.isfunction)
    if rule.__module__ == module.__name__ and not name.startswith("_")
}


def main() -> int:
    """Print every violation; return the exit status."""
    violations = [violation for rule in RULES.values() for violation in rule(ROOT)]
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
