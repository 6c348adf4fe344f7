"""Faults of gradient accumulation: divisors, clipping, scalers, masks, and NaN.

Proof: `python -m pytest tests/gates/test_grad_accum.py`.
"""

import types
from dataclasses import dataclass, replace

import torch
from saboteurs import planted
from torch import nn

from curry_train.primitives.grad_accum import (
    GradientAccumulation,
    NonFiniteWindow,
    StepInBackward,
    Window,
    train_window,
)


def by_hand(
    model, window, loss, optimizer, *, divisors, clip=None, each=(), zero=True, scheduler=None
):
    """A training step written out, with options for planted faults."""
    if zero:
        optimizer.zero_grad()
    total = 0.0
    for microbatch, divisor in zip(window, divisors, strict=True):
        value = loss(model, microbatch) / divisor
        value.backward()
        total += value.item()
        if "clip" in each and clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if "schedule" in each:
            scheduler.step()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    if scheduler is not None and "schedule" not in each:
        scheduler.step()
    return types.SimpleNamespace(loss=total)


def right_by_hand(model, window, loss, optimizer, *, clip_norm=None, scheduler=None, **changes):
    divisors = changes.pop("divisors", [window.loss_divisor] * len(window))
    return by_hand(
        model,
        window,
        loss,
        optimizer,
        divisors=divisors,
        clip=clip_norm,
        scheduler=scheduler,
        **changes,
    )


def no_accumulation(model, window, loss, optimizer, **options):
    last = replace(window, microbatches=window.microbatches[-1:])
    return train_window(model, last, loss, optimizer, **options)


def divided_twice(model, window, loss, optimizer, **options):
    twice = replace(window, loss_divisor=window.loss_divisor * len(window))
    return train_window(model, twice, loss, optimizer, **options)


def mean_of_means(model, window, loss, optimizer, **options):
    terms = [int((microbatch["targets"] != -100).sum()) * len(window) for microbatch in window]
    return right_by_hand(model, window, loss, optimizer, divisors=terms, **options)


def divided_by_full_window(model, window, loss, optimizer, **options):
    longer = replace(window, loss_divisor=window.loss_divisor * 4 / len(window))
    return train_window(model, longer, loss, optimizer, **options)


def short_window_dropped(model, window, loss, optimizer, **options):
    if len(window) < 4:
        return types.SimpleNamespace(loss=0.0)
    return train_window(model, window, loss, optimizer, **options)


def short_window_not_stepped(model, window, loss, optimizer, *, clip_norm, scheduler):
    if len(window) == 4:
        return right_by_hand(model, window, loss, optimizer, scheduler=scheduler)
    optimizer.zero_grad()
    values = [loss(model, microbatch) / window.loss_divisor for microbatch in window]
    for value in values:
        value.backward()
    return types.SimpleNamespace(loss=sum(value.item() for value in values))


def gradients_kept(model, window, loss, optimizer, **options):
    return right_by_hand(model, window, loss, optimizer, zero=False, **options)


def clipped_each_microstep(model, window, loss, optimizer, **options):
    return right_by_hand(model, window, loss, optimizer, each=("clip",), **options)


def scheduled_each_microstep(model, window, loss, optimizer, **options):
    return right_by_hand(model, window, loss, optimizer, each=("schedule",), **options)


def not_clipped(model, window, loss, optimizer, *, clip_norm=None, scheduler=None):
    return train_window(model, window, loss, optimizer, scheduler=scheduler)


def stepped_on_nan(model, window, loss, optimizer, **options):
    return right_by_hand(model, window, loss, optimizer, **options)


def stepped_before_looking(model, window, loss, optimizer, **options):
    result = right_by_hand(model, window, loss, optimizer, **options)
    raise NonFiniteWindow(f"microbatch 2 of 4: {result.loss}")


def clipped_before_unscaling(
    model, window, loss, optimizer, *, clip_norm=None, scheduler=None, scaler=None
):
    optimizer.zero_grad()
    total = 0.0
    for microbatch in window:
        value = loss(model, microbatch) / window.loss_divisor
        (value if scaler is None else scaler.scale(value)).backward()
        total += value.item()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    scheduler.step()
    return types.SimpleNamespace(loss=total)


def scheduled_though_skipped(model, window, loss, optimizer, *, scheduler=None, **options):
    result = train_window(model, window, loss, optimizer, **options)
    if scheduler is not None:
        scheduler.step()
    return result


