# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11,!=2.12.*,<2.14", "numpy>=1.26", "click>=8.1", "rich>=13"]
# ///
"""Compare predicted with measured peaks of whole training steps, over models, sizes, dtypes, batches and techniques.

python scripts/plan_accuracy.py --json evidence/estimates.json
"""

import environment

environment.require(__file__)

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from curry_train.cli.options import choose_device, json_option
from curry_train.core.wording import provenance, write_json
from curry_train.plan.estimate import Sketch, make_optimizer
from curry_train.plan.timeline import record_step_storages, timeline_of
from curry_train.primitives import apply_chunked_loss, apply_regions, apply_sac, recompute_blocks
from curry_train.workloads.models import resnet, transformer
from curry_train.workloads.workload import Case, Workload

DTYPES = (torch.float32, torch.bfloat16)
MODELS: dict[str, Callable[[], Workload]] = {
    "transformer": transformer,
    "transformer, 8 of 256": lambda: transformer(depth=8, dim=256, vocabulary=4096, length=128),
    "resnet": resnet,
}
TECHNIQUES: dict[str, Callable[[nn.Module], object]] = {
    "none": lambda module: None,
    "full": recompute_blocks,
    "regions": apply_regions,
    "sac": apply_sac,
    "chunked loss": lambda module: apply_chunked_loss(module, chunk_tokens=64),
}


def configurations() -> Iterator[tuple[str, torch.dtype, int, str]]:
    for model, dtype, size, technique in itertools.product(MODELS, DTYPES, (2, 8), TECHNIQUES):
        if (
            model != "resnet" or technique != "chunked loss"
        ):  # whose head is no wider than its input
            yield model, dtype, size, technique


def measure(case: Case, size: int, change: Callable[[nn.Module], object]) -> int:
    module = case.build()
    optimizer = make_optimizer("adamw", module, foreach=case.device.type == "cuda")
    change(module)
    lives = record_step_storages(
        module, case.batch(size), case.workload.mean_loss, optimizer=optimizer
    )
    return timeline_of(lives, type(module).__name__).peak.bytes_alive


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option(
    "--device", default="auto", type=click.Choice(["auto", "cuda", "cpu"]), show_default=True
)
@json_option()
def main(device: str, json_path: str | None) -> None:
    place, rows = choose_device(device), list[dict[str, Any]]()
    console = Console(stderr=True)
    for model, dtype, size, technique in track(
        list(configurations()), console=console, transient=True, disable=not console.is_terminal
    ):
        workload, kernels = MODELS[model](), "cuda" if place.type == "cuda" else "cpu"
        with Sketch(workload, dtype=dtype, kernels=kernels) as sketch:
            predicted = sketch.step(size, change=TECHNIQUES[technique]).peak_bytes
        measured = measure(Case(workload, place, dtype), size, TECHNIQUES[technique])
        name = str(dtype).removeprefix("torch.")
        ratio = predicted / measured
        rows.append(
            {"model": model, "dtype": name, "batch_size": size, "technique": technique}
            | {"predicted": predicted, "measured": measured, "ratio": ratio}
        )
        click.echo(
            f"{model:<22} {name:<9} {size:>2} {technique:<13} {predicted:>12,} {measured:>12,} {ratio:>8.4f}"
        )
    worst = max(abs(row["ratio"] - 1) for row in rows)
    equal = sum(row["predicted"] == row["measured"] for row in rows)
    click.echo(f"\n{len(rows)} configurations, {equal} equal to the byte, worst {worst:.2%} off")
    if json_path:
        write_json(
            json_path,
            provenance(place)
            | {"rows": rows, "num_rows": len(rows), "equal": equal, "worst": worst},
        )


if __name__ == "__main__":
    main()
