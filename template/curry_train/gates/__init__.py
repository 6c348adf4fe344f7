"""Checks of the user's model, loop and implementation, one file for each technique."""

from ..core import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__, {"loop": ("preflight",), "verdict": ("Gate", "Verdict", "discover")}
)
