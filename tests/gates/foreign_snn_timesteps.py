"""Loops over time in chunks, as users write them on torch's own checkpoint, and wrong twins.

The models pass a tensor, a tuple as state, and ask for the mean of the outputs.
"""

import functools

import torch
from torch.utils.checkpoint import checkpoint


def rerun(run, *args, **options):
    return checkpoint(run, *args, use_reentrant=False, **options)


def unrolled(step, inputs, state, *, sizes, time_dim=0, outputs="mean", around=rerun):
    """Run chunks of the first size, each in chunks of the next."""
    assert outputs == "mean"

    def run(sizes, total, inputs, *state):
        if sizes:
            for chunk in inputs.split(sizes[0], time_dim):
                total, *state = around(run, sizes[1:], total, chunk, *state)
            return total, *state
        for x in inputs.unbind(time_dim):
            output, state = step(x, state)
            total = total + output
        return total, *state

    total = torch.zeros_like(inputs.select(time_dim, 0))
    total, *state = run(sizes, total, inputs, *state)
    return total / inputs.shape[time_dim], tuple(state)


def in_chunks(step, inputs, state, **options):
    return unrolled(step, inputs, state, sizes=[4], **options)


# Wrong twins.


def in_one_go(step, inputs, state, **options):
    return unrolled(step, inputs, state, sizes=[], **options)


def detaches_the_state(step, inputs, state, **options):
    def around(run, sizes, total, chunk, *state):
        return rerun(run, sizes, total, chunk, *(one.detach() for one in state))

    return unrolled(step, inputs, state, sizes=[2], around=around, **options)


def draws_again(step, inputs, state, **options):
    around = functools.partial(rerun, preserve_rng_state=False)
    return unrolled(step, inputs, state, sizes=[4], around=around, **options)


def in_single_steps(step, inputs, state, **options):
    """Recompute each step twice."""
    return unrolled(step, inputs, state, sizes=[1, 1], **options)
