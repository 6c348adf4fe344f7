"""Collect and restore the whole state of a training: model, optimizer, schedule, counters.

`snapshot` returns it for the store, and `Load` restores it. By default, a missing or extra
key, or another shape or dtype, is an error before anything is changed.

Torch's `get_state_dict` and `set_state_dict` (2.13) restore the same in most trainings, but: saving
an optimizer that has no state yet makes a step with it; a parameter that never had a gradient has
no state, and the checkpoint can't be loaded; float32 moments of bfloat16 weights are rounded;
LBFGS and state under other keys than parameters are errors; entries of quantised weights, which are
no attributes, too. `tests/runs/test_torch_state.py` has most of them in a table.

Proof: `python -m pytest tests/runs/test_state.py tests/runs/test_state_odd.py`.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..core.wording import some_of
from .format import MODEL_PREFIX, Contents, Snapshot
from .history import ABSENT_VALUE, changes
from .parameters import bare_name, bare_names, parameter_names
from .random_state import restore_random_state, restore_threads, seed_new_rank, take_random_state
from .ranks import PARTIAL_LOAD_ADVICE, Ranks, StateMismatch, reading
from .values import (
    CollectedTensors,
    Facts,
    Stored,
    Values,
    decode,
    each_once,
    elements_of,
    encode,
    is_plain,
    memory_of,
    name_component,
    references,
)

# Training state: model, optimizer, schedule, scaler, generators, position and settings.

# How the names of parts' tensors begin, and how those of a module's extra state end.
PART_PREFIX = "part."
OPTIMIZER_PREFIX = "optimizer."
EXTRA_STATE_SUFFIX = "_extra_state"
# Names of the state that an optimizer has of its parameters.
_OF_PARAMETERS = re.compile(r"optimizer\.\d+\.")


class TrainingState:
    """The state that a training run resumes from.

    The loop sets two counters: `position` counts the samples consumed, `step` the optimizer's
    steps. Gradients are not saved: save between two steps. `extra` holds any other objects
    with `state_dict` and `load_state_dict`, by name. The first rank's state is saved; with an
    attribute `of_each_rank = True`, the state of every rank. With `keeps_settings` a load leaves
    the settings of the optimizers' groups as they are.
    """

    keeps_settings = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        scheduler: Any = None,
        scaler: Any = None,
        *,
        config: Values | None = None,
        extra: Values | None = None,
        generators: Mapping[str, torch.Generator] | None = None,
    ) -> None:
        self.model = model
        self.config = dict(config or {})
        given = [optimizer] if isinstance(optimizer, Optimizer | nn.Module) else optimizer
        self.optimizers = list(given)
        if not isinstance(model, nn.Module) or not all(
            isinstance(one, Optimizer) for one in self.optimizers
        ):
            got = " and ".join(type(one).__name__ for one in (model, *self.optimizers))
            raise TypeError(f"a model is saved, then its optimizer or a list of several; got {got}")

        schedulers = scheduler if isinstance(scheduler, list | tuple) else [scheduler]
        parts = {f"scheduler-{index}": one for index, one in enumerate(schedulers)}
        parts["scaler"] = scaler
        parts |= {f"extra-{name}": one for name, one in (extra or {}).items()}
        self.parts = {name: part for name, part in parts.items() if part is not None}

        self.generators = dict(generators or {})
        self.step = 0
        self.position = 0
        # The loaded states of the generators, and whether they are those of another rank.
        self.loaded_random: tuple[Values, bool] = ({}, False)

    def require_schedule(self) -> None:
        """Raise if an optimizer has a learning rate scheduler that would not be saved.

        A scheduler leaves `initial_lr` in the optimizer's groups.
        """
        scheduled = any(
            "initial_lr" in group for one in self.optimizers for group in one.param_groups
        )
        is_saved = any(
            name.startswith("scheduler-") or isinstance(part, LRScheduler)
            for name, part in self.parts.items()
        )
        if scheduled and not is_saved:
            raise ValueError(
                "the optimizer has a learning rate scheduler that saving() was not given, and that "
                "would start over at each resume: call saving(model, optimizer, scheduler, ...), "
                "or pass a list of schedulers"
            )

    def snapshot(self) -> Snapshot:
        """Return the current state; what only the optimizer's step changes is not copied.

        Raises ValueError, with its path, for a value that a load could not restore.
        """
        ranks = Ranks()
        tensors = CollectedTensors()
        own_parts = {
            name for name in self.parts if getattr(self.parts[name], "of_each_rank", False)
        }
        content = encode(self.content(self.parts.keys() - own_parts), tensors)
        prefix = f"rank-{ranks.rank}."
        own = {"random": take_random_state(self.generators), **self._read_parts(own_parts)}
        of_rank = encode(own, tensors, prefix=prefix)

        # An average of weights changes only after a step; a loader's state may change at once.
        stays = tuple(
            f"{PART_PREFIX}{name}/"
            for name, part in self.parts.items()
            if isinstance(part, nn.Module)
        )
        parameters = {MODEL_PREFIX + name for name in parameter_names(self.model).values()}
        taken = {
            name: tensor
            if name in parameters or name.startswith(stays) or _OF_PARAMETERS.match(name)
            else tensor.clone()
            for name, tensor in tensors.by_name.items()
        }
        # The first rank's own are saved under the bare names.
        buffers = bare_names(self.model, dict(self.model.named_buffers())) if ranks.rank else ()
        for name in {MODEL_PREFIX + name for name in buffers} & taken.keys():
            if not hasattr(taken[name], "to_local"):
                taken[prefix + name] = taken[name]

        values = {
            "content": content,
            "step": self.step,
            "position": self.position,
            "config": _to_json(self.config),
            "world_size": ranks.size,
            "threads": torch.get_num_threads(),
        }
        return Snapshot(taken, values, of_rank, tensors.inline, self.optimizers, parameters)

    def content(self, parts: Collection[str]) -> Facts:
        """Return what is saved of the model, the optimizers and these parts, by its names."""
        named = bare_names(self.model, self.model.state_dict())
        found = {MODEL_PREFIX + name: _to_saved_form(value) for name, value in named.items()}
        names = parameter_names(self.model)
        for number, optimizer in enumerate(self.optimizers):
            found |= _read_optimizer(optimizer, names, f"{OPTIMIZER_PREFIX}{number}")
        return found | self._read_parts(parts)

    def _read_parts(self, names: Collection[str]) -> Facts:
        return {PART_PREFIX + name: self.parts[name].state_dict() for name in sorted(names)}

    def restore_random(self) -> list[str]:
        """Restore the loaded generators' states once more.

        Creating an iterator over a DataLoader draws from the generators, so call this afterwards.
        """
        state, is_new = self.loaded_random
        if is_new:
            rank = Ranks().rank
            seed_new_rank(state, rank, self.generators)
            return [f"rank {rank} was not there at the save: its generators are seeded anew"]
        return restore_random_state(state, self.generators)


def _read_optimizer(optimizer: Optimizer, names: Mapping[Any, str], place: str) -> Facts:
    """Return an optimizer's groups by `place`, and its state of a parameter by the name of that."""
    kind = type(optimizer).__name__
    if additional := set(optimizer.state_dict()) - {"state", "param_groups"}:
        raise ValueError(
            f"{kind} keeps {', '.join(sorted(map(str, additional)))} besides its state and groups, "
            f"which would be lost: save it under TrainingState(extra=...)"
        )
    groups = []
    found = {}
    for index, group in enumerate(optimizer.param_groups):
        own = []
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"group {index} of {kind} has a parameter of shape {list(parameter.shape)} "
                    f"that the model does not have: save the module that holds it"
                )
            own.append(names[parameter])
            if entries := optimizer.state.get(parameter):
                # A load makes tensors like the parameter of its class again.
                found[f"{place}.{names[parameter]}"] = {
                    key: elements_of(value)
                    if isinstance(value, Tensor) and value.shape == parameter.shape
                    else value
                    for key, value in entries.items()
                }
        groups.append({**group, "params": own})
    others = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    whole = {"class": kind, "groups": groups, "others": others}
    return {place: whole, **found}


