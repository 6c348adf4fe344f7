"""Compare the plan of a chain of blocks with two simpler choices at the same peak.

    python benchmarks/plan_comparison.py --json evidence/plan_8b.json

One is a policy on every block, the other the best of no and full recompute for each block.
Proof: `python -m pytest tests/plan/test_chain.py`.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click
import numpy
import torch

from curry_train.cli.options import (
    DTYPES,
    batch_size_option,
    dtype_option,
    json_option,
    model_option,
)
from curry_train.core.wording import format_bytes, provenance, write_json
from curry_train.plan.chain import PricedBlock, PricedChain
from curry_train.plan.costs import BlockKind, candidates, find_kinds
from curry_train.plan.estimate import Sketch
from curry_train.plan.saved import FULL_KIND, NONE_KIND, SAC_KIND, Option

LLAMA = "curry_train.workloads.models:llama_8b"
THEIRS = "attention and every second product"


def every_second(kind: BlockKind) -> Option:
    """Return the calls of a block that torchtitan's policy keeps by default."""
    _, calls = kind.run(Option(NONE_KIND))
    counted: Counter[str] = Counter()
    kept = set()
    for family, _, _ in calls:
        if family != "matmul" or counted[family] % 2 == 0:
            kept.add((family, counted[family]))
        counted[family] += 1
    return Option(SAC_KIND, frozenset(kept))


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print peak and recompute of each choice."""
    for row in rows:
        click.echo(
            f"  {row['choice']:<36} peak {format_bytes(row['peak_bytes']):>9} "
            f"{row['of_forward']:>7.1%} again"
        )


@click.command()
@model_option("spec", default=LLAMA)
@batch_size_option(default=1)
@dtype_option(default="bfloat16")
@json_option()
def main(spec: str, batch_size: int, dtype: str, json_path: str | None) -> None:
    """Compare the plan of a chain of blocks with two simpler choices at the same peak."""
    start = time.perf_counter()
    with Sketch(spec, kernels="cuda", dtype=DTYPES[dtype]) as sketch:
        step = sketch.step(batch_size)
        seconds = time.perf_counter() - start
        (kind,) = find_kinds(sketch, step, batch_size)
        plain = kind.run(Option(NONE_KIND))[0]

        def price(options: Sequence[Option]) -> PricedChain:
            """Return the chain of the model's blocks, whose seconds are parts of their forward."""
            measured = [kind.run(option)[0] for option in options]
            flops = [float(one.flops.sum()) for one in measured]
            again = (numpy.array(flops) - plain.flops.sum()) / (plain.flops.sum() / 3)
            block = PricedBlock(
                "",
                tuple(options),
                numpy.array([one.held for one in measured]),
                numpy.array([one.transient for one in measured]),
                again,
            )
            blocks = tuple(replace(block, name=name) for name in kind.names)
            return PricedChain(blocks, numpy.zeros(len(blocks) + 1, dtype=numpy.int64))

        policy = every_second(kind)
        theirs = price([policy])
        menu = price(candidates(kind, offload=False))
    number = len(kind.names)
    every = dict.fromkeys(kind.names, policy)
    budget = theirs.peak(every)

    def row(name: str, chain: PricedChain) -> dict[str, Any]:
        options = chain.fastest(budget)
        assert options is not None
        again = chain.seconds(options) / number
        return {
            "choice": name,
            "peak_bytes": chain.peak(options),
            "of_forward": again,
            "chosen": dict(Counter(map(str, options.values()))),
        }

    rows = [
        row(THEIRS, theirs),
        row(f"the best of {NONE_KIND} and {FULL_KIND}", menu.only({FULL_KIND})),
        row("the plan", menu),
    ]
    again = [one["of_forward"] for one in rows]
    of_policy = again[2] / again[0]
    of_halves = again[2] / again[1]
    click.echo(
        f"a whole step of {batch_size} samples was estimated in {seconds:.1f} s, "
        f"{format_bytes(step.peak_bytes)}\n{number} blocks alone, {format_bytes(plain.held)} each; "
        "recomputed, as a part of their forward:"
    )
    show(rows)
    click.echo(
        f"the plan recomputes {of_policy:.3f} of what the policy does, "
        f"{of_halves:.3f} of what the best of none and full does"
    )
    if json_path:
        figures = {
            "rows": [{name: one[name] for name in one if name != "chosen"} for one in rows],
            "of_policy": of_policy,
            "of_none_and_full": of_halves,
            "block_bytes": plain.held,
            "estimate_seconds": seconds,
            "step_peak_bytes": step.peak_bytes,
            "chosen": rows[2]["chosen"],
        }
        write_json(json_path, provenance(torch.device("cpu")) | figures)


if __name__ == "__main__":
    main()
