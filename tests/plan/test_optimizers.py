"""Predicted state and temporary bytes are those of the optimizer that a user gives.

python -m pytest tests/plan/test_optimizers.py
"""

import functools

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from curry_train.plan import Sketch, measure_timeline
from curry_train.plan.optimizers import make_optimizer
from curry_train.plan.shapes import host_bytes
from curry_train.primitives import StepInBackward, recompute_blocks
from curry_train.workloads.models import mlp
from curry_train.workloads.workload import default_workload
from finetune_models import OPTIMIZERS, of

from ..plan_models import ByParameter, Coded, MomentsMadeAnew, Runs, estimated, measured
from ..toy_steps import stacked

WORKLOAD = mlp(depth=2, width=64)
STATE = "optimizer state"


class ByteState(Coded):
    """A moment in one byte for each element and a scale, as quantised optimizers keep it."""

    def values(self):
        return self.codes.float().mul_(self.scale)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            target, source = args
            target.scale.copy_(source.abs().max() / 127)
            target.codes.copy_(source / target.scale)
            return target
        return super().__torch_dispatch__(func, types, args, kwargs)


class SmallMomentum(ByParameter):
    """Momentum in one byte for each element."""

    def update(self, parameter, state):
        if not state:
            codes = torch.zeros_like(parameter, dtype=torch.int8)
            state["moment"] = ByteState(codes, torch.zeros(()))
        moment = torch.lerp(parameter.grad, state["moment"], 0.9)
        state["moment"].copy_(moment)
        parameter.sub_(moment, alpha=1e-3)


class Clipping(ByParameter):
    """Copy a gradient where its norm is above a limit."""

    def update(self, parameter, state):
        gradient = parameter.grad
        if gradient.norm() < 1e9:
            gradient = gradient * 0.1
        parameter.sub_(gradient, alpha=1e-3)


class Sparse(ByParameter):
    """Step on the elements above zero, whose number is not known from shapes."""

    def update(self, parameter, state):
        parameter.flatten()[parameter.grad.flatten().nonzero()] -= 1e-3


# Of the optimizers that `make finetune` measures, those of torch and of the tests' libraries.
FACTORIES = (
    *(OPTIMIZERS[name] for name in OPTIMIZERS if not name.startswith(("Lion", "torchao", "bits"))),
    *(SmallMomentum, Clipping, MomentsMadeAnew),
)


def predicted(factory, **options):
    with Sketch(WORKLOAD, optimizer=factory, **options) as sketch:
        return sketch, sketch.step(4)


def require_equal(timeline, real):
    assert (timeline.points, timeline.owners) == (real.points, real.owners)


@pytest.mark.parametrize("optimizer", FACTORIES)
def test_a_step_on_shapes_equals_the_real_one(optimizer):
    sketch, step = predicted(optimizer)
    real = measured(WORKLOAD, 4, optimizer=optimizer)
    assert sketch.why_real is None
    require_equal(step.timeline, real)
    assert step.peak_bytes == real.peak.bytes_alive > 0


def test_a_state_of_one_byte_counts_one_byte():
    """A wrapper's own storage, which has no memory, would count the state in float32."""
    _, step = predicted(SmallMomentum)
    scales = 4 * len(list(WORKLOAD.build().parameters()))
    numbers = sum(parameter.numel() for parameter in WORKLOAD.build().parameters())
    assert step.timeline.owners[STATE][0] == numbers + scales


def test_a_step_that_needs_values_is_measured():
    sketch, step = predicted(Sparse)
    assert "nonzero" in sketch.why_real
    assert step.peak_bytes == measured(WORKLOAD, 4, optimizer=Sparse).peak.bytes_alive


def test_capturable_is_estimated_for_a_device_that_allows_it():
    """Its step counts are on the device."""
    _, step = predicted(of("AdamW", capturable=True), kernels="cuda")
    _, plain = predicted(of("AdamW"), kernels="cuda")
    assert len(step.trace.state) > len(plain.trace.state)
    with pytest.raises(AssertionError, match="capturable"):
        measured(WORKLOAD, 4, optimizer=of("AdamW", capturable=True))


# Bases whose weights are quantised, below adapters that are trained.


class QuantState:
    """Scales of a quantised weight, in an object of the parameter as bitsandbytes keeps them."""

    def __init__(self, scales):
        self.scales = scales


class ByteWeight(nn.Parameter):
    """A weight in one byte for each element, which is made out of a tensor with values."""

    @staticmethod
    def __new__(cls, weight):
        scales = weight.detach().abs().amax(1, keepdim=True) / 127
        codes = (weight.detach() / scales).round().to(torch.int8)
        made = torch.Tensor._make_subclass(cls, codes.data, False)
        made.quant_state = QuantState(scales)
        return made


def adapted(width=32, rank=2):
    """Return a frozen linear layer in bytes, and an adapter of low rank."""

    def run(inner, x):
        (weight,), down, up = inner
        return torch.relu(x @ (weight.float() * weight.quant_state.scales).T + up(down(x)))

    adapter = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
    return Runs(run, nn.ParameterList([ByteWeight(torch.randn(width, width))]), *adapter)


