"""Small trainings for tests of the store, and file systems that fail or kill.

Proof: `python -m pytest tests/runs/test_store.py`.
"""

import contextlib
import os
import shutil
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from curry_train.runs import SavedRun, TrainingState
from curry_train.runs.files import HashingStream

WIDTH = 8
WRITES_PER_CHANGE = 200  # torch makes about twenty per tensor
CHANGES = [
    *((Path, name) for name in ("mkdir", "rename", "replace")),
    *((os, "fsync"), (shutil, "rmtree"), (HashingStream, "write")),
]


def network():
    """Build a network with parameters, buffers and dropout."""
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4)
    )


def new_state(seed=0, *, build=network, **options):
    torch.manual_seed(seed)
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return TrainingState(model, optimizer, scheduler, **options)


def unscheduled(seed, optimizer, build=network):
    """Build a state whose optimizer a function makes of all parameters."""
    torch.manual_seed(seed)
    model = build()
    return TrainingState(model, optimizer(list(model.parameters())))


def regressor():
    """Build a model of four inputs and one output, with dropout and always the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))


def linear_training(rate=0.1):
    """Build the smallest model, which takes two numbers, and its optimizer."""
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=rate)


def train(state, steps):
    """Train some steps and return the losses; inputs and dropout use torch's generator."""
    losses = []
    for _ in range(steps):
        loss = state.model(torch.randn(6, WIDTH)).float().square().mean()
        loss.backward()
        for optimizer in state.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, part in state.parts.items():
            if name.startswith("scheduler"):
                part.step()
        state.step += 1
        state.position += 6
        losses.append(loss.item())
    return losses


def tensors_of(state):
    """Return copies of all saved tensors, with shards gathered."""
    held = {}
    for name, tensor in state.snapshot().tensors.items():
        held[name] = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
    return held


def equal(first, second):
    """Return whether tensors of the same names have the same values and dtypes."""
    return first.keys() == second.keys() and all(
        one.dtype == second[name].dtype and torch.equal(one, second[name])
        for name, one in first.items()
    )


def alike(first, second):
    """Return whether two states have equal tensors."""
    return equal(tensors_of(first), tensors_of(second))


def newest_step(folder):
    """Return the step of the newest checkpoint of a run."""
    return SavedRun(folder).latest().step


def save_new(store, step=1, seed=0):
    """Save a new state as a rollback."""
    return store.save("rollback", step, new_state(seed))


def save_best(store, step, state, value=1.0):
    """Save the parameters of a state as the best, with this dev loss."""
    return store.save("best-k", step, state, metric=("dev_loss", value))


def save_both(store, step, state):
    """Save a state as a rollback, and its parameters as the best."""
    store.save("rollback", step, state)
    save_best(store, step, state)


class Holder:
    """A part of a state that keeps what it is given."""

    def __init__(self, kept):
        self.kept = kept

    def state_dict(self):
        return self.kept

    def load_state_dict(self, state):
        self.kept = state


class CountedFiles(contextlib.ExitStack):
    """Calls `self.ask(operation)` before and after changes of files, and within some writes."""

    def __init__(self, ask=lambda operation: None):
        super().__init__()
        self.ask = ask
        self._count = 0
        for owner, name in CHANGES:
            call = self._asking(name, getattr(owner, name))
            self.enter_context(mock.patch.object(owner, name, call))

    def _asking(self, name, change):
        def call(*args, **options):
            self.ask(name)
            answer = change(*args, **options)
            self.ask(f"{name} done")
            return answer

        def write(stream, data):
            self._count += 1
            if self._count % WRITES_PER_CHANGE != 1:
                return change(stream, data)
            view = memoryview(data).cast("B")
            half = len(view) // 2
            change(stream, view[:half])
            stream.flush()
            self.ask("write")
            change(stream, view[half:])
            return len(view)

        return write if name == "write" else call


class At:
    """A counter of changes that acts at the n-th one."""

    def __init__(self, number, act):
        self.number = number
        self.act = act
        self.count = 0
        self.last = ""

    def __call__(self, operation):
        self.count += 1
        self.last = operation
        if self.count == self.number:
            self.act()


def flip(path, place=None, mask=4):
    """Flip bits of a byte of a file, by default of the one in its middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= mask
    path.write_bytes(data)


def flip_largest(folder, pattern="*.*", place=None):
    """Flip a bit of the largest file of a name in a folder."""
    flip(max(folder.glob(pattern), key=lambda one: one.stat().st_size), place)


def fail(error):
    def act():
        raise error

    return act
