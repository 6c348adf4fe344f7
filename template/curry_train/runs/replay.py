"""Repeat a step of a run that was kept in a box, and record what its operations make.

    with Replay(box, until=180, root=folder, record=record, end=end).running():
        run_the_script()
    examine(read_fingerprints(record))

The script runs again as it is. Its call of `saving` loads the state of the box, gives the batch and
the generators to the bad step, and ends the script after it. Nothing is saved.

Compiled code has no operations, so torch runs it uncompiled in the steps that are recorded, where
it draws and rounds otherwise. Without a record it runs compiled.

Proof: `python -m pytest tests/runs/test_box.py tests/cli/test_runs_replay.py`.
"""

import contextlib
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn
from unittest import mock

import torch

from ..core.blocks import tensors_in
from ..core.digest import digest
from ..core.generators import same_state
from .box import BoxFacts, digest_of, read_facts, read_rank
from .fingerprints import Observation, Range, Record, Recorder
from .layout import RESUMABLE_KINDS
from .policy import with_infinite_sum
from .random_state import restore_random_state, take_random_state
from .spike import RECOVERIES_FILE_NAME
from .state import TrainingState
from .values import Facts

# Options of `saving` in a replay.
NOTHING_SAVED = {"rollback_every": None, "recovery_every": None, "best_k": 0}
Key = tuple[Any, ...]


class Replay:
    """Stands for the boxes of a run in the process that repeats a step.

    The steps `until` and the one before it are recorded, if a folder is given for that. `end` gets
    what was found.
    """

    current: ClassVar["Replay | None"] = None
    # The loaded state of the training that is repeated.
    state: TrainingState

    def __init__(
        self,
        box: str,
        *,
        until: int,
        root: Path,
        record: str | None,
        end: Callable[[Facts], NoReturn],
    ) -> None:
        self.facts: BoxFacts = read_facts(box)
        self.root = root
        self._content = read_rank(box, int(os.environ.get("RANK", "0")))
        self._until = until
        self._end = end
        self._begun = 0
        self._is_recorded = record is not None
        self._recorder = Recorder(Path(record or root), in_replay=True)
        self._recording = contextlib.ExitStack()
        self.found: Facts = {
            "steps": {},
            "notes": [],
            "not finite": None,
            "compiled": False,
        }
        for name in (*RESUMABLE_KINDS, RECOVERIES_FILE_NAME):
            if (own := Path(box, name)).exists():
                (root / name).symlink_to(own.absolute())

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        compiled = torch.compile

        def noticed(*args: Any, **options: Any) -> Any:
            self.found["compiled"] = True
            return compiled(*args, **options)

        with (
            mock.patch.object(Replay, "current", self),
            mock.patch.object(torch, "compile", noticed),
        ):
            yield

    def begin(self) -> None:
        """Begin a step: restore its generators, and record it if it is asked for."""
        step = self.state.step + 1
        if step == self._begun:
            return
        self._begun = step
        if step == self.facts.step:
            self._restore()
        if self._is_recorded and step >= self._until - 1:
            if not self._recorder.path.exists():
                self._recording.enter_context(self._recorder.running({}))
            self._recorder.begin(step, self.state.model)

    def _restore(self) -> None:
        saved = self._content["generators"]
        generators = self.state.generators
        if saved is not None:
            others = [
                name
                for name, now in take_random_state(generators).items()
                if name in saved and not same_state(now, saved[name])
            ]
            if others:
                self.found["notes"].append(
                    f"generators in another state before the step: {', '.join(others)}"
                )
            restore_random_state(saved, generators)

    def hand_out(self, batch: Any) -> Any:
        """Return the batch that the step had in the run."""
        self.begin()
        if self._begun == self.facts.step and self._content["batches"]:
            kept = self._content["batches"].pop(0)
            own, other = ([digest(it) for it in tensors_in(one)] for one in (kept, batch))
            if own != other:
                self.found["notes"].append(
                    "the script's own batch is another one than the box's: seed what makes the data"
                )
            batch = kept
        if self._recorder.is_on:
            self._recorder.note_batch(batch)
        return batch

    def stepped(self, loss: float) -> None:
        """Note the state after a step; end after the last one."""
        self._note(self.state.step, loss)

    def keep(self, step: int, reason: str, *, found_at: int) -> None:
        """End at a step that can't be made, because it is not finite."""
        if found_at > self.state.step:
            self._until = step
            self._note(step, math.nan)

    def _note(self, step: int, loss: float) -> None:
        self._recorder.is_on = False
        self.found["steps"][str(step)] = [loss.hex(), digest_of(self.state)]
        parameters = dict(self.state.model.named_parameters())
        if with_infinite_sum(parameters) and self.found["not finite"] is None:
            self.found["not finite"] = step
        if step >= self._until:
            self._recording.close()
            self._end(self.found)


# What was recorded.


