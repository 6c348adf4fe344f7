"""Compare predicted and measured peaks of training steps, by model, dtype and technique.

    python benchmarks/plan_accuracy.py --json evidence/estimates.json

Proof: `python -m pytest tests/plan/test_estimate.py`.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from curry_train.cli.options import choose_device, device_option, json_option
from curry_train.core.wording import provenance, write_json
from curry_train.plan.estimate import Sketch
from curry_train.plan.optimizers import make_optimizer
from curry_train.plan.timeline import measure_timeline
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
    """Yield model, dtype, batch size and technique of each row."""
    for model, dtype, size, technique in itertools.product(MODELS, DTYPES, (2, 8), TECHNIQUES):
        # The head of the resnet is no wider than its input, so its loss is not chunked.
        if model != "resnet" or technique != "chunked loss":
            yield model, dtype, size, technique


def measure(case: Case, size: int, change: Callable[[nn.Module], object]) -> int:
    """Return the peak bytes of a real training step."""
    module = case.build()
    optimizer = make_optimizer("adamw", module, foreach=case.device.type == "cuda")
    change(module)
    return measure_timeline(
        module,
        case.batch(size),
        case.workload.mean_loss,
        optimizer=optimizer,
        keeps_output=case.device.type == "cuda",
    ).peak.bytes_alive


@click.command()
@device_option()
@json_option()
def main(device: str, json_path: str | None) -> None:
    """Compare predicted with measured peaks of training steps."""
    place = choose_device(device)
    rows = list[dict[str, Any]]()
    console = Console(stderr=True)
    for model, dtype, size, technique in track(
        list(configurations()), console=console, transient=True, disable=not console.is_terminal
    ):
        workload = MODELS[model]()
        kernels = "cuda" if place.type == "cuda" else "cpu"
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
            f"{model:<22} {name:<9} {size:>2} {technique:<13} "
            f"{predicted:>12,} {measured:>12,} {ratio:>8.4f}"
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
