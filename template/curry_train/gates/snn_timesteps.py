"""Gates of timestep recompute: predicted memory and FLOPs, the same training, hidden state.

Each gate takes the technique as `apply`, and the last one its detector as `check`, so that tests
can plant wrong ones. They apply to models whose loop over time is a method
`unroll(step, inputs, state)`.

Why so long: all gates run a loop over time, by hand and in chunks, and share how it is compared.

Proof: `python -m pytest tests/gates/test_snn_timesteps.py`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import set_checkpoint_early_stop

from ..core.blocks import NoBlocks
from ..core.measure import FlopCount, Memory, count_flops, measure_memory, recompute_flops
from ..core.rerun import seeded, untouched
from ..primitives.hidden_state import HiddenState, TimestepFunction, check_step, roots_of, take_step
from ..primitives.snn_timesteps import (
    ChunkSchedule,
    Costs,
    best_schedule,
    checkpoint_timesteps,
    measure_costs,
    recompute_timesteps,
    remove_timesteps,
    slice_time,
    steppers,
)
from ..primitives.strategies import STRATEGIES, Apply, Sample, schedule_peak_bytes, times_again
from ..workloads.workload import Case
from .planted_blocks import HIDING_STEPS, PlantedCells, PlantedObject
from .same_training import same_training, sample_of
from .verdict import (
    Gate,
    Implementation,
    Judged,
    Takes,
    Verdict,
    not_applicable,
    unrefused,
    with_errors,
)

NO_LOOP = (
    "no module has a loop over time in a method unroll(step, inputs, state), so there is no loop "
    "to replace"
)
# Of the plain peak: if the predicted peak is higher, the saving is too small to check.
MOST_TIMESTEPS_SHARE = 0.8
ENOUGH_BYTES = 256 * 2**20
# Of a loop that is compared in each way to call it: chunks of two, and a shorter one.
MOST_COMPARED_STEPS = 7
Loop = Callable[..., tuple[Any, Any]]  # takes what checkpoint_timesteps takes


@dataclass(frozen=True)
class Unrolled:
    """One loop over time and the arguments that the model passes to it."""

    name: str
    step: TimestepFunction
    timesteps: Sequence[Any]
    state: Any

    def costs(self) -> Costs:
        return measure_costs(self.step, self.timesteps, self.state)

    def schedule(self, costs: Costs, levels: int) -> ChunkSchedule:
        """Choose the schedule by the formula."""
        return best_schedule(len(self.timesteps), costs, levels)


def timestep_memory(case: Case, *, apply: Apply | None = None) -> Verdict:
    """Compare the peak with its prediction, at a batch where activations dominate.

    The prediction is the state at the chunk boundaries and one chunk of timesteps.
    """
    gate = "snn-timesteps/memory"
    case = replace(case, blocks=None)  # the whole loop, whatever the blocks are
    if not _has_loop(case):
        return not_applicable(gate, required="the predicted peak", why=NO_LOOP)

    case, plain = _large_enough(case)
    module = case.build()
    allowed = plain.peak_bytes
    for loop in _loops(case):
        costs = loop.costs()
        allowed -= len(loop.timesteps) * costs.step_bytes
        allowed += schedule_peak_bytes(loop.schedule(costs, 1), costs)
        # A step that is being computed, and the gradient of the state.
        allowed += costs.step_bytes + costs.boundary_bytes
    allowed += sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    if case.device.type != "cpu":
        allowed += plain.peak_bytes // 20  # the allocator rounds up, and the formula counts bytes

    required = f"peak at most {allowed / plain.peak_bytes:.0%} of plain"
    if allowed > MOST_TIMESTEPS_SHARE * plain.peak_bytes:
        why = (
            "the formula predicts a small saving here: there are few timesteps, or other things "
            "own the memory"
        )
        return not_applicable(gate, required=required, why=why)

    (apply or STRATEGIES["timesteps"].apply)(module, sample_of(case))
    loss = case.workload.mean_loss
    batch = case.batch()
    with untouched(module):
        loss(module, batch)  # the first call measures costs
    found = measure_memory(module, batch, loss)
    held = found.peak_bytes <= allowed
    hint = ""
    if not held:
        hint = (
            "the chunks are of another size, or something is held for each timestep, such as "
            "outputs"
        )
    measured = f"peak {found.peak_bytes / plain.peak_bytes:.0%} of plain, batch {case.batch_size}"
    return Verdict(gate, held, measured, required, hint)


def timestep_parity(case: Case, *, strategy: str, apply: Apply | None = None) -> Verdict:
    """Compare loss, gradients, buffers and generators of one step with and without recompute."""
    gate = _named("parity", strategy)
    case = replace(case, blocks=None)
    if not _has_loop(case):
        return not_applicable(gate, required="bit-equal", why=NO_LOOP)

    try:
        return same_training(
            gate,
            case,
            apply or STRATEGIES[strategy].apply,
            alone=lambda model, sample: [],
            can_leave_out=False,
        )
    except NoBlocks:
        # Raised only after a difference was found, by the search for the block that causes it.
        hint = "the recomputed values differ from those of the first run"
        return Verdict(gate, False, "differs", "bit-equal", hint)


def timestep_flops(case: Case, *, strategy: str, apply: Apply | None = None) -> Verdict:
    """Compare the recomputed FLOPs with the schedule.

    Every timestep but those of the last chunks is recomputed once per level. With early stop the
    FLOPs may be fewer.
    """
    gate = _named("flops", strategy)
    required = "as predicted; with early stop at most that"
    case = replace(case, blocks=None)
    levels = 2 if strategy.endswith("nested") else 1
    if not _has_loop(case):
        return not_applicable(gate, required=required, why=NO_LOOP)

    expected = 0
    for loop in _loops(case):
        again = times_again(loop.schedule(loop.costs(), levels))
        expected += sum(times * cost for times, cost in zip(again, _step_flops(loop), strict=True))
    if not expected:
        why = "a step has no matrix product, convolution or attention whose FLOPs could be counted"
        return not_applicable(gate, required=required, why=why)

    loss = case.workload.mean_loss
    batch = case.batch()
    module = case.build()
    plain = count_flops(case.build(), batch, loss)
    (apply or STRATEGIES[strategy].apply)(module, sample_of(case))
    with untouched(module):
        loss(module, batch)  # the first call also runs some steps to detect hidden state
    with seeded(case.seed), set_checkpoint_early_stop(False):
        whole = recompute_flops(plain, count_flops(module, batch, loss))
    stopped = recompute_flops(plain, count_flops(module, batch, loss))
    held = whole == expected and 0 <= stopped <= whole <= levels * plain.forward
    measured = f"{whole:,} of {expected:,} predicted, {stopped:,} with early stop"
    hint = ""
    if not held:
        hint = "timesteps are not recomputed exactly once per level: check the chunk size"
    return Verdict(gate, held, measured, required, hint)


class PlantedStep(nn.Module):
    """A step with a hidden potential, as modules of spiking networks have."""

    def __init__(self, step: TimestepFunction) -> None:
        super().__init__()
        self.step = step
        self.potential: Any = 0.0

    def forward(self, x: Any, state: Any) -> tuple[Any, Any]:
        output, state = take_step(self.step, x, state)
        first = next(
            leaf
            for leaf in tree_leaves(output)
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        )
        self.potential = 0.5 * self.potential + first
        fires = (self.potential > 1e3).to(first.dtype)  # never in the steps that the check runs
        return tree_map(lambda leaf: leaf + fires if leaf is first else leaf, output), state


def hidden_state(
    case: Case, *, check: Callable[[TimestepFunction, Sequence[Any], Any], Any] = check_step
) -> Verdict:
    """Check that hidden state planted in a step is found and named, and that the step has none."""
    gate = "snn-timesteps/hidden-state"
    required = "planted: potential; own step: none"
    if not _has_loop(case):
        return not_applicable(gate, required=required, why=NO_LOOP)

    results = []
    hints = []
    for loop in _loops(case):
        own, why = _found(check, loop.step, loop)
        planted, _ = _found(check, PlantedStep(loop.step), loop)
        results.append(f"planted: {planted}; own step: {own}")
        if own != "none":
            hints.append(why)
        elif planted != "potential":
            hints.append(
                "the planted state is not found: chunks of such a module would silently get wrong "
                "gradients"
            )
    measured = " / ".join(dict.fromkeys(results))
    return Verdict(gate, not hints, measured, required, "; ".join(dict.fromkeys(hints)))


def _found(
    check: Callable[[TimestepFunction, Sequence[Any], Any], Any],
    step: TimestepFunction,
    loop: Unrolled,
) -> tuple[str, str]:
    try:
        check(step, loop.timesteps, loop.state)
    except HiddenState as error:
        return error.attribute or "state", str(error)
    return "none", ""


def every_output(case: Case, *, loop: Loop = checkpoint_timesteps) -> Verdict:
    """Compare outputs, last state and gradients of a step in each way to call the loop.

    Outputs are collected in each mode, of a tensor with time in its second dimension and of a
    list, in chunks of two timesteps with one level and with two.
    """
    gate = "snn-timesteps/outputs"
    required = "bit-equal to a loop by hand"
    if not _has_loop(case):
        return not_applicable(gate, required=required, why=NO_LOOP)

    wrong = []
    num_ways = 0
    for found in _loops(case):
        timesteps = found.timesteps[:MOST_COMPARED_STEPS]
        step = _in_a_mapping(found.step)
        run = partial(_run_loop, step, timesteps, found.state, seed=case.seed)
        for way in _ways(step, timesteps, found.state):
            by_hand = run(_loop_by_hand, **way)
            if not _all_equal(by_hand, run(_loop_by_hand, **way)):
                why = "a loop by hand does not repeat itself bit for bit"
                return not_applicable(gate, required=required, why=why)
            num_ways += 2
            for levels in (1, 2):
                ours = run(loop, chunk_size=2, levels=levels, **way)
                if not _all_equal(by_hand, ours):
                    place = f"time in {way['time_dim']}" if way["time_dim"] else "a list"
                    wrong.append(f"{way['outputs']} of {place}, levels {levels}")
    measured = f"{num_ways - len(wrong)} of {num_ways} ways bit-equal"
    hint = ""
    if wrong:
        hint = (
            f"{wrong[0]} differs: collect outputs in the order of time, and return the last state"
        )
    return Verdict(gate, not wrong, measured, required, hint)


def _ways(step: TimestepFunction, timesteps: Sequence[Any], state: Any) -> list[dict[str, Any]]:
    """Return the options of each way; truth values and whole numbers have no sum."""
    with torch.no_grad():
        output, _ = take_step(step, timesteps[0], state)
    can_add = all(
        isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in tree_leaves(output)
    )
    has_dimensions = all(isinstance(x, Tensor) and x.dim() for x in timesteps)
    return [
        {"outputs": outputs, "time_dim": time_dim}
        for outputs in (("stack", "sum", "mean", "last") if can_add else ("stack", "last"))
        for time_dim in ((0, 1) if has_dimensions else (0,))
    ]


def _in_a_mapping(step: TimestepFunction) -> TimestepFunction:
    """Return a step with two outputs: its own, and the double of that."""

    def both(x: Any, state: Any) -> tuple[Any, Any]:
        output, state = take_step(step, x, state)
        double = tree_map(lambda leaf: leaf * 2 if isinstance(leaf, Tensor) else leaf, output)
        return {"own": output, "double": double}, state

    return both


def _run_loop(
    step: TimestepFunction,
    timesteps: Sequence[Any],
    state: Any,
    loop: Loop,
    *,
    seed: int,
    time_dim: int,
    **options: Any,
) -> list[Tensor]:
    """Run a loop and its backward; return all outputs, the last state and all gradients."""

    def leaf_of(value: Any) -> Any:
        needs = isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().clone().requires_grad_() if needs else value

    inputs, state = tree_map(leaf_of, (list(timesteps), state))
    leaves = [leaf for leaf in tree_leaves((inputs, state)) if isinstance(leaf, Tensor)]
    leaves += [one for module in roots_of(step).values() for one in module.parameters()]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    given = torch.stack(inputs, time_dim) if time_dim else inputs
    with seeded(seed):
        found = tree_leaves(loop(step, given, state, time_dim=time_dim, **options))
    tensors = [leaf for leaf in found if isinstance(leaf, Tensor)]
    # Another factor for each number, so that none may take another's place.
    total = sum(
        (leaf * torch.arange(1, leaf.numel() + 1).to(leaf).reshape(leaf.shape)).sum()
        for leaf in tensors
        if leaf.requires_grad
    )
    gradients: Sequence[Any] = ()
    if isinstance(total, Tensor):
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return [*(leaf.detach() for leaf in tensors), *(one for one in gradients if one is not None)]


def _loop_by_hand(
    step: TimestepFunction, inputs: Any, state: Any, *, time_dim: int, outputs: str
) -> tuple[Any, Any]:
    """Run a loop over time and collect its outputs as the documentation says."""
    collected: list[Any] = []
    for x in inputs.unbind(time_dim) if isinstance(inputs, Tensor) else inputs:
        output, state = take_step(step, x, state)
        collected.append(output)

    def joined(*leaves: Any) -> Any:
        if outputs == "last":
            return leaves[-1]
        if not isinstance(leaves[0], Tensor):
            return leaves
        if outputs == "stack":
            return torch.stack(leaves, min(time_dim, leaves[0].dim()))
        total = leaves[0]
        for leaf in leaves[1:]:
            total = total + leaf
        return total / len(leaves) if outputs == "mean" else total

    return tree_map(joined, *collected), state


def _all_equal(expected: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
    return len(expected) == len(found) and all(map(torch.equal, expected, found))


# Planted steps: wrong calls of the loop, layers that keep state, and layers that only look so.

NUM_PLANTED_STEPS = 7
PLANTED_SHAPE = (4, 3)  # samples and features


class PlantedLayer(nn.Module):
    """A cell that adds up what `act` makes of its input; `act` may keep values in `kept`."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor], kept: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(PLANTED_SHAPE[1], PLANTED_SHAPE[1])
        self.act = act
        if isinstance(kept, Tensor):
            self.register_buffer("kept", kept)
        else:
            self.kept = kept

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = 0.9 * state + self.act(self, self.linear(x))
        return state.tanh(), state


