"""Collect and restore the whole state of a training: model, optimizer, schedule, counters.

`snapshot` returns it for the store, and `begin_load` restores it. By default, a missing or extra
key, or another shape or dtype, is an error before anything is changed.

Proof: `python -m pytest tests/runs/test_state.py`.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .format import MODEL_PREFIX, Contents, Loading, LoadReport, Snapshot, TensorFacts
from .optimizer_state import (
    FrozenBase,
    MakeTensor,
    OptimizerState,
    ReadState,
    bare_names,
    parameter_names,
    require_base,
    same_memory,
)
from .random_state import (
    check_random_state,
    restore_random_state,
    restore_threads,
    seed_new_rank,
    take_random_state,
)
from .ranks import PARTIAL_LOAD_ADVICE, DamagedCheckpoint, Ranks, StateMismatch
from .values import (
    CollectedTensors,
    Place,
    Stored,
    decode,
    elements_of,
    encode,
    is_expanded,
    is_plain,
    name_component,
    references,
)


def no_schedule_forgotten(optimizer: Any, scheduler: Any, extra: Mapping[str, Any]) -> None:
    """Raise if the optimizer has a learning rate scheduler that would not be saved.

    A scheduler leaves `initial_lr` in the optimizer's groups.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    scheduled = any("initial_lr" in group for one in optimizers for group in one.param_groups)
    saved_as_extra = any(isinstance(value, LRScheduler) for value in extra.values())
    if scheduled and scheduler is None and not saved_as_extra:
        raise ValueError(
            "the optimizer has a learning rate scheduler that saving() was not given, and that "
            "would start over at each resume: call saving(model, optimizer, scheduler, ...), or "
            "pass a list of schedulers"
        )


# Training state: model, optimizer, schedule, scaler, generators, position and settings.

# How the names of parts' tensors begin, and how those of a module's extra state end.
PART_PREFIX = "part."
EXTRA_STATE_SUFFIX = "_extra_state"


