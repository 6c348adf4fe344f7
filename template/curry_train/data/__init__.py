"""Floor 1: training data in a reproducible order.

The order is a pure function of a seed and a position. Modules here import nothing but core.
"""

from ..core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "dataset": ("Dataset", "Part", "Samples"),
        "layout": ("Layout", "layout_of"),
        "library_text": ("read_library_text",),
        "order": ("Order",),
        "stream": ("Stream",),
        "tokens": ("Tokens", "open_tokens"),
    },
)