def _integrates(layer: Any, x: Tensor) -> Tensor:
    layer.kept = 0.5 * layer.kept + x
    return x + (layer.kept > 1e3).to(x.dtype)  # never in the steps that the check runs


def _writes(layer: Any, x: Tensor) -> Tensor:
    layer.kept.mul_(0.5).add_(x.detach().mean())
    return x + layer.kept


def _appends(layer: Any, x: Tensor) -> Tensor:
    layer.kept.append(x)
    return x + sum(list(layer.kept)[-2:])


def _adds_to_an_entry(layer: Any, x: Tensor) -> Tensor:
    layer.kept["nested"][0] = layer.kept["nested"][0] + x
    return x + layer.kept["nested"][0]


def _adds_to_an_object(layer: Any, x: Tensor) -> Tensor:
    layer.kept.total = layer.kept.total + x
    return x + layer.kept.total


class PlantedPair(NamedTuple):
    """A named tuple that a layer replaces in each step."""

    factor: int
    total: Any


def _adds_to_a_pair(layer: Any, x: Tensor) -> Tensor:
    layer.kept = PlantedPair(layer.kept.factor, 0.5 * layer.kept.total + x)
    return x + layer.kept.total


def _counts(layer: Any, x: Tensor) -> Tensor:
    layer.kept += 1
    return -x if layer.kept % 5 == 0 else x


