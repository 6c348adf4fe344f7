"""Gates, one module per technique; `discover` lists the gates of the installed techniques."""

import importlib
import pkgutil
from typing import TYPE_CHECKING

from ..core.lazy import lazy_names

if TYPE_CHECKING:
    from ..core.verdict import Gate


def discover() -> tuple["Gate", ...]:
    """List every gate in this package, in the order of the files."""
    modules = [
        importlib.import_module(f"{__name__}.{found.name}")
        for found in pkgutil.iter_modules(__path__)
    ]
    return tuple(gate for module in modules for gate in module.GATES)


__getattr__, __dir__, __all__ = lazy_names(__name__, {"grad_accum": ()})
