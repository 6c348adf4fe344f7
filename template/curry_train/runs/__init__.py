"""State that survives: checkpoints, resume, journal, loss spikes."""

from ..core import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "attach": ("saving",),
        "background": ("BackgroundSaver",),
        "fingerprints": ("record_run",),
        "history": ("History", "read_history"),
        "journal": ("Journal", "JournalError"),
        "layout": ("SavedCheckpoint",),
        "policy": ("SavingPolicy",),
        "policy_config": ("PolicyConfig", "Retention", "SpikeConfig"),
        "ranks": (
            "DamagedCheckpoint",
            "HostileCheckpoint",
            "LockedRun",
            "RunError",
            "SaveError",
            "StateMismatch",
            "StepExists",
        ),
        "resume": ("Resumed", "load_chosen"),
        "spike": ("Spike", "SpikeNotRecovered", "SpikeWatchdog"),
        "state": ("TrainingState",),
        "store": ("SavedRun", "Store"),
        "trainers": ("commit_checkpoints", "newest_whole", "record_training"),
    },
)