def stepped_past_the_scaler(model, window, loss, optimizer, *, scaler=None, **options):
    return train_window(model, window, loss, optimizer, **options)


def one_mask_for_all(model, window, loss, optimizer, **options):
    def seeded(model, microbatch):
        torch.manual_seed(0)
        return loss(model, microbatch)

    return train_window(model, window, seeded, optimizer, **options)


def put_into_eval_mode(model, window, loss, optimizer, **options):
    return train_window(model.eval(), window, loss, optimizer, **options)


def last_one_twice(model, window, loss, optimizer, **options):
    twice = replace(window, microbatches=(*window.microbatches[1:], window.microbatches[-1]))
    return train_window(model, twice, loss, optimizer, **options)


def loss_alone_checked(model, window, loss, optimizer, **options):
    optimizer.zero_grad()
    for number, microbatch in enumerate(window):
        value = loss(model, microbatch) / window.loss_divisor
        if not value.isfinite():
            optimizer.zero_grad()
            raise NonFiniteWindow(f"microbatch {number} of {len(window)}")
        value.backward()
    optimizer.step()
    return types.SimpleNamespace(loss=value.item())


class FullWindows(GradientAccumulation):
    """Its last microbatch is that of a full window, though the data end earlier."""

    def windows(self, microbatches, **options):
        for window in super().windows(microbatches, **options):
            yield AnswersOfTheRun(**vars(window), accumulation=self)


@dataclass(frozen=True)
class AnswersOfTheRun(Window):
    accumulation: GradientAccumulation | None = None

    def train_step_kwargs(self, index):
        what = self.accumulation.train_step_kwargs(index)
        return what | {"loss_divisor": self.loss_divisor}


class NeverZeroed(GradientAccumulation):
    """Gradients of the last window are added to."""

    def windows(self, microbatches, **options):
        for window in super().windows(microbatches, **options):
            yield AddsUp(**vars(window))


class AddsUp(Window):
    def train_step_kwargs(self, index):
        return super().train_step_kwargs(index) | {"zero_grad": False}


class SyncsAlways(GradientAccumulation):
    """Every microbatch syncs."""

    def windows(self, microbatches, **options):
        for window in super().windows(microbatches, **options):
            yield replace(window, sync_each_batch=True)


class IgnoresSyncs(GradientAccumulation):
    """Reads the steps of a config, and not when to sync."""

    @classmethod
    def from_config(cls, config, key="gradient_accumulation_steps"):
        return cls(GradientAccumulation.from_config(config, key).steps)


def joined_one_by_one(model, window, loss, optimizer, *, joint_loss=None, **options):
    each = loss if joint_loss is None else lambda *given: joint_loss([loss(*given)])
    return train_window(model, window, each, optimizer, **options)


def joined_and_divided_again(model, window, loss, optimizer, *, joint_loss=None, **options):
    def mean(values):
        return joint_loss(values) / len(values)

    return train_window(model, window, loss, optimizer, joint_loss=mean, **options)


def joined_with_old_ones_detached(model, window, loss, optimizer, *, joint_loss=None, **options):
    def of_last(values):
        return joint_loss([*(one.detach() for one in values[:-1]), values[-1]])

    return train_window(model, window, loss, optimizer, joint_loss=of_last, **options)


class AnySteps(GradientAccumulation):
    """Any number of steps is taken."""

    def __post_init__(self):
        pass


class AtLeastOneTerm(GradientAccumulation):
    """A microbatch without terms counts as one."""

    def windows(self, microbatches, *, count=None, group=None):
        least = None if count is None else lambda microbatch: max(1, count(microbatch))
        yield from super().windows(microbatches, count=least, group=group)


def keeps_unused_gradients(model, window, loss, optimizer, **options):
    """Fill gradients with zeros in place of None."""
    unused = [group["params"][-1] for group in optimizer.param_groups]
    result = train_window(model, window, loss, optimizer, **options)
    for parameter in unused:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return result


class AnySyncs(GradientAccumulation):
    """A config that has no `sync_each_batch` syncs each batch."""

    @classmethod
    def from_config(cls, config, key="gradient_accumulation_steps"):
        found = super().from_config(config, key)
        is_read = isinstance(config, dict) or hasattr(config, "sync_each_batch")
        return found if is_read else replace(found, sync_each_batch=True)


