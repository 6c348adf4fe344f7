"""A run's record of its spike recoveries: skipped samples and lowered learning rates.

    recoveries = Recoveries(store.files)
    recoveries.attempt(step=181, within=64)       # which attempt a rollback now would be
    recoveries.factor(150)                        # factor on the learning rate of this step

A recovery is recorded after its rollback. A run that is killed before that trains through the spike
once more and detects it again.
Proof: `python -m pytest tests/test_spike_recovery.py`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from .errors import RunError
from .files import Files, LocalFiles

NAME = "recoveries.json"


@dataclass(frozen=True)
class Recovery:
    """One rollback after a spike."""

    # The step after which the spike was found.
    spike: int
    # The step of the state that was loaded.
    back_to: int
    # The first data position that is skipped from now on.
    start: int
    # The data position after the last skipped one.
    stop: int
    # 1, or more where the spike came back.
    attempt: int
    # The factor on the learning rate until step `slower_until`.
    learning_rate: float = 1.0
    slower_until: int = 0


class Recoveries:
    """The recoveries of a run, read from its folder.

    Every rank calls `add`; only the first rank does so with `write=True`.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self.done: list[Recovery] = _read(files)

    def attempt(self, step: int, *, within: int) -> int:
        """Return the number of the attempt that a rollback at `step` would be.

        Earlier recoveries count as long as each spike was at most `within` steps from the next.
        """
        number = 1
        for recovery in reversed(self.done):
            if abs(step - recovery.spike) > within:
                break
            number += 1
            step = recovery.spike
        return number

    def factor(self, done: int) -> float:
        """Return the factor on the learning rate of the step that follows `done` steps."""
        product = 1.0
        for recovery in self.done:
            if recovery.back_to <= done < recovery.slower_until:
                product *= recovery.learning_rate
        return product

    def add(self, recovery: Recovery, *, write: bool) -> None:
        self.done.append(recovery)
        if write:
            _write(self._files, self.done)


def _read(files: Files) -> list[Recovery]:
    if files.kind(NAME) != "file":
        return []
    try:
        return [_checked(entry) for entry in json.loads(files.read(NAME))]
    except (ValueError, TypeError, AttributeError) as error:
        raise RunError(
            f"{files.location(NAME)} lists the samples that are skipped, and can't be read "
            f"({error}): restore it, or remove it to train on those samples again"
        ) from error


def _checked(entry: Any) -> Recovery:
    for field in fields(Recovery):
        if field.type not in (int, "int") or field.name not in entry:
            continue
        value = entry[field.name]
        if type(value) is not int or value < 0:
            raise ValueError(f"{field.name} is {value!r}, not a whole number from 0")
    return Recovery(**entry)


def _write(files: Files, done: Sequence[Recovery]) -> None:
    if files.kind(NAME) is not None and not isinstance(files, LocalFiles):
        files.remove_file(NAME)
    files.write(NAME, json.dumps([asdict(recovery) for recovery in done], indent=1).encode())
    files.sync_folder("")
