"""The command `runs estimate`: the disk space that a checkpoint policy needs.

Proof: `python -m pytest tests/cli/test_runs_estimate.py`.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import click

from ..config import set_words
from ..core.wording import write_json
from ..runs.policy_config import PolicyConfig, read_fields
from ..runs.store import SavedRun
from ..workloads.models import load_workload
from ..workloads.workload import Case
from .options import dtype_option, json_option, model_option
from .screen import ScreenCommand, fill_screen, table

# Bytes per parameter: the weights, and the weights with the state of AdamW.
BYTES_PER_PARAMETER = {
    "float32": (4, 12),
    "bfloat16": (2, 14),
    "float16": (2, 14),
    "bfloat16-pure": (2, 6),
}
COUNT_SUFFIXES = ((10**9, "B"), (10**6, "M"), (1, ""))
DISK_SIZE_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("bytes", 1))


@dataclass(frozen=True)
class DiskEstimate:
    """The disk space of a policy, in bytes."""

    # Number of parameters of the model.
    parameters: int
    dtype: str
    # Size of a checkpoint with the optimizer state.
    checkpoint: int
    # Size of a best-K checkpoint, which holds the weights alone.
    best: int
    # Size of all checkpoints that the policy retains, by kind.
    kept: Mapping[str, int]
    # Sum of `kept`.
    total: int
    # Size of the new checkpoint that is written before an old one is deleted.
    in_flight: int
    # The highest use of the volume at any moment.
    most: int
    advice: tuple[str, ...] = ()


def estimate_disk(parameters: int, config: PolicyConfig, *, dtype: str) -> DiskEstimate:
    """Estimate the disk space for a model with this number of parameters, trained with AdamW."""
    if parameters < 1:
        raise ValueError(f"parameters must be 1 or more, got {parameters}")
    best, checkpoint = [parameters * each for each in BYTES_PER_PARAMETER[dtype]]
    retention = config.retention
    kept = {
        "rollback": 0 if config.rollback_every is None else retention.rollback_keep * checkpoint,
        # A recovery is written at the end of a run, even without `recovery_every`.
        "recovery": retention.recovery_keep * checkpoint,
        "best-k": config.best_k * best,
    }
    total = sum(kept.values())
    every = retention.keep_every
    advice = (
        f"retention.keep_every: {every} keeps one checkpoint every {every} steps forever, in "
        f"addition to this estimate",
    )
    return DiskEstimate(
        parameters,
        dtype,
        checkpoint,
        best,
        kept,
        total,
        in_flight=checkpoint,
        most=total + checkpoint,
        advice=() if every is None else advice,
    )


def estimate_table(found: DiskEstimate) -> str:
    count, letter = next(
        (found.parameters / factor, letter)
        for factor, letter in COUNT_SUFFIXES
        if found.parameters >= factor
    )
    unit, unit_bytes = next((unit, size) for unit, size in DISK_SIZE_UNITS if found.most >= size)
    sizes = {
        "one checkpoint: weights, moments, other state": found.checkpoint,
        "one best-K checkpoint: weights only": found.best,
        **{f"retained as {kind}": num_bytes for kind, num_bytes in found.kept.items()},
        "retained in total": found.total,
        "extra while one is written": found.in_flight,
        "space needed on the volume": found.most,
    }
    lines = [[f"{round(count, 2):,g}{letter} parameters, {found.dtype}", unit]]
    for label, num_bytes in sizes.items():
        size = num_bytes / unit_bytes
        lines.append([label, f"{size:,.1f}" if num_bytes >= unit_bytes / 10 else f"{size:.2g}"])
    return table(lines)


@click.command("estimate", cls=ScreenCommand, example="--parameters 7e9 retention.rollback_keep=2")
@click.option(
    "--parameters", metavar="NUMBER", help="Number of parameters, such as 7e9; or give --model."
)
@model_option("model", more=". Its parameters are counted.")
@dtype_option(type=click.Choice(list(BYTES_PER_PARAMETER)), help="Type of the weights.")
@click.option(
    "--folder", metavar="FOLDER", help="Check that the volume of this folder has the space."
)
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
@json_option()
def estimate_command(
    parameters: str | None,
    model: str | None,
    dtype: str,
    folder: str | None,
    words: tuple[str, ...],
    json_path: str | None,
) -> None:
    """Estimate the disk space that a checkpoint policy needs.

    KEY=VALUE sets a key of the block checkpoint:, such as retention.rollback_keep=2. Exit status: 0
    estimated, 1 the volume of --folder is too small, 2 wrong usage.
    """
    if (parameters is None) == (model is None):
        raise ValueError("give --parameters or --model")
    number = _count(model) if model else int(float(parameters or 0))
    block: dict[str, Any] = {}
    set_words(block, [word.removeprefix("checkpoint.") for word in words])
    policy = read_fields(PolicyConfig, block, inside="checkpoint")
    estimate = estimate_disk(number, policy, dtype=dtype)
    click.echo(estimate_table(estimate))
    for line in estimate.advice:
        click.echo(fill_screen(line, indent=""))

    facts = asdict(estimate)
    enough = True
    if folder is not None:
        free = SavedRun(folder).files.free_bytes("recovery")
        enough = free >= estimate.most
        facts["free"] = free
        verdict = "enough" if enough else "not enough"
        click.echo(fill_screen(f"{folder} has {free / 1e9:.1f} GB free: {verdict}"))
    if json_path:
        write_json(json_path, facts)
    sys.exit(0 if enough else 1)


def _count(model: str) -> int:
    return sum(parameter.numel() for parameter in Case(load_workload(model)).build().parameters())