def examine(record: Record) -> Facts:
    """Return the operations of the last step, and what is the first to be not finite or has grown.

    What makes NaN or infinity in the step before, too, does so by design, as a mask.
    """
    last = record[-1].step
    bad, good = ([one for one in record if one.step == step] for step in (last, last - 1))
    sources = _find_sources(bad)
    by_design = _find_sources(good).keys()
    norms = [_read_last_norms(one) for one in (good, bad)]
    return {
        "operations": [(_select_shown(one), one.digests) for one in bad if one.kind == "operation"],
        "origin": next(
            # Without a good step an infinite argument is taken for that of a mask.
            (it for key, it in sources.items() if key not in by_design and (good or key[-1])),
            None,
        ),
        "growth": growth(good, bad) if good else None,
        "gradient": math.hypot(*norms[1].values()),
        "gradient before": math.hypot(*norms[0].values()) if good else None,
    }


def _select_shown(one: Observation) -> Facts:
    """Return the names by which an operation is shown."""
    within = one.within
    module = (
        _describe_module(within[0]) or "the model itself" if within else "no module of the model"
    )
    return {"phase": one.phase, "module": module, "name": one.name, "line": one.line}


def _describe_module(path: str) -> str:
    return path.removeprefix("model").removeprefix(".")


def _find_sources(step: Record) -> dict[Key, Facts]:
    """Return what makes NaN or infinity of finite values, in order, by a key for its place.

    The last entry of a key is the number of the call, or 0 for an infinite argument, because a good
    step may have fewer calls of a mask.
    """
    found: dict[Key, Facts] = {}
    counts = Counter[Key]()
    for place, one in enumerate(step):
        ranges = one.ranges.items()
        bad = {name: ends for name, ends in ranges if not all(map(math.isfinite, ends))}
        if one.kind == "batch" and one.path == "box":
            for name, ends in bad.items():
                source = {"phase": "data", "name": f"{name} of the batch", "result": ends}
                found["data", name] = source | {"place": place}
        elif one.kind == "operation":
            source = _select_shown(one)
            key = tuple(source.values())
            counts[key] += 1
            if makes_not_finite(one.given, list(one.ranges.values())):
                source |= {"place": place, "inputs": one.given, "result": next(iter(bad.values()))}
                fills = {math.inf, -math.inf}.intersection(one.values.values())
                found.setdefault((*key, 0 if fills else counts[key]), source)
    return found


def makes_not_finite(before: Sequence[Range], after: Sequence[Range]) -> bool:
    """Return whether an operation has made NaN or infinity of finite values, or NaN of infinity."""
    if all(map(math.isfinite, itertools.chain(*after))):
        return False
    if all(map(math.isfinite, itertools.chain(*before))):
        return True
    has_nan = [any(math.isnan(low) for low, _ in ranges) for ranges in (before, after)]
    return has_nan == [False, True]


def _read_last_norms(step: Record) -> dict[str, float]:
    return next((one.norms for one in reversed(step) if one.kind == "gradients"), {})


def _read_sizes(step: Record, kind: str) -> dict[str, float]:
    """Return the largest absolute input or output of each module, by the kind of observation."""
    found: dict[str, float] = {}
    for one in step:
        if one.kind == kind and one.phase == "forward":
            path = one.path
            found.setdefault(path, 0.0)
            for name, ends in one.ranges.items():
                if not name.startswith("buffer "):
                    found[path] = max(found[path], *map(abs, ends))
    return found


def _compute_ratios(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    return {name: now[name] / one if one else 1.0 for name, one in before.items() if name in now}


def growth(good: Record, bad: Record) -> Facts:
    """Name the module whose outputs have grown most against its inputs, and the largest gradient.

    Modules that hold this one grow as it does, so the innermost of those is named that have at
    least half of the growth, in powers of ten.
    """
    inputs = _compute_ratios(_read_sizes(good, "enter"), _read_sizes(bad, "enter"))
    sizes = _read_sizes(good, "exit"), _read_sizes(bad, "exit")
    gains = {name: one / (inputs.get(name) or 1.0) for name, one in _compute_ratios(*sizes).items()}
    least = math.sqrt(max(gains.values(), default=1.0))
    grown = [name for name, gain in gains.items() if gain >= least]
    inner = [name for name in grown if not any(one.startswith(f"{name}.") for one in grown)]
    named = max(inner, key=lambda name: gains[name], default="")
    gradients = _compute_ratios(_read_last_norms(good), _read_last_norms(bad))
    largest = max(gradients, key=lambda name: gradients[name], default="")
    return {
        "module": _describe_module(named),
        "gain": gains.get(named, 1.0),
        "sizes": [one.get(named, 0.0) for one in sizes],
        "batch": next(iter(inputs.values()), 1.0),
        "parameter": _describe_module(largest),
        "gradient": gradients.get(largest, 1.0),
    }
