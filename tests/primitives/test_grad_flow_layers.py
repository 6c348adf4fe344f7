"""Layers that grad-flow probes, the parameters of each, and layers without a figure.

python -m pytest tests/primitives/test_grad_flow_layers.py
"""

import contextlib
import gc
import math
import weakref
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import LBFGS, SGD, AdamW

from curry_train.core.blocks import inside_wrappers
from curry_train.core.measure import LiveStorages
from curry_train.primitives import GradFlow, flow_findings, flow_json, flow_table, grad_flow_probe
from curry_train.primitives.grad_flow_probe import compiled_modules

from ..plan_models import Runs
from ..toy_steps import activated, copies_of, drawn, gradients_of, seeded_stack


@contextlib.contextmanager
def probed(model, **options):
    """Probe what runs inside, and the step of an optimizer after it."""
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with GradFlow(model, optimizer, every=1, **options) as flow:
        yield flow
        optimizer.step()


def probe(model, x, *, loss=lambda out: out.sum(), **options):
    with probed(model, **options) as flow:
        loss(model(x)).backward()
    return flow.records[0]


def test_tied_weights_are_counted_once():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    record = probe(model, torch.arange(8), loss=lambda out: out.square().sum())
    assert record.gradient.norm == pytest.approx(norm(model))
    assert record.layers["0"].gradient == record.gradient
    assert record.layers["1"].gradient is None
    assert record.layers["1"].tied == ("0.weight",)
    assert record.layers["1"].calls == 1


def named_layers(*names):
    return nn.ModuleDict({name: nn.Linear(4, 4) for name in names})


def test_frozen_and_unreached_parameters_are_named_instead_of_counted_as_0():
    model = named_layers("frozen", "used", "unused")
    model["frozen"].requires_grad_(False)
    model.forward = lambda x: model["used"](model["frozen"](x))
    record = probe(model, torch.randn(2, 4))
    assert record.layers["frozen"].gradient is None
    assert record.layers["frozen"].frozen == ("frozen.weight", "frozen.bias")
    unused = record.layers["unused"]
    assert unused.activation is None
    assert unused.calls == 0
    assert unused.gradient is None
    assert unused.without_gradient == ("unused.weight", "unused.bias")
    assert record.gradient.elements == 20


@pytest.mark.parametrize(
    ("pattern", "names"), [("first", ["first"]), (["f*", "used"], ["first", "frozen", "used"])]
)
def test_layers_are_chosen_by_patterns_and_ordered_as_their_forwards_end(pattern, names):
    model = named_layers("first", "frozen", "used", "unused")
    model.forward = lambda x: model["used"](model["first"](model["frozen"](x)))
    record = probe(model, torch.randn(2, 4), layers=pattern)
    assert list(record.layers) == names
    assert record.order == tuple(name for name in ("frozen", "first", "used") if name in names)


@dataclass
class Out:
    first: torch.Tensor
    count: int


def test_outputs_of_every_structure_are_counted_once():
    def contained(inner, x):
        y = torch.nested.as_nested_tensor([*inner[0](x)], layout=torch.jagged)
        return {"out": Out(y, 3), "again": (y, torch.arange(3), None)}

    model = nn.Sequential(nn.Identity(), Runs(contained, nn.LazyLinear(4)))
    record = probe(
        model, torch.randn(2, 4), loss=lambda out: out["out"].first.values().sum(), layers="*"
    )
    assert record.layers["1"].activation.elements == 8
    assert record.layers["1"].activation == record.layers["1.inner.0"].activation


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: GradFlow(nn.Linear(2, 2)),
            "Linear has no module with parameters to probe: name modules with layers=$",
        ),
        (
            lambda: GradFlow(nn.Sequential(nn.DataParallel(nn.Linear(2, 2)))),
            "^layers inside DataParallel can't be probed: use fully_shard or Dist",
        ),
        (
            lambda: GradFlow(build(), "adam"),
            "^an optimizer is needed, got str; pass the one it wraps$",
        ),
        (
            lambda: GradFlow(build(), SGD(build().parameters())),
            "^SGD holds no parameter of this model: create it after the model is moved, sharded or "
            "adapted, and pass that optimizer$",
        ),
    ],
)
def test_wrong_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_counted_in_pieces_of_a_strided_tensor(monkeypatch, dtype):
    tensor = torch.randn(9, 30).to(dtype).relu().T  # strided, with zeros
    tensor[3, 5], tensor[4, 5], tensor[20, 1] = float("inf"), float("nan"), -float("inf")
    monkeypatch.setattr(grad_flow_probe, "CPU_PIECE_ELEMENTS", 7)
    for part in (tensor, tensor[5:20], tensor[:0]):
        elements, zeros, bad, squares = grad_flow_probe.sums_of(part).tolist()
        assert (elements, zeros) == (part.numel(), (part == 0).sum())
        assert bad == (~part.isfinite()).sum()
        assert squares == pytest.approx(part.double().square().sum().item(), nan_ok=True)


