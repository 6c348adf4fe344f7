"""Loops that accumulate gradients as users write them, and wrong twins of each."""

import contextlib
from functools import partial

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn


def synced_if(model, is_synced):
    """Sync the gradients of DDP and FSDP2 only if it is asked for."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_synced)
    elif hasattr(model, "no_sync") and not is_synced:
        return model.no_sync()
    return contextlib.nullcontext()


def num_ranks():
    return dist.get_world_size() if dist.is_initialized() else 1


def by_hand(model, window, loss, optimizer, *, synced=synced_if, factor=num_ranks):
    """Zero the gradients after the step, not before the first microbatch."""
    last = len(window.microbatches) - 1
    for index, microbatch in enumerate(window.microbatches):
        with synced(model, index == last):
            (loss(model, microbatch) * factor() / window.num_terms).backward()
    optimizer.step()
    optimizer.zero_grad()


def with_clipping(model, window, loss, optimizer, clip_norm=None, scheduler=None, scaler=None):
    """Clip, and scale the losses, as in torch's recipe of automatic mixed precision."""
    scaler = scaler or torch.amp.GradScaler(enabled=False)
    optimizer.zero_grad()
    for microbatch in window.microbatches:
        with synced_if(model, microbatch is window.microbatches[-1]):
            scaler.scale(loss(model, microbatch) * num_ranks() / window.num_terms).backward()
    if clip_norm is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scheduler is not None and scaler.get_scale() >= scale:
        scheduler.step()


def by_accelerate(model, window, loss, optimizer, clip_norm=None, scheduler=None):
    """Accelerate divides by the steps of a window, and averages over the ranks."""
    steps = len(window.microbatches)
    accelerator = Accelerator(gradient_accumulation_steps=steps, cpu=True)
    optimizer = accelerator.prepare_optimizer(optimizer)
    if scheduler is not None:
        scheduler = accelerator.prepare_scheduler(scheduler)
    share = steps * accelerator.num_processes / window.num_terms
    for microbatch in window.microbatches:
        with accelerator.accumulate(model):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(accelerator.sync_gradients)
            accelerator.backward(loss(model, microbatch) * share)
            if accelerator.sync_gradients and clip_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()


# Wrong twins.


def mean_of_means(model, window, loss, optimizer):
    """Weight each microbatch equally, however many tokens it has."""
    for microbatch in window.microbatches:
        num_terms = int((microbatch["targets"] != -100).sum())
        (loss(model, microbatch) / num_terms / len(window.microbatches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def steps_each_time(model, window, loss, optimizer):
    for microbatch in window.microbatches:
        (loss(model, microbatch) / window.num_terms).backward()
        optimizer.step()
    optimizer.zero_grad()


def zeroes_each_time(model, window, loss, optimizer):
    for microbatch in window.microbatches:
        optimizer.zero_grad()
        (loss(model, microbatch) / window.num_terms).backward()
    optimizer.step()


def clips_each_time(model, window, loss, optimizer, clip_norm=None):
    optimizer.zero_grad()
    for microbatch in window.microbatches:
        (loss(model, microbatch) / window.num_terms).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()


def ddp_alone_synced_if(model, is_synced):
    held = model.no_sync() if hasattr(model, "no_sync") and not is_synced else None
    return held or contextlib.nullcontext()


syncs_each_time = partial(by_hand, synced=lambda *_: contextlib.nullcontext())
syncs_fsdp_each_time = partial(by_hand, synced=ddp_alone_synced_if)
# By the terms of one rank, as loops do that count in their own batch.
divides_by_own_terms = partial(by_hand, factor=lambda: 1)
