"""Registry of strategies: every way to use less memory that this project has, by name.

Every command lists the strategies in this registry. A module `plan/*_strategies.py` registers its
own in a tuple `FOUND`, so a project with only some techniques has only their strategies.

Proof: `python -m pytest tests/test_recompute_contract.py`.
"""

import importlib
import pkgutil
from pathlib import Path

from .strategy import Sample, Strategy

__all__ = ["STRATEGIES", "Sample", "Strategy"]


FIRST = "recompute_strategies"  # none and full, the references for all others


def _discover() -> dict[str, Strategy]:
    """Import the strategy modules of this package and collect their strategies."""
    found = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    names = sorted(
        (name for name in found if name.endswith("_strategies")),
        key=lambda name: (name != FIRST, name),
    )
    modules = [importlib.import_module(f".{name}", __package__) for name in names]
    return {strategy.name: strategy for module in modules for strategy in module.FOUND}


STRATEGIES = _discover()
