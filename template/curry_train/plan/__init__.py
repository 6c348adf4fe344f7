"""Bytes and seconds of a step, from shapes; the solver and the planner."""

from ..core import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "device": ("DeviceProfile", "find_profile", "measure_profile", "profile_of"),
        "estimate": ("Sketch",),
        # Writes the snapshots whose owners the module names.
        "owners": ("memory_record",),
        "parallel": ("Sharding",),
        "planner": ("Infeasible", "Planner", "plan"),
        "profiler": (
            "LayerMemory",
            "MemoryProfiler",
            "Peak",
            "Point",
            "ProfileReport",
            "SelectiveCheckpointer",
            "Timeline",
        ),
        "saved": ("Plan", "PlanMismatch"),
        "timeline": ("measure_timeline",),
    },
)