def _to_json(config: Any) -> Any:
    """Return a configuration in numbers, text, lists and mappings; other values as text."""
    return json.loads(json.dumps(config, default=str, skipkeys=True))


# Match a checkpoint with the state of a training, and restore it.

_NO_STATE = "the saved state is not that of a training run"


def _make_tensor(found: Stored, saved: Tensor, parameter: Tensor | None) -> Tensor:
    """Return a tensor where a parameter is, whose state it belongs to.

    Without one: on the current device of the kind that it was on, or on the host.
    """
    if parameter is None:
        is_cuda = found.device == "cuda" and torch.cuda.is_available()
        return torch.zeros_like(saved, device="cuda" if is_cuda else "cpu")
    if parameter.shape == saved.shape:
        return torch.zeros_like(parameter, dtype=saved.dtype, requires_grad=False)
    return torch.zeros_like(saved, device=parameter.device)


class Load:
    """A load that passed its checks: fill `targets`, and call `finish`.

    One that is not strict is for a new run: it takes the model's tensors that fit, and no other
    state.
    """

    def __init__(self, state: TrainingState, contents: Contents, *, strict: bool) -> None:
        self._state = state
        self._contents = contents
        self._ranks = Ranks()
        self._model_only = contents.model_only or not strict
        # How the state differs from what was saved, where that does not prevent a load.
        self.notes: list[str] = []
        # This state's own tensors where they fit, and new ones.
        self.targets: dict[str, Tensor] = {}
        own = CollectedTensors()
        self._modules = [name for name, one in state.parts.items() if isinstance(one, nn.Module)]
        try:
            current = encode(state.content(self._modules), own)
        except ValueError as error:
            raise StateMismatch(f"nothing can be loaded into this model: {error}") from error
        # This state's own tensors, by the names under which they would be saved.
        self._own = own.by_name
        with reading(_NO_STATE):
            values = contents.values
            for name in ("step", "position", "threads", "world_size"):
                if type(values[name]) is not int or values[name] < 0:
                    raise TypeError(f"{name} is {values[name]!r:.40}")
            # A rank that was not there at the save loads the values of rank 0.
            self._is_new_rank = self._ranks.rank >= values["world_size"]
            of_rank = contents.rank_values[0 if self._is_new_rank else self._ranks.rank]
            # The saved values of this rank, by name.
            self._saved = {**values["content"], **of_rank}
            current = {PART_PREFIX + name: 0 for name in state.parts} | current
            self._match(current, strict=strict)
            self._choose_tensors()

    def _match(self, current: Values, *, strict: bool) -> None:
        """Compare what is saved with the current state; raise StateMismatch, or note the rest."""
        was = self._describe_all(self._saved, self._contents.tensors)
        now = self._describe_all(current, self._own)
        fitting = [name for name in was if was[name] == now.get(name)]
        different = []
        for name in {**was, **now}:
            if name not in now:
                different.append(f"{name} is only in the checkpoint")
            elif name not in was:
                different.append(f"{name} is missing in the checkpoint")
            elif was[name] != now[name]:
                different.append(f"{name} was {was[name]} and is {now[name]}")
        if different:
            # Names that are missing tell more than shapes.
            different.sort(key=lambda text: " was " in text)
            note = f"{len(fitting)} of {len(now)} tensors match; {some_of(different)}"
            if strict:
                raise StateMismatch(
                    f"{note}. Build the model and optimizer that were saved, or "
                    f"{PARTIAL_LOAD_ADVICE}"
                )
            self.notes.append(note)
        if self._model_only:
            self._saved = {name: self._saved[name] for name in fitting}

    def _describe_all(self, content: Values, tensors: Values) -> dict[str, str]:
        """Describe what has to be equal: shapes, dtypes, ties, groups and parts."""
        found: dict[str, str] = {}
        for name, item in content.items():
            if name.startswith(MODEL_PREFIX):
                found[name] = _describe_entry(name, item, tensors)
            elif self._model_only:
                continue
            elif name.startswith(PART_PREFIX):
                found[name] = "saved"
                is_module = name.removeprefix(PART_PREFIX) in self._modules
                for key, entry in item.items() if is_module else ():
                    inner = f"{name}/{name_component(key)}"
                    found[inner] = _describe_entry(inner, entry, tensors)
            elif name.startswith(OPTIMIZER_PREFIX) and not _OF_PARAMETERS.match(name):
                found[name] = item["class"]
                for index, group in enumerate(item["groups"]):
                    found |= {f"{one} of {name}": f"in group {index}" for one in group["params"]}
        return found

    def _choose_tensors(self) -> None:
        """Choose the tensors to fill: own ones that fit in place, and new ones."""
        # The parameters at which new tensors of their state are made.
        homes: dict[str, Tensor] = {}
        for _, group, parameter, name, place in (
            () if self._model_only else self._iterate_with_state()
        ):
            was_moved = self._saved[MODEL_PREFIX + name].device is not None
            # Torch keeps `step` on the host, except with capturable or fused.
            keeps_step = not (group.get("capturable") or group.get("fused"))
            for key, item in self._saved[place].items():
                on_host = was_moved or (key == "step" and keeps_step)
                for found in references(item):
                    if found.device is not None or not on_host:
                        homes.setdefault(found.name, parameter)
        for found in references(self._saved):
            saved = self._contents.tensors[found.name]
            target = self._own.get(found.name)
            # Memory that several elements share can't be written to.
            if (
                target is None
                or not saved.shape == target.shape == each_once(target).shape
                or saved.dtype != target.dtype
            ):
                target = _make_tensor(found, saved, homes.get(found.name))
            self.targets[found.name] = target
        if self._contents.values["world_size"] == self._ranks.size:
            # This rank's own copy of a buffer, in place of the first rank's.
            for name in [*self.targets]:
                own_name = f"rank-{self._ranks.rank}.{name}"
                if own_name in self._contents.tensors:
                    self.targets[own_name] = self.targets.pop(name)

    def _iterate_with_state(self) -> Iterator[tuple[Optimizer, Values, Tensor, str, str]]:
        """Yield the parameters that have saved state, with their optimizer and group.

        The last two are the names of the parameter and of its state.
        """
        names = parameter_names(self._state.model)
        for number, optimizer in enumerate(self._state.optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = names[parameter]
                    place = f"{OPTIMIZER_PREFIX}{number}.{name}"
                    if place in self._saved:
                        yield optimizer, group, parameter, name, place

    def finish(self) -> None:
        """Restore everything from the filled tensors and the saved values."""
        state = self._state
        notes = self.notes
        found = decode(self._saved, {**self._own, **self.targets})
        self._finish_model(found)
        if self._model_only:
            notes.append("parameters only: optimizer, generators and position are as they were")
            return
        with reading(_NO_STATE):
            for number, optimizer in enumerate(state.optimizers):
                saved = found[f"{OPTIMIZER_PREFIX}{number}"]
                optimizer.state.clear()
                optimizer.state.update(saved["others"])
                for group, was in zip(optimizer.param_groups, saved["groups"], strict=True):
                    if not state.keeps_settings:
                        group.update({**was, "params": group["params"]})
            for optimizer, _, parameter, _, place in self._iterate_with_state():
                optimizer.state[parameter] = {**found[place]}
        for parameter in state.model.parameters():
            parameter.grad = None
        for name, part in state.parts.items():
            try:
                part.load_state_dict(found[PART_PREFIX + name])
            except Exception as error:
                raise StateMismatch(
                    f"load_state_dict of {name} ({type(part).__name__}) refused its saved state "
                    f"({type(error).__name__}: {error}): build it as at the save"
                ) from error
        state.step = self._contents.values["step"]
        state.position = self._contents.values["position"]
        notes += self._list_changes_of_run()
        state.loaded_random = (found["random"], self._is_new_rank)
        notes += state.restore_random()

    def _finish_model(self, found: Values) -> None:
        """Load what was not filled in the model's own memory."""
        model = self._state.model
        late = {}
        for full, value in model.state_dict().items():
            name = MODEL_PREFIX + bare_name(model, full)
            is_stored = isinstance(self._saved.get(name), Stored)
            if is_stored and not name.endswith(EXTRA_STATE_SUFFIX):
                filled = found[name]
                if memory_of(_to_saved_form(value)) != memory_of(filled) and filled.numel():
                    late[full] = filled
            elif name in found:
                late[full] = found[name]
        if late:
            model.load_state_dict(late, strict=False)

    def _list_changes_of_run(self) -> list[str]:
        """Return notes on how the run differs from the one that saved the state."""
        values = self._contents.values
        size = self._ranks.size
        notes = []
        if values["world_size"] != size:
            notes.append(
                f"saved by {values['world_size']} ranks, loaded by {size}: the state is bit-equal"
            )
        if values["threads"] != torch.get_num_threads():
            # With other ranks the sums differ anyway, and more threads could crowd the cores.
            may_restore = values["world_size"] == size
            notes.append(restore_threads(values["threads"], may_restore=may_restore))
        texts = [
            f"{one['name']}: {one['a']!r:.60} -> {one['b']!r:.60}"
            for one in changes(values["config"], _to_json(self._state.config))
            # A new setting that is not set changes nothing.
            if (one["a"], one["b"]) != (ABSENT_VALUE, None)
        ]
        if texts:
            notes.append(f"the configuration differs in {', '.join(texts)}")
        return notes


def _describe_entry(name: str, item: Any, tensors: Values) -> str:
    """Describe what has to be equal of an entry: a shape and dtype, or a tie."""
    if name.endswith(EXTRA_STATE_SUFFIX):
        # It may have another form at each save.
        return "free"
    if isinstance(item, Stored):
        held = tensors[item.name]
        tied = item.name != name
        return f"one tensor with {item.name}" if tied else f"{list(held.shape)}, {held.dtype}"
    if isinstance(item, Tensor):
        return f"{list(item.shape)}, {item.dtype}, {item.layout}"
    return f"a {type(item).__name__}"


def _to_saved_form(value: Any) -> Any:
    """Return a tensor as it is saved: of a plain class, and each element in memory once."""
    if not isinstance(value, Tensor):
        return value
    tensor = elements_of(value)
    return each_once(tensor) if is_plain(tensor) else tensor
