"""Bytes and seconds of a step, from shapes; the solver and the planner."""

from ..core import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "device": (
            "DeviceProfile",
            "find_profile",
            "measure_profile",
            "profile_of",
        ),
        "estimate": ("Sketch",),
        "parallel": ("Sharding",),
        "planner": (
            "Infeasible",
            "Planner",
            "plan",
        ),
        "profiler": (
            "LayerMemory",
            "MemoryProfiler",
            "Peak",
            "Point",
            "ProfileReport",
            "SelectiveCheckpointer",
            "Timeline",
            "memory_record",
        ),
        "saved": (
            "Plan",
            "PlanMismatch",
        ),
        "timeline": ("measure_timeline",),
    },
)
