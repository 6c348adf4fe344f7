"""Gates of grad-flow: exact figures, each layer once under recompute, and no side effects.

Each gate takes the probe as `probe`, so that its tests can plant a wrong one.

Why so long: the gates of one technique, with the chains and models of all forms that they probe.

Proof: `python -m pytest tests/gates/test_grad_flow.py`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from ..core.measure import LiveStorages, Loss, tensors_in
from ..core.parity import GRADIENT_TOLERANCES, StepRecord, compare, record
from ..core.rerun import seeded, untouched
from ..primitives.grad_flow import RECOMPUTE_MODES, GradFlow, LayerFlow, StepFlow, ValueSpread
from ..primitives.grad_flow_probe import choose_layers
from ..primitives.grad_flow_report import Finding, flow_findings, flow_json, flow_table
from ..primitives.recompute import recompute_blocks
from ..workloads.workload import Case
from .fixtures import PLANTED_REPORTS, wrong_report
from .two_ranks import Found, Wrapped, by_name, judged, load_function, on_two_ranks, under_both
from .verdict import Gate, Judged, Takes, Verdict, not_applicable, unlike, unrefused

FlowProbe = Callable[..., Any]
NORM_TOLERANCE = 1e-9  # both sums are float64, in different orders


def exact(case: Case, *, probe: FlowProbe = GradFlow) -> Verdict:
    """Compare every figure of one step with autograd's tensors, counted by hand."""
    records = _trained(case, probe=probe).flow.records
    by_hand = _trained(case, probe=_ByHand).flow
    errors = by_hand.errors(records[0].layers if records else {})
    wrong = [figure for figure, error in errors.items() if error > NORM_TOLERANCE]
    held = not wrong and len(records) == 1
    num_right = len(errors) - len(wrong)
    measured = f"{num_right} of {len(errors)} figures, worst {max(errors.values()):.1e}"
    if wrong:
        measured += f"; first wrong: {wrong[0]}"
    required = f"all: counts equal, norms within {NORM_TOLERANCE:.0e}"
    hint = ""
    if not held:
        hint = (
            "a call is left out or counted twice, or the gradients are not those of the last "
            "backward"
        )
    return Verdict("grad-flow/exact", held, measured, required, hint)


def layers_counted_once(case: Case, *, probe: FlowProbe = GradFlow) -> Verdict:
    """Compare the figures with and without recompute, to the bit, for each `recompute` option."""
    gate = "grad-flow/once"
    required = "the figures of the model without recompute, to the bit"
    change = partial(recompute_blocks, blocks=case.blocks)
    bare, again = (_trained(case, probe=probe) for _ in range(2))
    if _figures(bare) != _figures(again):
        return not_applicable(
            gate, required=required, why="the model without recompute gives other figures each time"
        )

    try:
        same = compare(bare.record, _trained(case, change=change).record).bit_equal
    except CheckpointError:
        same = False
    if not same:
        why = "recompute itself changes the training here: see the gates of recompute"
        return not_applicable(gate, required=required, why=why)

    ways = {
        way: _trained(case, probe=partial(probe, recompute=way), change=change)
        for way in RECOMPUTE_MODES
    }
    differing = [way for way, run in ways.items() if _figures(run) != _figures(bare)]
    held = not differing and _calls(bare) > 0
    measured = ", ".join(
        f"{_calls(run):,} calls {way}" for way, run in ({"bare": bare} | ways).items()
    )
    measured += f"; {' and '.join(differing)} differ" if differing else "; all figures equal"
    hint = ""
    if not held:
        hint = "skip forwards that run inside a backward, for every kind of checkpointing"
    return Verdict(gate, held, measured, required, hint)


def flow_same_training(case: Case, *, probe: FlowProbe = GradFlow) -> Verdict:
    """Compare two steps with and without the probe.

    Compared are loss, gradients, buffers, generators, and the weights after the steps.
    """
    gate = "grad-flow/same-training"
    plain, again = (_trained(case, steps=2) for _ in range(2))
    required = "bit-equal, 2 steps probed"
    if not compare(plain.record, again.record).bit_equal:
        return not_applicable(
            gate, required=required, why="the plain step does not repeat bit for bit"
        )

    probed = _trained(case, steps=2, probe=probe)
    found = compare(plain.record, probed.record)
    weights = sum(
        not torch.equal(value, probed.weights[name]) for name, value in plain.weights.items()
    )
    num_records = len(probed.flow.records)
    held = found.holds and not weights and num_records == 2
    measured = f"{found.describe()}, {weights} weights differ; {num_records} steps probed"
    hint = ""
    if not held:
        hint = (
            "use no_grad, draw no random numbers, and write to no tensor of a step; or nothing was "
            "probed"
        )
    return Verdict(gate, held, measured, required, hint)


