"""Grad-flow counts each layer once under every kind of recompute, equal to the bit.

python -m pytest tests/primitives/test_grad_flow_recompute.py
"""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from curry_train.primitives import (
    CheckpointWrapper,
    GradFlow,
    apply_regions,
    apply_sac,
    offload_blocks,
    recompute_blocks,
    recompute_segments,
    recompute_timesteps,
)
from curry_train.workloads import Case
from curry_train.workloads.models import snn, transformer

from ..peers.peer_table import around_layers, torch_checkpoints
from ..toy_steps import all_equal

DROPOUT = transformer(depth=3, dim=32, length=16, vocabulary=64, dropout=0.1)


def run(workload, change, *, steps=2, **options):
    """Return figures of two steps of two microbatches, and the state after them."""
    case = Case(workload)
    model, batch = case.build(), case.batch()
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    losses = []
    with GradFlow(model, optimizer, every=1, **options) as flow:
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(2):
                loss = workload.mean_loss(model, batch)
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return flow, (
        losses,
        [parameter.detach().clone() for parameter in model.parameters()],
        torch.get_rng_state(),
    )


def figures(flow):
    return [
        (record.forwards, name, layer.calls, layer.activation, layer.gradient, layer.update)
        for record in flow.records
        for name, layer in record.layers.items()
    ]


def wrap_each(model):
    for index, block in enumerate(model.layers):
        model.layers[index] = CheckpointWrapper(block, use_reentrant=True, preserve_rng_state=True)


KEPT = ("_to_copy", "count_nonzero", "dot", "sub", "mul", "mm", "bmm", "full_like", "stack")


def save_what_the_probe_uses(context, operation, *args, **kwargs):
    """Build a policy that would keep an operation of the probe and return it for another."""
    kept = operation.__name__.partition(".")[0] in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


CONTEXTS = partial(create_selective_checkpoint_contexts, save_what_the_probe_uses)


def nested(run, *args):
    return checkpoint(partial(checkpoint, run, use_reentrant=False), *args, use_reentrant=False)


FORMS = {
    "CheckpointWrapper reentrant": wrap_each,
    "blocks": recompute_blocks,
    "segments": partial(recompute_segments, num_segments=2),
    "sac": apply_sac,
    "regions": apply_regions,
    "offload": offload_blocks,
    "torch": torch_checkpoints,
    "torch reentrant": partial(around_layers, around=checkpoint, use_reentrant=True),
    "torch nested": partial(around_layers, around=nested),
    "torch selective": partial(torch_checkpoints, context_fn=CONTEXTS),
}


@pytest.fixture(scope="module")
def bare():
    return run(DROPOUT, lambda model: None)


@pytest.mark.parametrize("form", FORMS)
def test_figures_under_recompute_are_the_bare_models(form, bare):
    flow, left = run(DROPOUT, FORMS[form])
    assert figures(flow) == figures(bare[0])
    for layer in flow.records[0].layers.values():
        assert layer.calls == 2  # microbatches
    assert left[0] == bare[1][0]
    assert all_equal(left[1], bare[1][1])
    assert torch.equal(left[2], bare[1][2])


def test_a_loop_over_time_in_chunks_is_counted_by_timestep():
    workload = snn(depth=2, width=16, timesteps=12)
    plain, _ = run(workload, lambda model: None)

    def change(model):
        recompute_timesteps(model, chunk_size=4)
        model(Case(workload).batch()[0])  # the first call looks for hidden state, in extra steps

    flow, _ = run(workload, change)
    assert figures(flow) == figures(plain)
    assert flow.records[0].layers["layers.0"].calls == 2 * 12
