"""Judge an alarm on simulated losses."""

from evals_grading import Work, point

STEPS = 200


def series(seed, level, jump=None, rise=0.6, value=None, spikes=True):
    """Make the losses of a run that falls slowly, with noise and single hard batches."""
    import random

    draw = random.Random(seed)
    losses = []
    for step in range(STEPS):
        loss = level * (0.4 + 0.6 * 0.98**step) * (1 + draw.gauss(0, 0.05))
        if spikes and draw.random() < 0.04 and (jump is None or abs(step - jump) > 6):
            loss *= draw.uniform(2, 5)
        if jump is not None and step >= jump:
            loss *= 1 + rise
        if value is not None and step == jump:
            loss = value
        losses.append(loss)
    return losses


def pages(runs):
    """Return the steps at which the alarm pages in each run."""
    from alarm import Alarm

    found = []
    for losses in runs:
        alarm = Alarm()
        found.append([step for step, loss in enumerate(losses) if alarm.observe(step, loss)])
    return found


@point(3)
def jumps_are_found(work: Work) -> None:
    """In 20 runs at three levels a jump that stays is found within 4 steps, and not before."""
    places = [60 + 6 * seed for seed in range(20)]
    runs = [series(seed, 10.0 ** (seed % 3 - 1), jump) for seed, jump in enumerate(places)]
    found = work.call(pages, runs)
    late = [
        jump
        for jump, steps in zip(places, found, strict=True)
        if not any(jump <= step <= jump + 4 for step in steps)
    ]
    assert len(late) <= 1, f"{len(late)} of 20 jumps were missed"


@point(3)
def healthy_runs_are_quiet(work: Work) -> None:
    """Jumps are found, and in 40 healthy runs with single high losses there is no page at all."""
    jumps_are_found(work)
    found = work.call(pages, [series(seed, 10.0 ** (seed % 3 - 1)) for seed in range(40)])
    noisy = sum(bool(steps) for steps in found)
    assert noisy <= 1, f"{noisy} of 40 healthy runs were paged"


@point(1)
def nan_is_found_at_once(work: Work) -> None:
    """A loss that is NaN or infinite pages at that step, and never in a run without it."""
    runs = [series(1, 2.0, 90, value=float(word), rise=0) for word in ("nan", "inf")]
    found = work.call(pages, [*runs, series(1, 2.0, 90, rise=0)])
    assert found[:2] == [[90], [90]], f"paged at {found[:2]}"
    assert found[2] == [], f"paged at {found[2]} without one"
