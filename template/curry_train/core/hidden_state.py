"""Check that a step function keeps no state of its own between timesteps.

A step is recomputed correctly only if its result follows from its input and state. The step runs
several times, and every attribute or variable that changes in between is tested: it is set to other
values, to higher counts, and to tensors that autograd tracks. If the step's result, the parameters
that its graph reaches or the random numbers that it draws are then different, the value is hidden
state, and the step is refused. Values that change without any effect, such as a stored copy of the
last output, are returned to the caller, which must restore them after a recomputation.

Proof: `python -m pytest tests/test_snn_timesteps_refusals.py`.
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
    "step computes something else the second time, from the same input, state and attributes: it "
    "keeps state outside of its modules (a global, or a random generator of its own). Pass that in "
    "with the state"
)

# Increments that find a counter which takes effect at most every tenth time.
COUNTS = range(1, 11)

# Noise levels that carry a value across a threshold which it has not reached yet.
SCALES = (10.0, 1e6)


class HiddenState(ValueError):
    """A step keeps state of its own, so running it again gives another result."""

    def __init__(self, said: str, module: str = "", attribute: str = "") -> None:
        super().__init__(said)
        self.module = module
        self.attribute = attribute


def check_step(step: Step, timesteps: Sequence[Any], state: Any) -> dict[Key, bool]:
    """Raise `HiddenState` if a step depends on more than its input and state.

    Return the values that the step changes without depending on them, each with whether the step
    writes into tensors of it.
    """
    probe = Probe(step, timesteps, state)
    initial_places = probe.keep()
    try:
        return _check(probe)
    finally:
        initial_places.put_back()


def _check(probe: Probe) -> dict[Key, bool]:
    initial_places = probe.keep()
    initial_versions = {name: version_of(value) for name, value in probe.parameters.items()}
    reference = _first_run(probe)
    _check_leaves(reference)
    _check_restorable(probe, initial_places, initial_versions)
    _check_repeatable(probe, initial_places, reference)

    # From here on the places are not restored between runs, so each run starts from what the run
    # before has left in them.
    after_one = probe.keep()
    repeated = probe.run(0, probe.state)
    after_two = probe.keep()
    next_step = probe.run(1, reference.state)
    after_three = probe.keep()

    if tree_flatten(next_step.state)[1] != tree_flatten(reference.state)[1]:
        raise ValueError(
            "the state that step returns has another structure after the second timestep than "
            "after the first: return a state of the same structure every time, and collect values "
            "over time with `outputs`"
        )

    changing = _changing_keys(probe, after_one, after_two, after_three)
    if not repeated.is_as(reference, exact=probe.exact):
        raise _refusal_of_repeat(probe, initial_places, after_one, changing, reference)

    if changing:
        _try_out(probe, changing, after_one, after_three)

        # Try again from a state that is far off, in which every neuron spikes.
        probe.state = tree_map(partial(_disturbed, scale=SCALES[0]), reference.state)
        _try_out(probe, changing, after_one, after_three)

    _check_attached(reference)
    return {
        key: after_one.kept[key].is_written(after_two.kept[key])
        for key in changing
        if key in after_two.kept
    }


def _check_restorable(
    probe: Probe, initial_places: KeptPlaces, initial_versions: dict[str, int]
) -> None:
    """Raise if the first run wrote into a parameter, or into a tensor that has no copy."""
    written = [
        name.rpartition(".")
        for name, value in probe.parameters.items()
        if version_of(value) != initial_versions[name]
    ]
    after_one = probe.keep()
    written += [
        (key[0], ".", key[2])
        for key in initial_places.changed(after_one)
        if initial_places.is_lost(key, after_one)
    ]
    if written:
        module, _, name = written[0]
        raise HiddenState(
            f"step writes into {name!r} of {module}, which can't be put back: make it part of the "
            "state",
            module,
            name,
        )


def _check_repeatable(probe: Probe, initial_places: KeptPlaces, reference: Outcome) -> None:
    """Run the step again from restored places, and set `probe.exact` to whether it repeats.

    On a CPU, a different result means hidden state. On other devices a kernel may add in another
    order each time, so a different result is accepted there.
    """
    probe.exact = probe.run_from(initial_places, {}).is_as(reference, exact=True)
    on_cpu = all(
        value.device.type == "cpu" for value in reference.values if isinstance(value, Tensor)
    )
    if on_cpu and not probe.exact:
        raise HiddenState(OUTSIDE)


def _changing_keys(
    probe: Probe, after_one: KeptPlaces, after_two: KeptPlaces, after_three: KeptPlaces
) -> list[Key]:
    """List the values that the second or the third run changed, BatchNorm statistics excepted."""
    statistics = {
        (place.name, place.where, name) for place in probe.places for name in place.statistics
    }
    changed = dict.fromkeys([*after_one.changed(after_two), *after_two.changed(after_three)])
    return [key for key in changed if key not in statistics]


def _refusal_of_repeat(
    probe: Probe,
    initial_places: KeptPlaces,
    after_one: KeptPlaces,
    changing: list[Key],
    reference: Outcome,
) -> HiddenState:
    """Return the error for a step whose second run, without restored places, differs.

    It names the first value that makes the difference when it alone is carried over.
    """
    changed = dict.fromkeys([*initial_places.changed(after_one), *changing])
    suspects = [key for key in changed if key in after_one.kept]
    if not suspects:
        return HiddenState(OUTSIDE)

    for key in suspects:
        if probe.matters(initial_places, after_one.rebuilt([key]), reference):
            return _refusal(probe, key)
    return _refusal(probe, suspects[0])


def _try_out(probe: Probe, keys: list[Key], after_one: KeptPlaces, after_three: KeptPlaces) -> None:
    """Raise if a step depends on one of these values."""
    try:
        unchanged = probe.run_from(after_one, {})
    except BROKEN:
        return
    for matters in _trials(probe, after_one, after_three, unchanged):
        if matters(keys):
            culprit = next((key for key in keys if matters([key])), keys[0])
            raise _refusal(probe, culprit)


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
            f"step was given an input of shape {shapes}, one of {len(probe.timesteps)}: is "
            "time_dim right?"
        )
        raise


def _check_leaves(reference: Outcome) -> None:
    """Raise if the state holds anything but tensors and plain values."""
    for leaf in tree_leaves(reference.state):
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise ValueError(
                f"the state that step returns holds {type(leaf).__name__}: keep tensors in tuples, "
                "lists or dicts, because only those are freed and recomputed"
            )


def _check_attached(reference: Outcome) -> None:
    """Raise if the step detaches the state that it returns."""
    floating = [
        leaf for leaf in reference.made if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    if floating and reference.reached and not any(leaf.requires_grad for leaf in floating):
        raise ValueError(
            "the state that step returns is detached, so that no gradient reaches an earlier "
            "timestep: return it as it was computed; to truncate on purpose, call this once for "
            "each stretch of timesteps and detach the state between the calls"
        )


def _trials(
    probe: Probe, after_one: KeptPlaces, after_three: KeptPlaces, unchanged: Outcome
) -> list[Callable[[list[Key]], bool]]:
    """List tests of whether the values of some keys matter to a step, the gentlest first."""

    def replaced(source: KeptPlaces, change: Callable[[Any], Any] = lambda value: value) -> Any:
        return lambda keys: probe.matters(after_one, source.rebuilt(keys, change), unchanged)

    return [
        replaced(after_three),
        lambda keys: probe.is_traced(after_one, keys),
        *[replaced(after_one, partial(_counted_on, more=more)) for more in COUNTS],
        *[replaced(after_one, partial(_disturbed, scale=scale)) for scale in SCALES],
    ]


def _counted_on(value: Any, *, more: int) -> Any:
    if isinstance(value, bool):
        return not value
    return value + more if isinstance(value, int | float) else value


def _disturbed(value: Any, *, scale: float) -> Any:
    """Add so much noise that a potential crosses its threshold for some neurons."""
    if not (isinstance(value, Tensor) and value.is_floating_point() and value.numel()):
        return value
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
    return value + noise.to(value) * scale * (1 + value.abs().max())


def _refusal(probe: Probe, key: Key) -> HiddenState:
    place_name, where, value_name = key
    kind = next(
        place.kind for place in probe.places if (place.name, place.where) == (place_name, where)
    )
    label = f"{place_name} ({kind})" if place_name else kind
    return HiddenState(
        f"{label} keeps state from one timestep to the next in its {where} {value_name!r}, and a "
        "recomputed chunk would start from the last value: gradients would be wrong without any "
        "error. Set it from `state` at the start of step and return it with the state, or use a "
        "layer that takes it as an argument (snntorch: init_hidden=False)",
        place_name,
        value_name,
    )
