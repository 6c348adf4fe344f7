"""Gate of bench: on this machine a step is as fast as itself, and a slower one is found.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import random
from collections.abc import Sequence

from ..bench.steps import TrainingStep
from ..core.timing import FASTER_VERDICT, SLOWER_VERDICT, paired_ratio, time_in_turns, wait_for
from ..workloads.workload import Case
from .verdict import Gate, Outcome

TIMED_ROUNDS = 12
NUM_SWAPS = 400
LEAST_EQUAL_SHARE = 0.92  # 95%, less three standard errors of NUM_SWAPS draws


def compare_with_itself(case: Case) -> Outcome:
    """Compare a step with itself on this machine.

    Swapping the two steps of a round at random must show no difference in 95% of all cases, and a
    step that takes longer in every round must be detected as slower.
    """
    steps = [TrainingStep(case)]
    steps[0]()
    steps.append(TrainingStep(case, like=steps[0]))
    ours, theirs = time_in_turns(
        steps, rounds=TIMED_ROUNDS, warmup=1, wait=lambda: wait_for(case.device)
    )

    # The two steps are the same, so each round could as well have come out the other way round.
    pairs = list(zip(ours, theirs, strict=True))
    generator = random.Random(case.seed)
    num_equal = 0
    for _ in range(NUM_SWAPS):
        swapped = [pair if generator.random() < 0.5 else pair[::-1] for pair in pairs]
        num_equal += not _is_different(*zip(*swapped, strict=True))

    factor = 1.1 * max(other / one for one, other in pairs)
    detected = _is_different([factor * one for one in ours], theirs)
    measured = (
        f"no difference in {num_equal / NUM_SWAPS:.1%}; {factor:.2f} times as long "
        f"{'detected' if detected else 'missed'}"
    )
    hint = ""
    if num_equal < LEAST_EQUAL_SHARE * NUM_SWAPS or not detected:
        hint = "compute the interval from the ranks of the rounds' ratios"
    required = f"no difference in at least {LEAST_EQUAL_SHARE:.0%}; detected"
    return measured, required, hint


def _is_different(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    return paired_ratio(ours, theirs).verdict in (FASTER_VERDICT, SLOWER_VERDICT)


GATES = (Gate("bench/same", compare_with_itself, machine=True),)
