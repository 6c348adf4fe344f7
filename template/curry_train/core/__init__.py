"""Shared measurements and data types; imports only torch and the standard library."""

from .lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "lazy": ("MissingTechnique", "lazy_names"),
        "measure": (
            "Flops",
            "Memory",
            "StepTime",
            "count_flops",
            "measure_memory",
            "recompute_flops",
            "time_step",
        ),
        "parity": ("Parity", "StepRecord", "compare", "record_step"),
        "verdict": ("Gate", "Verdict"),
        "load": ("load_workload",),
        "workload": ("Case", "Workload", "WorkloadError"),
    },
)
