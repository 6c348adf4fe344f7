"""Gate of bench: on this machine a step is as fast as itself.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import random

from ..bench.steps import TrainingStep
from ..core.timing import NO_DIFFERENCE_VERDICT, paired_ratio, time_in_turns, wait_for
from ..workloads.workload import Case
from .verdict import Gate, Outcome

TIMED_ROUNDS = 12
NUM_SWAPS = 400
LEAST_EQUAL_SHARE = 0.92  # 95%, less three standard errors of NUM_SWAPS draws


def compare_with_itself(case: Case) -> Outcome:
    """Compare a step with itself on this machine.

    Swapping the two steps of a round at random must show no difference in 95% of all cases.
    """
    steps = [TrainingStep(case)]
    steps[0]()
    steps.append(TrainingStep(case, like=steps[0]))
    seconds = time_in_turns(
        steps, rounds=TIMED_ROUNDS, warmup=1, wait=lambda: wait_for(case.device)
    )

    # The two steps are the same, so each round could as well have come out the other way round.
    generator = random.Random(case.seed)
    num_equal = 0
    for _ in range(NUM_SWAPS):
        swapped = [generator.sample(pair, 2) for pair in zip(*seconds, strict=True)]
        ratio = paired_ratio(*zip(*swapped, strict=True))
        num_equal += ratio.verdict == NO_DIFFERENCE_VERDICT
    measured = f"no difference in {num_equal / NUM_SWAPS:.1%}"
    hint = ""
    if num_equal < LEAST_EQUAL_SHARE * NUM_SWAPS:
        hint = "compute the interval from the ranks of the rounds' ratios"
    return measured, f"no difference in at least {LEAST_EQUAL_SHARE:.0%}", hint


GATES = (Gate("bench/same", compare_with_itself, machine=True),)