class TrainingState:
    """The state that a training run resumes from.

    The loop sets two counters: `position` counts the samples consumed, `step` the optimizer's
    steps. Gradients are not saved: save between two steps. `extra` holds any other objects
    with `state_dict` and `load_state_dict`, by name. The first rank's state is saved; with an
    attribute `of_each_rank = True`, the state of every rank. With `trained_only` the parameters
    that do not train are a hash, and a load needs them in the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        scheduler: Any = None,
        scaler: Any = None,
        *,
        config: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        generators: Mapping[str, torch.Generator] | None = None,
        trained_only: bool = False,
    ) -> None:
        self.model = model
        self.base = FrozenBase(model) if trained_only else None
        self.config = dict(config or {})
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)

        schedulers = scheduler if isinstance(scheduler, list | tuple) else [scheduler]
        parts = {f"scheduler-{index}": one for index, one in enumerate(schedulers)}
        parts["scaler"] = scaler
        for name, one in (extra or {}).items():
            parts[f"extra-{name}"] = one
        self.parts = {name: part for name, part in parts.items() if part is not None}

        self.generators = dict(generators or {})
        self.step = 0
        self.position = 0
        self._random: tuple[Mapping[str, Any], bool] | None = None

    def snapshot(self) -> Snapshot:
        """Return the current state; what only the optimizer's step changes is not copied.

        Raises ValueError, with its path, for a value that a load could not restore.
        """
        ranks = Ranks()
        tensors = CollectedTensors()
        model = self._model_values(tensors, self.base)
        parameters = {MODEL_PREFIX + name for name in parameter_names(self.model).values()}
        stays = parameters & tensors.by_name.keys()
        optimizers = []
        for one in self._optimizer_states():
            before = set(tensors.by_name)
            optimizers.append(one.take(tensors))
            changing = {entry.name for entry in references(optimizers[-1]["groups"])}
            stays |= tensors.by_name.keys() - before - changing

        parts: dict[str, Any] = {}
        own_parts: dict[str, Any] = {}
        for name, part in sorted(self.parts.items()):
            before = set(tensors.by_name)
            own = bool(getattr(part, "of_each_rank", False))
            held = own_parts if own else parts
            held[name] = self._part_values(name, tensors, rank=ranks.rank if own else None)
            # An average of weights changes only after a step; a loader's state may change at once.
            if isinstance(part, nn.Module):
                stays |= tensors.by_name.keys() - before
        place = Place("the generators", f"rank-{ranks.rank}.random")
        random = encode(take_random_state(self.generators), place, tensors)

        taken = {
            name: tensor if name in stays else tensor.clone()
            for name, tensor in tensors.by_name.items()
        }
        for name in self._buffer_names() & taken.keys() if ranks.rank else ():
            if not hasattr(taken[name], "to_local"):
                taken[f"rank-{ranks.rank}.{name}"] = taken[name]

        values = {
            "step": self.step,
            "position": self.position,
            "config": _as_json(self.config),
            "world_size": ranks.size,
            "threads": torch.get_num_threads(),
            "model": model,
            "optimizers": optimizers,
            "parts": parts,
        }
        if self.base is not None:
            values["base"] = self.base.content()
        rank_values = {"random": random, "parts": own_parts}
        return Snapshot(taken, values, rank_values, tensors.inline, self.optimizers)

    def _model_values(self, tensors: CollectedTensors, base: FrozenBase | None) -> dict[str, Any]:
        """Return the model's state; its tensors go into `tensors`."""
        named = bare_names(self.model, self.model.state_dict())
        chosen = named if base is None else base.leave_out(named)
        state = {MODEL_PREFIX + name: value for name, value in chosen.items()}
        return {
            name: encode(_once(value), Place(name, name), tensors) for name, value in state.items()
        }

    def _part_values(self, name: str, tensors: CollectedTensors, *, rank: int | None = None) -> Any:
        stored = PART_PREFIX + name_component(name, 0)
        if rank is not None:
            stored = f"rank-{rank}.{stored}"
        shown = f"{name.replace('extra-', 'extra.', 1)}.state_dict()"
        return encode(self.parts[name].state_dict(), Place(shown, stored), tensors)

    def begin_load(self, contents: Contents, *, strict: bool = True) -> Loading:
        """Match a checkpoint with this state, and return the tensors to fill.

        Raises StateMismatch or DamagedCheckpoint before anything is changed.
        """
        with _state_of_a_training():
            load = self._matched(contents, strict=strict)
        return Loading(
            load.live,
            lambda: self._finish_load(load),
            load.report,
            first=load.new,
            prepare=lambda: self._prepare(load),
        )

    def _matched(self, contents: Contents, *, strict: bool) -> "_Load":
        """Compare a checkpoint with this state."""
        ranks = Ranks()
        values = contents.values
        for name in ("step", "position", "threads", "world_size"):
            if type(values[name]) is not int or values[name] < 0:
                raise TypeError(f"{name} is {values[name]!r:.40}")
        base = self.base if "base" in values else None
        if "base" in values and strict:
            require_base(values["base"], base)

        own = CollectedTensors()
        try:
            model = self._model_values(own, base)
            for state in self._optimizer_states():
                state.take(own)
        except ValueError as error:
            raise StateMismatch(f"nothing can be loaded into this model: {error}") from error
        # A rank that was not there at the save loads the values of rank 0.
        source_rank = ranks.rank if ranks.rank < values["world_size"] else 0
        load = _Load(contents, own, ranks, source_rank)
        load.match_model(model)
        if not contents.model_only:
            self._match_optimizers(load)
        if strict and not load.report.exact:
            raise StateMismatch(_describe(load.report))

        if values["world_size"] == ranks.size and ranks.rank:
            self._prefer_own_buffers(load)
        load.add(load.extras)
        if not contents.model_only:
            self._match_parts(load)
            _as_json(values["config"])
        return load

    def _match_optimizers(self, load: "_Load") -> None:
        """Add the tensors to fill for each optimizer that fits; put differences in the report."""
        values = load.contents.values
        for state, saved in zip(self._optimizer_states(), values["optimizers"], strict=False):
            try:
                state.add_to(load.add, saved)
            except StateMismatch as error:
                load.report.different.append(str(error))
            else:
                load.optimizers.append((state, saved))

        saved_parts = {*load.parts, *(f"optimizer {n}" for n in range(len(values["optimizers"])))}
        own = {*self.parts, *(f"optimizer {number}" for number in range(len(self.optimizers)))}
        load.report.missing += sorted(
            name
            for name in own - saved_parts
            if not getattr(self.parts.get(name), "may_be_new", False)
        )
        load.report.extra += sorted(saved_parts - own)

    def _match_parts(self, load: "_Load") -> None:
        """Add the tensors of parts: those of a module are filled in place, others are new."""
        for name in sorted(self.parts.keys() & load.parts.keys()):
            if isinstance(self.parts[name], nn.Module):
                load.require_same(load.parts[name], self._part_values(name, load.collected))
        load.add([load.parts[name] for name in self.parts if name in load.parts])
        load.add(load.contents.rank_values[load.source_rank]["random"])

    def _prepare(self, load: "_Load") -> None:
        """Read everything but the tensors that are filled in place, and load the parts.

        What is damaged or does not fit is found here, before model and optimizers change.
        """
        tensors = {**load.own, **load.live, **load.new}
        load.values = {name: decode(content, tensors) for name, content in load.extras.items()}
        self._compare_extras(load.values)
        if load.contents.model_only:
            return

        with _state_of_a_training():
            for optimizer, saved in load.optimizers:
                load.read.append((optimizer, optimizer.read(saved, tensors, load.fitting)))
        content = load.contents.rank_values[load.source_rank]["random"]
        load.random = decode(content, tensors)
        check_random_state(load.random)

        # What shares its memory with the model or an optimizer is loaded once that is filled.
        read = {
            name: decode(load.parts[name], tensors) for name in self.parts if name in load.parts
        }
        for name, content in read.items():
            if any(found.name in load.live for found in references(load.parts[name])):
                load.late_parts[name] = content
            else:
                self._load_part(name, content)

    def _compare_extras(self, values: Mapping[str, Any]) -> None:
        """Raise StateMismatch where a tensor in the model's other state has another form."""
        state = bare_names(self.model, self.model.state_dict())
        for name, value in values.items():
            current = state[name.removeprefix(MODEL_PREFIX)]
            is_free = name.endswith(EXTRA_STATE_SUFFIX) or not isinstance(current, Tensor)
            if not is_free and _form(current) != _form(value):
                raise StateMismatch(f"{name} was {_form(value)} and is {_form(current)}")

    def _load_part(self, name: str, content: Any) -> None:
        try:
            self.parts[name].load_state_dict(content)
        except Exception as error:
            part = type(self.parts[name]).__name__
            raise StateMismatch(
                f"load_state_dict of {name} ({part}) refused its saved state "
                f"({type(error).__name__}: {error}): build it as at the save"
            ) from error

    def _finish_load(self, load: "_Load") -> None:
        """Restore everything from the filled tensors and the values that were read."""
        values = load.contents.values
        self._finish_model(load)
        if load.contents.model_only:
            load.report.notes.append(
                "parameters only: optimizer, generators and position are as they were"
            )
            return

        for optimizer, read in load.read:
            optimizer.restore(read)
        for parameter in self.model.parameters():
            parameter.grad = None
        for name, content in load.late_parts.items():
            self._load_part(name, content)

        self.step = values["step"]
        self.position = values["position"]
        self._random = (load.random, load.source_rank != load.ranks.rank)
        load.report.notes += [*self._differences(values, load.ranks), *self.restore_random()]

    def _finish_model(self, load: "_Load") -> None:
        """Load what was not filled in the model's own memory."""
        state = self.model.state_dict()
        for bare, full in bare_names(self.model, {name: name for name in state}).items():
            name = MODEL_PREFIX + bare
            if name in load.values:
                state[full] = load.values[name]
                continue
            filled = load.own.get(load.filled.get(name, ""))
            if filled is None or same_memory(_once(state[full]), filled):
                del state[full]
            else:
                state[full] = filled
        if state:
            self.model.load_state_dict(state, strict=False)

    def _prefer_own_buffers(self, load: "_Load") -> None:
        """Load this rank's own copy of a buffer instead of the first rank's."""
        for name in self._buffer_names() & load.live.keys():
            own_name = f"rank-{load.ranks.rank}.{name}"
            if own_name in load.contents.tensors:
                load.live[own_name] = load.live.pop(name)

    def restore_random(self) -> list[str]:
        """Restore the loaded generators' states once more.

        Creating an iterator over a DataLoader draws from the generators, so call this afterwards.
        """
        if self._random is None:
            raise ValueError("nothing was loaded yet, so there is no random state to restore")
        state, is_new = self._random
        if is_new:
            rank = Ranks().rank
            seed_new_rank(state, rank, self.generators)
            return [f"rank {rank} was not there at the save: its generators are seeded anew"]
        return restore_random_state(state, self.generators)

    def _buffer_names(self) -> set[str]:
        names = bare_names(self.model, dict(self.model.named_buffers()))
        return {MODEL_PREFIX + name for name in names}

    def _optimizer_states(self) -> list[OptimizerState]:
        names = parameter_names(self.model)
        return [
            OptimizerState(one, names, f"optimizer.{index}.")
            for index, one in enumerate(self.optimizers)
        ]

    def _differences(self, values: Mapping[str, Any], ranks: Ranks) -> list[str]:
        """Return notes on how the run differs from the one that saved the state."""
        notes = []
        if values["world_size"] != ranks.size:
            notes.append(
                f"saved by {values['world_size']} ranks, loaded by {ranks.size}: the state is "
                f"bit-equal"
            )
        if values["threads"] != torch.get_num_threads():
            # With other ranks the sums differ anyway, and more threads could crowd the cores.
            may_restore = values["world_size"] == ranks.size
            notes.append(restore_threads(values["threads"], may_restore=may_restore))
        if changed := list(_changes(values["config"], _as_json(self.config))):
            notes.append(f"the configuration differs in {', '.join(changed)}")
        return notes


