"""Floor 1: samples in an order that is a pure function of a seed and a position. Imports core at most."""

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
