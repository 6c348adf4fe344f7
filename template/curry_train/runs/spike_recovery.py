"""Recovery from a loss spike: roll back, then skip its samples.

It works with any loop whose position in the data is one number.

    recovered = recover(
        spike, config, state=state, load=load, after=stream.after, recoveries=recoveries
    )
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
    """The spike came back after every attempt, or there is no state to go back to."""


@dataclass(frozen=True)
class Recovered:
    """The state that was loaded, and the positions that are skipped from now on."""

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
    """Roll back to a state before the spike, and record the samples to skip.

    `load` gets `before-STEP` and restores `state.step` and `state.position`. `after(position,
    windows)` returns the data position that many windows later. `go_on` is the command line that
    resumes from a state, for the error message. All ranks call together, one of them with `write`.
    Raises SpikeNotRecovered.
    """
    attempt = recoveries.attempt(spike.step, within=config.window)
    around = config.skip_around * 2 ** (attempt - 1)
    first = max(1, spike.first - around)
    if attempt > config.attempts:
        raise SpikeNotRecovered(
            _given_up(spike, recoveries, attempt - 1, go_on.format(f"{BEFORE}{first}"))
        )

    resumed = _go_back(spike, first, load)
    back_to = state.step
    start = after(state.position, max(0, first - 1 - back_to))
    stop = after(state.position, spike.step + around - back_to)

    learning_rate = 1.0
    slower_until = 0
    if config.lower_rate is not None:
        learning_rate = config.lower_rate
        slower_until = spike.step + config.lower_rate_steps
    recovery = Recovery(spike.step, back_to, start, stop, attempt, learning_rate, slower_until)
    recoveries.add(recovery, write=write)
    return Recovered(resumed, recovery)


def _go_back(spike: Spike, first: int, load: Callable[[str], Resumed | None]) -> Resumed:
    """Load a state from before the first skipped step, or at least from before the spike."""
    nothing_saved: NothingSaved | None = None
    for step in dict.fromkeys((first, spike.first)):
        try:
            resumed = load(f"{BEFORE}{step}")
        except NothingSaved as error:
            nothing_saved = error
            continue
        assert resumed is not None
        return resumed
    raise SpikeNotRecovered(
        f"{spike.words}: there is nothing to go back to ({nothing_saved}). Save earlier, with a "
        "lower rollback_every, or set the spike's action to warn"
    ) from nothing_saved


def _given_up(spike: Spike, recoveries: Recoveries, number: int, go_on: str) -> str:
    skipped = ", ".join(f"{one.start} to {one.stop - 1}" for one in recoveries.done[-number:])
    return (
        f"{spike.words}: it came back after {number} rollbacks, which skipped the samples at "
        f"positions {skipped}. So the samples are not the cause: look at the gradients before the "
        f"spike (python -m curry_train grad-flow), lower optimizer.learning_rate, and go on with "
        f"{go_on}"
    )