def _takes_turns(layer: Any, x: Tensor) -> Tensor:
    layer.kept = not layer.kept
    return x if layer.kept else -x


def _draws_once(layer: Any, x: Tensor) -> Tensor:
    if layer.kept is None:
        layer.kept = torch.rand_like(x)
    return x * layer.kept


# Each keeps state from one timestep to the next in its `kept`.
HIDING_LAYERS: dict[str, Callable[[], PlantedLayer]] = {
    "a potential": lambda: PlantedLayer(_integrates, 0.0),
    "a buffer": lambda: PlantedLayer(_integrates, torch.zeros(1)),
    "a buffer in place": lambda: PlantedLayer(_writes, torch.zeros(1)),
    "a list": lambda: PlantedLayer(_appends, []),
    "a deque": lambda: PlantedLayer(_appends, deque(maxlen=3)),
    "a dictionary": lambda: PlantedLayer(_adds_to_an_entry, {"nested": [0.0]}),
    "a named tuple": lambda: PlantedLayer(_adds_to_a_pair, PlantedPair(1, 0.0)),
    "an object": lambda: PlantedLayer(_adds_to_an_object, PlantedObject()),
    "a counter": lambda: PlantedLayer(_counts, 0),
    "a flag": lambda: PlantedLayer(_takes_turns, False),
    "a mask": lambda: PlantedLayer(_draws_once),
}


