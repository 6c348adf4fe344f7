"""Every way to use less memory that this project has, by name; what is registered here appears in every command.

A module `plan/*_strategies.py` registers with a tuple `FOUND`, so that a project that holds only some techniques has
the strategies of those. Proof: `python -m pytest tests/test_recompute_contract.py`.
"""

import importlib
import pkgutil
from pathlib import Path

from .strategy import Sample, Strategy

__all__ = ["STRATEGIES", "Sample", "Strategy"]


FIRST = "recompute_strategies"  # nothing, and whole blocks: what the others are read against


def _discover() -> dict[str, Strategy]:
    found = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    names = sorted(
        (name for name in found if name.endswith("_strategies")),
        key=lambda name: (name != FIRST, name),
    )
    modules = [importlib.import_module(f".{name}", __package__) for name in names]
    return {strategy.name: strategy for module in modules for strategy in module.FOUND}


STRATEGIES = _discover()
