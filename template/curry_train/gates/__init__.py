"""The claims of each technique as gates, one file for each technique."""

from ..core import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "verdict": (
            "Gate",
            "Verdict",
            "discover",
        ),
    },
)