def _records(layer: Any, x: Tensor) -> Tensor:
    layer.kept.append(x.detach())
    return x


def _updates(layer: Any, x: Tensor) -> Tensor:
    layer.kept.mul_(0.9).add_(x.detach().mean())
    return x


def _reports(layer: Any, x: Tensor) -> Tensor:
    layer.kept = (x.detach(), 1 if layer.kept is None else layer.kept[1] + 1)
    return x


def _makes_a_constant(layer: Any, x: Tensor) -> Tensor:
    if layer.kept is None:
        layer.kept = torch.linspace(0, 1, x.shape[-1]).to(x)
    return x + layer.kept


# What these keep has no effect on any result.
SOUND_LAYERS: dict[str, Callable[[], PlantedLayer]] = {
    "a recorder": lambda: PlantedLayer(_records, []),
    "a statistic": lambda: PlantedLayer(_updates, torch.zeros(1)),
    "a report": lambda: PlantedLayer(_reports),
    "a constant": lambda: PlantedLayer(_makes_a_constant),
    "dropout": lambda: PlantedLayer(lambda layer, x: nn.functional.dropout(x, 0.5)),
    "batch norm": lambda: PlantedLayer(lambda layer, x: layer.kept(x), nn.BatchNorm1d(3)),
}


class PlantedUnroll(nn.Module):
    """A module with a loop over time, and one inside of it."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.inside = nn.ModuleList(inside)

    def unroll(self, step: Any, inputs: Any, state: Any) -> Any:
        return _loop_by_hand(step, inputs, state, time_dim=0, outputs="stack")


def _wrong_steps(case: Case, loop: Loop) -> list[str]:
    """Return steps whose state is not named, and loops that are not found or not restored."""
    wrong = []
    for name, (build, text) in HIDING_STEPS.items():
        call = partial(loop, build(), *_planted_inputs(case), chunk_size=3)
        if why := unrefused(HiddenState, call, text, "'total'"):
            wrong.append(f"{name}: {why}")
    inputs, state = _planted_inputs(case)
    layer, cells = PlantedLayer(lambda layer, x: x).to(case.device), PlantedCells()
    loop(layer, inputs, state, chunk_size=3)
    # Of a module that was in a loop before.
    call = partial(loop, lambda x, state: layer(cells(x, state)[0], state), inputs, state)
    if why := unrefused(HiddenState, partial(call, chunk_size=3), "'cells'"):
        wrong.append(f"another step of a module: {why}")
    model: Any = nn.Sequential(PlantedUnroll(PlantedUnroll()), nn.Linear(1, 1), PlantedUnroll())
    model[1].unroll = 3
    model[2].unroll = own = lambda step, inputs, state: None
    found = recompute_timesteps(model), remove_timesteps(model), remove_timesteps(model)
    if found != (["0", "2"], ["0", "2"], []) or "unroll" in vars(model[0]):
        wrong.append(f"loops of a model: {found}")
    if model[2].unroll is not own:
        wrong.append("a loop on the instance is not restored")
    costs = measure_costs(PlantedLayer(lambda layer, x: x.exp()).to(case.device), [*inputs], state)
    # Each step saves an exponential; the state is another tensor of that size.
    nbytes = state.nbytes
    if costs != Costs(nbytes, nbytes):
        wrong.append(f"a step is measured as {costs}, not as {nbytes} bytes each")
    return wrong


def planted_layers(case: Case, *, loop: Loop = checkpoint_timesteps) -> Verdict:
    """Plant layers that keep state, each another way, and layers that only look as if.

    Those have to be refused by name, with their values as before. These have to train as in a loop
    by hand, in chunks by measured costs and by size, and to hold the same values at the end.
    """
    gate = "snn-timesteps/layers"
    num_steps = len(HIDING_LAYERS) + len(HIDING_STEPS)
    required = f"{num_steps} named, {len(SOUND_LAYERS)} bit-equal"
    if not _has_loop(case):
        return not_applicable(gate, required=required, why=NO_LOOP)

    accepted = []
    for name, build in HIDING_LAYERS.items():
        layer = build().to(case.device)
        before = _values_of(layer.kept)
        try:
            loop(layer, *_planted_inputs(case), chunk_size=3)
            accepted.append(f"{name} is accepted")
        except HiddenState as error:
            where = "buffer" if name.startswith("a buffer") else "attribute"
            if error.attribute != "kept" or f"{where} 'kept'" not in str(error):
                accepted.append(f"{name} is called {error.attribute!r}")
            elif not _all_equal(before, _values_of(layer.kept)):
                accepted.append(f"{name} is not as before the check")
    different = []
    for name, build in SOUND_LAYERS.items():
        by_hand = _train_planted(case, build, _loop_by_hand)
        for options in ({}, {"chunk_size": 2}, {"chunk_size": 1, "levels": 2}):
            if not _all_equal(by_hand, _train_planted(case, build, loop, **options)):
                different.append(f"{name} with {options or 'measured chunks'}")
                break
    accepted += _wrong_steps(case, loop)
    hint = "; ".join([*accepted, *(f"{name} trains otherwise" for name in different)])
    num_named = num_steps - len(accepted)
    measured = f"{num_named} named, {len(SOUND_LAYERS) - len(different)} bit-equal"
    return Verdict(gate, not hint, measured, required, hint)


def _planted_inputs(case: Case) -> tuple[Tensor, Tensor]:
    with seeded(case.seed):
        inputs = torch.randn(NUM_PLANTED_STEPS, *PLANTED_SHAPE).to(case.device)
    return inputs, torch.zeros_like(inputs[0])


def _train_planted(
    case: Case, build: Callable[[], PlantedLayer], loop: Loop, **options: Any
) -> list[Tensor]:
    """Run a loop and its backward; return its results and what the layer holds at the end."""
    with seeded(case.seed):
        layer = build().to(case.device)
    inputs, state = _planted_inputs(case)
    options |= {"time_dim": 0, "outputs": "stack", "seed": case.seed}
    found = _run_loop(layer, [*inputs], state, loop, **options)
    return [*found, *_values_of(layer.kept)]


def _values_of(kept: Any) -> list[Tensor]:
    """Return copies of the tensors and numbers that a value holds."""
    if isinstance(kept, nn.Module):
        kept = [*kept.buffers()]
    if isinstance(kept, PlantedObject):
        kept = kept.total
    leaves = [leaf for leaf in tree_leaves(kept) if leaf is not None]
    return [torch.as_tensor(leaf).detach().clone() for leaf in leaves]


def _returns(result: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Return a step that changes what the layer returns."""
    return lambda layer, x, state: result(*layer(x, state))


