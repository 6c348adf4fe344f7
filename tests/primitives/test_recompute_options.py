"""Options of torch's checkpoint, plain functions, shared state, generators of a block, refusals.

python -m pytest tests/primitives/test_recompute_options.py
"""

import contextlib
import copy
import functools
import logging
import weakref
from types import FunctionType

import pytest
import torch
from torch import nn

from curry_train.core.measure import measure_memory
from curry_train.plan import MemoryProfiler, SelectiveCheckpointer
from curry_train.primitives import (
    CheckpointConfig,
    Recompute,
    apply_sac,
    checkpoint_timesteps,
    choose_segments,
    plain_blocks,
    recompute_blocks,
    recompute_segments,
)
from curry_train.primitives.rerun import modules_of
from curry_train.workloads.models import snn

from ..peers.peer_table import Block
from ..toy_steps import all_equal, drawn, gradients_of, seeded_stack, square_sum

LEVERS = {
    "recompute": recompute_blocks,
    "sac": lambda model, **options: apply_sac(model, "save_matmuls", **options),
    "segments": lambda model, **options: recompute_segments(model, 2, **options),
    "reentrant": lambda model: recompute_blocks(model, use_reentrant=True),
}
X = drawn(6, 8)


def chain(block=Block, depth=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *(block() for _ in range(depth)))


def gradients(model, run=None):
    model.zero_grad()
    (run or model)(X).square().sum().backward()
    return gradients_of(model)


# Options of `torch.utils.checkpoint.checkpoint`.


class Counting(Block):
    def forward(self, x):
        out = super().forward(x)
        ENDS.append(1)
        return out


ENDS = []


@pytest.mark.parametrize(
    ("early_stop", "enabled", "expected"), [(True, True, 1), (False, True, 2), (False, False, 1)]
)
@pytest.mark.parametrize("lever", ["recompute", "sac", "segments"])
def test_early_stop_ends_the_second_run_or_lets_it_finish(lever, early_stop, enabled, expected):
    model = chain(Counting, depth=2)
    LEVERS[lever](model, early_stop=early_stop, enabled=enabled)
    ENDS.clear()
    model(X).sum().backward()
    # Of two segments the second is plain.
    assert len(ENDS) == (expected + 1 if lever == "segments" else 2 * expected)


def test_debug_lists_the_operations_where_the_second_run_differs(monkeypatch):
    # Torch would look up frames of C++, which takes seconds.
    monkeypatch.setattr("platform.system", str)
    # Torch ends this logger's propagation for good, and pytest would format its records then.
    monkeypatch.setattr(logging.getLogger("LoggingTensor"), "propagate", True)

    class Unsteady(Block):
        def forward(self, x):
            ENDS.append(1)
            return super().forward(x if len(ENDS) == 1 else x[:3])

    block = Recompute(Unsteady(), debug=True)
    ENDS.clear()
    with pytest.raises(RuntimeError, match="layer_norm"):
        block(X).sum().backward()


@pytest.mark.parametrize("option", [{"debug": True}, {"context_fn": contextlib.nullcontext}])
def test_reentrant_takes_no_contexts(option):
    with pytest.raises(
        ValueError,
        match=r"^reentrant checkpointing takes no context_fn and no debug: turn use_reentrant off$",
    ):
        Recompute(Block(), use_reentrant=True, **option)


# Plain functions.


class Methods(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        # It requires a count of its batches.
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8))

    def compute(self, x, power=1):
        return self.inner(x).sin() ** power

    @Recompute
    def decorated(self, x, power=1):
        return self.compute(x, power)


def with_module(x, power, *, used):
    return used.compute(x, power)


def of_globals(x, power):
    return GLOBAL.compute(x, power)  # noqa: F821


@pytest.mark.parametrize(
    "make",
    [
        lambda model: Recompute(model.compute),
        lambda model: model.decorated,
        lambda model: Recompute(functools.partial(model.compute)),
        lambda model: Recompute(functools.partial(Methods.compute, model), use_reentrant=False),
        lambda model: functools.partial(Recompute(with_module), used=model),
        lambda model: Recompute(FunctionType(of_globals.__code__, {"GLOBAL": model})),
    ],
    ids=["method", "decorated", "of a partial", "of a function", "argument by name", "global name"],
)
def test_methods_partials_and_decorated_functions_recompute(make):
    plain = Methods()
    model = copy.deepcopy(plain)
    found = gradients(model, lambda x: make(model)(x, power=2))
    assert all_equal(found, gradients(plain, lambda x: plain.compute(x, 2)))
    assert int(model.inner[1].num_batches_tracked) == 1
    with torch.no_grad():
        assert torch.equal(model.decorated(X), model.compute(X))


def test_a_function_without_modules_is_the_same_function_by_name():
    @Recompute
    def scaled(x, weight, *, debug):
        """Multiply."""
        return (x * weight).sin() * debug

    weight = torch.ones(8, requires_grad=True)
    scaled(X, weight, debug=2).sum().backward()
    assert torch.equal(weight.grad, (X.cos() * X * 2).sum(0))
    assert (scaled.__name__, scaled.__doc__) == ("scaled", "Multiply.")
    reentrant = Recompute(scaled.__wrapped__, use_reentrant=True)
    with pytest.raises(ValueError, match="scaled gets a tensor that requires grad by keyword"):
        reentrant(X, weight=weight, debug=2)
    # Nothing is saved without gradients, and so nothing refused.
    frozen = weight.detach()
    assert torch.equal(reentrant(X, frozen, debug=2), scaled(X, frozen, debug=2))


