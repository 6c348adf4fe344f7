"""Symptoms of recompute that saves no memory: reproduced, cured, not by the wrong fix.

python -m pytest tests/skills/test_symptoms_recompute_memory.py
"""

from functools import partial

import pytest
import torch
from symptoms import blocks, linear, mean_square, memory, rows, step, symptom
from torch import nn
from torch.nn import functional as F

from curry_train.core.measure import count_flops, recompute_flops
from curry_train.core.parity import compare, record_step
from curry_train.plan.profiler import MemoryProfiler
from curry_train.primitives.recompute import Recompute, recompute_blocks
from curry_train.primitives.segments import recompute_segments
from curry_train.workloads.models import transformer
from curry_train.workloads.workload import Case


@pytest.fixture
def batch():
    return rows()


@symptom("blocks of Linear and ReLU hold as much as before")
def test_linear_and_relu_save_nothing_alone_and_something_in_segments(batch):
    build, smooth = partial(blocks, linear, nn.ReLU), blocks(linear, nn.GELU)
    plain, model = memory(build(), batch), build()
    recompute_blocks(model, preserve_rng_state=False)
    assert memory(model, batch) == plain
    recompute_blocks(smooth, preserve_rng_state=False)
    assert (
        memory(smooth, batch) == plain
    )  # GELU held twice as much: recompute frees only what GELU added
    model = build()
    recompute_segments(model, 3, preserve_rng_state=False)
    assert memory(model, batch).held_bytes < 0.7 * plain.held_bytes
    assert memory(model, batch).peak_bytes < 0.8 * plain.peak_bytes
    assert compare(step(build(), batch), step(model, batch)).bit_equal


CASE = Case(transformer(vocabulary=8192))


class HeadAndLoss(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, hidden, targets):
        return F.cross_entropy(self.head(hidden), targets, reduction="sum")


def loss_in_chunks(model, batch):
    """Recompute the last projection and the loss for 32 tokens at a time."""
    tokens, targets = batch["tokens"], batch["targets"].flatten()
    hidden = model.embedding(tokens)
    for layer in model.layers:
        hidden = layer(hidden, model.cosine[: tokens.shape[1]], model.sine[: tokens.shape[1]])
    chunks = zip(model.norm(hidden).flatten(0, 1).split(32), targets.split(32), strict=True)
    part = Recompute(HeadAndLoss(model.head))
    return sum(part(*chunk) for chunk in chunks) / len(targets)


@symptom("held goes down and the peak hardly")
def test_logits_own_the_peak_until_the_loss_is_chunked():
    loss, batch, peaks = CASE.workload.mean_loss, CASE.batch(), []
    for patterns in (None, "layers.*", ["layers.*", "head"]):
        model = CASE.build()
        if patterns:
            recompute_blocks(model, blocks=patterns)
        peaks.append(memory(model, batch, loss=loss))
    plain, full, with_head = peaks
    assert full.held_bytes < 0.5 * plain.held_bytes
    assert full.peak_bytes > 0.7 * plain.peak_bytes
    assert with_head == full
    model = CASE.build()
    recompute_blocks(model)
    assert memory(model, batch, loss=loss_in_chunks).peak_bytes < 0.4 * plain.peak_bytes
    found = compare(
        record_step(CASE.build(), batch, loss),
        record_step(model, batch, loss_in_chunks),
        tolerance=1e-6,
    )
    assert found.holds, found.describe()  # the loss is summed in another order


@symptom("out of memory at batch size 1 too")
def test_using_each_gradient_at_once_lowers_a_peak_of_gradients(batch):
    def build():
        return blocks(partial(nn.Linear, 256, 256), nn.GELU, depth=4)

    def descend(parameter):
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    plain, model, batch = build(), build(), batch.repeat(1, 16)[:2]
    recompute_blocks(model)
    before = memory(plain, batch).peak_bytes
    assert memory(model, batch).peak_bytes > 0.95 * before
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(descend)
    assert memory(model, batch).peak_bytes < 0.6 * before
    model.load_state_dict(build().state_dict())  # the measured step was taken
    for module in (model, plain):
        mean_square(module, batch).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@symptom("nothing is saved after `model.eval()`")
def test_fine_tuning_in_eval_mode_recomputes_nothing(batch):
    build = partial(blocks, linear, nn.GELU, partial(nn.Dropout, 0.5), depth=4)
    plain, model, trained = build().eval(), build(), build()
    recompute_blocks(model)
    recompute_blocks(trained)
    assert memory(model.eval(), batch) == memory(plain, batch)
    reference = step(plain, batch)
    assert not compare(reference, step(trained, batch)).holds  # dropout is on again
    for module in model.train().modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    assert memory(model, batch).held_bytes < 0.6 * memory(plain, batch).held_bytes
    assert compare(reference, step(model, batch)).bit_equal


@symptom("it fits with room to spare, and each step costs up to a third more")
def test_only_as_many_layers_as_the_budget_needs_are_recomputed():
    case = Case(transformer())
    loss, batch, plain, full, model = (
        case.workload.mean_loss,
        case.batch(),
        *(case.build() for _ in range(3)),
    )
    before, held = count_flops(plain, batch, loss), memory(plain, batch, loss=loss).held_bytes
    recompute_blocks(full)
    spent = recompute_flops(before, count_flops(full, batch, loss))
    assert 0.2 < spent / before.total < 1 / 3
    budget = 0.6 * held
    names = MemoryProfiler(model).profile(batch, loss=loss).recommend_layers(budget / 2**20)
    recompute_blocks(model, blocks=names)
    assert 0 < recompute_flops(before, count_flops(model, batch, loss)) < 0.6 * spent
    assert (
        memory(model, batch, loss=loss).held_bytes <= budget * 1.01
    )  # a generator's state is kept for each layer
    assert compare(record_step(plain, batch, loss), record_step(model, batch, loss)).bit_equal
