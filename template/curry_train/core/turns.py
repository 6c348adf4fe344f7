"""Time several ways of doing work in turns, so that machine drift affects all alike.

    plain, ours = time_in_turns([step, our_step], rounds=20, warmup=5, wait=torch.cuda.synchronize)

A round runs each way once. Rounds come in pairs, the second in reverse order, and each pair starts
with another way. Over a cycle every way has every position, and follows every other way, equally
often.

Proof: `python -m pytest tests/test_bench_turns.py`.
"""

import time
from collections.abc import Callable, Iterator, Sequence

Clock = Callable[[], float]
Act = Callable[[], object]


def order_of_rounds(num_ways: int) -> Iterator[list[int]]:
    """Yield the order of the ways, by number, for one round after another, without end."""
    # The offsets are 0, 1, -1, 2, -2, ...
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(num_ways)]
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
    """Return the seconds of each way, one figure for each round after the warm-up.

    `wait` must return once the device has finished all of its work, so that the time between two
    readings is that of one step only. `before` is called before each step and is not timed. `tell`
    is called before that with the number of the round, negative in the warm-up, and of the way.
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