def held_bytes(case: Case, *, probe: FlowProbe = GradFlow) -> Verdict:
    """Compare the bytes held between forward and backward, without and with recompute."""
    rows = []
    num_calls = []
    held = True
    for change in (None, partial(recompute_blocks, blocks=case.blocks)):
        module = case.build()
        batch = case.batch()
        loss = case.workload.mean_loss
        if change is not None:
            change(module)
        # The first forward may make what the model caches.
        _held_bytes(module, batch, loss)
        plain = _held_bytes(module, batch, loss)
        with probe(module) as flow:
            probed = _held_bytes(module, batch, loss)
            flow.step()
        held = held and plain == probed
        num_calls.append(
            sum(layer.calls for record in flow.records for layer in record.layers.values())
        )
        rows.append(f"{probed:,} of {plain:,}")

    held = held and min(num_calls) > 0
    measured = f"plain {rows[0]}, recompute {rows[1]}"
    hint = ""
    if not held:
        hint = (
            "keep sums and no activation, graph or output; or no call was counted during the "
            "measurement"
        )
    return Verdict("grad-flow/held-bytes", held, measured, "the same bytes", hint)


def _held_bytes(module: nn.Module, batch: Any, loss: Loss) -> int:
    with untouched(module), LiveStorages() as storages:
        value = loss(module, batch)
        return storages.bytes_alive if value.requires_grad else 0


# Findings, on planted chains of layers that each have one fault.

CHAIN_WIDTH = 16
CHAIN_LENGTH = 4
CHAIN_STEPS = 3
# With Adam a weight moves by the rate, which is this share of the weights.
SOUND_RATE = 1e-3


class PlantedChain(nn.Module):
    """Layers that add to their input; of some the output or its gradient is multiplied."""

    def __init__(
        self,
        *,
        length: int,
        output: Mapping[int, float],
        gradient: float,
        detached: int,
        broken: int,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(CHAIN_WIDTH, CHAIN_WIDTH, bias=False), Scaled(output.get(n, 1)))
            for n in range(length)
        )
        self.gradient = gradient
        self.detached = detached
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            out = layer(x)
            x = x + (out.detach() if number == self.detached else out)
            x = x.detach() * (1 - self.gradient) + x * self.gradient
            if number == self.broken:
                x.register_hook(lambda gradient: gradient * math.inf)
        return x