# For each wrong call, whose step takes the layer first: a text that the error has to contain.
WRONG_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "0 levels": ({"levels": 0}, "levels"),
    "3 levels": ({"levels": 3}, "levels"),
    "True levels": ({"levels": True}, "levels"),
    "chunks of 0": ({"chunk_size": 0}, "chunk_size"),
    "chunks of 1.5": ({"chunk_size": 1.5}, "chunk_size"),
    "chunks of True": ({"chunk_size": True}, "chunk_size"),
    "other outputs": ({"outputs": "first"}, "first"),
    "time in dimension 0.0": ({"time_dim": 0.0}, "0.0"),
    "time in dimension 3": ({"time_dim": 3}, "dimension 3"),
    "time in dimension -4": ({"time_dim": -4}, "dimension -4"),
    "no timestep": ({"inputs": torch.zeros(0, *PLANTED_SHAPE)}, "no timestep"),
    "an empty list": ({"inputs": []}, "empty"),
    "a word": ({"inputs": "word"}, "str"),
    "a named tuple": ({"inputs": PlantedPair(1, 0)}, "PlantedPair"),
    "a dictionary": ({"inputs": {0: torch.zeros(PLANTED_SHAPE)}}, "dict"),
    "a step without state": ({"step": _returns(lambda output, state: output)}, "pair"),
    "a step of three": ({"step": _returns(lambda output, state: (output, state, 0))}, "3 values"),
    "a cut state": ({"step": _returns(lambda output, state: (output, state.detach()))}, "detached"),
    "an object as state": ({"step": _returns(lambda output, state: (output, object()))}, "object"),
    "a state that grows": ({"step": lambda layer, x, state: (x, [*state, x])}, "structure"),
    "a written input": (
        {"step": lambda layer, x, state: layer(x.mul_(2), state)},
        "into the input",
    ),
    "a written state": ({"step": lambda layer, x, state: layer(x, state.mul_(0.5))}, "the state"),
    "a sum of truth values": (
        {"step": _returns(lambda output, state: (output > 0, state)), "outputs": "sum"},
        "truth values",
    ),
}


