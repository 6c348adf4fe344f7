"""Floor 2: state that survives. Writes, verifies and loads a run's checkpoints. Imports core and primitives at most."""

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
            *(
                "background",
                "errors",
                "files",
                "names",
                "object_files",
                "saved_run",
                "snapshot",
                "state",
                "store",
            ),
            *("diff", "journal", "journal_history", "journal_lines", "journal_reading"),
            *("attach", "disk_estimate", "policy", "policy_config", "resume"),
        ),
        "checkpoint-policy",
    )
    | dict.fromkeys(("recoveries", "spike", "spike_config", "spike_recovery"), "loss-spike"),
)
