"""Every way to use less memory that this project has, by name; what is registered here appears in every command.

A technique registers in a module `plan/<technique>_strategies.py` of its own, with a tuple `FOUND`, so that a project
that holds only some techniques has the strategies of those. Proof: `python -m pytest tests/test_recompute_contract.py`.
"""

import importlib
import pkgutil
from pathlib import Path

from .strategy import Sample, Strategy

__all__ = ["STRATEGIES", "Sample", "Strategy"]


def _discover() -> dict[str, Strategy]:
    names = [found.name for found in pkgutil.iter_modules([str(Path(__file__).parent)])]
    modules = [
        importlib.import_module(f".{name}", __package__) for name in sorted(names) if name.endswith("_strategies")
    ]
    return {strategy.name: strategy for module in modules for strategy in module.FOUND}


STRATEGIES = _discover()