class Scaled(nn.Module):
    """A factor on the output of a layer."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@dataclass(frozen=True)
class Expected:
    """A finding: its kind, layers, a word of its message, and its value, if that follows."""

    kind: str
    layers: frozenset[str]
    word: str
    value: float | None = None

    def is_in(self, findings: Sequence[Finding]) -> bool:
        return any(
            one.kind == self.kind
            and set(one.layers) == self.layers
            and self.word in one.message
            and one.step == (0 if self.kind == "nonfinite" else CHAIN_STEPS - 1)
            and (self.value is None or self.value / 2 <= one.value <= self.value * 2)
            for one in findings
        )


@dataclass(frozen=True)
class PlantedFlow:
    """A chain with a fault, and the findings that it has."""

    expected: Sequence[Expected]
    length: int = CHAIN_LENGTH
    output: Mapping[int, float] = field(default_factory=dict)
    gradient: float = 1.0
    detached: int = -1
    broken: int = -1
    rate: float = SOUND_RATE
    clip: float | None = None
    loss: Callable[[Tensor], Tensor] = lambda x: x.square().mean()

    def probed(self, probe: FlowProbe) -> Any:
        model = PlantedChain(
            length=self.length,
            output=self.output,
            gradient=self.gradient,
            detached=self.detached,
            broken=self.broken,
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=self.rate)
        with probe(model, optimizer, every=1) as flow:
            for _ in range(CHAIN_STEPS):
                optimizer.zero_grad()
                self.loss(model(torch.randn(8, CHAIN_WIDTH))).backward()
                if self.clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)
                optimizer.step()
        return flow


def _expected(kind: str, layers: str, word: str, value: float | None = None) -> Expected:
    return Expected(kind, frozenset(layers.split()), word, value)


ALL_LINEARS = " ".join(f"layers.{number}.0" for number in range(CHAIN_LENGTH))
# Three factors on the gradient lie between the first layer and the last.
PLANTED_FLOWS = {
    "no fault": PlantedFlow([]),
    "an infinite output": PlantedFlow(
        [_expected("nonfinite", "layers.2", "activations", 1.0)], output={2: math.inf}
    ),
    "an infinite gradient": PlantedFlow(
        [_expected("nonfinite", "layers.3.0", "all activations were finite", 1.0)],
        loss=lambda x: (x * 0).abs().sqrt().sum(),
    ),
    "an infinite gradient from the third layer on": PlantedFlow(
        [_expected("nonfinite", "layers.2.0", "all activations were finite", 1.0)], broken=2
    ),
    "small factors on gradients": PlantedFlow(
        [_expected("vanishing", "layers.0", "that of layers.3", 0.05**3)], gradient=0.05
    ),
    "large factors on gradients": PlantedFlow(
        [_expected("exploding", "layers.0", "that of layers.3", 20.0**3)], gradient=20.0
    ),
    "a small factor between two layers": PlantedFlow(
        [_expected("vanishing", "layers.0", "that of layers.1", 1e-4)], length=2, gradient=1e-4
    ),
    "an output of 0": PlantedFlow(
        [
            _expected("dead", "layers.1", "exactly 0", 1.0),
            _expected("no-gradient", "layers.1.0", "exactly 0", 0.0),
            _expected("update", "layers.1.0", "does not move", 0.0),
        ],
        output={1: 0.0},
    ),
    "a detached layer": PlantedFlow(
        [
            _expected("no-gradient", "layers.2.0", "gets no gradient at all", 0.0),
            _expected("update", "layers.2.0", "does not move", 0.0),
        ],
        detached=2,
    ),
    "a high rate": PlantedFlow([_expected("update", ALL_LINEARS, "moves far")], rate=1.0),
    "a low rate": PlantedFlow([_expected("update", ALL_LINEARS, "hardly moves")], rate=1e-7),
    "a clip": PlantedFlow([_expected("scaled", "", "were multiplied by")], clip=1e-3),
}


def findings(
    case: Case,
    *,
    probe: FlowProbe = GradFlow,
    judge: Callable[[Sequence[StepFlow]], Sequence[Finding]] = flow_findings,
    table: Callable[..., str] = flow_table,
) -> Verdict:
    """Compare the findings on planted chains with what was planted, in the table and JSON too."""
    wrong = []
    for name, planted in PLANTED_FLOWS.items():
        with seeded(case.seed):
            flow = planted.probed(probe)
        found = judge(flow.records)
        if len(found) != len(planted.expected) or not all(
            one.is_in(found) for one in planted.expected
        ):
            kinds = [f"{one.kind} of {', '.join(one.layers) or 'all'}" for one in found]
            wrong.append(f"{name} gives {'; '.join(kinds) or 'no finding'}")
        elif what := _not_shown(flow, found, table):
            wrong.append(f"{name}: {what}")
    if "no step was probed" not in table(()):
        wrong.append("a table without records")
    if report := wrong_report(table):
        wrong.append(report)
    measured = f"{len(wrong)} of {len(PLANTED_FLOWS) + len(PLANTED_REPORTS)} wrong"
    hint = f"{wrong[0]}: judge the latest steps, and name the first layer" if wrong else ""
    required = "each planted fault with its layers, and no other"
    return Verdict("grad-flow/findings", not wrong, measured, required, hint)


def _not_shown(flow: Any, found: Sequence[Finding], table: Callable[..., str]) -> str:
    """Name what the table or the JSON does not have; empty if nothing is missing."""
    whole, short = (
        " ".join(table(flow.records, **options).split()) for options in ({}, {"most": 3})
    )
    names = list(flow.records[-1].layers)
    for one in found:
        first = f"{one.layers[0]}: " if one.layers else ""
        line = f"{one.kind} {first}{one.message} (step {one.step})"
        if line not in whole or line not in short:
            return f"the table has no line of {one.kind}"
        if first and f"{one.layers[0]} " not in short.partition(" ratio ")[2]:
            return f"the short table leaves out {one.layers[0]}"
    if not all(f"{name} " in whole.partition(" ratio ")[2] for name in names):
        return "the table has not all layers"
    if f"and {len(names) - 3} more layers" not in short or "more layers: choose" in whole:
        return "the short table has another number of layers"
    if ("nothing is wrong" in whole) == bool(found):
        return "the table is wrong on whether something is"
    return _not_written(flow) if hasattr(flow, "every") else ""


def _not_written(flow: Any) -> str:
    written = flow_json(flow)
    kinds = [(one["kind"], tuple(one["layers"])) for one in written["findings"]]
    if kinds != [(one.kind, one.layers) for one in flow_findings(flow.records)]:
        return "the JSON has other findings"
    layers = [[*step["layers"]] for step in written["steps"]]
    if layers != [[*record.layers] for record in flow.records]:
        return "the JSON has other steps or layers"
    return ""


# Layers that are chosen, tied or frozen, steps that are skipped, and wrong settings.


class ManyForms(nn.Module):
    """Layers that are tied, frozen, unused, inside of another, and of a long name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(CHAIN_WIDTH, CHAIN_WIDTH, bias=False)
        self.tied = nn.Linear(CHAIN_WIDTH, CHAIN_WIDTH, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(CHAIN_WIDTH, CHAIN_WIDTH, bias=False).requires_grad_(False)
        self.unused = nn.Linear(CHAIN_WIDTH, CHAIN_WIDTH, bias=False)
        self.group = nn.ModuleDict({LONG_NAME: nn.Linear(CHAIN_WIDTH, CHAIN_WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.tied(torch.tanh(self.first(x))))
        output: Tensor = self.group[LONG_NAME](x)
        return output


SKIPPED_STEP = 1
# With their modules more layers than a probe takes.
MANY_BLOCKS = 150
LONG_NAME = "a_layer_of_a_name_that_no_column_holds"
# Patterns of layers, and the layers that they choose.
CHOSEN_LAYERS: tuple[tuple[Any, Sequence[str]], ...] = (
    (None, ("first", "tied", "frozen", "unused", f"group.{LONG_NAME}")),
    ("first", ("first",)),
    (["f*", "tied"], ("first", "tied", "frozen")),
)


def _flow_of(probe: FlowProbe, *, skips: bool = False, **options: Any) -> Any:
    """Probe three steps of a model of many forms, of which the second may be skipped."""
    model = ManyForms()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with probe(model, optimizer, **({"scaler": scaler} if skips else {}), **options) as flow:
        for step in range(CHAIN_STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(8, CHAIN_WIDTH)).square().mean()
            if skips:
                broken = math.inf if step == SKIPPED_STEP else 1.0
                scaler.scale(loss * broken).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
    return flow


def _flow_of_own_gradients(probe: FlowProbe) -> Any:
    """Probe a step on gradients of 1 that no backward made, scaled for a fused optimizer."""
    model = ManyForms()
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with probe(model, optimizer, every=1) as flow:
        for parameter in parameters:
            parameter.grad = scaler.scale(torch.ones_like(parameter))
        scaler.step(optimizer)
    return flow


def _wrong_layers(probe: FlowProbe) -> Iterator[str]:
    """Yield what is wrong with the layers of a record, and with their rows."""
    for pattern, names in CHOSEN_LAYERS:
        flow = _flow_of(probe, every=1, layers=pattern)
        yield unlike(f"the layers {pattern}", tuple(flow.records[-1].layers), tuple(names))
    blocks = [
        nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)) for _ in range(MANY_BLOCKS)
    ]
    with probe(nn.Sequential(*blocks), None, every=1) as flow:
        _ = flow.model(torch.ones(1, 1)).sum().backward()
        flow.step()
    yield unlike("of many layers the blocks", len(flow.records[-1].layers), MANY_BLOCKS)
    every = _flow_of(probe, every=1)
    last = every.records[-1].layers
    yield unlike("a tied parameter", last["tied"].tied, ("first.weight",))
    yield unlike("a layer whose parameter counts before", last["tied"].gradient, None)
    yield unlike("a frozen parameter", last["frozen"].frozen, ("frozen.weight",))
    yield unlike("an unused layer", (last["unused"].activation, last["unused"].calls), (None, 0))
    yield unlike("no gradient", last["unused"].without_gradient, ("unused.weight",))
    order = ("first", "tied", "frozen", f"group.{LONG_NAME}")
    yield unlike("the order of forwards", every.records[-1].order, order)
    rows = flow_table(every.records).splitlines()
    yield "" if any("not called" in row for row in rows) else "no row of a layer without a call"
    yield "" if max(map(len, rows)) <= 80 else "a row of more than 80 columns"
    short = f"...{LONG_NAME[-28:]} "
    yield "" if any(short in row for row in rows) else "a long name does not end in its own end"


def _wrong_steps(probe: FlowProbe) -> Iterator[str]:
    """Yield what is wrong with the steps that are probed, and with a skipped one."""
    for every, first, steps in ((1, 0, (0, 1, 2)), (2, 0, (0, 2)), (2, 1, (2,)), (5, 5, (5,))):
        flow = _flow_of(probe, every=every, first_step=first)
        probed = tuple(record.step for record in flow.records)
        yield unlike(f"the steps with every={every} from {first}", probed, steps)
    skipped = _flow_of(probe, skips=True, every=1)
    yield unlike("steps taken", [one.stepped for one in skipped.records], [True, False, True])
    yield unlike("an update of none", skipped.records[1].layers["first"].update, None)
    found = [one for one in flow_findings(skipped.records) if one.kind == "skipped"]
    yield unlike("skipped steps", [(one.step, one.value) for one in found], [(1, 1 / 3)])
    yield "" if found and "1 of 3 probed steps" in found[0].message else "no words on the skipped"
    kinds = {one.kind for one in flow_findings(skipped.records)}
    yield "" if "nonfinite" in kinds else "an infinite gradient of a skipped step is not found"
    table = flow_table(skipped.records[: SKIPPED_STEP + 1])
    yield "an infinite factor in the table" if "multiplied by" in table else ""
    found = _flow_of_own_gradients(probe).records[0].layers["first"].gradient
    yield unlike("gradients that a fused optimizer unscales", found and found.rms, 1.0)
    written = flow_json(skipped)
    settings = (written["every"], written["recompute"])
    yield unlike("the settings in the JSON", settings, (1, "filter"))
    norm = written["steps"][1]["layers"]["first"]["gradient"]["norm"]
    yield "" if norm in ("inf", "nan") else f"an infinite norm is written as {norm!r}"
    finite = written["steps"][0]["layers"]["first"]["gradient"]["norm"]
    yield "" if isinstance(finite, float) else f"a norm is written as {finite!r}"


# Settings that are none, and what the error has to name.
WRONG_SETTINGS: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({"every": 0}, "every"),
    ({"every": 1.5}, "every"),
    ({"layers": "fist"}, "fist"),
    ({"recompute": "maybe"}, "recompute"),
)


