"""Compare the plan of a chain of blocks with a policy on every block at the same peak.

    python benchmarks/plan_comparison.py --json evidence/plan_8b.json

Proof: `python -m pytest tests/plan/test_chain.py`.
"""

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy
import torch

from curry_train.plan.chain import PricedBlock, PricedChain
from curry_train.plan.costs import candidates, find_kinds, more_bytes, work_of
from curry_train.plan.estimate import Sketch, StepEstimate
from curry_train.plan.saved import NONE_KIND, SAC_KIND, Option, apply_options
from recording import record_parser, write_record

LLAMA = "benchmarks/large_models.py:llama_8b"


def every_second(calls: Sequence[tuple[str, int, int]]) -> Option:
    """Return the calls of a block that torchtitan's policy keeps by default."""
    counted = Counter()
    kept = set()
    for family, _, _ in calls:
        if family != "matmul" or counted[family] % 2 == 0:
            kept.add((family, counted[family]))
        counted[family] += 1
    return Option(SAC_KIND, frozenset(kept))


def flops_of(step: StepEstimate, name: str) -> float:
    return float(work_of(step, name)[0].sum())


def main() -> None:
    """Compare the plan of a chain of blocks with a policy at the same peak."""
    options = record_parser(__doc__).parse_args()
    start = time.perf_counter()
    with Sketch(LLAMA, kernels="cuda", dtype=torch.bfloat16) as sketch:
        plain = sketch.step(1)
        seconds = time.perf_counter() - start
        (names,) = find_kinds(sketch.blocks(sketch.build()), [plain])
        calls = plain.blocks[names[0]].expensive
        policy = every_second(calls)
        every_option = dict.fromkeys([policy, *candidates(calls, offload=False)])
        # Each option on a block of its own.
        tried = dict(zip(names, every_option, strict=False))
        step = sketch.step(1, change=partial(apply_options, options=tried))
    flops = flops_of(plain, names[0])
    more = more_bytes(step, plain)
    # The chain of the blocks alone, whose seconds are parts of their forward.
    again = [3 * (flops_of(step, name) / flops - 1) for name in tried]
    held, transient = numpy.array([(0, 0), *(more[name] for name in tried)], dtype=int).T
    menu = (Option(NONE_KIND), *tried.values())
    costs = (held + plain.blocks[names[0]].held, transient, numpy.array([0, *again]))
    blocks = tuple(PricedBlock(name, menu, *costs) for name in names)
    chain = PricedChain(blocks, numpy.zeros(len(blocks) + 1, dtype=int))
    every = dict.fromkeys(names, policy)
    plan = chain.fastest(chain.peak(every))
    figures = {
        "of_policy": chain.seconds(plan) / chain.seconds(every),
        "estimate_seconds": seconds,
    }
    print(figures)
    write_record(options.json, figures)


if __name__ == "__main__":
    main()
