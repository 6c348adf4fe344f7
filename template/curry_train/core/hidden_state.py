"""Is a step a function of its input and state alone? It is run twice, and what it holds between is tried out.

What changes while a step runs is set to other values, to numbers that count on, and to tensors that autograd can trace:
where the step's result, the parameters that it reaches or the random numbers that it draws are others then, it is
state. What changes and does not matter, such as a copy of the last output, is returned: it has to be put back after a
recomputation. Proof: `python -m pytest tests/test_snn_timesteps_refusals.py`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from .kept import PLAIN, KeptPlaces, Key, version_of
from .probe import BROKEN, Outcome, Probe
from .timesteps import Step

OUTSIDE = (
    "step computes something else the second time, from the same input, state and attributes: it keeps state outside "
    "of its modules (a global, a generator of its own). Pass that in with the state"
)
COUNTS = range(1, 11)  # a counter that acts at most every tenth time is seen
SCALES = (10.0, 1e6)  # so that a threshold which is not reached yet is


class HiddenState(ValueError):
    """A step keeps something to itself, so that running it again is another step."""

    def __init__(self, said: str, module: str = "", attribute: str = "") -> None:
        super().__init__(said)
        self.module, self.attribute = module, attribute


def check_step(step: Step, timesteps: Sequence[Any], state: Any) -> dict[Key, bool]:
    """Raise `HiddenState` where a step is more than a function of its input and state.

    Returned is what it leaves behind that does not matter to it, each with whether tensors are written into.
    """
    probe = Probe(step, timesteps, state)
    before = probe.keep()
    try:
        return _check(probe)
    finally:
        before.put_back()


def _check(probe: Probe) -> dict[Key, bool]:
    start, versions = (
        probe.keep(),
        {name: version_of(value) for name, value in probe.parameters.items()},
    )
    first = _first_run(probe)
    once = probe.keep()
    _check_leaves(first)
    lost = [
        name.rpartition(".")
        for name, value in probe.parameters.items()
        if version_of(value) != versions[name]
    ]
    lost += [(key[0], ".", key[2]) for key in start.changed(once) if start.is_lost(key, once)]
    if lost:
        module, _, name = lost[0]
        said = f"step writes into {name!r} of {module}, which can't be put back: make it part of the state"
        raise HiddenState(said, module, name)
    probe.exact = probe.run_from(start, {}).is_as(first, exact=True)
    if not probe.exact and all(
        value.device.type == "cpu" for value in first.values if isinstance(value, Tensor)
    ):
        raise HiddenState(OUTSIDE)  # elsewhere a kernel may add in another order each time
    once = probe.keep()
    second, twice = probe.run(0, probe.state), probe.keep()
    later, thrice = probe.run(1, first.state), probe.keep()
    if tree_flatten(later.state)[1] != tree_flatten(first.state)[1]:
        raise ValueError(
            "the state that step returns has another structure after the second timestep than after the first: keep "
            "it as it is, and collect over time with `outputs`"
        )
    statistics = {
        (place.name, place.where, name) for place in probe.places for name in place.statistics
    }
    changing = [
        key
        for key in dict.fromkeys([*once.changed(twice), *twice.changed(thrice)])
        if key not in statistics
    ]
    if not second.is_as(first, exact=probe.exact):
        touched = [
            key for key in dict.fromkeys([*start.changed(once), *changing]) if key in once.kept
        ]
        guilty = (key for key in touched if probe.matters(start, once.rebuilt([key]), first))
        raise _refusal(probe, next(guilty, touched[0])) if touched else HiddenState(OUTSIDE)
    if changing:
        _try_out(probe, changing, once, thrice)
        probe.state = tree_map(
            partial(_disturbed, scale=SCALES[0]), first.state
        )  # so that every neuron has spikes
        _try_out(probe, changing, once, thrice)
    _check_attached(first)
    return {
        key: once.kept[key].is_written(twice.kept[key]) for key in changing if key in twice.kept
    }


def _try_out(probe: Probe, keys: list[Key], once: KeptPlaces, thrice: KeptPlaces) -> None:
    """Raise where one of these values matters to a step."""
    try:
        plain = probe.run_from(once, {})
    except BROKEN:
        return
    for matter in _trials(probe, once, thrice, plain):
        if matter(keys):
            raise _refusal(probe, next((key for key in keys if matter([key])), keys[0]))


def _first_run(probe: Probe) -> Outcome:
    try:
        return probe.run(0, probe.state)
    except RuntimeError as error:
        shapes = [
            tuple(leaf.shape)
            for leaf in tree_leaves(probe.timesteps[0])
            if isinstance(leaf, Tensor)
        ]
        error.add_note(
            f"step was given an input of shape {shapes}, one of {len(probe.timesteps)}: is time_dim right?"
        )
        raise


def _check_leaves(first: Outcome) -> None:
    strange = next(
        (leaf for leaf in tree_leaves(first.state) if not isinstance(leaf, (Tensor, *PLAIN))), None
    )
    if strange is not None:
        raise ValueError(
            f"the state that step returns holds {type(strange).__name__}: keep tensors in tuples, lists or dicts, "
            "because only those are freed and computed again"
        )


def _check_attached(first: Outcome) -> None:
    floating = [
        leaf for leaf in first.made if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    if floating and first.reached and not any(leaf.requires_grad for leaf in floating):
        raise ValueError(
            "the state that step returns is detached, so that no gradient reaches an earlier timestep: return it as it "
            "was computed; to cut on purpose, call this for each window and detach the state between the calls"
        )


def _trials(
    probe: Probe, once: KeptPlaces, thrice: KeptPlaces, plain: Outcome
) -> list[Callable[[list[Key]], bool]]:
    """Ways to find out whether the values of some keys matter, the gentle ones first."""

    def with_values(kept: KeptPlaces, change: Callable[[Any], Any] = lambda value: value) -> Any:
        return lambda keys: probe.matters(once, kept.rebuilt(keys, change), plain)

    return [
        with_values(thrice),
        lambda keys: probe.is_traced(once, keys),
        *[with_values(once, partial(_counted_on, more=more)) for more in COUNTS],
        *[with_values(once, partial(_disturbed, scale=scale)) for scale in SCALES],
    ]


def _counted_on(value: Any, *, more: int) -> Any:
    if isinstance(value, bool):
        return not value
    return value + more if isinstance(value, int | float) else value


def _disturbed(value: Any, *, scale: float) -> Any:
    """Far off: a potential is on the other side of its threshold for some neurons."""
    if not (isinstance(value, Tensor) and value.is_floating_point() and value.numel()):
        return value
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
    return value + noise.to(value) * scale * (1 + value.abs().max())


def _refusal(probe: Probe, key: Key) -> HiddenState:
    kind = next(place.kind for place in probe.places if (place.name, place.where) == key[:2])
    label = f"{key[0]} ({kind})" if key[0] else kind
    return HiddenState(
        f"{label} keeps state from one timestep to the next in its {key[1]} {key[2]!r}, and a chunk that is "
        "computed again would start from the last value: gradients would be wrong, and nothing would say so. Let step "
        "set it from `state` before it runs and return it with the state, or use what takes it as an argument "
        "(snntorch: init_hidden=False)",
        key[0],
        key[2],
    )
