"""Floor 2: who owns the memory of a training step, and what to do about it. Imports core and primitives at most."""

from ..core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "profiler": ("MemoryProfiler",),
        "report": ("LayerMemory", "Peak", "Point", "ProfileReport", "Timeline"),
        "timeline": ("measure_timeline",),
    },
    technique_of={"profiler": "recompute", "report": "recompute", "timeline": "recompute"},
)
