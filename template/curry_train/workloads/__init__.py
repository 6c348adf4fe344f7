"""The user's model as the tools use it."""

from ..core import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__, {"models": ("load_workload",), "workload": ("Case", "Workload", "WorkloadError")}
)
