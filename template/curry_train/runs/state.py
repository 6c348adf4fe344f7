"""Collect and restore the whole state of a training: model, optimizer, schedule, counters.

`snapshot` returns it for the store, and `begin_load` restores it. By default, a missing or extra
key, or another shape or dtype, is an error before anything is changed.

Proof: `python -m pytest tests/runs/test_state.py`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .format import MODEL_PREFIX, Contents, Loading, LoadReport, Snapshot, TensorFacts
from .optimizer_state import (
    FrozenBase,
    OptimizerState,
    ReadState,
    bare_names,
    parameter_names,
    require_base,
    same_memory,
    split_ties,
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
    decode,
    elements_of,
    encode,
    is_expanded,
    is_plain,
    name_component,
    plain_text,
    references,
)

# Match the tensors of a checkpoint with those of the model by name, shape, dtype and ties.


def match(
    targets: Mapping[str, Tensor],
    contents: Contents,
    ties: Mapping[str, str],
    report: LoadReport,
    *,
    optional: Collection[str],
) -> dict[str, Tensor]:
    """Return the targets that match a saved tensor, and add all mismatches to `report`.

    Saved tensors whose names are in `optional`, or begin with a prefix of each rank's own tensors
    or of parts, are ignored.
    """
    fitting = {}
    saved = {
        name: facts
        for name, facts in contents.tensors.items()
        if name not in optional and not name.startswith(UNMATCHED_PREFIXES)
    }

    for name, target in targets.items():
        facts = saved.get(name)
        if facts is None:
            report.missing.append(name)
        elif tuple(target.shape) != facts.shape:
            report.different.append(f"{name} was {list(facts.shape)} and is {list(target.shape)}")
        elif target.dtype != facts.dtype:
            report.different.append(f"{name} was {facts.dtype} and is {target.dtype}")
        else:
            fitting[name] = target

    for name in saved:
        if name in targets or name in ties:
            continue
        if name.startswith(MODEL_PREFIX) or not contents.model_only:
            report.extra.append(name)

    report.different += _different_ties(contents.ties, ties)
    report.missing = sorted(name for name in report.missing if name not in contents.ties)
    report.extra.sort()
    report.matched += len(fitting)
    report.wanted += len({*saved, *targets})
    return fitting


def _different_ties(saved: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    return [
        f"{name} was {_tie(saved.get(name))} and is {_tie(current.get(name))}"
        for name in sorted({*current, *saved})
        if saved.get(name) != current.get(name)
    ]


def _tie(first: str | None) -> str:
    return f"one tensor with {first}" if first else "a tensor of its own"


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

# The form of a state: types, mappings with these keys, and lists whose items have one form.
STATE_FORM = {
    "step": int,
    "position": int,
    "config": object,
    "world_size": int,
    "threads": int,
    "model": dict,
    "optimizers": [
        {
            "class": str,
            "groups": [{"params": [str], "options": object}],
            "parameters": dict,
            "others": object,
        }
    ],
    "parts": dict,
}
RANK_FORM = {"random": dict, "parts": dict}
# Prefixes of the names of saved tensors.
PART_PREFIX = "part."
UNMATCHED_PREFIXES = (PART_PREFIX, "rank-")


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
        """Return the current state; only tensors that a forward pass may change are copied.

        Raises ValueError, with its path, for a value that a load could not restore.
        """
        ranks = Ranks()
        tensors = CollectedTensors()
        own, ties, model_values = self._model_state(tensors, self.base)
        copied = set(tensors.by_name) - set(own)
        copied |= own.keys() & set(self._buffer_names())
        optimizers = []
        for one in self._optimizer_states():
            optimizers.append(one.take(tensors))
            copied |= {entry.name for entry in references(optimizers[-1]["groups"])} - set(own)
        parts, own_parts, of_parts = self._part_states(ranks.rank, tensors)
        place = Place("the generators", f"rank-{ranks.rank}.random")
        random = encode(take_random_state(self.generators), place, tensors)

        taken = {
            name: tensor.clone() if name in copied or name in of_parts else tensor
            for name, tensor in tensors.by_name.items()
        }
        for name in own.keys() & set(self._buffer_names()) if ranks.rank else ():
            if _is_whole(taken[name]):
                taken[f"rank-{ranks.rank}.{name}"] = taken[name]

        values = {
            "step": self.step,
            "position": self.position,
            "config": encode(plain_text(self.config), Place("config", "config")),
            "world_size": ranks.size,
            "threads": torch.get_num_threads(),
            "model": model_values,
            "optimizers": optimizers,
            "parts": parts,
        }
        if self.base is not None:
            values["base"] = self.base.content()
        rank_values = {"random": random, "parts": own_parts}
        return Snapshot(taken, values, rank_values, ties, tensors.inline, self.optimizers)

    def _part_states(
        self, rank: int, tensors: CollectedTensors
    ) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
        """Return the state of shared parts, that of this rank's parts, and the tensors to copy.

        An average of weights (a module) changes only after a step; a loader's state may change at
        once, so its tensors are copied.
        """
        shared: dict[str, Any] = {}
        of_this_rank: dict[str, Any] = {}
        changing: set[str] = set()
        for name, part in sorted(self.parts.items()):
            count = len(tensors.by_name)
            stored = PART_PREFIX + name_component(name, 0)
            shown = f"{name.replace('extra-', 'extra.', 1)}.state_dict()"
            if getattr(part, "of_each_rank", False):
                place = Place(shown, f"rank-{rank}.{stored}")
                of_this_rank[name] = encode(part.state_dict(), place, tensors)
            else:
                shared[name] = encode(part.state_dict(), Place(shown, stored), tensors)
            if not isinstance(part, nn.Module):
                changing |= set(islice(tensors.by_name, count, None))
        return shared, of_this_rank, changing

    def begin_load(self, contents: Contents, *, strict: bool = True) -> Loading:
        """Match a checkpoint with this state, and return the tensors to fill.

        Raises StateMismatch or DamagedCheckpoint before anything is changed.
        """
        ranks = Ranks()
        check_values(contents)
        values = contents.values
        base = self.base if "base" in values else None
        if "base" in values and strict:
            require_base(values["base"], base)
        try:
            own, ties, model_values = self._model_state(CollectedTensors(), base)
        except ValueError as error:
            raise StateMismatch(f"nothing can be loaded into this model: {error}") from error
        report = LoadReport()
        load = _Load(contents, own, report, ranks, self._source_rank(contents, ranks))
        load.extras = _saved_extras(contents, model_values, report)

        targets = dict(own)
        if not contents.model_only:
            self._add_optimizer_targets(load, targets)
        named = {found.name for found in references([load.extras, load.optimizers])}
        fitting = match(targets, contents, ties, report, optional=named - set(targets))
        if strict and not report.exact:
            raise StateMismatch(_describe(report))

        load.fitting = {*fitting, *(name for name, first in ties.items() if first in fitting)}
        for name, target in fitting.items():
            if name in load.new_state:
                load.new[name] = target
            elif is_expanded(target):
                whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
                load.expanded[name] = load.new[name] = whole
            else:
                load.live[name] = target
        if values["world_size"] == ranks.size and ranks.rank:
            self._prefer_own_buffers(load)
        load.add_new(load.extras)
        if not contents.model_only:
            self._add_part_targets(load)
        return Loading(
            load.live,
            lambda: self._finish_load(load),
            report,
            first=load.new,
            prepare=lambda: self._prepare(load),
        )

    def _source_rank(self, contents: Contents, ranks: Ranks) -> int:
        """Return the rank whose own values this rank loads; a new rank loads those of rank 0."""
        return ranks.rank if ranks.rank < contents.values["world_size"] else 0

    def _add_optimizer_targets(self, load: "_Load", targets: dict[str, Tensor]) -> None:
        """Add the tensors to fill for each optimizer that fits; put differences in the report."""
        saved_optimizers = load.contents.values["optimizers"]
        for state, saved in zip(self._optimizer_states(), saved_optimizers, strict=False):
            try:
                live, new = state.targets(saved, load.contents.tensors)
            except StateMismatch as error:
                load.report.different.append(str(error))
                continue
            targets |= live | new
            load.new_state |= set(new)
            load.optimizers.append(saved)
            load.states.append(state)
        self._compare_parts(load.contents, load.report)

    def _add_part_targets(self, load: "_Load") -> None:
        """Add the tensors of parts: those of a module are filled in place, others are new."""
        modules = {name: part for name, part in self.parts.items() if isinstance(part, nn.Module)}
        held = CollectedTensors()
        for name, part in modules.items():
            place = Place(name, PART_PREFIX + name_component(name, 0))
            encode(part.state_dict(), place, held)
            if name in load.parts:
                load.require_same(f"{place.name}/", load.parts[name], held.by_name)
        load.add_new([load.parts[name] for name in self.parts if name in load.parts], held.by_name)
        load.add_new(load.contents.rank_values[load.source_rank]["random"])

    def _prepare(self, load: "_Load") -> None:
        """Read everything but the tensors that are filled in place, and load the parts.

        What is damaged or does not fit is found here, before model and optimizers change.
        """
        tensors = {**load.own, **load.live, **load.new}
        load.values = {name: decode(content, tensors) for name, content in load.extras.items()}
        self._compare_extras(load.values)
        for name, whole in load.expanded.items():
            if not torch.equal(_once(load.own[name], whole).expand_as(whole), whole):
                raise StateMismatch(f"{name} is expanded here, and was not at the save")
        if load.contents.model_only:
            return

        fitting = {name.removeprefix(MODEL_PREFIX) for name in load.fitting}
        for optimizer, saved in zip(load.states, load.optimizers, strict=True):
            load.read.append(optimizer.read(saved, tensors, fitting))
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
            if isinstance(current, Tensor) and not _alike(current, value, name):
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

        for optimizer, read in zip(load.states, load.read, strict=True):
            optimizer.restore(read)
        for parameter in self.model.parameters():
            parameter.grad = None
        for name, content in load.late_parts.items():
            self._load_part(name, content)

        self.step = values["step"]
        self.position = values["position"]
        self._random = (load.random, load.source_rank != load.ranks.rank)
        load.report.notes += [*self._differences(values, load.ranks), *self.restore_random()]

    def _prefer_own_buffers(self, load: "_Load") -> None:
        """Load this rank's own copy of a buffer instead of the first rank's."""
        for name in self._buffer_names():
            own_name = f"rank-{load.ranks.rank}.{name}"
            for targets in (load.live, load.new):
                if own_name in load.contents.tensors and name in targets:
                    targets[own_name] = targets.pop(name)

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

    def _model_state(
        self, tensors: CollectedTensors, base: FrozenBase | None
    ) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
        """Return the model's tensors, the ties between their names, and its other state.

        All its tensors go into `tensors`, also those in the other state.
        """
        named = bare_names(self.model, self.model.state_dict())
        chosen = named if base is None else base.leave_out(named)
        state = {MODEL_PREFIX + name: value for name, value in chosen.items()}
        plain = {}
        for name, value in state.items():
            # The extra state of a module may have another shape at each save.
            if isinstance(value, Tensor) and not name.endswith("_extra_state"):
                elements = elements_of(value.detach())
                if is_plain(elements):
                    plain[name] = elements
        own, ties = split_ties(plain)
        for name, tensor in own.items():
            tensors.add(tensor, Place(name, name))
        values = {
            name: encode(value, Place(name, name), tensors)
            for name, value in state.items()
            if name not in plain
        }
        return own, ties, values

    def _buffer_names(self) -> list[str]:
        return [
            MODEL_PREFIX + name for name in bare_names(self.model, dict(self.model.named_buffers()))
        ]

    def _optimizer_states(self) -> list[OptimizerState]:
        names = parameter_names(self.model)
        return [
            OptimizerState(one, names, f"optimizer.{index}.")
            for index, one in enumerate(self.optimizers)
        ]

    def _compare_parts(self, contents: Contents, report: LoadReport) -> None:
        """Report parts and optimizers that only the state or only the checkpoint has."""
        values = contents.values
        saved = {*values["parts"], *_parts_of(contents, 0)}
        saved |= {f"optimizer {index}" for index in range(len(values["optimizers"]))}
        own = set(self.parts)
        own |= {f"optimizer {index}" for index in range(len(self.optimizers))}
        report.missing += sorted(
            name for name in own - saved if not getattr(self.parts.get(name), "may_be_new", False)
        )
        report.extra += sorted(saved - own)

    def _finish_model(self, load: "_Load") -> None:
        """Load the filled tensors into the model, unless they are the model's own memory."""
        for name, whole in load.expanded.items():
            _once(load.own[name], load.own[name]).copy_(_once(load.own[name], whole))
        state = self.model.state_dict()
        bare_to_full = bare_names(self.model, {name: name for name in state})
        keys = {full: MODEL_PREFIX + bare for bare, full in bare_to_full.items()}

        if not load.values and all(
            same_memory(elements_of(state[name]), load.own[key])
            for name, key in keys.items()
            if key in load.own
        ):
            return

        for name, key in keys.items():
            if key in load.expanded:
                # It is filled, and torch refuses to copy into it.
                del state[name]
            elif key in load.own:
                state[name] = load.own[key]
            elif key in load.values:
                state[name] = load.values[key]
        self.model.load_state_dict(state, strict=not load.expanded)

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
        if changed := list(_changes(decode(values["config"]), self.config)):
            notes.append(f"the configuration differs in {', '.join(changed)}")
        return notes


