"""Errors of saving and loading; every message names the problem, the place and the remedy.

Proof: `python -m pytest tests/test_store.py`.
"""

PARTLY = "begin a new run with what matches: load_chosen(FOLDER, state, strict=False)"


class RunError(RuntimeError):
    """Base class of the errors about a run's folder."""


class SaveError(RunError):
    """A save was not committed; the checkpoints committed before it are intact."""


class StepExists(SaveError):
    """A valid checkpoint of this step exists already, and is never overwritten."""


class LockedRun(RunError):
    """Another process is writing to this run."""


class DamagedCheckpoint(RunError):
    """The files on the disk differ from what was saved."""


class HostileCheckpoint(DamagedCheckpoint):
    """Loading this checkpoint would run code, or read files outside of it."""


class StateMismatch(ValueError):
    """The checkpoint is intact but belongs to another model, optimizer or layout of ranks."""
