"""Faults of timestep recompute: states, chunks, levels, and the search for hidden state.

Proof: `python -m pytest tests/gates/test_snn_timesteps.py`.
"""

from dataclasses import replace

import torch
from saboteurs import planted
from torch import nn
from torch.utils.checkpoint import checkpoint

from curry_train.gates import snn_timesteps
from curry_train.primitives import hidden_state
from curry_train.primitives.hidden_state import HiddenState
from curry_train.primitives.snn_timesteps import (
    checkpoint_timesteps,
    recompute_timesteps,
    run_timesteps,
)
from curry_train.workloads.models import (
    SpikingNetwork,
    snn,
)


class Noisy(SpikingNetwork):
    """A spiking network with dropout on the input of each step."""

    def step(self, x, state):
        return super().step(nn.functional.dropout(x, 0.3, self.training), state)


NOISY = replace(snn(), build=lambda: Noisy(64, 3))


def replaced(unroll):
    """Build a technique that replaces the model's loop."""

    def apply(module, sample):
        module.unroll = unroll
        return [""]

    return apply


def in_chunks(around, *, size=4):
    """Build a loop in chunks as written by hand; `around(run, *args)` runs one chunk."""

    def unroll(step, inputs, state, *, time_dim=0, outputs="stack"):
        def run(total, x, *state):
            output, state = run_timesteps(step, x, state, time_dim=time_dim, outputs="sum")
            return (total + output, *state)

        total = torch.zeros_like(inputs.select(time_dim, 0))
        for x in inputs.split(size, time_dim):
            total, *state = around(run, total, x, *state)
        return total / inputs.shape[time_dim], tuple(state)

    return unroll


def rerun(run, *args, **options):
    return checkpoint(run, *args, use_reentrant=False, **options)


def no_op(module, sample):
    return [""]


def drops_the_rest(step, inputs, state, *, time_dim=0, outputs="stack"):
    whole = inputs.shape[time_dim] // 5 * 5
    return checkpoint_timesteps(
        step,
        inputs.narrow(time_dim, 0, whole),
        state,
        chunk_size=5,
        time_dim=time_dim,
        outputs=outputs,
    )


def detaches_the_state(run, total, x, *state):
    return rerun(run, total, x, *(tensor.detach() for tensor in state))


def keeps_the_state(run, total, x, *state, calls=[]):  # noqa: B006 - the planted fault
    def run_with_hidden_state(total, x, *state):
        total, *after = run(total, x, *[tensor + 0.1 * len(calls) for tensor in state])
        calls.append(None)
        return total, *after

    return rerun(run_with_hidden_state, total, x, *state)


def no_generator_kept(run, *args):
    return rerun(run, *args, preserve_rng_state=False)


def stacked_first(step, inputs, state, *, time_dim=0, outputs="stack"):
    stacked, state = checkpoint_timesteps(step, inputs, state, time_dim=time_dim, outputs="stack")
    return stacked.clone().mean(time_dim), state


def one_step_at_a_time(module, sample):
    return recompute_timesteps(module, chunk_size=1)


def another_level(module, sample):
    return recompute_timesteps(module, levels=2)


whole_chunks = replaced(in_chunks(rerun))


def blind(step, timesteps, state):
    return {}


def sees_it_everywhere(step, timesteps, state):
    raise HiddenState("state", "layers.0", "potential")


def names_another(step, timesteps, state):
    if isinstance(step, snn_timesteps.PlantedStep):
        raise HiddenState("state", "layers.0", "weight")


def looks_for_spikes_only(step, timesteps, state):
    """Detect by two runs of one step, in which the threshold is not reached yet."""
    first, second = (step(timesteps[0], state)[0] for _ in range(2))
    if not torch.equal(first, second):
        raise HiddenState("state", "", "potential")


SNN = snn()
LONG_SNN = snn(timesteps=64)


