"""A small training with one planted difference, to be recorded and compared."""

import functools
import tempfile

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from curry_train.runs.fingerprints import read_fingerprints, record_run
from curry_train.runs.locate import locate


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.0001


class Block(nn.Module):
    def __init__(self, number, fault):
        super().__init__()
        is_here = number == 1
        self.number = number
        self.fault = fault if is_here else ""
        self.ln = nn.LayerNorm(16, eps=1e-6 if self.fault == "epsilon" else 1e-5)
        up = nn.Linear(16, 32)
        if "renamed" in fault:
            self.widen = up
        else:
            self.up = up
        self.down = nn.Linear(32, 16)
        self.drop = nn.Dropout(0.2 if self.fault == "dropout" else 0.1)

    def forward(self, x):
        hidden = self.ln(x)
        if self.fault == "operation":
            hidden = hidden * 1.0001
        hidden = (self.widen if hasattr(self, "widen") else self.up)(hidden)
        if self.fault == "backward":
            hidden = WrongBackward.apply(hidden)
        hidden = F.gelu(hidden, approximate="tanh" if self.fault == "kernel" else "none")
        if self.fault == "moved":
            return x + self.down(self.drop(hidden))
        return x + self.drop(self.down(hidden))


class Model(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.recomputes = fault == "recompute"
        self.h = nn.ModuleList(Block(number, fault) for number in range(3))
        self.h[1].down = self.h[2 if fault == "tied" else 1].down
        self.extra = nn.Identity()
        self.register_buffer("empty", torch.ones(0))
        self.calls_extra = fault == "more modules"
        if fault == "inserted":
            self.h.insert(2, nn.Identity())
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        if self.calls_extra:
            x = self.extra(x)
        return self.head(x)


def _optimizer(model, fault):
    if fault == "hooked":

        def longer(parameter):
            parameter.grad.mul_(1.5)

        model.head.bias.register_post_accumulate_grad_hook(longer)
    eps = 1e-7 if fault == "optimizer" else 1e-8
    adam = torch.optim.Adam if fault == "other optimizer" else torch.optim.AdamW
    return adam(model.parameters(), eps=eps, foreach=True)


def train(fault="", *, steps=3):
    """Train, and return the losses; a name of a fault plants it."""
    torch.manual_seed(fault == "seed")
    model = Model(fault)
    if fault == "weight":
        with torch.no_grad():
            model.h[1].down.weight[0, 0] += 1e-6
    model.h[1].ln.bias.requires_grad_(fault != "frozen")
    optimizer = _optimizer(model, fault)
    inputs, labels = torch.randn(64, 16), torch.randint(4, (64,))
    order = torch.Generator().manual_seed(3 if fault == "order" else 2)
    data = DataLoader(TensorDataset(inputs, labels), 8, shuffle=True, generator=order)
    if fault == "other loader":
        next(iter(DataLoader(TensorDataset(labels), 8, generator=torch.Generator())))
    torch.backends.cuda.enable_math_sdp(fault != "other loader")
    losses = []
    for number, (x, y) in zip(range(steps), data, strict=False):
        is_second = number == 1
        if is_second and fault == "made anew":
            optimizer = torch.optim.AdamW(optimizer.param_groups)
        torch.rand(int(is_second and fault == "drawn"))
        if is_second and fault == "same samples":
            x, y = x.flip(0), y.flip(0)
        if is_second and "stale weight" in fault:
            _, up, *_ = model.h[0].children()
            up.weight.data[3] += 1e-3
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1 if fault == "loss" else 0.0)
        loss.backward()
        if fault == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if is_second and fault.startswith("flipped"):
            moment = optimizer.state[model.head.weight]["exp_avg"]
            flipped = model.head.weight.data if fault == "flipped weight" else moment
            flipped.view(torch.int32)[0, 0] ^= 1
        for _ in range(1 + is_second * (fault == "two steps")):
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.backends.cuda.enable_math_sdp(True)
    return losses


def recorded(folder, fault="", **options):
    with record_run(folder, **options):
        train(fault)
    return read_fingerprints(folder)


@functools.cache
def sound_record(**options):
    """Return the record of a training without a fault, which is made once."""
    with tempfile.TemporaryDirectory() as folder:
        return recorded(folder, **options)


def located(fault, **options):
    pair = sound_record(**options), recorded("b", fault, **options)
    return locate(*pair), pair