def _changes(saved: Any, current: Any, key: str = "") -> Iterator[str]:
    """Yield each key whose value is another one than was saved, with both."""
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        for name in sorted({*saved, *current}, key=str):
            inner = f"{key}.{name}" if key else str(name)
            yield from _changes(saved.get(name), current.get(name), inner)
    elif saved != current:
        yield f"{key}: {saved!r:.60} -> {current!r:.60}"


def _parts_of(contents: Contents, rank: int) -> Mapping[str, Any]:
    # A best-K has no values of ranks.
    return contents.rank_values[rank]["parts"] if contents.rank_values else {}


def _is_whole(tensor: Tensor) -> bool:
    return not hasattr(tensor, "to_local")


@dataclass
class _Load:
    """One load: the tensors to fill, and the values to read."""

    contents: Contents
    # The model's tensors, by their saved names.
    own: Mapping[str, Tensor]
    report: LoadReport
    ranks: Ranks
    source_rank: int
    # Tensors that are filled in place, and new ones that are filled before anything changes.
    live: dict[str, Tensor] = field(default_factory=dict)
    new: dict[str, Tensor] = field(default_factory=dict)
    # Of own tensors that have elements more than once, the new ones.
    expanded: dict[str, Tensor] = field(default_factory=dict)
    # Names that fit, and names of optimizer state that the optimizer does not hold yet.
    fitting: set[str] = field(default_factory=set)
    new_state: set[str] = field(default_factory=set)
    # The model's other state, as saved and as read.
    extras: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    # The optimizers that fit, as saved and as read.
    states: list[OptimizerState] = field(default_factory=list)
    optimizers: list[Mapping[str, Any]] = field(default_factory=list)
    read: list[ReadState] = field(default_factory=list)
    late_parts: dict[str, Any] = field(default_factory=dict)
    random: Any = None

    @property
    def parts(self) -> dict[str, Any]:
        """The saved state of shared parts, and of this rank's parts."""
        return {**self.contents.values["parts"], **_parts_of(self.contents, self.source_rank)}

    def require_same(self, prefix: str, content: Any, own: Mapping[str, Tensor]) -> None:
        """Raise StateMismatch unless a module that is a part has the saved tensors."""
        saved = {found.name: self.contents.tensors.get(found.name) for found in references(content)}
        for name in sorted(saved.keys() | own.keys()):
            # Nested tensors are of extra state, and may differ from save to save.
            key = name.removeprefix(prefix)
            if key == name or "/" in key or key.endswith("_extra_state"):
                continue
            facts = saved.get(name)
            current = own.get(name)
            if facts is None or current is None or not _has(current, facts):
                raise StateMismatch(
                    f"{name} was {_shape_of(facts)} and is {_shape_of(current)}: build the part as "
                    f"at the save"
                )

    def add_new(self, content: Any, own: Mapping[str, Tensor] | None = None) -> None:
        """Add the tensors that a value names: those of `own` in place, and new ones otherwise."""
        for found in references(content):
            name = found.name
            if name in self.live or name in self.new or name in self.own:
                continue
            facts = self.contents.tensors.get(name)
            if facts is None:
                raise DamagedCheckpoint(f"{name:.80} is in the saved state, but not saved")
            current = (own or {}).get(name)
            if current is not None and _has(current, facts) and not is_expanded(current):
                self.live[name] = current
            else:
                place = _device(found.device)
                self.new[name] = torch.empty(facts.shape, dtype=facts.dtype, device=place)