def flow_forms(case: Case, *, probe: FlowProbe = GradFlow) -> Verdict:
    """Probe layers and steps of all forms: chosen, tied, frozen, unused, skipped, and wrong."""
    with seeded(case.seed):
        checks = [*_wrong_layers(probe), *_wrong_steps(probe)]
        for settings, word in WRONG_SETTINGS:
            call = partial(_flow_of, probe, **({"every": 1} | dict(settings)))
            checks.append(unrefused(ValueError, call, word))
    wrong = [problem for problem in checks if problem]
    measured = f"{len(checks) - len(wrong)} of {len(checks)} right"
    hint = f"{wrong[0]}: count each parameter once, and say what was not observed" if wrong else ""
    required = f"{len(checks)} of {len(checks)}"
    return Verdict("grad-flow/forms", not wrong, measured, required, hint)


JUDGED_CALLABLES = (Judged("GradFlow", lambda model, optimizer, *, every, recompute: None),)
# Two ranks.


def flow_of_both(case: Case, *, probe: str = f"{GradFlow.__module__}:GradFlow") -> Verdict:
    """Probe a step of two ranks; its figures are those of both batches on one process."""
    tolerance = GRADIENT_TOLERANCES[case.dtype]
    required = f"all within {tolerance:.0e} of the figures of one process"
    # Raises here, and not in the other processes, if the batch can't be split.
    _halves(case)
    results = on_two_ranks(f"{__name__}:_probed", case, required=required, probe=probe)

    def figure(of_ranks: Sequence[dict[str, Any]]) -> tuple[bool, str]:
        wrong = [name for found in of_ranks for name in found["wrong"]]
        words = f"{of_ranks[0]['figures'] - len(set(wrong))} of {of_ranks[0]['figures']} right"
        return not wrong and of_ranks[0]["figures"] > 0, words + (
            f", not {wrong[0]}" if wrong else ""
        )

    return judged(
        "grad-flow/two-ranks",
        results,
        required=required,
        figure=figure,
        hint="add up activations over the ranks of the batch, and sharded tensors over the shards",
    )


