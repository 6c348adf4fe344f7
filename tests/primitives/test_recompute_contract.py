"""What recompute, segments and a configuration refuse, and what a configuration chooses.

python -m pytest tests/primitives/test_recompute_contract.py
"""

import weakref

import pytest
import torch
from torch import nn

from curry_train.core.measure import measure_memory
from curry_train.plan import MemoryProfiler, SelectiveCheckpointer
from curry_train.primitives import CheckpointConfig, Recompute, choose_segments, recompute_segments
from curry_train.workloads.models import snn

from ..peers.peer_table import Block
from ..toy_steps import drawn, seeded_stack, square_sum

BATCH = drawn(16, 8)


# Refusals and their messages.


def with_own_forward(block):
    block.forward = block.forward
    return block


def compiled_already(block):
    block.compile(backend="eager")
    return block


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda block: Recompute(Recompute(block)),
            "already, and a second wrapper would run its forward three times; wrap it once$",
        ),
        (
            lambda block: Recompute(nn.parallel.DistributedDataParallel(block)),
            "wrap the blocks before DistributedDataParallel",
        ),
        (
            lambda block: Recompute(with_own_forward(block)),
            "has a forward of its own on the instance",
        ),
        (lambda block: Recompute(compiled_already(block)), "wrap first, compile afterwards"),
        (lambda block: Recompute(nn.LazyLinear(3)), "run one batch through it first"),
        (lambda block: Recompute("layer"), "a module is needed, got str"),
        (
            lambda block: Recompute(block, enabled="yes"),
            "^enabled must be True or False, got 'yes'$",
        ),
        (lambda block: Recompute(block, early_stop=1), "^early_stop must be True or False, got 1$"),
        (
            lambda block: Recompute(block, determinism_check="all"),
            "^determinism_check: default or none, not 'all'$",
        ),
        (lambda block: apply(chain(3), strategy="selective"), "needs a profile"),
        (lambda block: apply(chain(3), strategy="sequential"), "needs a batch"),
    ],
)
def test_what_can_not_be_recomputed_is_refused(make, message, pair_of_four_ranks):
    with pytest.raises(ValueError, match=message):
        make(Block())


def test_an_error_of_a_block_holds_no_tensor():
    x = torch.ones(2, 8)
    held = weakref.ref(x)
    with pytest.raises(RuntimeError):
        Recompute(nn.Linear(2, 2))(x)
    del x
    assert held() is None


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_a_block_with_a_scripted_part_trains_the_same():
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))
    weights = [*model.parameters()]
    steps = (model, Recompute(model))
    found = [torch.autograd.grad(square_sum(step, BATCH), weights) for step in steps]
    assert all(map(torch.equal, *found))
    assert MemoryProfiler(model).profile(BATCH, 1, loss=square_sum).layers
    with pytest.raises(ValueError, match="RecursiveScriptModule is scripted"):
        Recompute(model[1])


def test_reentrant_is_refused_if_it_would_lose_gradients():
    block = Block()
    with pytest.raises(
        ValueError,
        match=r"^no input of RecomputeBlock requires grad, and with use_reentrant=True its "
        "parameters would get no gradient at all; leave use_reentrant at False, or call "
        "enable_input_require_grads.. or a similar method$",
    ):
        Recompute(block, use_reentrant=True)(BATCH)
    scale = torch.ones(1, requires_grad=True)
    with pytest.raises(
        ValueError,
        match=r"gets a tensor that requires grad by keyword or inside a container, and with "
        "use_reentrant=True its gradient would be lost; leave use_reentrant at False$",
    ):
        Recompute(block, use_reentrant=True)(BATCH.clone().requires_grad_(), scale=scale)
    Recompute(block.requires_grad_(False), use_reentrant=True)(BATCH)  # no gradient to lose


# Segments.


def chain(length=6):
    return seeded_stack(Block, length)


def test_the_chosen_count_has_the_lowest_peak():
    batch = BATCH.repeat(32, 1)

    def peak(count):
        model = chain(16)
        recompute_segments(model, count, preserve_rng_state=False)
        return measure_memory(model, batch, square_sum).peak_bytes

    peaks = {count: peak(count) for count in (1, 2, 4, 8, 16)}
    assert peak(choose_segments(chain(16), batch, square_sum)) <= min(peaks.values())
    assert peaks[1] > peaks[4]


@pytest.mark.parametrize("count", [0, -1, True, 2.0, 7])
def test_an_invalid_number_of_segments_is_refused(count):
    with pytest.raises(ValueError, match="segments"):
        recompute_segments(chain(), count)


# The configuration and the strategies that it applies.


def apply(model, report=None, *, batch=None, loss=None, **config):
    checkpointer = SelectiveCheckpointer(
        CheckpointConfig(enabled=config.pop("enabled", True), **config)
    )
    assert checkpointer.apply(model, report, batch=batch, loss=loss) is model
    return checkpointer.get_checkpointed_layers()


def test_selective_takes_the_layers_above_the_threshold():
    model = chain(3)
    report = MemoryProfiler(model).profile(BATCH)
    largest = max(layer.bytes / 2**20 for layer in report.layers)
    assert apply(model, report, memory_threshold_mb=2 * largest) == []
    assert apply(model, report, enabled=False, memory_threshold_mb=0) == []
    assert apply(model, report, memory_threshold_mb=0, exclude_patterns=["1"]) == ["0", "2"]


@pytest.mark.parametrize("size", [1, 4, None])
def test_timesteps_are_chunked_by_the_configuration(size):
    model = snn().build()
    config = CheckpointConfig(
        enabled=True, strategy="none", snn_timestep_checkpoint=True, snn_chunk_size=size
    )
    checkpointer = SelectiveCheckpointer(config)
    checkpointer.apply(model)
    assert checkpointer.get_checkpointed_layers() == [""]
    assert model.unroll.keywords == {"chunk_size": size}