def build(*, width=8):
    return seeded_stack(lambda: activated(width, nn.ReLU))


def batch(rows=4, width=8):
    return drawn(rows, width)


def norm(model):
    return math.hypot(*(gradient.double().norm() for gradient in gradients_of(model)))


def test_microbatches_are_pooled_and_the_last_unclipped_gradient_counts():
    model, parts = build(), batch().split([1, 3])
    outputs = torch.cat([model[0][0](part) for part in parts])
    with probed(model) as flow:
        for part in parts:
            model(part).square().sum().backward()
        expected = norm(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), expected / 4)
    (record,) = flow.records
    activation = record.layers["0.0"].activation
    assert activation.elements == 32
    assert activation.norm == pytest.approx(outputs.double().norm().item(), rel=1e-12)
    assert record.gradient.norm == pytest.approx(expected, rel=1e-12)
    assert record.gradients_read == "after backward"
    assert record.scaled == pytest.approx(0.25, rel=1e-5)
    assert record.forwards == record.layers["0.0"].calls == 2


def test_nothing_of_a_step_stays_alive():
    model = build()
    with probed(model):
        out = model(batch())
        node, seen = out.grad_fn, weakref.ref(out)
        out.sum().backward()
        del out, node
        gc.collect()
        assert seen() is None


def test_weights_are_kept_while_the_optimizer_steps_and_no_longer():
    model = build(width=512)
    optimizer = SGD(model.parameters(), lr=0.1)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    peaks = []
    for updates in (False, True):
        with GradFlow(model, optimizer, every=1, updates=updates) as flow:
            model(batch(width=512)).sum().backward()
            with LiveStorages() as storages:
                optimizer.step()
            peaks.append(storages.bytes_peak)
            assert storages.bytes_alive == 0
        assert (flow.records[0].layers["0"].update is None) != updates
    assert weights <= peaks[1] - peaks[0] <= 1.5 * weights


def scaled_loop(losses, *, fused, given=True, early=False):
    model = build()
    optimizer = AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with GradFlow(model, optimizer, every=1, scaler=scaler if given else None) as flow:
        for factor in losses:
            if not early:
                optimizer.zero_grad()
            loss = (model(batch()) * factor).square().mean()
            if early:
                optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return flow


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_a_step_that_the_scaler_skips_is_recorded_with_its_gradients(fused, early):
    flow = scaled_loop([1.0, float("inf"), 1.0], fused=fused, early=early)
    records = flow.records
    assert [record.stepped for record in records] == [True, False, True]
    assert [record.step for record in records] == ([0, 1, 2] if fused else [0, 1, 1])
    assert records[1].nonfinite
    assert records[1].layers["0.0"].update is None
    assert records[2].gradient.nonfinite == 0
    norms = [one["layers"]["0.0"]["gradient"]["norm"] for one in flow_json(flow)["steps"]]
    assert [isinstance(norm, float) for norm in norms] == [True, False, True]
    assert {"nonfinite", "skipped"} <= {finding.kind for finding in flow_findings(records)}


