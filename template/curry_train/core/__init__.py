"""Code that two rooms or more need; it imports torch and the standard library only."""

from .lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "lazy": ("lazy_names",),
        "measure": (
            "Flops",
            "Memory",
            "count_flops",
            "measure_memory",
            "recompute_flops",
        ),
        "parity": (
            "Parity",
            "StepRecord",
            "compare",
            "record_step",
        ),
    },
)
