"""Gates of saved state in the forms that users have: optimizers, generators, loaders, disks.

Each trial plants a small training of its own, because none of these claims depends on the model. A
gate runs a table of trials, and names the first one that does not hold.

Why so long: the trials of three gates, of which each is a few lines and stands beside the table
that lists it.

Proof: `python -m pytest tests/gates/test_saved_forms.py`.
"""

import copy
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from ..core.rerun import seeded
from ..runs.optimizer_state import FrozenBase, require_base, upgraded
from ..runs.random_state import (
    DataPosition,
    RandomState,
    check_random_state,
    generators_of,
    inexact,
    restore_random_state,
    restore_threads,
    seed_new_rank,
    spared_workers,
    take_random_state,
)
from ..runs.ranks import DamagedCheckpoint, StateMismatch
from ..runs.retention import (
    bytes_to_write,
    estimate_disk,
)
from ..runs.state import TrainingState
from ..runs.store import SavedRun, Store
from ..workloads.workload import Case
from .trials import (
    InterruptedFiles,
    estimated,
    no_room,
)
from .verdict import (
    Gate,
    Judged,
    Takes,
    Trial,
    Verdict,
    first_of,
    judged_by,
    unlike,
    unrefused,
)

ROLLBACK_KIND = "rollback"
BEST_KIND = "best-k"


# Optimizers of all forms, under wrappers of all forms.


class PlantedNet(nn.Module):
    """Two layers, a scale without dimensions, and two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.last = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.last.weight
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.scale * self.tied(self.last(self.first(x)))
        return output


class OddOptimizer(torch.optim.Optimizer):
    """Keeps state that is nested, shared, of other shapes and dtypes, and of no parameter."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.01) -> None:
        defaults = {"lr": torch.tensor(lr), "betas": (0.5, [0.25]), "name": None}
        super().__init__(parameters, defaults)

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        whole: Any = self.state
        seen = whole.setdefault("whole", {"count": 0, "average": torch.zeros(2)})
        seen["count"] += 1
        seen["average"] = 0.5 * seen["average"] + seen["count"]
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group["lr"])

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter, rate: Tensor) -> None:
        entry = self.state[parameter]
        if not entry:
            shared = torch.zeros(2, dtype=torch.float64)
            entry |= {"a.b": shared, 7: shared, "nested": [torch.zeros_like(parameter), (1, None)]}
            entry |= {"step": 0, "row": torch.zeros(3, dtype=torch.int16), "best": math.inf}
        entry["step"] += 1
        entry["a.b"] += 0.3
        entry["row"] += 2
        entry["nested"][0] += parameter.grad
        parameter.sub_(rate * (entry["nested"][0] + entry["a.b"][0]))


def _in_two_groups(net: nn.Module) -> torch.optim.Optimizer:
    biases = [one for name, one in net.named_parameters() if name.endswith("bias")]
    others = [one for name, one in net.named_parameters() if not name.endswith("bias")]
    groups: Any = [{"params": biases, "lr": 0.1, "weight_decay": 0.0}, {"params": others}]
    return torch.optim.AdamW(groups, lr=0.01, amsgrad=True)


Build = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Build] = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
    "AdamW in two groups": _in_two_groups,
    "AdamW with a tensor as rate": lambda net: torch.optim.AdamW(
        net.parameters(), torch.tensor(0.01), foreach=False
    ),
    "Adam, fused": lambda net: torch.optim.Adam(net.parameters(), 0.01, fused=True),
    "NAdam": lambda net: torch.optim.NAdam(net.parameters()),
    "ASGD": lambda net: torch.optim.ASGD(net.parameters()),
    "Adagrad": lambda net: torch.optim.Adagrad(net.parameters()),
    "Rprop": lambda net: torch.optim.Rprop(net.parameters()),
    "LBFGS": lambda net: torch.optim.LBFGS(net.parameters(), 0.1, max_iter=2),
    "one of their own": lambda net: OddOptimizer(net.parameters()),
}