class ForgetsStateInCopies(StepInBackward):
    def __deepcopy__(self, memo):
        return ForgetsStateInCopies(self.parts, self.make)


class NoEmptyMicrobatch(GradientAccumulation):
    """A microbatch without terms is refused."""

    def windows(self, microbatches, *, count=None, group=None):
        for window in super().windows(microbatches, count=count, group=group):
            if count is not None and not all(map(count, window)):
                raise ValueError("count returned 0 for a microbatch")
            yield window


FAULTS = [
    planted("grad-accum.wrong-input", "any-steps", accumulation=AnySteps, hint="0 steps"),
    planted("grad-accum.wrong-input", "one-term", accumulation=AtLeastOneTerm, hint="no terms"),
    planted("grad-accum.unusual-terms", "refused", accumulation=NoEmptyMicrobatch, hint="count"),
    planted(
        "grad-accum.unusual-terms", "zeros-for-none", train=keeps_unused_gradients, hint="to None"
    ),
    planted(
        "grad-accum.steps-of-config", "syncs-by-default", accumulation=AnySyncs, hint="sync at"
    ),
    planted(
        "grad-accum.in-backward",
        "copy-without-state",
        optimizer=ForgetsStateInCopies,
        hint="copies need the state",
    ),
    planted("grad-accum.own-loop", "full-windows", accumulation=FullWindows, hint="zero at"),
    planted("grad-accum.own-loop", "never-zeroed", accumulation=NeverZeroed, hint="zero at"),
    planted("grad-accum.steps-of-config", "syncs-always", accumulation=SyncsAlways, hint="sync at"),
    planted("grad-accum.steps-of-config", "ignored", accumulation=IgnoresSyncs, hint="sync at"),
    planted("grad-accum.joint-loss", "one-by-one", train=joined_one_by_one),
    planted("grad-accum.joint-loss", "divided-again", train=joined_and_divided_again),
    planted("grad-accum.joint-loss", "detached", train=joined_with_old_ones_detached),
    planted("grad-accum.large-batch", "no-accumulation", train=no_accumulation),
    planted("grad-accum.large-batch", "divided-twice", train=divided_twice),
    planted("grad-accum.large-batch", "last-one-twice", train=last_one_twice),
    planted("grad-accum.uneven", "mean-of-means", train=mean_of_means),
    planted("grad-accum.uneven", "no-accumulation", train=no_accumulation),
    planted("grad-accum.short-window", "divided-by-full-window", train=divided_by_full_window),
    planted("grad-accum.short-window", "dropped", train=short_window_dropped),
    planted("grad-accum.short-window", "not-stepped", train=short_window_not_stepped),
    planted("grad-accum.short-window", "gradients-kept", train=gradients_kept),
    planted("grad-accum.clip-once", "each-microstep", train=clipped_each_microstep),
    planted("grad-accum.clip-once", "not-clipped", train=not_clipped),
    planted("grad-accum.step-once", "each-microstep", train=scheduled_each_microstep),
    planted(
        "grad-accum.unscaled",
        "clipped-before-unscaling",
        train=clipped_before_unscaling,
        hint="before clipping",
    ),
    planted(
        "grad-accum.overflow",
        "scheduled-though-skipped",
        train=scheduled_though_skipped,
        hint="the schedule only if",
    ),
    planted(
        "grad-accum.overflow",
        "past-the-scaler",
        train=stepped_past_the_scaler,
        hint="step through the scaler|raised",
    ),
    planted(
        "grad-accum.own-dropout",
        "one-mask-for-all",
        train=one_mask_for_all,
        model="dropout",
        hint="do not seed",
    ),
    planted(
        "grad-accum.own-dropout",
        "one-mask-without-dropout",
        train=one_mask_for_all,
        hint="do not seed",
    ),
    planted(
        "grad-accum.train-mode",
        "eval-mode",
        train=put_into_eval_mode,
        model="dropout",
        hint="draw on",
    ),
    planted("grad-accum.train-mode", "last-one-twice", train=last_one_twice, hint="in order"),
    planted("grad-accum.nan-loss", "stepped", train=stepped_on_nan),
    planted("grad-accum.nan-loss", "stepped-before-looking", train=stepped_before_looking),
    planted(
        "grad-accum.nan-gradient",
        "loss-alone",
        train=loss_alone_checked,
        hint="check the gradient norm as well",
    ),
]
