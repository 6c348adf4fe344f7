"""Judge a comparison of two functions on a simulated machine with its own clock."""

from evals_grading import Work, guard, point

SEEDS = 12


class Machine:
    """A clock that only moves while a function runs, on a machine that drifts and stalls."""

    def __init__(self, seed):
        import math
        import random

        self.now, self.calls, self.random, self.wave = 1000.0, {}, random.Random(seed), math.sin
        self.phase = self.random.uniform(0, 6.28)

    def step(self, name, seconds):
        def run():
            number = self.calls[name] = self.calls.get(name, 0) + 1
            drift = 1 + 0.6 * self.wave(self.phase + self.now / 9)
            cold = 4.0 if number <= 3 else 1.0
            stall = 25.0 if self.random.random() < 0.03 else 1.0
            self.now += seconds * drift * cold * stall * self.random.uniform(0.97, 1.03)

        return run


def results(second_seconds):
    """Compare a step of 0.1 s with another on several simulated machines."""
    import time

    found = []
    for seed in range(SEEDS):
        machine = Machine(seed)
        for name in ("perf_counter", "monotonic", "time", "process_time"):
            setattr(time, name, lambda machine=machine: machine.now)
            setattr(time, f"{name}_ns", lambda machine=machine: int(machine.now * 1e9))
        from bench import compare

        first, second = machine.step("first", 0.1), machine.step("second", second_seconds)
        one = compare(first, second)
        most = max(machine.calls.values())
        found.append([one["ratio"], one["low"], one["high"], most])
    return found


@point(2)
def twice_is_twice(work: Work) -> None:
    """A step that takes twice as long measures 1.9 to 2.1 on every machine."""
    ratios = [ratio for ratio, *_ in work.call(results, 0.2)]
    wrong = [round(one, 2) for one in ratios if not 1.9 <= one <= 2.1]
    assert not wrong, f"measured as {wrong}"


@point(2)
def no_difference_is_seen_as_none(work: Work) -> None:
    """A step against itself has 1.0 in its interval on at least 10 of 12 machines."""
    held = sum(low <= 1 <= high for _, low, high, _ in work.call(results, 0.1))
    assert held >= SEEDS - 2, f"1.0 is in {held} of {SEEDS} intervals"


@point(2)
def small_difference_is_seen(work: Work) -> None:
    """A step that takes 8% longer is found to be slower on at least 10 of 12 machines."""
    found = sum(low > 1 for _, low, _, _ in work.call(results, 0.108))
    assert found >= SEEDS - 2, f"found on {found} of {SEEDS} machines"


@guard(1)
def few_calls(work: Work) -> None:
    """No function is called more than 60 times, and the interval contains the ratio."""
    for ratio, low, high, calls in work.call(results, 0.1):
        assert calls <= 60, f"{calls} calls"
        assert low < ratio < high, f"{ratio} is outside of {low} to {high}"
        assert high - low > 1e-6
