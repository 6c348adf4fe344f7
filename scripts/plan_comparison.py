# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11,!=2.12.*,<2.14", "numpy>=1.26", "click>=8.1", "rich>=13"]
# ///
"""Compare the plan for a chain of blocks with a policy on every block, and with the best none/full choice, at one peak.

python scripts/plan_comparison.py --json evidence/plan_8b.json
"""

import environment

environment.require(__file__)

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import click
import torch

from curry_train.cli.options import DTYPES, json_option, model_option
from curry_train.core.wording import format_bytes, provenance, write_json
from curry_train.plan.costs import BlockKind, candidates, find_kinds
from curry_train.plan.estimate import Sketch
from curry_train.plan.saved import FULL_KIND, NONE_KIND, SAC_KIND, Option
from curry_train.plan.solve import Choice, Solution, Stage, peak_of, solve

LLAMA = "curry_train.workloads.models:llama_8b"
THEIRS = "attention and every second product"


def every_second(kind: BlockKind) -> Option:
    """What torchtitan's policy keeps by default, as calls of the block."""
    _, calls = kind.run(Option(NONE_KIND))
    counted: Counter[str] = Counter()
    kept = set()
    for family, _, _ in calls:
        if family != "matmul" or counted[family] % 2 == 0:
            kept.add((family, counted[family]))
        counted[family] += 1
    return Option(SAC_KIND, frozenset(kept))


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@model_option("spec", default=LLAMA)
@click.option("--batch-size", default=1, type=click.IntRange(1), show_default=True)
@click.option("--dtype", default="bfloat16", type=click.Choice(list(DTYPES)), show_default=True)
@json_option()
def main(spec: str, batch_size: int, dtype: str, json_path: str | None) -> None:
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

        policy, menu = (
            choice(every_second(kind)),
            [choice(option) for option in candidates(kind, offload=False)],
        )
    number = len(kind.names)
    budget = peak_of([Stage((policy,))] * number, [0] * number)

    def best(choices: Sequence[Choice]) -> Solution:
        found = solve([Stage(tuple(choices))] * number, budget)
        assert found is not None
        return found

    plan, halves = best(menu), best([one for one in menu if one.name in (NONE_KIND, FULL_KIND)])
    rows: list[dict[str, Any]] = [
        {"choice": name, "peak_bytes": peak, "of_forward": again}
        for name, peak, again in (
            (THEIRS, budget, policy.cost),
            (f"the best of {NONE_KIND} and {FULL_KIND}", halves.peak_bytes, halves.cost / number),
            ("the plan", plan.peak_bytes, plan.cost / number),
        )
    ]
    click.echo(
        f"a whole step of {batch_size} samples was estimated in {seconds:.1f} s, {format_bytes(step.peak_bytes)}"
    )
    click.echo(
        f"{number} blocks alone, {format_bytes(plain.held)} each; recomputed, as a part of their forward:"
    )
    for row in rows:
        click.echo(
            f"  {row['choice']:<36} peak {format_bytes(row['peak_bytes']):>9} {row['of_forward']:>7.1%} again"
        )
    of_policy, of_halves = plan.cost / number / policy.cost, plan.cost / halves.cost
    click.echo(
        f"the plan computes {of_policy:.3f} of what the policy does again, {of_halves:.3f} of none and full"
    )
    if json_path:
        found = {
            "rows": rows,
            "of_policy": of_policy,
            "of_none_and_full": of_halves,
            "block_bytes": plain.held,
        }
        chosen = Counter(menu[index].name for index in plan.chosen)
        more = {
            "estimate_seconds": seconds,
            "step_peak_bytes": step.peak_bytes,
            "chosen": dict(chosen),
        }
        write_json(json_path, provenance(torch.device("cpu")) | found | more)


if __name__ == "__main__":
    main()