def wrong_calls(case: Case, *, loop: Loop = checkpoint_timesteps) -> Verdict:
    """Check that wrong arguments and wrong steps are errors that name them."""
    gate = "snn-timesteps/refused"
    required = f"{len(WRONG_CALLS)} of {len(WRONG_CALLS)}"
    if not _has_loop(case):
        return not_applicable(gate, required=required, why=NO_LOOP)

    accepted = []
    for name, (given, text) in WRONG_CALLS.items():
        options = {"chunk_size": 2, **given}
        layer = PlantedLayer(lambda layer, x: x).to(case.device)
        inputs, state = _planted_inputs(case)
        step = options.pop("step", PlantedLayer.forward)
        try:
            loop(partial(step, layer), options.pop("inputs", inputs), state, **options)
            accepted.append(name)
        except (ValueError, TypeError) as error:
            if text not in str(error):
                accepted.append(f"{name} (the error does not name {text})")
        except RuntimeError as error:
            accepted.append(f"{name} (ends in an error of torch: {error})")
    hint = f"accepts this, or does not name it: {', '.join(accepted)}" if accepted else ""
    measured = f"{len(WRONG_CALLS) - len(accepted)} refused"
    return Verdict(gate, not accepted, measured, required, hint)


def _named(gate: str, strategy: str) -> str:
    return f"snn-timesteps/{gate}{strategy.removeprefix('timesteps').replace('_', '-')}"