class Holder:
    """An object that is no module and no function."""

    def __init__(self, held):
        self.held = held


LAYER = nn.Linear(2, 2)
IN_ANOTHER_FILE = FunctionType((lambda: LAYER).__code__, {"LAYER": LAYER})


def test_modules_are_found_in_all_that_a_function_uses():
    first, second, third = (nn.Linear(2, 2) for _ in range(3))
    second.friends = [third]
    in_closure = [first, {"one": Holder([third])}]

    def inner():
        return second, Holder, torch

    def outer():
        return inner, in_closure

    def outermost():
        return outer, IN_ANOTHER_FILE

    bound = functools.partial(Methods.compute, first, used=second)
    for function, depth, found in (
        (bound, 0, [first, second]),
        (outer, 0, [first]),
        (outer, 1, [first, third, second]),
        (inner, 1, [second, third]),
        (outermost, 1, [first]),
        (outermost, 2, [first, third, second]),
        (Holder([first]), 0, []),
        (Holder([first]), 1, [first]),
        (first, 0, [first]),
    ):
        assert modules_of(function, depth=depth) == found


def test_a_generator_that_a_function_is_given_draws_the_same_again():
    def drawn(x, generator):
        return (x * torch.rand(8, generator=generator)).sin()

    found = []
    for function in (drawn, Recompute(drawn)):
        weight = torch.ones(8, requires_grad=True)
        function(weight, torch.Generator().manual_seed(1)).sum().backward()
        found.append(weight.grad)
    assert torch.equal(*found)


# Without any lever for a while.


def test_backward_inside_plain_blocks_runs_the_blocks_of_timesteps_as_forward_did():
    def step(x, state):
        x = model(x)
        return x, state + x

    model = chain(depth=2)
    losses = []
    for lever in (lambda model: None, recompute_blocks):
        lever(model)
        model.zero_grad()
        outputs, _ = checkpoint_timesteps(step, X[:, None], torch.zeros(1, 8), chunk_size=2)
        with plain_blocks():
            outputs.square().sum().backward()
        losses.append(gradients_of(model))
    assert all_equal(*losses)


# A block and the module that it was made of.


def test_what_is_set_on_the_module_later_reaches_the_block_and_back():
    module = Block()
    block = Recompute(module)
    module.eval()
    assert not block.training
    module.last = nn.Linear(16, 4)
    module.label = "set later"
    assert block.last.out_features == 4
    assert block.label == "set later"
    block.train()
    assert module.training
    assert not isinstance(module, Recompute)


@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize(
    "kept_as", [nn.Module.register_buffer, nn.Module.register_parameter, setattr]
)
def test_a_changed_parameter_buffer_or_attribute_is_named(lever, kept_as):
    class Scaled(Block):
        def add(self):
            scale = torch.ones(8)
            self.register_parameter("absent", None)
            self.register_module("removed", None)
            if kept_as is nn.Module.register_parameter:
                scale = nn.Parameter(scale)
            kept_as(self, "scale", scale)

        def forward(self, x):
            return super().forward(x) * self.scale

    model = chain(Scaled)
    LEVERS[lever](model)
    loss = model(X).square().sum()
    with torch.no_grad():
        model[1].scale.mul_(2)
    with pytest.raises(
        RuntimeError,
        match=r"^scale of \w+ was changed in place between the forward "
        "and its backward, so the block can't be recomputed as it ran: run backward before the "
        "change, or assign a new tensor$",
    ):
        loss.backward()


# Refusals of recompute, of segments and of configurations, and the choices of a configuration.


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
        (lambda block: apply(linears(3), strategy="selective"), "needs a profile"),
        (lambda block: apply(linears(3), strategy="sequential"), "needs a batch"),
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
    x = BATCH.clone().requires_grad_()
    for called, options in ((block, {"scale": x}), (lambda x: {0: x.sin()}, {}), ([].append, {})):
        with pytest.raises(
            ValueError, match=r"inside a container, .* leave use_reentrant at False$"
        ):
            Recompute(called, use_reentrant=True)(x, **options)


# Segments.


def linears(length=6):
    return seeded_stack(Block, length)


def test_the_chosen_count_has_the_lowest_peak():
    batch = BATCH.repeat(32, 1)

    def peak(count):
        model = linears(16)
        recompute_segments(model, count, preserve_rng_state=False)
        return measure_memory(model, batch, square_sum).peak_bytes

    peaks = {count: peak(count) for count in (1, 2, 4, 8, 16)}
    assert peak(choose_segments(linears(16), batch, square_sum)) <= min(peaks.values())
    assert peaks[1] > peaks[4]


@pytest.mark.parametrize("count", [0, -1, True, 2.0, 7])
def test_an_invalid_number_of_segments_is_refused(count):
    with pytest.raises(ValueError, match="segments"):
        recompute_segments(linears(), count)


# The configuration and the strategies that it applies.


def apply(model, report=None, *, batch=None, loss=None, **config):
    checkpointer = SelectiveCheckpointer(
        CheckpointConfig(enabled=config.pop("enabled", True), **config)
    )
    assert checkpointer.apply(model, report, batch=batch, loss=loss) is model
    return checkpointer.get_checkpointed_layers()


def test_selective_takes_the_layers_above_the_threshold():
    model = linears(3)
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
