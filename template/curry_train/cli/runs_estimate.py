"""The command `runs estimate`: the disk space that a checkpoint policy needs.

Proof: `python -m pytest tests/cli/test_runs_estimate.py`.
"""

import shutil

import click

from ..config import set_words
from ..core.wording import format_count
from ..runs.policy_config import PolicyConfig, read_fields
from ..runs.store import SavedRun
from ..runs.values import Facts, Values
from .parameters import WORDS_ARGUMENT, option
from .screen import Ended, echo_lines, screen_command, table

# Bytes per parameter: the weights, and the weights with the state of AdamW.
BYTES_PER_PARAMETER = {
    "float32": (4, 12),
    "bfloat16": (2, 14),
    "float16": (2, 14),
    "bfloat16-pure": (2, 6),
}


def estimate_disk(parameters: int, config: PolicyConfig, *, dtype: str) -> Facts:
    """Estimate the bytes for a model with this number of parameters, trained with AdamW."""
    best, checkpoint = [parameters * each for each in BYTES_PER_PARAMETER[dtype]]
    retention = config.retention
    kept = {
        "rollback": 0 if config.rollback_every is None else retention.rollback_keep * checkpoint,
        # A recovery is written at the end of a run, even without `recovery_every`.
        "recovery": retention.recovery_keep * checkpoint,
        "best-k": config.best_k * best,
    }
    total = sum(kept.values())
    return {
        "parameters": parameters,
        "dtype": dtype,
        "checkpoint": checkpoint,
        "best": best,
        "kept": kept,
        "total": total,
        # The highest use of the volume: a new one is written before an old one is deleted.
        "most": total + checkpoint,
    }


def estimate_table(found: Values) -> str:
    sizes = {
        "one checkpoint: weights, moments, other state": found["checkpoint"],
        "one best-K checkpoint: weights only": found["best"],
        **{f"retained as {kind}": num_bytes for kind, num_bytes in found["kept"].items()},
        "retained in total": found["total"],
        "extra while one is written": found["checkpoint"],
        "space needed on the volume": found["most"],
    }
    # Disks are sold by powers of ten.
    unit, unit_bytes = ("GB", 10**9) if found["most"] >= 10**9 else ("MB", 10**6)
    lines = [[f"{format_count(found['parameters'])} parameters, {found['dtype']}", unit]]
    lines += [[label, f"{num_bytes / unit_bytes:,.4g}"] for label, num_bytes in sizes.items()]
    return table(lines)


@screen_command("estimate", example="--parameters 7e9 retention.rollback_keep=2")
def estimate_command(
    parameters: float = option(
        "Number of parameters, such as 7e9.", "NUMBER", type=click.FloatRange(1), required=True
    ),
    dtype: str = option(
        "Type of the weights.", type=click.Choice([*BYTES_PER_PARAMETER]), default="float32"
    ),
    folder: str | None = option("Check that the volume of this folder has the space.", "FOLDER"),
    words: tuple[str, ...] = WORDS_ARGUMENT,
) -> Ended:
    """Estimate the disk space that a checkpoint policy needs.

    KEY=VALUE sets a key of the block checkpoint:, such as retention.rollback_keep=2. Exit status: 0
    estimated, 1 the volume of --folder is too small, 2 wrong usage.
    """
    block: Facts = {}
    set_words(block, [word.removeprefix("checkpoint.") for word in words])
    policy = read_fields(PolicyConfig, block, inside="checkpoint")
    estimate = estimate_disk(int(parameters), policy, dtype=dtype)
    click.echo(estimate_table(estimate))
    if (every := policy.retention.keep_every) is not None:
        more = f"retention.keep_every: {every} keeps one checkpoint every {every} steps forever, in"
        echo_lines(f"{more} addition to this estimate", indent="")
    if folder is None:
        return estimate, 0
    # It may be a link, or not be there yet.
    place = (SavedRun(folder).root / "recovery").resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    enough = free >= estimate["most"]
    verdict = "enough" if enough else "not enough"
    echo_lines(f"{folder} has {free / 1e9:.1f} GB free: {verdict}")
    return estimate | {"free": free}, not enough