@pytest.mark.parametrize("fused", [False, True])
def test_the_scale_of_a_scaler_is_removed_and_an_unnamed_scaler_is_reported(fused):
    norms = []
    for given in (True, False):
        flow = scaled_loop([1.0], fused=fused, given=given)
        norms.append(flow.records[0].gradient.norm)
        assert flow.records[0].scaled == pytest.approx(1.0 if given else 1 / 1024, rel=1e-6)
        assert ("scaled" in {finding.kind for finding in flow_findings(flow.records)}) != given
    assert norms[1] == pytest.approx(1024 * norms[0], rel=1e-6)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_optimizers_end_a_step_together(order):
    model = build()
    optimizers = [SGD(model[0].parameters(), lr=0.1), AdamW(model[1:].parameters(), lr=0.1)]
    with GradFlow(model, optimizers, every=2) as flow:
        for _ in range(3):
            model(batch()).sum().backward()
            for number in order:
                optimizers[number].step()
                optimizers[number].zero_grad()
    found = [(record.step, record.gradients_read) for record in flow.records]
    assert found == [(0, "after backward"), (2, "after backward")]
    assert all(flow.records[0].layers[name].update.distance > 0 for name in ("0.0", "1.0", "2.0"))


def test_an_optimizer_with_a_closure_is_probed():
    model = build()
    optimizer = LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        return loss

    with GradFlow(model, optimizer, every=1) as flow:
        optimizer.step(closure)
    (record,) = flow.records
    assert record.stepped
    assert record.forwards >= 2
    assert record.gradients_read == "at the optimizer's step"
    assert record.gradient.norm == pytest.approx(norm(model))
    assert record.layers["0.0"].update.distance > 0


# Ranks, all with the values of this one.


def test_a_rank_that_shares_its_batch_with_no_group_is_noted(pair_of_four_ranks):
    model = build()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
    record = probe(model, batch())
    assert record.ranks == 1
    assert record.notes == (
        "activations are those of this rank only: pass group= to add up the ranks that share a "
        "batch",
    )


def test_the_users_model_is_found_inside_of_wrappers(pair_of_four_ranks):
    model = build()
    wrapped = nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager"))
    assert inside_wrappers(torch.compile(wrapped, backend="eager")) is model
    assert compiled_modules(wrapped) == {*model.modules()}
    model[1].compile(backend="eager")
    assert compiled_modules(model) == {*model[1].modules()}


# Calls of a layer by itself, after a forward of the model that failed.
@pytest.mark.parametrize(
    ("around", "calls"),
    [
        (contextlib.nullcontext, 1),
        (torch.no_grad, 0),
        (lambda: mock.patch.object(torch.compiler, "is_compiling", return_value=True), 0),
    ],
)
def test_a_layer_that_is_called_outside_of_a_forward_counts_where_it_trains(around, calls):
    model = build()
    with probed(model) as flow:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(batch(width=9))
        with around():
            model[0](batch())
        for inside in (model[0], model):
            torch.func.vmap(inside)(batch())
    assert flow.records[0].layers["0.0"].calls == calls
    assert flow.records[0].forwards == 1


def validate(model):
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(batch(rows=100))


def train_copies(model):
    for other in copies_of(model)[1:]:
        other(batch(rows=50)).sum().backward()


@pytest.mark.parametrize("beside", [validate, train_copies])
def test_validation_and_copies_made_in_a_probed_step_are_not_probed(beside):
    model = build()
    with probed(model) as flow:
        beside(model)
        model(batch()).sum().backward()
    assert flow.records[0].layers["0.0"].activation.elements == 32
    assert flow.records[0].forwards == 1


def test_compiled_layers_are_reported_as_unprobed():
    model = build()
    compiled = torch.compile(model, backend="eager")
    compiled(batch())
    record = probe(compiled, batch())
    assert record.layers["0.0"].activation is None
    assert record.gradient.norm == pytest.approx(norm(model))
    assert "compiled code runs no hooks" in flow_table([record])
