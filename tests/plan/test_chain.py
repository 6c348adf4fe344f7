"""The options of a chain are the fastest ones within a budget, compared with all possible choices.

python -m pytest tests/plan/test_chain.py
"""

import itertools
import random

import numpy
import pytest

from curry_train.plan.chain import PricedBlock, PricedChain
from curry_train.plan.saved import Option

GIB = 2**30


def block(name, rows):
    """Make a block of options from rows of held bytes, transient bytes and seconds."""
    held, transient, seconds = zip(*rows, strict=True)
    return PricedBlock(
        str(name),
        tuple(Option("sac", frozenset({("call", place)})) for place in range(len(rows))),
        numpy.array(held),
        numpy.array(transient),
        numpy.array(seconds, dtype=float),
    )


def chain(blocks, head=0, standing=None):
    blocks = tuple(blocks)
    return PricedChain(blocks, numpy.array([*(standing or [0] * len(blocks)), head]))


def small_chain(seed):
    """Draw up to five blocks of five options, the head's needs, and a budget near them."""
    draw = random.Random(seed).randint
    blocks = []
    standing = []
    for name in range(draw(1, 5)):
        rows = [(draw(0, 40), draw(0, 40), draw(0, 50)) for _ in range(draw(1, 5))]
        blocks.append(block(name, rows))
        standing.append(draw(0, 10))
    return chain(blocks, draw(0, 60), standing), draw(1, 200)


def large_chain(seed, *, num_blocks=28):
    """Make blocks of about half a GB with fine menus: holding less costs more recompute."""
    draw = random.Random(seed)
    blocks = []
    standing = []
    for name in range(num_blocks):
        whole, forward = draw.randint(4 * 10**8, 8 * 10**8), draw.uniform(0.5, 1.5)
        parts = [0.05, *sorted(draw.uniform(0.05, 1.0) for _ in range(14)), 1.0]
        rows = [
            (
                int(whole * part),
                int((whole - int(whole * part)) * draw.uniform(0.8, 1.3)),
                forward * (1 - part) ** 1.2 * draw.uniform(1.0, 1.02),
            )
            for part in parts
        ]
        blocks.append(block(name, rows))
        standing.append(draw.randint(0, 10**7))
    return chain(blocks, draw.choice((0, 10**8, 2 * 10**9)), standing)


def by_hand(found, options):
    """Return the peak and the seconds of options, without the chain's arrays."""
    held = peak = 0
    seconds = 0.0
    *standing, head = found.standing
    for one, others in zip(found.blocks, standing, strict=True):
        place = one.options.index(options[one.name])
        held += int(one.held[place])
        peak = max(peak, held + int(one.transient[place]) + others)
        seconds += float(one.seconds[place])
    return max(peak, held + head), seconds


def all_choices(found):
    menus = [one.options for one in found.blocks]
    for options in itertools.product(*menus):
        yield by_hand(found, dict(zip((one.name for one in found.blocks), options, strict=True)))


def test_the_options_of_a_small_chain_are_the_fastest_that_fit_or_none_do():
    num_without = 0
    for seed in range(150):
        found, budget = small_chain(seed)
        fitting = [seconds for peak, seconds in all_choices(found) if peak <= budget]
        options = found.fastest(budget)
        assert (options is None) == (not fitting), seed
        num_without += options is None
        if options is not None:
            peak, seconds = by_hand(found, options)
            assert (found.peak(options), found.seconds(options)) == (peak, seconds)
            assert peak <= budget
            assert seconds == min(fitting), seed
    assert 40 < num_without < 110  # both kinds occur


def test_the_least_peak_is_exact_and_holds_least():
    for seed in range(100):
        found, _ = small_chain(seed)
        assert found.peak(found.least()) == min(peak for peak, _ in all_choices(found)), seed
    large = large_chain(1, num_blocks=64)
    least = large.peak(large.least())
    assert large.fastest(least) is not None
    assert large.fastest(least - 1) is None


def test_sums_that_only_differ_in_their_last_bytes_are_distinguished():
    """Catch a search that rounds each block up: no options, or slower ones."""
    found = chain(block(name, [(GIB + 1, 0, 0.0), (GIB, 0, 1.0)]) for name in range(20))
    for num_kept in range(21):
        options = found.fastest(20 * GIB + num_kept)
        assert found.seconds(options) == 20 - num_kept
        assert found.peak(options) == 20 * GIB + num_kept
    assert found.fastest(20 * GIB - 1) is None


def least_seconds_by_price(found, room):
    """Return a lower bound: for any price of a byte, seconds and held bytes at it, less the room's.

    It ignores transient bytes, so it allows too many choices.
    """

    def bound(price):
        return sum((one.seconds + price * one.held).min() for one in found.blocks) - price * room

    return max(bound(10 ** (exponent / 50)) for exponent in range(-600, -350))


@pytest.mark.parametrize("seed", range(6))
def test_large_chains_take_at_most_2_percent_longer_than_an_independent_bound(seed):
    found = chain(large_chain(seed).blocks, 2 * 10**9)
    room = int(sum(one.held[-1] for one in found.blocks) * (0.3 + 0.1 * seed))
    options = found.fastest(room + 2 * 10**9)
    assert found.seconds(options) <= 1.02 * least_seconds_by_price(found, room)


def test_a_chain_of_no_blocks_holds_its_head():
    assert chain([], 10).fastest(10) == chain([], 10).least() == {}
    assert chain([], 10).fastest(9) is None


def test_shifts_give_options_the_peak_of_their_whole_step():
    for seed in range(50):
        found, _ = small_chain(seed)
        options = found.least()
        for peak in (1, found.peak(options) - 3, found.peak(options) + 30):
            assert found.shifted_to(options, peak).peak(options) == peak
