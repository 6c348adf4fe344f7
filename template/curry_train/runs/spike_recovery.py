"""Back to before a spike, and on without the samples of it: for any loop whose place in the data is one number.

    recovered = recover(spike, config, state=state, load=load, after=stream.after, recoveries=recoveries)
    stream.position = state.position
    stream.skip(recovered.recovery.start, recovered.recovery.stop)

Proof: `python -m pytest tests/test_spike_recovery.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import RunError
from .recoveries import Recoveries, Recovery
from .resume import BEFORE, NothingSaved, Resumed
from .spike import Spike
from .spike_config import SpikeConfig


class SpikeNotRecovered(RunError):
    """A spike that going back does not help against, or with nothing to go back to."""


@dataclass(frozen=True)
class Recovered:
    """The state that was loaded, and what is skipped from now on."""

    resumed: Resumed
    recovery: Recovery


def recover(
    spike: Spike,
    config: SpikeConfig,
    *,
    state: Any,
    load: Callable[[str], Resumed | None],
    after: Callable[[int, int], int],
    recoveries: Recoveries,
    write: bool = True,
    go_on: str = "--resume RUN@{}",
) -> Recovered:
    """Go back with `load`, which is given `before-STEP`; it puts `state.step` and `state.position` to what was saved.

    `after` tells where in the data so many windows after a position begin, `go_on` how a person goes on from a state.
    On all ranks together, of which one has `write`. Raises SpikeNotRecovered.
    """
    attempt = recoveries.attempt(spike.step, within=config.window)
    around = config.skip_around * 2 ** (attempt - 1)
    first = max(1, spike.first - around)
    if attempt > config.attempts:
        raise SpikeNotRecovered(
            _given_up(spike, recoveries, attempt - 1, go_on.format(f"{BEFORE}{first}"))
        )
    resumed = _go_back(spike, first, load)
    back = state.step
    start = after(state.position, max(0, first - 1 - back))
    stop = after(state.position, spike.step + around - back)
    slower = (1.0, 0)
    if config.lower_rate is not None:
        slower = (config.lower_rate, spike.step + config.lower_rate_steps)
    recovery = Recovery(spike.step, back, start, stop, attempt, *slower)
    recoveries.add(recovery, write=write)
    return Recovered(resumed, recovery)


def _go_back(spike: Spike, first: int, load: Callable[[str], Resumed | None]) -> Resumed:
    """To before the first step whose samples are skipped, or at least to before the spike."""
    said: NothingSaved | None = None
    for step in dict.fromkeys((first, spike.first)):
        try:
            resumed = load(f"{BEFORE}{step}")
        except NothingSaved as error:
            said = error
            continue
        assert resumed is not None
        return resumed
    raise SpikeNotRecovered(
        f"{spike.words}: there is nothing to go back to ({said}). Save earlier, with a lower rollback_every, or let "
        "the spike's action be warn"
    ) from said


def _given_up(spike: Spike, recoveries: Recoveries, number: int, go_on: str) -> str:
    skipped = ", ".join(f"{one.start} to {one.stop - 1}" for one in recoveries.done[-number:])
    return (
        f"{spike.words}: it came again after {number} rollbacks, which skipped the samples at positions {skipped}. So "
        f"it is not they: look at the gradients before it (python -m curry_train grad-flow), lower "
        f"optimizer.learning_rate, and go on with {go_on}"
    )
