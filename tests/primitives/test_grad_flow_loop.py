"""Grad-flow in loops with microbatches, clipping, scalers, skipped steps and optimizers.

python -m pytest tests/primitives/test_grad_flow_loop.py
"""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from curry_train.core.measure import LiveStorages
from curry_train.primitives import GradFlow
from curry_train.primitives.grad_flow import AFTER_BACKWARD, AT_THE_STEP
from curry_train.primitives.grad_flow_report import flow_findings, flow_json, flow_table


def build(*, depth=3, width=8):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)])


def batch(rows=4, width=8):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def norm(model):
    return (
        torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])
        .norm()
        .item()
    )


def test_microbatches_are_pooled_and_the_last_unclipped_gradient_counts():
    model, x = build(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    model[0][0].register_forward_hook(
        lambda layer, inputs, output: outputs.append(output.detach().double())
    )
    with GradFlow(model, optimizer) as flow:
        for part in x.split([1, 3]):
            model(part).square().sum().backward()
        expected = norm(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), expected / 4)
        optimizer.step()
    (record,) = flow.records
    activation = record.layers["0.0"].activation
    assert activation.elements == 32
    assert activation.norm == pytest.approx(torch.cat(outputs).norm().item(), rel=1e-12)
    assert record.gradient.norm == pytest.approx(expected, rel=1e-12)
    assert record.gradients_read == AFTER_BACKWARD
    assert record.scaled == pytest.approx(0.25, rel=1e-5)
    assert record.forwards == record.layers["0.0"].calls == 2


def test_nothing_of_a_step_stays_alive():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradFlow(model, optimizer, every=1):
        out = model(batch())
        node, seen = out.grad_fn, weakref.ref(out)
        out.sum().backward()
        optimizer.step()
        del out, node
        gc.collect()
        assert seen() is None


def test_weights_are_kept_while_the_optimizer_steps_and_no_longer():
    model = build(width=512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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


def scaled_loop(model, optimizer, scaler, losses, *, zero_grad=None, given=True, early=False):
    with GradFlow(model, optimizer, every=1, scaler=scaler if given else None) as flow:
        for factor in losses:
            if early:
                loss = (model(batch()) * factor).square().mean()
                (zero_grad or optimizer.zero_grad)()
            else:
                (zero_grad or optimizer.zero_grad)()
                loss = (model(batch()) * factor).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        (zero_grad or optimizer.zero_grad)()
        if zero_grad is not None:
            model(batch())
    return flow


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_a_step_that_the_scaler_skips_is_recorded_with_its_gradients(fused, early):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    flow = scaled_loop(model, optimizer, scaler, [1.0, float("inf"), 1.0], early=early)
    assert [record.stepped for record in flow.records] == [True, False, True]
    assert [record.step for record in flow.records] == ([0, 1, 2] if fused else [0, 1, 1])
    assert flow.records[1].nonfinite
    assert flow.records[1].layers["0.0"].update is None
    assert flow.records[2].gradient.nonfinite == 0
    norms = [one["layers"]["0.0"]["gradient"]["norm"] for one in flow_json(flow)["steps"]]
    assert [isinstance(norm, float) for norm in norms] == [True, False, True]
    assert {"nonfinite", "skipped"} <= {finding.kind for finding in flow_findings(flow.records)}


@pytest.mark.parametrize("fused", [False, True])
def test_the_scale_of_a_scaler_is_removed_and_an_unnamed_scaler_is_reported(fused):
    norms = []
    for given in (True, False):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        flow = scaled_loop(
            model, optimizer, torch.amp.GradScaler("cpu", init_scale=1024.0), [1.0], given=given
        )
        norms.append(flow.records[0].gradient.norm)
        assert flow.records[0].scaled == pytest.approx(1.0 if given else 1 / 1024, rel=1e-6)
        assert ("scaled" in {finding.kind for finding in flow_findings(flow.records)}) != given
    assert norms[1] == pytest.approx(1024 * norms[0], rel=1e-6)


def test_two_optimizers_end_a_step_together():
    model = build()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.AdamW([*model[1].parameters(), *model[2].parameters()], lr=0.1)
    with GradFlow(model, [first, second], every=2) as flow:
        for _ in range(3):
            model(batch()).sum().backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
    assert [record.step for record in flow.records] == [0, 2]
    assert all(flow.records[0].layers[name].update.distance > 0 for name in ("0.0", "1.0", "2.0"))


def test_an_optimizer_with_a_closure_is_probed():
    model = build()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

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
    assert record.gradients_read == AT_THE_STEP
    assert record.gradient.norm == pytest.approx(norm(model))
    assert record.layers["0.0"].update.distance > 0


def test_a_model_whose_layers_are_called_one_by_one_is_probed():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradFlow(model, optimizer, every=1) as flow:
        model[2](model[1](model[0](batch()))).sum().backward()
        optimizer.step()
    (record,) = flow.records
    assert record.forwards == 0
    assert record.layers["1.0"].calls == 1
    assert record.gradients_read == AFTER_BACKWARD


def test_validation_in_between_is_not_training():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradFlow(model, optimizer, every=1) as flow:
        with torch.no_grad():
            model(batch(rows=100))
        with torch.inference_mode():
            model(batch(rows=100))
        model(batch()).sum().backward()
        optimizer.step()
    assert flow.records[0].layers["0.0"].activation.elements == 32
    assert flow.records[0].forwards == 1


def test_copies_and_pickles_made_in_a_probed_step_are_unprobed_models():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradFlow(model, optimizer, every=1) as flow:
        others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for other in others:
            other(batch(rows=50)).sum().backward()
            other.zero_grad()
        model(batch()).sum().backward()
        optimizer.step()
    assert flow.records[0].layers["0.0"].activation.elements == 32
    assert flow.records[0].forwards == 1


def test_compiled_layers_are_reported_as_unprobed():
    model = build()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled(batch())
    with GradFlow(compiled, optimizer, every=1) as flow:
        compiled(batch()).sum().backward()
        optimizer.step()
    (record,) = flow.records
    assert record.layers["0.0"].activation is None
    assert record.gradient.norm == pytest.approx(norm(model))
    assert "compiled code runs no hooks" in flow_table(flow.records)
