"""Compare the plan of a chain of blocks with two simpler choices at the same peak.

    python benchmarks/plan_comparison.py --json evidence/plan_8b.json

One is a policy on every block, the other the best of no and full recompute for each block.
Proof: `python -m pytest tests/plan/test_solve.py`.
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import click
import torch

from curry_train.cli.options import (
    DTYPES,
    batch_size_option,
    dtype_option,
    json_option,
    model_option,
)
from curry_train.core.wording import format_bytes, provenance, write_json
from curry_train.plan.costs import BlockKind, candidates, find_kinds
from curry_train.plan.estimate import Sketch
from curry_train.plan.saved import FULL_KIND, NONE_KIND, SAC_KIND, Option
from curry_train.plan.solve import Choice, Solution, Stage, peak_of, solve

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

        def choice(option: Option) -> Choice:
            measured = kind.run(option)[0]
            again = float(measured.flops.sum() - plain.flops.sum()) / (plain.flops.sum() / 3)
            return Choice(str(option), measured.held, measured.transient, again)

        policy = choice(every_second(kind))
        menu = [choice(option) for option in candidates(kind, offload=False)]
    number = len(kind.names)
    budget = peak_of([Stage((policy,))] * number, [0] * number)

    def best(choices: Sequence[Choice]) -> Solution:
        found = solve([Stage(tuple(choices))] * number, budget)
        assert found is not None
        return found

    plan = best(menu)
    halves = best([one for one in menu if one.name in (NONE_KIND, FULL_KIND)])
    rows: list[dict[str, Any]] = [
        {"choice": name, "peak_bytes": peak, "of_forward": again}
        for name, peak, again in (
            (THEIRS, budget, policy.cost),
            (f"the best of {NONE_KIND} and {FULL_KIND}", halves.peak_bytes, halves.cost / number),
            ("the plan", plan.peak_bytes, plan.cost / number),
        )
    ]
    of_policy = plan.cost / number / policy.cost
    of_halves = plan.cost / halves.cost
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
            "rows": rows,
            "of_policy": of_policy,
            "of_none_and_full": of_halves,
            "block_bytes": plain.held,
            "estimate_seconds": seconds,
            "step_peak_bytes": step.peak_bytes,
            "chosen": dict(Counter(menu[index].name for index in plan.chosen)),
        }
        write_json(json_path, provenance(torch.device("cpu")) | figures)


if __name__ == "__main__":
    main()
