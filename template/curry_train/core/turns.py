"""Several ways to do a piece of work, timed in turns: a machine that drifts, drifts for all of them alike.

    plain, ours = time_in_turns([step, our_step], rounds=20, warmup=5, wait=torch.cuda.synchronize)

A round runs each way once. Rounds come in pairs, the second one backwards, and each pair is opened by another way: over
a cycle every way stands at every place and follows every other one equally often.
Proof: `python -m pytest tests/test_bench_turns.py`.
"""

import time
from collections.abc import Callable, Iterator, Sequence

Clock = Callable[[], float]
Act = Callable[[], object]


def order_of_rounds(num_ways: int) -> Iterator[list[int]]:
    """The ways by number, round after round, for ever."""
    zigzag = [
        (place + 1) // 2 if place % 2 else -(place // 2) for place in range(num_ways)
    ]  # 0, 1, -1, 2, -2, ...
    while True:
        for first in range(num_ways):
            row = [(first + offset) % num_ways for offset in zigzag]
            yield row
            yield row[::-1]


def time_in_turns(
    ways: Sequence[Act],
    *,
    rounds: int,
    warmup: int,
    clock: Clock = time.perf_counter,
    wait: Act = lambda: None,
    before: Act = lambda: None,
    tell: Callable[[int, int], None] = lambda turn, way: None,
) -> list[list[float]]:
    """Seconds of each way, one figure for each round after the warm-up.

    `wait` returns once the device has done all that it was given: the time between two readings is then that of one
    step and no other's. `before` is called ahead of each step, outside of what is timed; `tell` hears what is next.
    """
    if rounds < 1 or warmup < 0:
        raise ValueError(
            f"rounds must be at least 1 and warmup at least 0, got {rounds} and {warmup}"
        )
    seconds: list[list[float]] = [[] for _ in ways]
    order = order_of_rounds(len(ways))
    for turn in range(warmup + rounds):
        for way in next(order):
            tell(turn - warmup, way)
            before()
            wait()
            start = clock()
            ways[way]()
            wait()
            taken = clock() - start
            if turn >= warmup:
                seconds[way].append(taken)
    return seconds
