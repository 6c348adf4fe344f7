"""Models of odd forms that are right, for gates that must not fail on them."""

import torch
from torch import nn

from curry_train.workloads.models import load_workload
from curry_train.workloads.workload import Case, Workload


class Counting(nn.Module):
    """Count calls in a buffer or an integer, of which a share enters the output."""

    def __init__(self, calls, share):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.share = share
        if isinstance(calls, torch.Tensor):
            self.register_buffer("calls", calls)
        else:
            self.calls = calls

    def forward(self, x):
        self.calls += 1
        return x + self.layers(x) * (1 + self.share * self.calls)


def make_batch(size):
    return torch.randn(size, 8)


def squared_sum(model, x):
    return model(x).square().sum()


def noisy(model, x):
    return squared_sum(model, x) * torch.rand(())


def of_slopes(model, x):
    x = x.detach().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return (slope - x.detach()).square().sum() + out.square().sum()


def make_model(share=0.0, calls=int):
    return nn.Sequential(*(Counting(calls(0), share) for _ in range(3)))


def make_workload(name, build, loss=squared_sum):
    return Workload(name, build, make_batch, loss, spec=f"{__file__}:{name}")


def counting():
    return make_workload("counting", lambda: make_model(calls=torch.tensor))


def counting_in_python():
    return make_workload("counting_in_python", make_model)


def counted():
    return make_workload("counted", lambda: make_model(0.1, torch.tensor))


def counted_in_python():
    return make_workload("counted_in_python", lambda: make_model(0.1))


def random_in_eval():
    return make_workload("random_in_eval", make_model, noisy)


def parallel():
    return make_workload("parallel", lambda: nn.DataParallel(make_model()))


def derived():
    return make_workload("derived", make_model, of_slopes)


def case_of(name):
    return Case(load_workload(f"{__file__}:{name}"))