def mean_of_chunks(step, inputs, state, *, outputs="stack", **options):
    if outputs != "mean":
        return checkpoint_timesteps(step, inputs, state, outputs=outputs, **options)
    total, state = checkpoint_timesteps(step, inputs, state, outputs="sum", **options)
    count = -(-len(inputs) // 2) * 2  # the short chunk counts as a full one
    return {name: value / count for name, value in total.items()}, state


def always_along_the_first(step, inputs, state, *, time_dim=0, **options):
    if time_dim:
        inputs = inputs.movedim(time_dim, 0)
    return checkpoint_timesteps(step, inputs, state, time_dim=0, **options)


def last_state_detached(step, inputs, state, **options):
    output, state = checkpoint_timesteps(step, inputs, state, **options)
    return output, tuple(one.detach() for one in state)


def first_for_last(step, inputs, state, *, outputs="stack", **options):
    if outputs != "last":
        return checkpoint_timesteps(step, inputs, state, outputs=outputs, **options)
    output, _ = step(inputs[0] if isinstance(inputs, list) else inputs.select(1, 0), state)
    _, state = checkpoint_timesteps(step, inputs, state, outputs=outputs, **options)
    return output, state


def without_the_check(step, inputs, state, *, chunk_size=2, levels=1, **options):
    """Checkpoint each chunk as torch does, without a search for state."""
    collected = []
    for chunk in torch.stack([*inputs]).split(chunk_size):
        output, state = checkpoint(run_timesteps, step, chunk, state, use_reentrant=False)
        collected.append(output)
    return torch.cat(collected), state


def takes_0_for_none(step, inputs, state, *, chunk_size=None, **options):
    return checkpoint_timesteps(step, inputs, state, chunk_size=chunk_size or None, **options)


def rounds_time_dim(step, inputs, state, *, time_dim=0, **options):
    return checkpoint_timesteps(step, inputs, state, time_dim=int(time_dim), **options)


def names_the_model(step, inputs, state, **options):
    try:
        return checkpoint_timesteps(step, inputs, state, **options)
    except HiddenState as error:
        raise HiddenState(str(error)) from error


def refuses_every_change(step, inputs, state, **options):
    before = dict(vars(step))
    run_timesteps(step, inputs, state)
    if vars(step) != before:
        raise HiddenState("attribute 'kept'", "", "kept")
    return checkpoint_timesteps(step, inputs, state, **options)


FAULTS = [
    planted(
        "snn-timesteps.layers",
        "closures-unseen",
        model="snn",
        patches=[(hidden_state, "_variables", lambda function: {})],
        hint="a closure",
    ),
    planted(
        "snn-timesteps.layers",
        "not-restored",
        model="snn",
        patches=[(snn_timesteps, "remove_timesteps", lambda model: [])],
        hint="loops of a model",
    ),
    planted("snn-timesteps.layers", "no-check", loop=without_the_check, model=SNN, hint="accepted"),
    planted("snn-timesteps.layers", "no-name", loop=names_the_model, model=SNN, hint="is called"),
    planted("snn-timesteps.layers", "every-change", loop=refuses_every_change, model=SNN),
    planted("snn-timesteps.refused", "0-for-none", loop=takes_0_for_none, model=SNN, hint="of 0"),
    planted("snn-timesteps.refused", "rounded-time", loop=rounds_time_dim, model=SNN, hint="0.0"),
    planted("snn-timesteps.outputs", "mean-of-chunks", loop=mean_of_chunks, model=SNN, hint="mean"),
    planted("snn-timesteps.outputs", "first-dimension", loop=always_along_the_first, model=SNN),
    planted("snn-timesteps.outputs", "state-detached", loop=last_state_detached, model=SNN),
    planted("snn-timesteps.outputs", "first-for-last", loop=first_for_last, model=SNN, hint="last"),
    planted(
        "snn-timesteps.parity",
        "no-op",
        apply=no_op,
        model=SNN,
        hint="nothing ran twice or was freed",
    ),
    planted(
        "snn-timesteps.parity",
        "drops-the-rest",
        apply=replaced(drops_the_rest),
        model=SNN,
        hint="another value",
    ),
    planted(
        "snn-timesteps.parity",
        "detaches-the-state",
        apply=replaced(in_chunks(detaches_the_state)),
        model=SNN,
        hint="another value",
    ),
    planted(
        "snn-timesteps.parity",
        "keeps-the-state",
        apply=replaced(in_chunks(keeps_the_state)),
        model=SNN,
        hint="another value",
    ),
    planted(
        "snn-timesteps.parity",
        "no-generator-kept",
        apply=replaced(in_chunks(no_generator_kept)),
        model=NOISY,
        hint="preserve_rng_state=True",
    ),
    planted(
        "snn-timesteps.parity-nested",
        "no-op",
        apply=no_op,
        model=SNN,
        hint="nothing ran twice or was freed",
    ),
    planted(
        "snn-timesteps.parity-nested",
        "detaches-the-state",
        apply=replaced(in_chunks(detaches_the_state)),
        model=SNN,
        hint="another value",
    ),
    planted("snn-timesteps.memory", "no-op", apply=no_op, model=SNN, hint="held for each timestep"),
    planted(
        "snn-timesteps.memory",
        "one-step-at-a-time",
        apply=one_step_at_a_time,
        model=LONG_SNN,
        hint="another size",
    ),
    planted(
        "snn-timesteps.memory",
        "stacked-first",
        apply=replaced(stacked_first),
        model=LONG_SNN,
        hint="held for each timestep",
    ),
    planted(
        "snn-timesteps.flops",
        "no-op",
        apply=no_op,
        model=SNN,
        hint="not recomputed exactly once per level",
    ),
    planted(
        "snn-timesteps.flops",
        "another-level",
        apply=another_level,
        model=SNN,
        hint="not recomputed exactly once per level",
    ),
    planted(
        "snn-timesteps.flops",
        "whole-chunks",
        apply=whole_chunks,
        model=SNN,
        hint="not recomputed exactly once per level",
    ),
    planted(
        "snn-timesteps.flops-nested",
        "no-op",
        apply=no_op,
        model=SNN,
        hint="not recomputed exactly once per level",
    ),
    planted(
        "snn-timesteps.flops-nested",
        "whole-chunks",
        apply=whole_chunks,
        model=SNN,
        hint="not recomputed exactly once per level",
    ),
    planted("snn-timesteps.hidden-state", "blind", check=blind, model=SNN),
    planted("snn-timesteps.hidden-state", "everywhere", check=sees_it_everywhere, model=SNN),
    planted("snn-timesteps.hidden-state", "another-name", check=names_another, model=SNN),
    planted("snn-timesteps.hidden-state", "spikes-alone", check=looks_for_spikes_only, model=SNN),
]