def _unrolled(levels: int) -> Takes:
    """Take a `checkpoint_timesteps`: the loops of a model over time run through it."""

    def adapt(given: Implementation, present: Any) -> Apply:
        def unroll(step: TimestepFunction, inputs: Any, state: Any, **options: Any) -> Any:
            return given.value(step, inputs, state, levels=levels, **options)

        def apply(model: nn.Module, sample: Sample) -> list[str]:
            found = steppers(model)
            for stepper in found.values():
                stepper.unroll = unroll  # type: ignore[assignment]
            return list(found)

        return apply

    return Takes("apply", adapt)


def _replaced(levels: int) -> Takes:
    """Take a `recompute_timesteps`, which changes the model."""

    def adapt(given: Implementation, present: Any) -> Apply:
        def apply(model: nn.Module, sample: Sample) -> list[str]:
            names = list(steppers(model))
            given.value(model, levels=levels)
            return names

        return apply

    return Takes("apply", adapt)


JUDGED_CALLABLES = (
    Judged(
        "checkpoint_timesteps",
        lambda step, inputs, state, *, levels, time_dim, outputs: None,
    ),
    Judged("recompute_timesteps", lambda model, *, levels: None),
    Judged("check_step", lambda step, timesteps, state: None),
)
LOOP_TAKES = {"checkpoint_timesteps": _unrolled(1), "recompute_timesteps": _replaced(1)}
NESTED_LOOP_TAKES = {"checkpoint_timesteps": _unrolled(2), "recompute_timesteps": _replaced(2)}

