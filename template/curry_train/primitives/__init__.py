"""Floor 1: one file per technique, each usable on its own. Imports core at most."""

from ..core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "grad_accum": ("GradientAccumulation", "NonFiniteWindow", "Window", "WindowResult", "train_window"),
    },
)
