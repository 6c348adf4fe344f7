"""Everything that a training run continues from: model, optimizer, schedule, scaler, generators, position, config.

`snapshot` gives it to the store, `begin_load` takes it back: strictly, so that a key that is missing, extra, reshaped
or of another dtype is an error before anything is changed. Proof: `python -m pytest tests/test_state.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import PARTLY, DamagedCheckpoint, StateMismatch
from .matching import match
from .optimizer_state import OptimizerState, parameter_names
from .plain_values import decode, encode
from .random_state import RandomState, restore_random_state, seed_new_rank, take_random_state
from .ranks import Ranks
from .snapshot import MODEL, Contents, Loading, LoadReport, Snapshot
from .tensor_names import bare_names, same_memory, split_ties

NEEDED = {
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
RANDOM, GRADIENT, PART = "random.", "gradient.", "part."


class TrainingState:
    """`position` counts the samples consumed, `step` the optimizer's steps, `microstep` the backward passes since the
    last one; the loop sets them. `extra` holds anything else with `state_dict` and `load_state_dict`, by name, of the
    first rank; of every rank, where it says `of_each_rank = True`.
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
        self.model, self.config, self.group = model, dict(config or {}), group
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        schedulers = scheduler if isinstance(scheduler, list | tuple) else [scheduler]
        parts = {f"scheduler-{index}": one for index, one in enumerate(schedulers)}
        parts |= {"scaler": scaler, **{f"extra-{name}": one for name, one in (extra or {}).items()}}
        self.parts = {name: part for name, part in parts.items() if part is not None}
        self.generators = dict(generators or {})
        self.step = self.position = self.microstep = 0
        self._random: tuple[RandomState, bool] | None = None

    def snapshot(self) -> Snapshot:
        """The state as it stands; only what forward passes change is copied."""
        ranks = Ranks(self.group)
        own, ties, model_values = self._model_tensors()
        buffers = {name: own[name].clone() for name in self._buffer_names() if name in own}
        tensors: dict[str, Tensor] = {**own, **buffers}
        if ranks.rank:
            tensors |= {
                f"rank-{ranks.rank}.{name}": held
                for name, held in buffers.items()
                if _is_whole(held)
            }
        if self.microstep:
            tensors |= self._gradients(ranks.rank)
        optimizers = [one.take(tensors) for one in self._optimizer_states()]
        parts, own_parts, part_tensors = dict[str, Any](), dict[str, Any](), dict[str, Tensor]()
        for name, part in sorted(self.parts.items()):
            changing, each = dict[str, Tensor](), getattr(part, "of_each_rank", False)
            path = f"{PART}{name}.rank-{ranks.rank}" if each else PART + name
            (own_parts if each else parts)[name] = encode(part.state_dict(), path, tensors=changing)
            live = isinstance(
                part, nn.Module
            )  # an average of weights changes after a step; a loader's state at once
            part_tensors |= (
                changing if live else {key: held.clone() for key, held in changing.items()}
            )
        tensors |= part_tensors
        random = take_random_state(self.generators)
        tensors |= {
            f"{RANDOM}{name}.rank-{ranks.rank}": held for name, held in random.tensors.items()
        }
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
        return Snapshot(
            tensors, values, {"random": random.values, "parts": own_parts}, ties, self.optimizers
        )

    def begin_load(self, contents: Contents, *, strict: bool = True) -> Loading:
        """Where the saved tensors go. Raises StateMismatch while nothing has been changed."""
        own, ties, _ = self._model_tensors()
        ranks, values = Ranks(self.group), contents.values
        same_world = values.get("world_size") == ranks.size
        targets = dict(own)
        states = [] if contents.model_only else self._optimizer_states()
        report = LoadReport()
        if absent := NEEDED - set(values):
            raise DamagedCheckpoint(
                f"the saved state has no {', '.join(sorted(absent))}: it is none of a training run"
            )
        if not contents.model_only:
            for state, saved in zip(states, values["optimizers"], strict=False):
                try:
                    targets |= state.targets(saved, contents.tensors)
                except StateMismatch as error:
                    report.different.append(str(error))
            self._compare_parts(contents, report)
            if values["microstep"]:
                if not same_world:
                    report.different.append(
                        "it was saved between two steps, whose gradients are of each rank"
                    )
                targets |= self._gradient_targets(ranks.rank)
        fitting = match(targets, contents, ties, report, optional=(RANDOM, PART, "rank-"))
        if strict and not report.exact:
            raise StateMismatch(_describe(report))
        if same_world and ranks.rank:
            for name in self._buffer_names():
                if (ours := f"rank-{ranks.rank}.{name}") in contents.tensors and name in fitting:
                    fitting[ours] = fitting.pop(name)
        rank = ranks.rank if ranks.rank < values.get("world_size", 0) else 0
        own_parts = _parts_of(contents, rank)
        parts = {**values["parts"], **own_parts}
        mine = [
            f"{PART}{name}.rank-{rank}." if name in own_parts else f"{PART}{name}" for name in parts
        ]
        fitting |= _fresh(contents, tuple(mine))
        fitting |= {
            name: held
            for name, held in _fresh(contents, (RANDOM,)).items()
            if name.endswith(f".rank-{rank}")
        }

        def finish() -> None:
            self._finish_model(own, values)
            if contents.model_only:
                report.notes.append(
                    "parameters only: optimizer, generators and position are as they were"
                )
                return
            for state, saved in zip(states, values["optimizers"], strict=False):
                if not any(saved["class"] in line for line in report.different):
                    state.restore(saved, fitting)
            self._set_gradients(ranks.rank, fitting)
            for name, part in self.parts.items():
                if name in parts:
                    part.load_state_dict(decode(parts[name], tensors=fitting))
            self.step, self.position, self.microstep = (
                values["step"],
                values["position"],
                values["microstep"],
            )
            suffix = f".rank-{rank}"
            held = {
                name.removeprefix(RANDOM).removesuffix(suffix): tensor
                for name, tensor in fitting.items()
                if name.startswith(RANDOM)
            }
            self._random = (
                RandomState(held, contents.rank_values[rank]["random"]),
                rank != ranks.rank,
            )
            report.notes += [*self._differences(values, ranks), *self.restore_random()]

        return Loading(fitting, finish, report)

    def restore_random(self) -> list[str]:
        """Put the loaded generators' states back once more: making an iterator over a DataLoader draws from them."""
        if self._random is None:
            raise ValueError("nothing was loaded yet, so there is no random state to restore")
        state, is_new = self._random
        if is_new:
            rank = Ranks(self.group).rank
            seed_new_rank(state, rank, self.generators)
            return [f"rank {rank} was not there at the save: its generators are seeded anew"]
        return restore_random_state(state, self.generators)

    def _model_tensors(self) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
        held = {
            MODEL + name: part
            for name, part in bare_names(self.model, self.model.state_dict()).items()
        }
        tensors = {name: part.detach() for name, part in held.items() if isinstance(part, Tensor)}
        own, ties = split_ties(tensors)
        return (
            own,
            ties,
            {name: encode(part, name) for name, part in held.items() if name not in tensors},
        )

    def _buffer_names(self) -> list[str]:
        return [MODEL + name for name in bare_names(self.model, dict(self.model.named_buffers()))]

    def _optimizer_states(self) -> list[OptimizerState]:
        names = parameter_names(self.model)
        return [
            OptimizerState(one, names, f"optimizer.{index}.")
            for index, one in enumerate(self.optimizers)
        ]

    def _gradients(self, rank: int) -> dict[str, Tensor]:
        held = {name: parameter.grad for parameter, name in parameter_names(self.model).items()}
        if any(gradient is not None and not _is_whole(gradient) for gradient in held.values()):
            raise ValueError(
                "sharded gradients between two steps can't be saved: save when microstep is 0"
            )
        begin = f"{GRADIENT}rank-{rank}."
        return {
            begin + name: gradient.clone()
            for name, gradient in held.items()
            if gradient is not None
        }

    def _gradient_targets(self, rank: int) -> dict[str, Tensor]:
        return {
            f"{GRADIENT}rank-{rank}.{name}": torch.zeros_like(parameter, requires_grad=False)
            for parameter, name in parameter_names(self.model).items()
            if parameter.requires_grad
        }

    def _set_gradients(self, rank: int, filled: Mapping[str, Tensor]) -> None:
        for parameter, name in parameter_names(self.model).items():
            parameter.grad = filled.get(f"{GRADIENT}rank-{rank}.{name}")

    def _compare_parts(self, contents: Contents, report: LoadReport) -> None:
        values = contents.values
        saved = {
            *values["parts"],
            *_parts_of(contents, 0),
            *(f"optimizer {index}" for index in range(len(values["optimizers"]))),
        }
        own = {*self.parts, *(f"optimizer {index}" for index in range(len(self.optimizers)))}
        report.missing += sorted(
            name for name in own - saved if not getattr(self.parts.get(name), "may_be_new", False)
        )
        report.extra += sorted(saved - own)

    def _finish_model(self, own: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        state, extra = self.model.state_dict(), values.get("model", {})
        bare = {
            name: MODEL + short
            for short, name in bare_names(self.model, {name: name for name in state}).items()
        }
        if not extra and all(
            same_memory(state[name], own[key]) for name, key in bare.items() if key in own
        ):
            return  # the filled tensors are the model's own
        for name, key in bare.items():
            state[name] = (
                own[key] if key in own else decode(extra[key]) if key in extra else state[name]
            )
        self.model.load_state_dict(state)

    def _differences(self, values: Mapping[str, Any], ranks: Ranks) -> list[str]:
        notes = []
        if values["world_size"] != ranks.size:
            notes.append(
                f"saved by {values['world_size']} ranks, loaded by {ranks.size}: the state is bit-equal"
            )
        if values["threads"] != torch.get_num_threads():
            notes.append(
                f"saved with {values['threads']} threads and {torch.get_num_threads()} are set: the last bits of sums "
                f"on the CPU will differ; torch.set_num_threads({values['threads']})"
            )
        saved = decode(values["config"])
        changed = sorted(
            key for key in {*saved, *self.config} if saved.get(key) != self.config.get(key)
        )
        return [*notes, f"the configuration differs in {', '.join(changed)}"] if changed else notes


def _parts_of(
    contents: Contents, rank: int
) -> Mapping[str, Any]:  # not of a best-K, which has none
    return contents.rank_values[rank].get("parts", {}) if contents.rank_values else {}


def _is_whole(tensor: Tensor) -> bool:
    return not hasattr(tensor, "to_local")


def _fresh(contents: Contents, begins: tuple[str, ...]) -> dict[str, Tensor]:
    return {
        name: torch.empty(facts.shape, dtype=facts.dtype)
        for name, facts in contents.tensors.items()
        if name.startswith(begins)
    }


def _describe(report: LoadReport) -> str:
    parts = [
        f"{report.matched} of {report.wanted} saved and present tensors match ({report.ratio:.0%})"
    ]
    for words, names in (
        ("missing in the checkpoint", report.missing),
        ("only in the checkpoint", report.extra),
        ("different", report.different),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{words}: {', '.join(names[:3])}{more}")
    return "; ".join(parts) + f". Build the model and optimizer that were saved, or {PARTLY}"
