"""Small models for plans, and estimates of steps compared with real ones.

`ROUTED` has shapes that depend on values.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from curry_train.core.measure import Life, OperationMode
from curry_train.plan import Sketch, measure_timeline
from curry_train.plan.cuda_step import StepTrace
from curry_train.plan.optimizers import make_optimizer
from curry_train.workloads import Case, Workload, load_workload

from .toy_steps import activated

# Estimates against real steps.


def measured(
    workload, size, *, optimizer="adamw", change=None, accumulated=False, cuda=False, **options
):
    """Measure the real step on real tensors, with torch's own optimizer.

    `cuda`: with foreach, and with logits that the caller holds.
    """
    case = Case(workload, **options)
    module, batch = case.build(), case.batch(size)
    optimizer = make_optimizer(optimizer, module, foreach=cuda)
    if change is not None:
        change(module)
    return measure_timeline(
        module,
        batch,
        case.workload.mean_loss,
        optimizer=optimizer,
        accumulated=accumulated,
        keeps_output=cuda,
    )


def estimated(workload, size, *, change=None, accumulated=False, **options):
    """Estimate a step on shapes."""
    with Sketch(workload, **options) as sketch:
        return sketch.step(size, change=change, accumulated=accumulated)


def check(sketch, real, size, **options):
    found = sketch.step(size, **options)
    estimated = found.timeline
    assert (estimated.after, estimated.peak.bytes_alive) == (real.after, real.peak.bytes_alive)
    assert (estimated.peak.phase, estimated.peak.owners) == (real.peak.phase, real.peak.owners)
    return found


def check_workload(workload, *, changes=(None,), **options):
    """Compare steps with real ones; return why shapes alone did not do, or None."""
    real = {change: measured(workload, 3, change=change, **options) for change in changes}
    with Sketch(workload, **options) as sketch:
        for change, timeline in real.items():
            check(sketch, timeline, 3, change=change)
    return sketch.why_real


def trace_of_sizes(sizes, events, *, given=(), gradients=(), products=(), **others):
    """Return the trace of a step without optimizer, by the sizes and the places of its tensors.

    An event is a place where a tensor is made, and ~place where it is freed.
    """
    lives = [Life(size, None, 0) for size in sizes]
    return StepTrace(
        given=[lives[place] for place in given],
        state=(),
        events=[(lives[max(event, ~event)], event >= 0) for event in events],
        step_start=len(events),
        gradients=[lives[place] for place in gradients],
        products=products,
        **others,
    )


def trace_of(workload, size=1, **options):
    """Return the trace of a step as CUDA runs it."""
    return estimated(workload, size, kernels="cuda", **options).trace


def built(name, **options):
    """Return the module, the batch and the loss of a built-in workload."""
    case = Case(load_workload(name), **options)
    return case.build(), case.batch(), case.workload.mean_loss


class Called(OperationMode):
    """Note the operations that run."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def run(self, func, args, kwargs):
        self.operations.append(func)
        return func(*args, **kwargs)


# Models.


class Block(nn.Module):
    def __init__(self, hidden, width=32):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Runs(nn.Module):
    """A model that calls a function with some modules."""

    def __init__(self, run, *modules):
        super().__init__()
        self.run, self.inner = run, nn.ModuleList(modules)

    def forward(self, *args, **named):
        return self.run(self.inner, *args, **named)


def in_turn(layers, x):
    for layer in layers:
        x = layer(x)
    return x


class Net(nn.Module):
    """A model with blocks of several widths, all of which run `times` times."""

    def __init__(self, hidden, times=1, frozen=(), outputs=4):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, outputs)
        self.blocks, self.times = nn.ModuleList(Block(width) for width in hidden), times
        for index in frozen:
            self.blocks[index].requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.times):
            x = in_turn(self.blocks, x)
        return self.last(x)


def sum_of_squares(module, x):
    return module(x).float().square().sum()


def squares(build, *shape, name="squares", loss=sum_of_squares):
    """Return a workload of random numbers of a shape, with the sum of squares as loss."""
    return Workload(name, build, lambda size: torch.randn(size, *shape), loss)


def net(*hidden, **settings):
    return squares(lambda: Net(hidden, **settings), 64, 8, name="net")


def routed(layers, x):
    """Send some rows through each layer, so that shapes depend on values."""
    for layer in layers:
        chosen = (x[:, 0] > 0).nonzero()[:, 0]
        x = x.index_add(0, chosen, layer(x[chosen]))
    return x


ROUTED = squares(lambda: Runs(routed, activated(8), activated(8)), 8, name="routed")


class ByParameter(torch.optim.Optimizer):
    """Update one parameter of a module after another."""

    def __init__(self, module):
        super().__init__(module.parameters(), {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.update(parameter, self.state[parameter])


class MomentsMadeAnew(ByParameter):
    """Replace both moments in each step instead of changing them in place."""

    def update(self, parameter, state):
        for name in ("first", "second"):
            before = state.get(name, torch.zeros_like(parameter))
            state[name] = 0.9 * before + parameter.grad
        parameter -= state["first"]


class MomentsInATuple(ByParameter):
    """Keep both moments in a tuple."""

    def update(self, parameter, state):
        before = state.get("moments") or (torch.zeros_like(parameter),) * 2
        state["moments"] = tuple(0.9 * one + parameter.grad for one in before)
        parameter -= state["moments"][0]


class Coded(torch.Tensor):
    """Numbers in float32 that other tensors stand for, the first of which has their shape."""

    inner = ("codes", "scale")

    @staticmethod
    def __new__(cls, codes, *others):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, *tensors):
        vars(self).update(zip(self.inner, tensors, strict=True))

    def __tensor_flatten__(self):
        return [*self.inner], None

    @classmethod
    def __tensor_unflatten__(cls, tensors, context, size, stride):
        return cls(*(tensors[name] for name in cls.inner))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Compute with the values."""
        if func is torch.ops.aten.detach.default:
            return cls(*(getattr(args[0], name) for name in cls.inner))
        opened = tree_map(lambda one: one.values() if isinstance(one, cls) else one, args)
        return func(*opened, **(kwargs or {}))
