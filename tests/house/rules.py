"""The rules of the house: functions from the root of a tree to the violations in it.

Every public function of a `rules_*` module that takes `root` alone is a rule by being there, and
each message says what to do. `test_house.py` asks for planted violations of each.

    python tests/house/rules.py            # status 1 when a rule is broken
    python tests/house/rules.py --count    # how many violations each rule finds
"""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import rules_code
import rules_imports
import rules_modules
import rules_names
import rules_techniques
import rules_text
from tree import ROOT

Rule = Callable[[Path], list[str]]

RULE_MODULES = (
    rules_modules,
    rules_imports,
    rules_names,
    rules_code,
    rules_text,
    rules_techniques,
)


def _is_rule(function: Callable[..., object]) -> bool:
    signature = inspect.signature(function)
    return [*signature.parameters] == ["root"] and signature.return_annotation == list[str]


RULES: dict[str, Rule] = {
    name: function
    for module in RULE_MODULES
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__ and not name.startswith("_") and _is_rule(function)
}


def main(*options: str) -> int:
    """Print every violation, or how many there are; return the exit status."""
    num_violations = 0
    for name, rule in RULES.items():
        violations = rule(ROOT)
        num_violations += len(violations)
        if options == ("--count",):
            print(f"{len(violations):>6} {name}")
        elif violations:
            print(*violations, sep="\n")
    return 1 if num_violations else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
