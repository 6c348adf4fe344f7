"""Floor 2: state that survives. Writes, verifies and loads a run's checkpoints. Imports core and primitives at most."""

from ..core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "background": ("BackgroundSaver",),
        "errors": (
            "DamagedCheckpoint",
            "HostileCheckpoint",
            "LockedRun",
            "RunError",
            "SaveError",
            "StateMismatch",
            "StepExists",
        ),
        "files": ("Files", "LocalFiles"),
        "names": ("Saved",),
        "object_files": ("ObjectFiles",),
        "saved_run": ("SavedRun",),
        "snapshot": ("LoadReport", "Snapshot"),
        "state": ("TrainingState",),
        "store": ("Store",),
    },
    technique_of=dict.fromkeys(
        ("background", "errors", "files", "names", "object_files", "saved_run", "snapshot", "state", "store"),
        "checkpoint-policy",
    ),
)