def _as_json(config: Any) -> Any:
    """Return a configuration in numbers, text, lists and mappings; other values as text."""
    return json.loads(json.dumps(config, default=str, skipkeys=True))


def _changes(saved: Any, current: Any, key: str = "") -> Iterator[str]:
    """Yield each key whose value is another one than was saved, with both."""
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        for name in sorted({*saved, *current}, key=str):
            inner = f"{key}.{name}" if key else str(name)
            yield from _changes(saved.get(name), current.get(name), inner)
    elif saved != current:
        yield f"{key}: {saved!r:.60} -> {current!r:.60}"


@contextlib.contextmanager
def _state_of_a_training() -> Iterator[None]:
    """Raise DamagedCheckpoint where values do not have the form of a training state."""
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        raise DamagedCheckpoint(
            f"the saved state is not that of a training run ({type(error).__name__}: {error})"
        ) from error


@dataclass
class _Load:
    """One load: the tensors to fill, and the values to read."""

    contents: Contents
    # This state's own tensors, by the names under which they would be saved.
    collected: CollectedTensors
    ranks: Ranks
    source_rank: int
    report: LoadReport = field(default_factory=LoadReport)
    # Tensors that are filled in place, and new ones that are filled before anything changes.
    live: dict[str, Tensor] = field(default_factory=dict)
    new: dict[str, Tensor] = field(default_factory=dict)
    # The names of the model's tensors.
    of_model: set[str] = field(default_factory=set)
    # Names of the model's state that fit, each with the name of its tensor.
    filled: dict[str, str] = field(default_factory=dict)
    # The model's other state, as saved and as read.
    extras: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    # The optimizers that fit, with their state as saved and as read.
    optimizers: list[tuple[OptimizerState, Mapping[str, Any]]] = field(default_factory=list)
    read: list[tuple[OptimizerState, ReadState]] = field(default_factory=list)
    late_parts: dict[str, Any] = field(default_factory=dict)
    random: Any = None

    @property
    def own(self) -> dict[str, Tensor]:
        return self.collected.by_name

    @property
    def parts(self) -> dict[str, Any]:
        """The saved state of shared parts, and of this rank's parts."""
        # A best-K has no values of ranks.
        ranks = self.contents.rank_values
        own = ranks[self.source_rank]["parts"] if ranks else {}
        return {**self.contents.values["parts"], **own}

    @property
    def fitting(self) -> set[str]:
        """The parameters that the checkpoint fits."""
        return {name.removeprefix(MODEL_PREFIX) for name in self.filled}

    def match_model(self, current: Mapping[str, Any]) -> None:
        """Compare the saved state of the model with the current one; report what differs."""
        saved = self.contents.values["model"]
        report = self.report
        report.missing += sorted(current.keys() - saved.keys())
        report.extra += sorted(saved.keys() - current.keys())
        report.wanted = len(saved.keys() | current.keys())
        for name in sorted(saved.keys() & current.keys()):
            was = saved[name]
            now = current[name]
            are_tensors = isinstance(was, Stored) and isinstance(now, Stored)
            if name.endswith(EXTRA_STATE_SUFFIX) or not are_tensors:
                self.extras[name] = was
                report.matched += 1
                continue
            self.of_model |= {was.name, now.name}
            if difference := self._difference(name, was.name, now.name):
                report.different.append(f"{name} was {difference}")
            else:
                self.filled[name] = now.name
                self.live[now.name] = self.own[now.name]
                report.matched += 1

    def _difference(self, name: str, was: str, now: str) -> str:
        """Describe how a tensor of the model differs from the saved one; empty if it does not."""
        if was != now:
            return f"{_tie(name, was)} and is {_tie(name, now)}"
        facts = self._facts(was)
        current = self.own[now]
        if tuple(current.shape) != facts.shape:
            return f"{list(facts.shape)} and is {list(current.shape)}"
        return "" if current.dtype == facts.dtype else f"{facts.dtype} and is {current.dtype}"

    def _facts(self, name: str) -> TensorFacts:
        if name not in self.contents.tensors:
            raise DamagedCheckpoint(f"{name:.80} is in the saved state, but not saved")
        return self.contents.tensors[name]

    def require_same(self, saved: Any, own: Any) -> None:
        """Raise StateMismatch unless a module that is a part has the saved tensors."""
        was = {found.name: self._facts(found.name) for found in references(saved)}
        now = {found.name: self.own[found.name] for found in references(own)}
        for name in sorted(was.keys() | now.keys()):
            facts = was.get(name)
            current = now.get(name)
            # Extra state may have other tensors at each save.
            if EXTRA_STATE_SUFFIX in name or not name.startswith(PART_PREFIX):
                continue
            if facts is None or current is None or not _has(current, facts):
                raise StateMismatch(
                    f"{name} was {_shape_of(facts)} and is {_shape_of(current)}: build the part as "
                    f"at the save"
                )

    def add(self, content: Any, make: MakeTensor | None = None) -> None:
        """Add the tensors that a value names: own ones that fit in place, and new ones."""
        for found in references(content):
            name = found.name
            if name in self.live or name in self.new or name in self.of_model:
                continue
            facts = self._facts(name)
            current = self.own.get(name)
            if current is not None and _has(current, facts) and not is_expanded(current):
                self.live[name] = current
            elif make is not None:
                self.new[name] = make(found, facts)
            else:
                place = _device(found.device)
                self.new[name] = torch.empty(facts.shape, dtype=facts.dtype, device=place)