def _device(kind: Any) -> torch.device:
    """Return the current device of the kind that a tensor was on, or the host without one."""
    if kind == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _shape_of(tensor: Tensor | TensorFacts | None) -> str:
    return "missing" if tensor is None else f"{list(tensor.shape)}, {tensor.dtype}"


def _has(tensor: Tensor, facts: TensorFacts) -> bool:
    return tuple(tensor.shape) == facts.shape and tensor.dtype == facts.dtype


def _once(expanded: Tensor, tensor: Tensor) -> Tensor:
    """Return each element of a tensor that `expanded` has once in memory."""
    pairs = zip(expanded.shape, expanded.stride(), strict=True)
    return tensor[
        tuple(slice(0, 1) if size > 1 and not step else slice(None) for size, step in pairs)
    ]


def _alike(current: Tensor, value: Any, name: str) -> bool:
    if name.endswith("_extra_state"):
        return True
    return isinstance(value, Tensor) and _form(current) == _form(value)


def _form(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{list(value.shape)}, {value.dtype}, {value.layout}"


def _saved_extras(contents: Contents, own: Mapping[str, Any], report: LoadReport) -> dict[str, Any]:
    """Return the model's saved other state, and report what only one side has."""
    saved = contents.values["model"]
    report.missing += sorted(own.keys() - saved.keys())
    report.extra += sorted(saved.keys() - own.keys())
    return {name: content for name, content in saved.items() if name in own}


def check_values(contents: Contents) -> None:
    """Raise DamagedCheckpoint unless the values of a state have the right form."""
    values = contents.values
    wrong = [name for name, form in STATE_FORM.items() if not _has_form(values.get(name), form)]
    if not wrong:
        wrong += [name for name in ("step", "position", "threads") if values[name] < 0]
        wrong += [
            f"optimizer {number}"
            for number, saved in enumerate(values["optimizers"])
            if not _has_form_of_entries(saved)
        ]
        are_of_ranks = _has_form(list(contents.rank_values), [RANK_FORM])
        is_of_all = 0 < len(contents.rank_values) == values["world_size"]
        if not contents.model_only and not (are_of_ranks and is_of_all):
            wrong.append("values of each rank")
    if wrong:
        raise DamagedCheckpoint(
            f"the saved state has invalid {', '.join(wrong)}: it is not the state of a training run"
        )


def _has_form(value: Any, form: Any) -> bool:
    if isinstance(form, dict):
        return type(value) is dict and all(
            key in value and _has_form(value[key], inner) for key, inner in form.items()
        )
    if isinstance(form, list):
        return type(value) is list and all(_has_form(item, form[0]) for item in value)
    return form is object or type(value) is form


def _has_form_of_entries(saved: Mapping[str, Any]) -> bool:
    """Return whether each parameter of an optimizer has entries of a key, a value and a device."""
    known = {name for group in saved["groups"] for name in group["params"]}
    entries = list(saved["parameters"].values())
    return (
        saved["parameters"].keys() <= known
        and _has_form(entries, [[list]])
        and all(len(entry) == 3 for own in entries for entry in own)
    )


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