def test_a_quantised_base_counts_its_bytes_and_its_scales():
    """Such a parameter is not made without values, so the model is measured."""

    def make():
        return stacked(adapted, 3), torch.randn(4, 32)

    with Sketch(default_workload("adapted", lambda: make()[0], make())) as sketch:
        step = sketch.step(4)
        whole = sketch.step(4, accumulated=True, change=recompute_blocks)
    adapters = 2 * 32 * 2
    assert "values" in sketch.why_real
    assert step.timeline.owners["parameters"][0] == 3 * (32 * 32 + 4 * 32 + 4 * adapters)
    assert step.timeline.owners[STATE][0] == 3 * (2 * 4 * adapters + 2 * 4)
    assert step.gradients == 3 * 4 * adapters
    assert whole.timeline.owners["activations"] != step.timeline.owners["activations"]


# Optimizers that step in backward.


def in_backward(module):
    return StepInBackward(list(module.parameters()), AdamW)


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_step_in_backward_holds_fewer_gradients_as_predicted(accumulated):
    """Of several microbatches, the gradients of the earlier ones stay until the last backward."""
    step = estimated(WORKLOAD, 4, accumulated=accumulated, optimizer=in_backward)
    real = measured(WORKLOAD, 4, optimizer=in_backward, accumulated=accumulated)
    require_equal(step.timeline, real)
    _, plain = predicted("adamw")
    assert plain.timeline.after["backward"] - step.timeline.after["backward"] == plain.gradients
    assert real.after["backward"] == real.after["step"]


def test_the_name_is_an_optimizer_and_the_original_steps_on():
    module = nn.Linear(4, 4)
    optimizer = make_optimizer("adamw-in-backward", module)
    before = module.weight.detach().clone()
    measure_timeline(module, torch.ones(2, 4), lambda one, x: one(x).sum(), optimizer=optimizer)
    assert torch.equal(module.weight, before)
    assert not optimizer.state

    module(torch.ones(2, 4)).sum().backward()
    assert not torch.equal(module.weight, before)
    assert module.weight.grad is None


# Optimizers that step on the host.


class CPUOffloadOptimizer(Optimizer):
    """Refuse a computer without a GPU, as the one of torchao does."""

    __module__ = "torchao.optim.cpu_offload"

    def __init__(self, parameters, **options):
        raise AssertionError("CPU Offload currently only supports CUDA & XPU")


def on_host(module, **options):
    return CPUOffloadOptimizer(list(module.parameters()), **options)


LARGE = 64 * 64


@pytest.mark.parametrize("offload_gradients", [False, True])
def test_a_step_on_the_host_leaves_its_state_there(offload_gradients):
    """Of torchao's class: copies, gradients and state of what has at least 4,096 elements."""

    make = functools.partial(on_host, lr=1e-3, offload_gradients=offload_gradients)
    sketch, step = predicted(make)
    require_equal(step.timeline, measured(WORKLOAD, 4, optimizer=make))

    sizes = [one.numel() for one in WORKLOAD.build().parameters()]
    large = sum(size for size in sizes if size >= LARGE)
    small = [size for size in sizes if size < LARGE]
    assert step.timeline.owners[STATE][0] == 2 * 4 * sum(small) + 4 * len(small)
    freed = 4 * large if offload_gradients else 0
    kept = step.timeline.after["step"] - predicted("sgd")[1].timeline.after["step"]
    assert kept == step.timeline.owners[STATE][0] - freed

    num_large = len(sizes) - len(small)
    assert sketch.host_note.startswith("its optimizer steps on the host, which holds ")
    assert host_bytes(make_optimizer(make, WORKLOAD.build())) == 4 * 4 * large + 4 * num_large


def test_gradients_that_are_moved_away_are_not_added_up():
    make = functools.partial(on_host, offload_gradients=True)
    with pytest.raises(ValueError, match="offload_gradients"):
        estimated(WORKLOAD, 4, accumulated=True, optimizer=make)


def test_the_class_is_replaced_where_it_is_imported_by_the_factory():
    def make(module):
        class CPUOffloadOptimizer(Optimizer):
            __module__ = "torchao.optim.cpu_offload"

            def __init__(self, parameters, optimizer_class, **options):
                raise AssertionError

        return CPUOffloadOptimizer(module.parameters(), SGD, lr=0.1, momentum=0.9)

    assert make_optimizer(make, WORKLOAD.build()).param_groups[0]["momentum"] == 0.9
    with pytest.raises(AssertionError):
        make(WORKLOAD.build())


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "paged_adamw_8bit"])
def test_names_of_trainers_are_known_and_others_refused_in_one_line(name):
    made = make_optimizer(name, nn.Linear(2, 2))
    assert bool(made.defaults.get("fused")) == name.endswith("fused")
    assert (made.defaults.get("num_bytes") == 2) == name.endswith("8bit")
    with pytest.raises(ValueError, match=r"LBFGS needs a closure, .*: measure .*\bSGD\b"):
        make_optimizer(lambda module: LBFGS(module.parameters()), nn.Linear(4, 4))