def _probed(case: Case, probe: str) -> Found:
    """Compare the figures of one step on this rank with those of both batches on one process."""
    batches = _halves(case)
    expected = _step_figures(case, case.build().eval(), batches, GradFlow)

    def measure(wrapped: Wrapped, kind: str) -> dict[str, Any]:
        found = _step_figures(case, wrapped(), [batches[dist.get_rank()]], load_function(probe))
        tolerance = GRADIENT_TOLERANCES[case.dtype]
        wrong = [
            f"{key} of {name}"
            for key, layers in expected.items()
            for name in layers
            if not _is_near(found[key].get(name), layers, name, tolerance)
        ]
        return {"figures": sum(map(len, expected.values())), "wrong": wrong}

    # An expert may be used by the batch of one rank alone.
    return under_both(case, batches[0], measure, unused=True)


def _halves(case: Case) -> list[Any]:
    return case.split(case.batch(2 * case.batch_size), [case.batch_size] * 2)


def _step_figures(
    case: Case, model: nn.Module, batches: Sequence[Any], probe: Callable[..., Any]
) -> dict[str, dict[str, float]]:
    """Return each figure of a step by layer; the gradients are the mean of those of the batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with probe(model, optimizer, every=1) as flow:
        for batch in batches:
            with seeded(case.seed):  # some models drop blocks in eval mode too
                (case.workload.mean_loss(model, batch) / len(batches)).backward()
        optimizer.step()
    (record,) = flow.records
    figures: dict[str, dict[str, float]] = defaultdict(dict)
    for name, layer in record.layers.items():
        if layer.activation is not None:
            figures["outputs"][name] = layer.activation.elements
            figures["zeros"][name] = layer.activation.zeros
            figures["norm of outputs"][name] = layer.activation.norm
        if layer.gradient is not None:
            figures["gradients"][name] = layer.gradient.elements
            figures["norm of gradients"][name] = layer.gradient.norm
        if layer.update is not None:
            figures["norm of weights"][name] = layer.update.weight_norm
            figures["norm of updates"][name] = layer.update.distance
    return figures


def _is_near(
    value: float | None, expected: Mapping[str, float], name: str, tolerance: float
) -> bool:
    """Return whether a norm differs by the rounding of the largest one, and a count not at all.

    The gradient of a bias before a norm, for one, is rounding alone.
    """
    wanted = expected[name]
    if value is None or isinstance(wanted, int) or not math.isfinite(wanted):
        return str(value) == str(wanted)
    return abs(value - wanted) <= tolerance * max(filter(math.isfinite, expected.values()))


PROBE_TAKES = {"GradFlow": Takes("probe")}

GATES = (
    Gate("grad-flow/exact", exact, PROBE_TAKES),
    Gate("grad-flow/once", layers_counted_once, PROBE_TAKES),
    Gate("grad-flow/same-training", flow_same_training, PROBE_TAKES),
    Gate("grad-flow/held-bytes", held_bytes, PROBE_TAKES),
    Gate("grad-flow/findings", findings, PROBE_TAKES),
    Gate("grad-flow/forms", flow_forms, PROBE_TAKES),
    Gate("grad-flow/two-ranks", flow_of_both, {"GradFlow": Takes("probe", by_name)}),
)


@dataclass
class FlowRun:
    """The probe, the last step and the weights after a few training steps."""

    flow: Any
    record: StepRecord
    weights: dict[str, Tensor]


def _trained(
    case: Case,
    *,
    steps: int = 1,
    probe: FlowProbe | None = None,
    change: Callable[[nn.Module], Any] | None = None,
) -> FlowRun:
    """Train steps of two microbatches with clipping.

    The gradients to report are then those of the last backward, before clipping.
    """
    module = case.build()
    batch = case.batch()
    if change is not None:
        change(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    with seeded(case.seed):
        flow = _Nothing() if probe is None else probe(module, optimizer, every=1)
        with flow:
            for _ in range(steps):
                optimizer.zero_grad()
                for _ in range(2):
                    loss = case.workload.mean_loss(module, batch)
                    loss.backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
                optimizer.step()
        weights = {
            name: parameter.detach().clone() for name, parameter in module.named_parameters()
        }
        return FlowRun(flow, record(module, loss.detach()), weights)


class _Nothing:
    """A probe that does nothing."""

    records: tuple[StepFlow, ...] = ()

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class _ByHand(_Nothing):
    """Reference figures: hold every output and gradient, and count at the end."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, *, every: int) -> None:
        self.layers = choose_layers(module)
        self.outputs: dict[str, list[Tensor]] = {layer.name: [] for layer in self.layers}
        self.gradients: dict[str, Tensor] = {}
        self.weights: dict[str, list[Tensor]] = {name: [] for name, _ in module.named_parameters()}
        for layer in self.layers:
            layer.module.register_forward_hook(partial(self._keep_output, layer.name))
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._keep_gradient, name))
        optimizer.register_step_pre_hook(lambda *_: self._keep_weights(module))
        optimizer.register_step_post_hook(lambda *_: self._keep_weights(module))

    def _keep_output(self, name: str, layer: nn.Module, arguments: Any, output: Any) -> None:
        self.outputs[name] += [
            _real(tensor.detach().clone())
            for tensor in tensors_in(output)
            if tensor.is_floating_point() or tensor.is_complex()
        ]

    def _keep_gradient(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.gradients[name] = _real(parameter.grad.clone())

    def _keep_weights(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self.weights[name].append(_real(parameter.detach()).double())

    def errors(self, layers: Mapping[str, LayerFlow]) -> dict[str, float]:
        """Return the relative error of each figure of the probe; infinite if a count differs."""
        found = {}
        for layer in self.layers:
            flow = layers.get(layer.name)
            names = [name for name in layer.parameters if name in self.gradients]
            activation = None if flow is None else flow.activation
            gradient = None if flow is None else flow.gradient
            gradients = [self.gradients[name] for name in names]
            found[f"activation of {layer.name}"] = _error(activation, self.outputs[layer.name])
            found[f"gradient of {layer.name}"] = _error(gradient, gradients)
            found[f"update of {layer.name}"] = _update_error(
                flow, [self.weights[name] for name in layer.parameters]
            )
        return found


def _real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as its real and imaginary parts, and another one as it is."""
    return torch.stack([tensor.real, tensor.imag]) if tensor.is_complex() else tensor


def _error(spread: ValueSpread | None, tensors: Sequence[Tensor]) -> float:
    if spread is None or not tensors:
        return 0.0 if spread is None and not tensors else math.inf
    values = torch.cat([tensor.double().flatten() for tensor in tensors])
    counts = values.numel(), int((values == 0).sum()), int((~values.isfinite()).sum())
    if counts != (spread.elements, spread.zeros, spread.nonfinite):
        return math.inf
    return _apart(spread.norm, values.square().sum().sqrt().item())


def _update_error(flow: LayerFlow | None, pairs: Sequence[Sequence[Tensor]]) -> float:
    if flow is None or flow.update is None or not pairs:
        return 0.0 if flow is not None and flow.update is None and not pairs else math.inf
    before = torch.cat([pair[0].flatten() for pair in pairs])
    after = torch.cat([pair[1].flatten() for pair in pairs])
    update = flow.update
    errors = (
        _apart(update.weight_norm, before.norm().item()),
        _apart(update.distance, (after - before).norm().item()),
    )
    return max(errors)


def _apart(value: float, expected: float) -> float:
    if value == expected or (math.isnan(value) and math.isnan(expected)):
        return 0.0
    return abs(value - expected) / abs(expected) if expected else math.inf


def _figures(run: FlowRun) -> list[Any]:
    """List the figures of every layer of every record."""
    return [
        (name, layer.calls, layer.activation, layer.gradient, layer.update)
        for record in run.flow.records
        for name, layer in record.layers.items()
    ]


def _calls(run: FlowRun) -> int:
    return sum(calls for _, calls, *_ in _figures(run))
