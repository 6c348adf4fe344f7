"""What a run learned from its spikes, in its folder: which samples it no longer takes, and for how long it goes slower.

    recoveries = Recoveries(store.files)
    recoveries.attempt(step=181, within=64)       # the number of the attempt that a rollback now would be
    recoveries.factor(150)                        # of the learning rate in this step

It is written once the rollback is through: a run that is killed before replays the spike, and finds it again.
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
    """A rollback from the step `spike` to `back_to`. Positions from `start` up to `stop` are skipped from then on;
    until step `slower_until` the learning rate is `learning_rate` of itself."""

    spike: int
    back_to: int
    start: int
    stop: int
    attempt: int
    learning_rate: float = 1.0
    slower_until: int = 0


class Recoveries:
    """Read when made; `add` is for the first rank alone to write, and for all to know."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.done: list[Recovery] = _read(files)

    def attempt(self, step: int, *, within: int) -> int:
        """1, and more where the spikes before came each within so many steps of the next."""
        number = 1
        for recovery in reversed(self.done):
            if abs(step - recovery.spike) > within:
                break
            number, step = number + 1, recovery.spike
        return number

    def factor(self, done: int) -> float:
        """On the learning rate of the step after so many."""
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
        return [_checked(one) for one in json.loads(files.read(NAME))]
    except (ValueError, TypeError, AttributeError) as error:
        raise RunError(
            f"{files.location(NAME)} says which samples are skipped, and can't be read ({error}): put it back, or "
            "remove it, and the run takes them again"
        ) from error


def _checked(one: Any) -> Recovery:
    whole = [each.name for each in fields(Recovery) if each.type in (int, "int")]
    if wrong := [
        name for name in whole if name in one and (type(one[name]) is not int or one[name] < 0)
    ]:
        raise ValueError(f"{wrong[0]} is {one[wrong[0]]!r}")
    return Recovery(**one)


def _write(files: Files, done: Sequence[Recovery]) -> None:
    if files.kind(NAME) is not None and not isinstance(files, LocalFiles):
        files.remove_file(NAME)
    files.write(NAME, json.dumps([asdict(one) for one in done], indent=1).encode())
    files.sync_folder("")
