"""Memory plans: which code owns the bytes of a training step, and how to fit a budget.

Layer 2 of the package: imports from `core` and `primitives` only.
"""

from ..core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "device_profile": ("DeviceProfile", "find_profile", "measure_profile", "profile_of"),
        "estimate": ("Sketch",),
        "planner": ("Infeasible", "Planner", "plan"),
        "profiler": ("MemoryProfiler",),
        "report": ("LayerMemory", "Peak", "Point", "ProfileReport", "Timeline"),
        "saved_plan": ("Plan", "PlanMismatch"),
        "selective": ("SelectiveCheckpointer",),
        "sharding": ("Sharding",),
        "timeline": ("measure_timeline",),
    },
    technique_of={
        "device_profile": "memory-plan",
        "estimate": "memory-plan",
        "planner": "memory-plan",
        "profiler": "recompute",
        "report": "recompute",
        "saved_plan": "memory-plan",
        "selective": "recompute",
        "sharding": "memory-plan",
        "timeline": "recompute",
    },
)
