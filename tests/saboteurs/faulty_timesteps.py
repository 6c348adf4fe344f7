"""Faults of timestep recompute: states, chunks, and models with hidden state.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

from dataclasses import replace

from torch import nn

from curry_train.primitives import snn_timesteps
from curry_train.primitives.snn_timesteps import even_chunks
from curry_train.workloads.models import SpikingNetwork, SurrogateSpike, snn

from ..gates.foreign_snn_timesteps import (
    detaches_the_state,
    draws_again,
    in_one_go,
    in_single_steps,
)
from .saboteurs import planted

LONG_SNN = snn(timesteps=64)


class Noisy(SpikingNetwork):
    """A spiking network with dropout on the input of each step."""

    def step(self, x, state):
        return super().step(nn.functional.dropout(x, 0.3, self.training), state)


NOISY = replace(snn(), build=lambda: Noisy(64, 3))


class Potential:
    """An object of the user, which is no module."""

    value = 0.0


class Keeper(nn.Module):
    """A neuron that holds its potential in an object, or in a list inside of a list."""

    def __init__(self, in_list):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.potential = [[0.0]] if in_list else Potential()

    def forward(self, x, potential):
        is_object = isinstance(self.potential, Potential)
        own = self.potential.value if is_object else self.potential[0][0]
        own = 0.9 * own + self.linear(x)
        spikes = SurrogateSpike.apply(own - 1.0)
        if is_object:
            self.potential.value = own - spikes
        else:
            self.potential[0][0] = own - spikes
        return spikes, potential


class KeeperNet(SpikingNetwork):
    def __init__(self, in_list=False):
        super().__init__(64, 3)
        self.layers[1] = Keeper(in_list)


KEEPERS = replace(snn(), build=KeeperNet)
LISTS = replace(snn(), build=lambda: KeeperNet(in_list=True))


# The chunks of our loop, but not those that it is compared with.
SINGLE_STEPS = [(snn_timesteps, "best_chunks", lambda num_steps, _: even_chunks(num_steps, 1))]
NOTHING_AGAIN = "nothing ran twice or was freed"
NOT_ONCE = "not recomputed exactly once:"


def broken(claim, name, loop=None, *, model="snn", **options):
    if loop is not None:
        options["checkpoint_timesteps"] = loop
    return planted(f"snn-timesteps.{claim}", name, model=model, **options)


FAULTS = [
    broken("memory", "no-chunks", in_one_go, hint="held for each timestep"),
    broken("memory", "other-chunks", model=LONG_SNN, patches=SINGLE_STEPS, hint="another size"),
    broken("parity", "no-chunks", in_one_go, hint=NOTHING_AGAIN),
    broken("parity", "detaches-the-state", detaches_the_state, hint="another value"),
    broken("parity", "draws-again", draws_again, model=NOISY, hint="preserve_rng_state=True"),
    broken("flops", "twice", in_single_steps, hint=NOT_ONCE),
    broken("flops", "no-chunks", in_one_go, hint=NOT_ONCE),
    broken("hidden-state", "an-object", model=KEEPERS, hint="state outside of its modules"),
    broken("hidden-state", "a-nested-list", model=LISTS, hint="state outside of its modules"),
]