def nets_and_optimizers() -> tuple[nn.ModuleList, list[torch.optim.Optimizer]]:
    """Build a net for each optimizer."""
    nets = nn.ModuleList(PlantedNet() for _ in OPTIMIZERS)
    return nets, [build(net) for build, net in zip(OPTIMIZERS.values(), nets, strict=True)]


def step_nets(state: Any, *, seed: int) -> None:
    """Train each net one step on the same batch."""
    batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    for net, optimizer in zip(state.model, state.optimizers, strict=True):

        def closure(net: nn.Module = net, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = net(batch).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    state.model.zero_grad()


def facts_of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what decides the next step: the state of each parameter, and the groups."""
    numbers: dict[Any, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            numbers[parameter] = len(numbers)
    state = {str(numbers.get(key, key)): value for key, value in optimizer.state.items()}
    groups = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
    ordered = dict(sorted(state.items()))
    for key, entry in ordered.items():
        ordered[key] = {str(name): value for name, value in entry.items()}
    return copy.deepcopy({"state": ordered, "groups": groups})


def every_optimizer(folder: Path, make: Callable[..., Any]) -> str:
    """Load the states of all optimizers into fresh ones and into ones that have trained."""
    state = make(*nets_and_optimizers())
    for seed in (1, 2):
        step_nets(state, seed=seed)
    expected = [facts_of_optimizer(optimizer) for optimizer in state.optimizers]
    with Store(folder, files=InterruptedFiles(folder)) as store:
        saved = store.save(ROLLBACK_KIND, 1, state)
    step_nets(state, seed=3)
    for num_steps in (0, 1):
        other = make(*nets_and_optimizers())
        for seed in range(num_steps):
            step_nets(other, seed=9 + seed)
        SavedRun(folder).load(saved, other)
        found = [facts_of_optimizer(optimizer) for optimizer in other.optimizers]
        step_nets(other, seed=3)
        after = [copy.deepcopy(dict(net.named_parameters())) for net in other.model]
        for number, name in enumerate(OPTIMIZERS):
            parameters = dict(state.model[number].named_parameters())
            if problem := first_of(
                (
                    unlike(name, found[number], expected[number]),
                    unlike(f"{name}, the next step", after[number], parameters),
                )
            ):
                return problem
    return ""


class _Wrapper(nn.Module):
    """Holds a module under a name that checkpoints leave out."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)


class _WithoutPrefix(_Wrapper):
    """A wrapper that removes its attribute from the names of its state, as torch's do."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__(name, inner)
        self._register_state_dict_hook(lambda *given: _renamed(given[1], given[2], f"{name}."))

    def named_parameters(self, *options: Any, **more: Any) -> Iterator[Any]:
        return next(iter(self.children())).named_parameters(*options, **more)


def _renamed(state: dict[str, Any], prefix: str, part: str) -> None:
    for name in [one for one in state if one.startswith(prefix + part)]:
        state[prefix + name.removeprefix(prefix + part)] = state.pop(name)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.compile": lambda net: _Wrapper("_orig_mod", net),
    "recompute": lambda net: _Wrapper("_checkpoint_wrapped_module", net),
    "FSDP": lambda net: _Wrapper("_fsdp_wrapped_module", net),
    "names without prefix": lambda net: _WithoutPrefix("_checkpoint_wrapped_module", net),
    "DataParallel": lambda net: nn.DataParallel(net),
    "two of them": lambda net: _Wrapper("_orig_mod", nn.DataParallel(net)),
}


def wrapped_models(folder: Path, make: Callable[..., Any]) -> str:
    """Compare the names of a wrapped model with those of the model, inside and outside."""

    def names(net: nn.Module) -> list[str]:
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        for parameter in net.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return sorted(
            name for name in make(net, optimizer).snapshot().tensors if "random" not in name
        )

    plain = names(PlantedNet())
    for name, wrap in WRAPPERS.items():
        inside: Any = PlantedNet()
        inside.first[0] = wrap(inside.first[0])
        for place, net in (("around", wrap(PlantedNet())), ("inside", inside)):
            if problem := unlike(f"the names with {name} {place}", names(net), plain):
                return problem
    own = nn.ModuleDict({"module": nn.Linear(1, 1)})
    if not any("module.weight" in name for name in names(own)):
        return "a module of the user's own that is named module lost its name"
    return ""


def _frozen(seed: int, *, changed: bool = False) -> Any:
    torch.manual_seed(seed)
    net: Any = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3))
    if changed:
        with torch.no_grad():
            net[0].bias[1] += 1
    return net


def frozen_base(folder: Path, make: Callable[..., Any]) -> str:
    """Save what trains alone; load it onto the same base, another one, and without one."""

    def state_of(net: nn.Module, *, trained_only: bool = True) -> Any:
        trained = [one for one in net.parameters() if one.requires_grad]
        return make(net, torch.optim.SGD(trained, 0.1), trained_only=trained_only)

    def hash_of(state: Any) -> Any:
        return state.base.content()["hash"]

    state = state_of(_frozen(1))
    with Store(folder, files=InterruptedFiles(folder)) as store:
        saved = store.save(ROLLBACK_KIND, 1, state)
    same = state_of(_frozen(1))
    with torch.no_grad():
        same.model[1].weight.zero_()
    SavedRun(folder).load(saved, same)
    renamed: Any = nn.Sequential(_frozen(1)[0], nn.Identity(), nn.Linear(3, 3))
    other_names = state_of(renamed)
    wider = state_of(_frozen(1).double())
    hashes = [
        hash_of(state_of(_frozen(1, changed=True))),
        hash_of(wider),
        hash_of(state_of(_frozen(2))),
    ]
    flat = _frozen(1)
    flat[0].weight = nn.Parameter(flat[0].weight.reshape(1, 9), requires_grad=False)
    hashes.append(hash_of(state_of(flat)))
    again = _written_to(other_names)
    content = state.base.content()
    load = SavedRun(folder).load
    return first_of(
        (
            unlike("the adapter", same.model[1].weight, state.model[1].weight),
            "frozen tensors were saved"
            if any(".0." in one for one in state.snapshot().tensors)
            else "",
            "two bases have one hash" if content["hash"] in hashes or len({*hashes}) < 4 else "",
            again,
            unrefused(StateMismatch, lambda: load(saved, state_of(_frozen(2))), "another base"),
            unrefused(
                StateMismatch,
                lambda: load(saved, state_of(_frozen(1), trained_only=False)),
                "trained_only=True",
            ),
            *(
                unrefused(DamagedCheckpoint, lambda one=one: require_base(one, state.base), "hash")
                for one in (None, {}, {"algorithm": 1, "hash": "x"}, {"algorithm": "blake2b"})
            ),
            unrefused(
                ValueError,
                FrozenBase(nn.Linear(1, 1, device="meta").requires_grad_(False)).content,
                "bias",
                "meta",
            ),
        )
    )


class Quantised(nn.Parameter):
    """A frozen parameter of two tensors, as a library of quantised weights has."""

    low = torch.ones(2, dtype=torch.uint8)
    scales = torch.ones(1)

    def detach(self) -> "Quantised":
        return self

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["low", "scales"], None


def _written_to(state: Any) -> str:
    """Write to a frozen weight, put another one in its place, and plant one of two tensors."""
    model = state.model
    base = state.base

    def content() -> Any:
        return base.content()["hash"]

    hashes = [content()]
    with torch.no_grad():
        model[0].weight[0, 0] += 1
    hashes.append(content())
    # It has the version of the one that is in its place now.
    other = nn.Parameter(torch.randn(3, 3), requires_grad=False)
    with torch.no_grad():
        other.add_(1)
    model[0].weight = other
    hashes.append(content())
    quantised = Quantised(torch.zeros(3), requires_grad=False)
    model[0].bias = quantised
    hashes.append(content())
    for name in ("low", "scales"):
        setattr(quantised, name, getattr(quantised, name) + 1)
        hashes.append(FrozenBase(model).content()["hash"])
    left = base.leave_out({"0.bias": 1, "0.bias.low": 2, "0.bias_of_theirs": 3, "0": 4})
    if len({*hashes}) < len(hashes):
        return "a base that was written to has the old hash"
    return unlike("what is not of the base", left, {"0.bias_of_theirs": 3, "0": 4})


class _Keeping(torch.optim.SGD):
    """An optimizer with a state that is in none of its groups."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"history": [1]}


class FullyShardedDataParallel(_Wrapper):
    """A model under the name of torch's first FSDP, whose parameters have no names."""


def refused_optimizers(folder: Path, make: Callable[..., Any]) -> str:
    """Save and load optimizers that are not those of the state; each error names what differs."""
    net: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    with Store(folder, files=InterruptedFiles(folder)) as store:
        saved = store.save(ROLLBACK_KIND, 1, make(net, sgd))
    load = SavedRun(folder).load

    def groups_of(*groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": list(group)} for group in groups], 0.1)

    strange = torch.optim.SGD(net.parameters(), 0.1)
    strange.state[net[0].weight] = [1]
    sharded = FullyShardedDataParallel("inner", nn.Linear(1, 1))

    def saving(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
        return lambda: make(model, optimizer).snapshot()

    def loading(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
        return lambda: load(saved, make(net, optimizer))

    away = groups_of([net[0].weight, net[0].bias, net[1].weight])
    divided = groups_of(net[0].parameters(), net[1].parameters())
    of_others = torch.optim.SGD(nn.Linear(5, 7).parameters(), 0.1)
    return first_of(
        (
            unrefused(StateMismatch, loading(torch.optim.Adam(net.parameters())), "SGD", "Adam"),
            unrefused(StateMismatch, loading(away), "[4]", "[3]", "1.bias"),
            unrefused(StateMismatch, loading(divided), "[4]", "[2, 2]", "divided differently"),
            unrefused(ValueError, saving(net, of_others), "group 0", "[7, 5]"),
            unrefused(
                ValueError, saving(net, _Keeping(net.parameters(), 0.1)), "history", "_Keeping"
            ),
            unrefused(ValueError, saving(net, strange), "0.weight", "list"),
            unrefused(ValueError, saving(sharded, groups_of(sharded.parameters())), "FSDP1"),
        )
    )


def first_format(folder: Path, make: Callable[..., Any]) -> str:
    """Rewrite an optimizer's state as the first format had it, and read it again."""
    net = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = make(net, optimizer)
    snapshot = state.snapshot()
    saved = copy.deepcopy(snapshot.values["optimizers"][0])
    plain = saved.pop("parameters")
    for name, entries in plain.items():
        plain[name] = [*([key, value, None] for key, value, _ in entries), ["count", 3, None]]
    prefix = next(name for name in snapshot.tensors if name.endswith("0.weight.exp_avg"))
    prefix = prefix.removesuffix("0.weight.exp_avg")
    saved["state"] = {f"{name}.count": 3 for name in plain} | {"elsewhere.count": 4}
    ours = [name for name in snapshot.tensors if name.startswith(prefix)]
    facts: Any = dict.fromkeys([*ours, f"{prefix}elsewhere.exp_avg", "0.weight.exp_avg"])
    found = upgraded(saved, prefix, facts)
    return first_of(
        (
            unlike("the first format", found["parameters"], plain),
            unlike("what is of no parameter", found["others"], {}),
            unlike("today's format", upgraded(found, prefix, facts) is found, True),
        )
    )


OPTIMIZER_TRIALS: dict[str, Trial] = {
    "optimizers": every_optimizer,
    "wrappers": wrapped_models,
    "trained_only": frozen_base,
    "refused": refused_optimizers,
    "first format": first_format,
}


def optimizers(case: Case, *, state: Callable[..., Any] = TrainingState) -> Verdict:
    """Save and load ten optimizers, wrapped models, adapters without their base, and wrong ones."""
    with seeded(case.seed):
        return judged_by(
            "checkpoint-policy/optimizers",
            OPTIMIZER_TRIALS,
            state,
            hint="save state by the parameter's bare name, with its types, and refuse what differs",
        )


# Generators, and the position in the data.

NUM_BATCHES = 5
NUM_TAKEN = 2


def _draws(own: torch.Generator | None = None) -> list[Any]:
    """Draw from every generator; each of them keeps a second normal number for the next call."""
    return [
        torch.rand(2),
        random.gauss(0, 1),
        random.random(),
        float(numpy.random.normal()),
        torch.rand(2, generator=own) if own else None,
    ]


def every_generator(folder: Path, position: Callable[..., Any]) -> str:
    """Restore all generators, and compare what they draw; a generator too many is a note."""
    own = torch.Generator().manual_seed(3)
    _draws(own)
    taken = take_random_state({"own": own})
    expected = _draws(own)
    _draws(own)
    check_random_state(taken)
    notes = restore_random_state(taken, {"own": own})
    found = _draws(own)
    alone = restore_random_state(taken)
    more = restore_random_state(take_random_state(), {"new": own})
    tensors = dict(taken.tensors)
    without_numpy = {"python": taken.values["python"]}
    no_numpy = restore_random_state(RandomState(tensors, without_numpy), {"own": own})
    only_torch = {"torch": taken.tensors["torch"]}
    elsewhere = RandomState(only_torch | {"cuda-97": torch.zeros(16, dtype=torch.uint8)}, {})
    return first_of(
        (
            unlike("what the generators draw", found, expected),
            unlike("notes", notes, []),
            unlike(
                "notes on a missing generator", ["generator-own" in one for one in alone], [True]
            ),
            unlike("notes on a new generator", ["new" in one for one in more], [True]),
            unlike("notes without NumPy's", ["numpy" in one for one in no_numpy], [True]),
            "a device that is gone is not noted"
            if not any("cuda-97" in one for one in restore_random_state(elsewhere))
            else "",
        )
    )


def damaged_generators(folder: Path, position: Callable[..., Any]) -> str:
    """Check states that no generator takes; none of the generators changes."""
    good = take_random_state({"own": torch.Generator()})
    tensors = dict(good.tensors)
    values = dict(good.values)
    short = torch.zeros(3, dtype=torch.uint8)
    damaged = {
        "no state of torch": RandomState({}, values),
        "a short state of torch": RandomState(tensors | {"torch": short}, values),
        "a short state of CUDA": RandomState(tensors | {"cuda-0": short}, values),
        "Python's state as a word": RandomState(tensors, values | {"python": "x"}),
        "NumPy's state as a word": RandomState(tensors, values | {"numpy": "x"}),
    }
    sound = {
        "without others": RandomState({"torch": tensors["torch"]}, {}),
        "a state of CUDA": RandomState(tensors | {"cuda-0": torch.zeros(16)}, values),
    }
    before = take_random_state().tensors["torch"]
    problems = [
        unrefused(DamagedCheckpoint, lambda one=one: check_random_state(one), "random state")
        for one in damaged.values()
    ]
    for one in sound.values():
        check_random_state(one)
    unchanged = torch.equal(before, torch.get_rng_state())
    return first_of([*problems, "" if unchanged else "a check changed the generators"])


def new_ranks(folder: Path, position: Callable[..., Any]) -> str:
    """Seed ranks that did not exist: each draws its own numbers, the same ones each time."""
    own = torch.Generator().manual_seed(3)
    torch.manual_seed(1)
    taken = take_random_state()
    torch.manual_seed(2)
    draws = []
    for state, rank in ((taken, 1), (taken, 2), (take_random_state(), 1), (taken, 1)):
        seed_new_rank(state, rank, {"own": own})
        draws.append(
            [
                float(one) if i != 0 and i != 4 else float(one[0])
                for i, one in enumerate(_draws(own))
            ]
        )
    again = draws.pop()
    return first_of(
        (
            unlike("what a new rank draws the second time", again, draws[0]),
            *(
                "two new ranks draw the same" if len(set(column)) < len(column) else ""
                for column in zip(*draws, strict=True)
            ),
        )
    )


def threads(folder: Path, position: Callable[..., Any]) -> str:
    """Restore the number of threads where it is possible and allowed; else a note has both."""
    current = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        told = restore_threads(1)
        problems = ["" if "1 threads, as at the save" in told else f"the note says {told!r}"]
        for saved, may in ((10**6, True), (0, True), (1, False)):
            note = restore_threads(saved, may_restore=may)
            wanted = f"saved with {saved} threads, but 1 are set"
            problems.append("" if wanted in note else f"the note says {note!r}")
            problems.append(unlike("the number of threads", torch.get_num_threads(), 1))
        if len(os.sched_getaffinity(0)) > 1:
            restore_threads(2)
            problems.append(unlike("the number of threads", torch.get_num_threads(), 2))
    finally:
        torch.set_num_threads(current)
    return first_of(problems)


SAMPLES: Any = range(NUM_BATCHES * 2)
LOADERS: dict[str, Callable[[torch.Generator], Any]] = {
    "shuffled by its own generator": lambda own: DataLoader(
        SAMPLES, 2, shuffle=True, generator=own
    ),
    "shuffled by torch's": lambda own: DataLoader(SAMPLES, 2, shuffle=True),
    "a sampler": lambda own: DataLoader(SAMPLES, 2, sampler=RandomSampler(SAMPLES, generator=own)),
    "a sampler of batches": lambda own: DataLoader(
        SAMPLES,
        batch_sampler=BatchSampler(RandomSampler(SAMPLES, generator=own), 2, False),
    ),
    "a list": lambda own: [torch.tensor([number]) for number in range(NUM_BATCHES)],
}


def middle_of_a_pass(folder: Path, position: Callable[..., Any]) -> str:
    """Save within a pass, and compare the batches that are left with those of another one.

    The state of the position goes through a copy, as through a checkpoint.
    """
    problems = []
    for name, make in LOADERS.items():
        own = torch.Generator().manual_seed(3)
        loader = make(own)
        place = position()
        problems.append(unlike("a position at the start", place.state_dict(), FRESH_POSITION))
        place.begin_epoch(4)
        data = place.iterator(loader, generators_of(loader))
        for _ in range(NUM_TAKEN):
            next(data)
            place.batch += 1
        saved = copy.deepcopy(place.state_dict())
        now = take_random_state(generators_of(loader))
        expected = [one.tolist() for one in data]

        own = torch.Generator().manual_seed(8)
        loader = make(own)
        again = position()
        again.load_state_dict(saved)
        problems.append(
            unlike(f"the place with {name}", (again.epoch, again.batch), (4, NUM_TAKEN))
        )
        data = again.iterator(loader, generators_of(loader))
        restore_random_state(now, generators_of(loader))
        problems.append(
            unlike(f"the batches with {name}", [one.tolist() for one in data], expected)
        )
        short = [0] * (NUM_TAKEN - 1)
        problems.append(
            unrefused(
                ValueError,
                lambda one=again, data=short: one.iterator(data, {}),
                "2",
                "1",
                "epoch 4",
            )
        )
        again.begin_epoch(5)
        problems.append(
            unlike(f"the place with {name}", again.state_dict(), FRESH_POSITION | {"epoch": 5})
        )
        again.batch = 3
        problems.append(unlike("a new pass", len(list(again.iterator([1, 2, 3], {}))), 3))
    return first_of(problems)


FRESH_POSITION = {"epoch": 0, "batch": 0, "began": None}


def loaders(folder: Path, position: Callable[..., Any]) -> str:
    """Find the generators of a loader, each once, and say what is not exact within a pass."""
    own = [torch.Generator() for _ in range(4)]
    inner = SimpleNamespace(generator=own[3])
    batches = SimpleNamespace(generator=own[2], sampler=inner)
    sampler = SimpleNamespace(generator=own[1])
    every = SimpleNamespace(generator=own[0], sampler=sampler, batch_sampler=batches)
    names = ("loader", "sampler", "batch-sampler", "inner-sampler")
    shared = SimpleNamespace(generator=own[0], sampler=SimpleNamespace(generator=own[0]))
    exact: tuple[dict[str, Any], ...] = (
        {},
        {"num_workers": 1},
        {"persistent_workers": True},
        {"num_workers": 1, "in_order": True},
        {"in_order": False},
    )
    loader: Any = DataLoader(SAMPLES, num_workers=1, worker_init_fn=print)
    before = loader.worker_init_fn
    with spared_workers(loader):
        inside = loader.worker_init_fn
    alone: Any = DataLoader(SAMPLES, worker_init_fn=print)
    with spared_workers(alone):
        untouched = alone.worker_init_fn is print
    persistent = inexact(SimpleNamespace(num_workers=1, persistent_workers=True)) or ""
    unordered = inexact(SimpleNamespace(num_workers=1, in_order=False)) or ""
    return first_of(
        (
            unlike(
                "the generators", generators_of(every) == dict(zip(names, own, strict=True)), True
            ),
            unlike("a shared generator", list(generators_of(shared)), ["loader"]),
            unlike("no generator", generators_of([1, 2]), {}),
            "" if "persistent_workers" in persistent else "persistent workers are not named",
            "" if "in_order" in unordered else "workers out of order are not named",
            *(
                unlike(f"what is not exact with {one}", inexact(SimpleNamespace(**one)), None)
                for one in exact
            ),
            ""
            if inside is not before and untouched
            else "workers start with a signal that ends them",
            "" if loader.worker_init_fn is before else "the loader keeps another worker_init_fn",
        )
    )


RANDOM_TRIALS: dict[str, Trial] = {
    "generators": every_generator,
    "damaged": damaged_generators,
    "new ranks": new_ranks,
    "threads": threads,
    "within a pass": middle_of_a_pass,
    "loaders": loaders,
}


def random_states(case: Case, *, position: Callable[..., Any] = DataPosition) -> Verdict:
    """Restore generators, threads, and the place in loaders of all forms."""
    with seeded(case.seed):
        return judged_by(
            "checkpoint-policy/random",
            RANDOM_TRIALS,
            position,
            hint="save each generator, also those of the loader, and draw the batches taken again",
        )


# Room on the disk.


def bytes_of_a_save(folder: Path, estimate: Callable[..., Any]) -> str:
    """Compare the bytes that a save needs with those that it writes: no fewer, and few more."""
    net = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 200)).sum().backward()
    optimizer.step()
    state = TrainingState(net, optimizer, config={"note": "x" * 50_000})
    problems = []
    with Store(folder, files=InterruptedFiles(folder)) as store:
        for kind, metric in ((ROLLBACK_KIND, None), (BEST_KIND, ("dev_loss", 1.0))):
            needed = bytes_to_write(state.snapshot(), model_only=kind == BEST_KIND)
            saved = store.save(kind, 1, state, metric=metric)
            written = sum(path.stat().st_size for path in (folder / saved.folder).iterdir())
            if not written <= needed <= 1.25 * written + 80_000:
                problems.append(f"a {kind} writes {written:,} bytes, and {needed:,} are required")
    return first_of(problems)


ROOM_TRIALS: dict[str, Trial] = {
    "estimate": estimated,
    "bytes of a save": bytes_of_a_save,
    "no room": no_room,
}


def room(case: Case, *, estimate: Callable[..., Any] = estimate_disk) -> Verdict:
    """Compare estimated bytes with their definition and with what a save writes, and refuse."""
    with seeded(case.seed):
        return judged_by(
            "checkpoint-policy/room",
            ROOM_TRIALS,
            estimate,
            hint="count each checkpoint that is kept, and the one that is being written",
        )


FORMS_GATES = (
    Gate("checkpoint-policy/optimizers", optimizers, {"TrainingState": Takes("state")}),
    Gate("checkpoint-policy/random", random_states, {"DataPosition": Takes("position")}),
    Gate("checkpoint-policy/room", room, {"estimate_disk": Takes("estimate")}),
)
JUDGED_FORMS = (
    Judged("DataPosition", lambda: None),
    Judged("estimate_disk", lambda parameters, config, *, dtype: None),
)
