"""Faults of gradient accumulation; those of users' loops stand in `foreign_grad_accum`.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

from dataclasses import replace

import torch
from torch import nn

from curry_train.gates.grad_accum import train_by_hand
from curry_train.gates.implementation import load_implementation
from curry_train.primitives import train_window

from .saboteurs import planted


def divided_by_full_window(model, window, loss, optimizer):
    def less(model, microbatch):
        return loss(model, microbatch) * len(window) / 4

    train_window(model, window, less, optimizer)


def short_window_dropped(model, window, loss, optimizer):
    if len(window) == 4:
        train_window(model, window, loss, optimizer)


def scheduled_each_time(model, window, loss, optimizer, *, scheduler=None):
    train_window(model, window, loss, optimizer)
    for _ in window:
        scheduler.step()


def scheduled_before_the_step(model, window, loss, optimizer, *, scheduler=None):
    """Halve the rate before the step that it is for."""
    handle = optimizer.register_step_pre_hook(lambda *_: scheduler.step())
    train_window(model, window, loss, optimizer)
    handle.remove()


def clipped_before_unscaling(model, window, loss, optimizer, *, clip_norm=None, scaler=None):
    optimizer.zero_grad()
    for microbatch in window:
        scaler.scale(loss(model, microbatch) / window.num_terms).backward()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    scaler.step(optimizer)
    scaler.update()


def scheduled_though_skipped(model, window, loss, optimizer, *, scheduler=None, scaler=None):
    train_window(model, window, loss, optimizer, scaler=scaler)
    scheduler.step()


def stepped_past_the_scaler(model, window, loss, optimizer, *, scaler=None):
    train_by_hand(model, window, loss, optimizer)


def one_mask_for_all(model, window, loss, optimizer):
    def seeded(model, microbatch):
        torch.manual_seed(0)
        return loss(model, microbatch)

    train_window(model, window, seeded, optimizer)


def put_into_eval_mode(model, window, loss, optimizer):
    train_window(model.eval(), window, loss, optimizer)


def last_one_twice(model, window, loss, optimizer):
    microbatches = (*window.microbatches[1:], window.microbatches[-1])
    train_window(model, replace(window, microbatches=microbatches), loss, optimizer)


# The claim, and the fault as a `train_window`.
FAULTY_WINDOWS = [
    ("large-batch", "steps_each_time"),
    ("large-batch", "zeroes_each_time"),
    ("uneven", "mean_of_means"),
    ("uneven", "zeroes_each_time"),
    ("short-window", divided_by_full_window),
    ("short-window", short_window_dropped),
    ("clip-once", "clips_each_time"),
    ("step-once", scheduled_each_time),
    ("step-once", scheduled_before_the_step),
    ("unscaled", clipped_before_unscaling),
    ("overflow", scheduled_though_skipped),
    ("overflow", stepped_past_the_scaler),
    ("own-dropout", one_mask_for_all),
    ("train-mode", put_into_eval_mode),
    ("train-mode", last_one_twice),
    ("two-ranks", "divides_by_own_terms"),
    ("one-sync", "syncs_each_time"),
    ("one-sync", "syncs_fsdp_each_time"),
]
HINTS = {
    "large-batch": "by the terms of the whole window",
    "uneven": "mean of means",
    "short-window": "from the window",
    "clip-once": "never inside it",
    "step-once": "never inside it",
    "unscaled": "before clipping",
    "overflow": "step through the scaler",
    "own-dropout": "do not seed",
    "train-mode": "in the mode|draw on",
    "two-ranks": "terms of all ranks",
    "one-sync": "syncs 3",
}
# Ranks load a model by its name.
MODELS = {"train-mode": "dropout", "two-ranks": "mlp", "one-sync": "mlp"}


def loaded(function):
    """Load a user's function as `--impl` does, and return one of ours as it is."""
    if callable(function):
        return function
    return load_implementation(f"train_window=tests.gates.foreign_grad_accum:{function}")


FAULTS = [
    *(
        planted(
            f"grad-accum.{claim}",
            getattr(function, "__name__", function),
            train_window=loaded(function),
            model=MODELS.get(claim, "small"),
            hint=HINTS[claim],
        )
        for claim, function in FAULTY_WINDOWS
    )
]