GATES = (
    Gate("snn-timesteps/memory", timestep_memory, LOOP_TAKES),
    Gate("snn-timesteps/parity", partial(timestep_parity, strategy="timesteps"), LOOP_TAKES),
    Gate(
        "snn-timesteps/parity-nested",
        partial(timestep_parity, strategy="timesteps_nested"),
        NESTED_LOOP_TAKES,
    ),
    Gate("snn-timesteps/flops", partial(timestep_flops, strategy="timesteps"), LOOP_TAKES),
    Gate(
        "snn-timesteps/flops-nested",
        partial(timestep_flops, strategy="timesteps_nested"),
        NESTED_LOOP_TAKES,
    ),
    Gate("snn-timesteps/outputs", every_output, {"checkpoint_timesteps": Takes("loop")}),
    Gate(
        "snn-timesteps/hidden-state",
        hidden_state,
        {"check_step": Takes("check", with_errors(HiddenState))},
    ),
    Gate(
        "snn-timesteps/layers",
        planted_layers,
        {"checkpoint_timesteps": Takes("loop", with_errors(HiddenState))},
    ),
    Gate("snn-timesteps/refused", wrong_calls, {"checkpoint_timesteps": Takes("loop")}),
)


def _has_loop(case: Case) -> bool:
    return bool(steppers(case.build()))


def _loops(case: Case) -> list[Unrolled]:
    """Record the loops over time of one forward, with their arguments."""
    module = case.build()
    found = list[Unrolled]()
    for name, stepper in steppers(module).items():
        plain = stepper.unroll

        def unroll(
            step: TimestepFunction,
            inputs: Any,
            state: Any,
            name: str = name,
            run: Any = plain,
            **options: Any,
        ) -> Any:
            detached_inputs, detached_state = tree_map(
                lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (inputs, state)
            )
            timesteps = slice_time(detached_inputs, options.get("time_dim", 0))
            found.append(Unrolled(name, step, timesteps, detached_state))
            return run(step, inputs, state, **options)

        stepper.unroll = unroll  # type: ignore[assignment]
    with seeded(case.seed), untouched(module):
        case.workload.mean_loss(module, case.batch())
    return found


def _step_flops(loop: Unrolled) -> list[int]:
    counted = []
    state = loop.state
    for x in loop.timesteps:
        with torch.no_grad(), FlopCount() as count:
            _, state = take_step(loop.step, x, state)
        counted.append(count.flops)
    return counted


def _large_enough(case: Case) -> tuple[Case, Memory]:
    """Grow the batch until it holds eight times the parameters' bytes, or `ENOUGH_BYTES`."""
    module = case.build()
    parameters = sum(parameter.nbytes for parameter in module.parameters())
    while True:
        plain = measure_memory(module, case.batch(), case.workload.mean_loss)
        if plain.held_bytes >= (wanted := min(8 * parameters, ENOUGH_BYTES)):
            return case, plain
        case = replace(
            case, batch_size=case.batch_size * max(2, wanted // max(1, plain.held_bytes))
        )
