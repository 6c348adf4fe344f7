"""Symptoms of the skill `grad-flow`: reproduced, cured, and not cured by the wrong fix.

python -m pytest tests/skills/test_symptoms_grad_flow.py
"""

from collections import Counter

import pytest
import torch
from symptoms import blocks, linear, mean_square, rows, symptom
from torch import nn
from torch.distributed.fsdp import fully_shard

from curry_train.gates.two_ranks import run_on_ranks
from curry_train.primitives import GradFlow, recompute_blocks
from curry_train.workloads.models import transformer
from curry_train.workloads.workload import Case


def one_step(model, optimizer=None, *, clip=None, **options):
    with GradFlow(model, optimizer, every=1, **options) as flow:
        mean_square(model, rows()).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if optimizer is None:
            flow.step()
        else:
            optimizer.step()
    return flow.records[0]


@symptom("hooks report twice the calls in recomputed layers")
def test_hooks_count_recomputed_layers_twice_and_the_others_once():
    case = Case(transformer(depth=2, dim=32, length=16, vocabulary=64))
    model, calls = case.build(), Counter()
    recompute_blocks(model)
    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    with GradFlow(model, every=1) as flow:
        case.workload.mean_loss(model, case.batch()).backward()
        flow.step()
    assert calls["layers.0.attention.wq"] == 2
    assert calls["head"] == calls["embedding"] == 1  # so halving every count would be wrong
    assert {layer.calls for layer in flow.records[0].layers.values()} == {1}


@symptom("gradient norms are all at the clip norm")
def test_gradients_are_read_before_clipping():
    seen = []
    for clip in (1e-3, 1e3):
        model = blocks(linear, nn.GELU)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_, model=model: seen.append(_norm(model)))
        record = one_step(model, optimizer, clip=clip)
        seen.append((record.gradient.norm, record.scaled))
    after, (before, scaled), unclipped, (same, factor) = seen
    assert after == pytest.approx(1e-3, rel=1e-3)
    assert before == same == pytest.approx(unclipped, rel=1e-6)
    assert scaled == pytest.approx(after / before, rel=1e-6)
    assert factor == 1.0


def _norm(model):
    return (
        torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])
        .norm()
        .item()
    )


@symptom("gradient norms are 65536 times too large")
def test_the_scale_of_the_scaler_is_removed():
    norms = []
    for given in (False, True):
        model = blocks(linear, nn.GELU)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
        with GradFlow(model, optimizer, every=1, scaler=scaler if given else None) as flow:
            scaler.scale(mean_square(model, rows())).backward()
            scaler.step(optimizer)
        norms.append(flow.records[0].gradient.norm)
    assert norms[0] == pytest.approx(65536 * norms[1], rel=1e-6)


@symptom("a layer's gradient is 0 in the log, and it is frozen or not reached")
def test_a_layer_without_a_gradient_has_none_with_a_reason():
    model = blocks(linear, nn.GELU, depth=3)
    model[0].requires_grad_(False)
    model.extra = nn.ModuleList([linear()])
    model.forward = lambda x: model[2](model[1](model[0](x)))
    record = one_step(model)
    assert record.layers["0.0"].gradient is None
    assert record.layers["0.0"].frozen
    assert record.layers["extra.0"].gradient is None
    assert record.layers["extra.0"].without_gradient == ("extra.0.weight", "extra.0.bias")


@symptom("`SGD holds no parameter of this model`")
def test_an_optimizer_of_other_parameters_is_refused():
    model = blocks(linear, nn.GELU)
    optimizer = torch.optim.SGD(blocks(linear, nn.GELU).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="SGD holds no parameter of this model"):
        GradFlow(model, optimizer)
    assert (
        one_step(model).layers["0.0"].update is None
    )  # without the optimizer there are no update figures
    assert (
        one_step(model, torch.optim.SGD(model.parameters(), lr=0.1)).layers["0.0"].update.distance
        > 0
    )


def on_one_rank_alone(everywhere):
    rank = torch.distributed.get_rank()
    model = fully_shard(blocks(linear, nn.GELU, depth=2))
    mean_square(model, rows()).backward()
    flow = GradFlow(model, every=1)
    if everywhere or rank == 0:
        with flow:
            mean_square(model, rows()).backward()
            flow.step()
    return len(flow.records)


@pytest.mark.long  # it waits for the time limits of both ranks
@symptom("the job hangs at a probed step")
def test_opening_the_probe_on_one_rank_alone_is_an_error():
    assert run_on_ranks(f"{__file__}:on_one_rank_alone", everywhere=True) == [1, 1]
    with pytest.raises(RuntimeError, match=r"did not end within|failed"):
        run_on_ranks(f"{__file__}:on_one_rank_alone", everywhere=False, timeout=25.0)
