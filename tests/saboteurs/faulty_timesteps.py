"""Faults of timestep recompute: states, chunks, levels, and models with hidden state.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

from dataclasses import replace

import torch
from foreign_snn_timesteps import (
    detaches_the_last_state,
    detaches_the_state,
    draws_again,
    drops_the_rest,
    in_chunks,
    in_one_go,
    in_single_steps,
    stacks_first,
)
from saboteurs import planted
from torch import nn

from curry_train.primitives import snn_timesteps
from curry_train.primitives.snn_timesteps import even_schedule
from curry_train.workloads.models import SpikingNetwork, SurrogateSpike, snn

LONG_SNN = snn(timesteps=64)


class Noisy(SpikingNetwork):
    """A spiking network with dropout on the input of each step."""

    def step(self, x, state):
        return super().step(nn.functional.dropout(x, 0.3, self.training), state)


NOISY = replace(snn(), build=lambda: Noisy(64, 3))


class Keeper(nn.Module):
    """A neuron that holds its potential as an attribute, or as a buffer."""

    def __init__(self, potential):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        if potential is None:
            self.v = 0.0
        else:
            self.register_buffer("v", potential)

    def forward(self, x, potential):
        self.v = 0.9 * self.v + self.linear(x)
        spikes = SurrogateSpike.apply(self.v - 1.0)
        self.v = self.v - spikes
        return spikes, potential


class KeeperNet(SpikingNetwork):
    def __init__(self, potential=None):
        super().__init__(64, 3)
        self.layers[1] = Keeper(potential)

    def forward(self, x):
        self.layers[1].v = torch.zeros(1)
        return super().forward(x)


KEEPERS = replace(snn(), build=KeeperNet)
BUFFERS = replace(snn(), build=lambda: KeeperNet(torch.zeros(1)))


def means_of_chunks(step, inputs, state, *, time_dim=0, **options):
    """Count the shorter last chunk as a whole one."""
    mean, state = in_chunks(step, inputs, state, time_dim=time_dim, **options)
    num_steps = inputs.shape[time_dim]
    return mean * (num_steps / (-(-num_steps // 5) * 5)), state


def schedule(size):
    """Patch the chunks of our loop, but not those that the gates predict."""

    def chunks(num_steps, costs, levels):
        return even_schedule(num_steps, size, levels)

    return [(snn_timesteps, "best_schedule", chunks)]


NOTHING_AGAIN = "nothing ran twice or was freed"
NOT_ONCE = "not recomputed exactly once per level"


def broken(claim, name, loop=None, *, model="snn", **options):
    if loop is not None:
        options["checkpoint_timesteps"] = loop
    return planted(f"snn-timesteps.{claim}", name, model=model, **options)


FAULTS = [
    broken("memory", "no-chunks", in_one_go, hint="held for each timestep"),
    broken("memory", "stacked-first", stacks_first, model=LONG_SNN, hint="for each timestep"),
    broken("memory", "other-chunks", model=LONG_SNN, patches=schedule(1), hint="another size"),
    broken("parity", "no-chunks", in_one_go, hint=NOTHING_AGAIN),
    broken("parity", "drops-the-rest", drops_the_rest, hint="another value"),
    broken("parity", "detaches-the-state", detaches_the_state, hint="another value"),
    broken("parity", "draws-again", draws_again, model=NOISY, hint="preserve_rng_state=True"),
    broken("parity-nested", "no-chunks", in_one_go, hint=NOTHING_AGAIN),
    broken("parity-nested", "detaches-the-state", detaches_the_state, hint="another value"),
    broken("flops", "no-chunks", in_one_go, hint=NOT_ONCE),
    broken("flops", "twice", in_single_steps, hint=NOT_ONCE),
    broken("flops", "other-chunks", patches=schedule(4), hint=NOT_ONCE),
    broken("flops-nested", "no-chunks", in_one_go, hint=NOT_ONCE),
    broken("flops-nested", "other-chunks", patches=schedule(4), hint=NOT_ONCE),
    broken("outputs", "state-detached", detaches_the_last_state, hint="return the last state"),
    broken("outputs", "means-of-chunks", means_of_chunks, hint="in the order of time"),
    broken("hidden-state", "an-attribute", model=KEEPERS, hint="layers.1 (Keeper) keeps state"),
    broken("hidden-state", "a-buffer", model=BUFFERS, hint="buffer 'v'"),
]
