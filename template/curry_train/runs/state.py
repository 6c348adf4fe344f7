"""Collect and restore the whole state of a training: model, optimizer, schedule, counters.

`snapshot` returns it for the store, and `begin_load` restores it. By default, a missing or extra
key, or another shape or dtype, is an error before anything is changed.

Proof: `python -m pytest tests/runs/test_state.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .format import MODEL_PREFIX, Contents, Loading, LoadReport, Snapshot
from .optimizer_state import OptimizerState, bare_names, parameter_names, same_memory, split_ties
from .random_state import (
    RandomState,
    decode,
    encode,
    restore_random_state,
    restore_threads,
    seed_new_rank,
    take_random_state,
)
from .ranks import PARTIAL_LOAD_ADVICE, DamagedCheckpoint, Ranks, StateMismatch

# Match the tensors of a checkpoint with those of the model by name, shape, dtype and ties.


def match(
    targets: Mapping[str, Tensor],
    contents: Contents,
    ties: Mapping[str, str],
    report: LoadReport,
    *,
    optional: Sequence[str],
) -> dict[str, Tensor]:
    """Return the targets that match a saved tensor, and add all mismatches to `report`.

    Saved tensors whose names begin with one of `optional` are ignored.
    """
    fitting = {}
    saved = {
        name: facts
        for name, facts in contents.tensors.items()
        if not name.startswith(tuple(optional))
    }

    for name, target in targets.items():
        facts = saved.get(name)
        if facts is None:
            # A parameter may have had no gradient at the save.
            if not name.startswith("gradient."):
                report.missing.append(name)
        elif tuple(target.shape) != facts.shape:
            report.different.append(f"{name} was {list(facts.shape)} and is {list(target.shape)}")
        elif target.dtype != facts.dtype:
            report.different.append(f"{name} was {facts.dtype} and is {target.dtype}")
        else:
            fitting[name] = target

    for name in saved:
        if name in targets or name in ties or name.startswith("gradient."):
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

REQUIRED_VALUES = {
    "step",
    "position",
    "microstep",
    "config",
    "world_size",
    "threads",
    "model",
    "optimizers",
    "parts",
}
# Prefixes of the names of saved tensors.
RANDOM_PREFIX = "random."
GRADIENT_PREFIX = "gradient."
PART_PREFIX = "part."


class TrainingState:
    """The state that a training run resumes from.

    The loop sets three counters: `position` counts the samples consumed, `step` the optimizer's
    steps, and `microstep` the backward passes since the last step. `extra` holds any other objects
    with `state_dict` and `load_state_dict`, by name. The first rank's state is saved; with an
    attribute `of_each_rank = True`, the state of every rank.
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
        group: Any = None,
    ) -> None:
        self.model = model
        self.config = dict(config or {})
        self.group = group
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
        self.microstep = 0
        self._random: tuple[RandomState, bool] | None = None

    def snapshot(self) -> Snapshot:
        """Return the current state; only tensors that a forward pass may change are copied."""
        ranks = Ranks(self.group)
        own, ties, model_values = self._model_tensors()
        buffers = {name: own[name].clone() for name in self._buffer_names() if name in own}
        tensors: dict[str, Tensor] = {**own, **buffers}
        if ranks.rank:
            for name, buffer in buffers.items():
                if _is_whole(buffer):
                    tensors[f"rank-{ranks.rank}.{name}"] = buffer
        if self.microstep:
            tensors |= self._gradients(ranks.rank)

        optimizers = [one.take(tensors) for one in self._optimizer_states()]
        parts, own_parts, part_tensors = self._part_states(ranks.rank)
        tensors |= part_tensors
        random = take_random_state(self.generators)
        for name, tensor in random.tensors.items():
            tensors[f"{RANDOM_PREFIX}{name}.rank-{ranks.rank}"] = tensor

        values = {
            "step": self.step,
            "position": self.position,
            "microstep": self.microstep,
            "config": encode(self.config, "config"),
            "world_size": ranks.size,
            "threads": torch.get_num_threads(),
            "model": model_values,
            "optimizers": optimizers,
            "parts": parts,
        }
        rank_values = {"random": random.values, "parts": own_parts}
        return Snapshot(tensors, values, rank_values, ties, self.optimizers)

    def _part_states(self, rank: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
        """Return the JSON of shared parts, the JSON of this rank's parts, and all their tensors."""
        shared: dict[str, Any] = {}
        of_this_rank: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for name, part in sorted(self.parts.items()):
            part_tensors: dict[str, Tensor] = {}
            if getattr(part, "of_each_rank", False):
                path = f"{PART_PREFIX}{name}.rank-{rank}"
                of_this_rank[name] = encode(part.state_dict(), path, tensors=part_tensors)
            else:
                shared[name] = encode(part.state_dict(), PART_PREFIX + name, tensors=part_tensors)

            # An average of weights (a module) changes only after a step; a loader's state may
            # change at once, so its tensors are copied.
            if isinstance(part, nn.Module):
                tensors |= part_tensors
            else:
                tensors |= {key: tensor.clone() for key, tensor in part_tensors.items()}
        return shared, of_this_rank, tensors

    def begin_load(self, contents: Contents, *, strict: bool = True) -> Loading:
        """Match a checkpoint with this state, and return the tensors to fill.

        Raises StateMismatch before anything is changed.
        """
        own, ties, _ = self._model_tensors()
        ranks = Ranks(self.group)
        values = contents.values
        optimizer_states = [] if contents.model_only else self._optimizer_states()
        report = LoadReport()
        if absent := REQUIRED_VALUES - set(values):
            raise DamagedCheckpoint(
                f"the saved state has no {', '.join(sorted(absent))}: it is not the state of a "
                f"training run"
            )

        targets = dict(own)
        if not contents.model_only:
            targets |= self._training_targets(optimizer_states, contents, ranks, report)
        fitting = match(
            targets, contents, ties, report, optional=(RANDOM_PREFIX, PART_PREFIX, "rank-")
        )
        if strict and not report.exact:
            raise StateMismatch(_describe(report))

        if values["world_size"] == ranks.size and ranks.rank:
            self._prefer_own_buffers(fitting, contents, ranks.rank)
        # A rank that did not exist at the save loads the values of rank 0.
        source_rank = ranks.rank if ranks.rank < values["world_size"] else 0
        fitting |= _fresh_part_tensors(contents, source_rank)
        for name, tensor in _fresh(contents, (RANDOM_PREFIX,)).items():
            if name.endswith(f".rank-{source_rank}"):
                fitting[name] = tensor

        def finish() -> None:
            self._finish_load(contents, own, fitting, optimizer_states, source_rank, report)

        return Loading(fitting, finish, report)

    def _finish_load(
        self,
        contents: Contents,
        own: Mapping[str, Tensor],
        filled: Mapping[str, Tensor],
        optimizer_states: Sequence[OptimizerState],
        source_rank: int,
        report: LoadReport,
    ) -> None:
        """Restore everything from the filled tensors and the saved values."""
        values = contents.values
        self._finish_model(own, values)
        if contents.model_only:
            report.notes.append(
                "parameters only: optimizer, generators and position are as they were"
            )
            return

        for state, saved in zip(optimizer_states, values["optimizers"], strict=False):
            if not any(saved["class"] in difference for difference in report.different):
                state.restore(saved, filled)

        ranks = Ranks(self.group)
        self._set_gradients(ranks.rank, filled)
        parts = {**values["parts"], **_parts_of(contents, source_rank)}
        for name, part in self.parts.items():
            if name in parts:
                part.load_state_dict(decode(parts[name], tensors=filled))

        self.step = values["step"]
        self.position = values["position"]
        self.microstep = values["microstep"]
        random = _random_state_of(contents, filled, source_rank)
        self._random = (random, source_rank != ranks.rank)
        report.notes += [*self._differences(values, ranks), *self.restore_random()]

    def _training_targets(
        self,
        optimizer_states: Sequence[OptimizerState],
        contents: Contents,
        ranks: Ranks,
        report: LoadReport,
    ) -> dict[str, Tensor]:
        """Return the tensors to fill for optimizers and gradients; put differences in `report`."""
        values = contents.values
        targets: dict[str, Tensor] = {}
        for state, saved in zip(optimizer_states, values["optimizers"], strict=False):
            try:
                targets |= state.targets(saved, contents.tensors)
            except StateMismatch as error:
                report.different.append(str(error))
        self._compare_parts(contents, report)

        if values["microstep"]:
            if values["world_size"] != ranks.size:
                report.different.append(
                    f"it was saved between two steps by {values['world_size']} ranks, each with "
                    f"its own gradients, and is loaded by {ranks.size}"
                )
            targets |= self._gradient_targets(ranks.rank)
        return targets

    def _prefer_own_buffers(
        self, fitting: dict[str, Tensor], contents: Contents, rank: int
    ) -> None:
        """Load this rank's own copy of a buffer instead of the first rank's."""
        for name in self._buffer_names():
            own_name = f"rank-{rank}.{name}"
            if own_name in contents.tensors and name in fitting:
                fitting[own_name] = fitting.pop(name)

    def restore_random(self) -> list[str]:
        """Restore the loaded generators' states once more.

        Creating an iterator over a DataLoader draws from the generators, so call this afterwards.
        """
        if self._random is None:
            raise ValueError("nothing was loaded yet, so there is no random state to restore")
        state, is_new = self._random
        if is_new:
            rank = Ranks(self.group).rank
            seed_new_rank(state, rank, self.generators)
            return [f"rank {rank} was not there at the save: its generators are seeded anew"]
        return restore_random_state(state, self.generators)

    def _model_tensors(self) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
        """Return the model's tensors, the ties between their names, and its other state as JSON."""
        state = {
            MODEL_PREFIX + name: value
            for name, value in bare_names(self.model, self.model.state_dict()).items()
        }
        tensors = {
            name: value.detach() for name, value in state.items() if isinstance(value, Tensor)
        }
        own, ties = split_ties(tensors)
        values = {name: encode(value, name) for name, value in state.items() if name not in tensors}
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

    def _gradients(self, rank: int) -> dict[str, Tensor]:
        gradients = {}
        for parameter, name in parameter_names(self.model).items():
            if parameter.grad is None:
                continue
            if not _is_whole(parameter.grad):
                raise ValueError(
                    "sharded gradients between two steps can't be saved: save when microstep is 0"
                )
            gradients[f"{GRADIENT_PREFIX}rank-{rank}.{name}"] = parameter.grad.clone()
        return gradients

    def _gradient_targets(self, rank: int) -> dict[str, Tensor]:
        return {
            f"{GRADIENT_PREFIX}rank-{rank}.{name}": torch.zeros_like(parameter, requires_grad=False)
            for parameter, name in parameter_names(self.model).items()
            if parameter.requires_grad
        }

    def _set_gradients(self, rank: int, filled: Mapping[str, Tensor]) -> None:
        for parameter, name in parameter_names(self.model).items():
            parameter.grad = filled.get(f"{GRADIENT_PREFIX}rank-{rank}.{name}")

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

    def _finish_model(self, own: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load the filled tensors into the model, unless they are the model's own memory."""
        state = self.model.state_dict()
        extra = values.get("model", {})
        bare_to_full = bare_names(self.model, {name: name for name in state})
        keys = {full: MODEL_PREFIX + bare for bare, full in bare_to_full.items()}

        if not extra and all(
            same_memory(state[name], own[key]) for name, key in keys.items() if key in own
        ):
            return

        for name, key in keys.items():
            if key in own:
                state[name] = own[key]
            elif key in extra:
                state[name] = decode(extra[key])
        self.model.load_state_dict(state)

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
        saved = decode(values["config"])
        changed = sorted(
            key for key in {*saved, *self.config} if saved.get(key) != self.config.get(key)
        )
        if changed:
            notes.append(f"the configuration differs in {', '.join(changed)}")
        return notes


def _parts_of(contents: Contents, rank: int) -> Mapping[str, Any]:
    # A best-K has no values of ranks.
    return contents.rank_values[rank].get("parts", {}) if contents.rank_values else {}


def _is_whole(tensor: Tensor) -> bool:
    return not hasattr(tensor, "to_local")


def _fresh(contents: Contents, prefixes: tuple[str, ...]) -> dict[str, Tensor]:
    """Return empty tensors for the saved names that start with one of the prefixes."""
    return {
        name: torch.empty(facts.shape, dtype=facts.dtype)
        for name, facts in contents.tensors.items()
        if name.startswith(prefixes)
    }


def _fresh_part_tensors(contents: Contents, rank: int) -> dict[str, Tensor]:
    """Return empty tensors for the shared parts, and for the parts of one rank."""
    own_parts = _parts_of(contents, rank)
    prefixes = []
    for name in {**contents.values["parts"], **own_parts}:
        prefixes.append(
            f"{PART_PREFIX}{name}.rank-{rank}." if name in own_parts else f"{PART_PREFIX}{name}"
        )
    return _fresh(contents, tuple(prefixes))


def _random_state_of(contents: Contents, filled: Mapping[str, Tensor], rank: int) -> RandomState:
    suffix = f".rank-{rank}"
    tensors = {
        name.removeprefix(RANDOM_PREFIX).removesuffix(suffix): tensor
        for name, tensor in filled.items()
        if name.startswith(RANDOM_PREFIX)
    }
    return RandomState(tensors, contents.rank_values[rank]["random"])


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
