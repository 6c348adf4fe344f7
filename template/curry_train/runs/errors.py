"""What can go wrong with saved state, each error saying what, where and what to do.

Proof: `python -m pytest tests/test_store.py`.
"""

PARTLY = "begin a new run with what matches: load_chosen(FOLDER, state, strict=False)"


class RunError(RuntimeError):
    """Anything about a run's folder."""


class SaveError(RunError):
    """A save was not committed; what was committed before is whole."""


class StepExists(SaveError):
    """A valid checkpoint of this step is there, and nothing is written into an existing one."""


class LockedRun(RunError):
    """Another process writes into this run."""


class DamagedCheckpoint(RunError):
    """What is on the disk is not what was saved."""


class HostileCheckpoint(DamagedCheckpoint):
    """Loading would run code, or read outside of the checkpoint."""


class StateMismatch(ValueError):
    """The checkpoint is whole, and of another model, optimizer or configuration of ranks."""