def _device(kind: Any) -> torch.device:
    """Return the current device of the kind that a tensor was on, or the host without one."""
    if kind == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _tie(name: str, first: str) -> str:
    return "a tensor of its own" if name == first else f"one tensor with {first}"


def _shape_of(tensor: Tensor | TensorFacts | None) -> str:
    return "missing" if tensor is None else f"{list(tensor.shape)}, {tensor.dtype}"


def _has(tensor: Tensor, facts: TensorFacts) -> bool:
    return tuple(tensor.shape) == facts.shape and tensor.dtype == facts.dtype


def _once(value: Any) -> Any:
    """Return a tensor as it is saved: of a plain class, and each element in memory once."""
    if not isinstance(value, Tensor):
        return value
    tensor = elements_of(value)
    if not is_plain(tensor) or not is_expanded(tensor):
        return tensor
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor[
        tuple(slice(0, 1) if size > 1 and not step else slice(None) for size, step in pairs)
    ]


def _form(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{list(value.shape)}, {value.dtype}, {value.layout}"


def _describe(report: LoadReport) -> str:
    lines = [f"{report.matched} of {report.wanted} tensors match ({report.ratio:.0%})"]
    for title, names in (
        ("missing in the checkpoint", report.missing),
        ("only in the checkpoint", report.extra),
        ("different", report.different),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"{title}: {', '.join(names[:3])}{more}")
    return (
        "; ".join(lines)
        + f". Build the model and optimizer that were saved, or {PARTIAL_LOAD_ADVICE}"
    )
