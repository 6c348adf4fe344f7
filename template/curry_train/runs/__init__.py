"""Checkpoints and journals: write, verify and load the saved state of a run.

Floor 2 of the package: imports core and primitives at most.
"""

from ..core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "attach": ("saving",),
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
        "diff": ("difference",),
        "disk_estimate": ("estimate_disk",),
        "files": ("Files", "LocalFiles"),
        "journal": ("Journal",),
        "journal_history": ("History", "read_history"),
        "journal_lines": ("JournalError", "NewerJournal"),
        "journal_reading": ("JournalReading",),
        "names": ("Saved",),
        "object_files": ("ObjectFiles",),
        "policy": ("SavingPolicy",),
        "policy_config": ("PolicyConfig", "Retention"),
        "recoveries": ("Recoveries",),
        "resume": ("Resumed", "load_chosen"),
        "saved_run": ("SavedRun",),
        "snapshot": ("LoadReport", "Snapshot"),
        "spike": ("Spike", "SpikeWatchdog"),
        "spike_config": ("SpikeConfig",),
        "spike_recovery": ("SpikeNotRecovered", "recover"),
        "state": ("TrainingState",),
        "store": ("Store",),
    },
    technique_of=dict.fromkeys(
        (
            "attach",
            "background",
            "diff",
            "disk_estimate",
            "errors",
            "files",
            "journal",
            "journal_history",
            "journal_lines",
            "journal_reading",
            "names",
            "object_files",
            "policy",
            "policy_config",
            "resume",
            "saved_run",
            "snapshot",
            "state",
            "store",
        ),
        "checkpoint-policy",
    )
    | dict.fromkeys(("recoveries", "spike", "spike_config", "spike_recovery"), "loss-spike"),
)
