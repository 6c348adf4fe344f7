"""The commands `runs record` and `runs locate`: find where two runs part.

Proof: `python -m pytest tests/cli/test_runs_locate.py`.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from ..core.wording import write_json
from ..gates.loop_run import LoopFailed, run_ranks, run_watched
from ..runs.fingerprints import LEVELS, read_fingerprints, record_run
from ..runs.locate import Located, first_operation, locate
from .options import json_option, program_of, program_options
from .screen import ScreenCommand, UnusableInput, fill_screen


@click.command("record", cls=ScreenCommand, example="--script train.py --out before -- --rate 0.1")
@program_options(3, least_steps=1)
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default=LEVELS[0],
    show_default=True,
    help="Level modules leaves out parameters, gradients and optimizer, and costs less.",
)
@click.option("--out", required=True, metavar="FOLDER", help="The new folder of the record.")
def record_command(
    script: str | None,
    trainer: str | None,
    num_steps: int,
    num_ranks: int,
    level: str,
    out: str,
    arguments: tuple[str, ...],
) -> None:
    """Record digests of what a script or Trainer computes.

    It runs the first steps in a process of its own, saves nothing else, and puts changed files
    back. Compare two records by `runs locate`.
    """
    kind, words = program_of(script, trainer, arguments)
    _record(out, num_steps, level, num_ranks, [kind, *words])
    click.echo(fill_screen(f"recorded {num_steps} steps in {out}"))


def _record(
    out: str, steps: int, level: str, num_ranks: int, program: list[Any], operations: int = 0
) -> None:
    if Path(out).exists() and any(Path(out).iterdir()):
        raise UnusableInput(f"{out} is there already: give a new folder")
    given = [out, str(steps), level, str(operations), *map(str, program)]
    try:
        found = run_ranks(str(__spec__.name), given, num_ranks=num_ranks)
    except LoopFailed as error:
        raise UnusableInput(str(error)) from error
    if not all(one.get("steps") for one in found):
        raise UnusableInput("it ended before a step of an optimizer")


def _main(result: str, out: str, steps: str, level: str, operations: str, *program: str) -> None:
    def watch(run: Callable[[], None], end: Callable[[dict[str, Any]], NoReturn]) -> None:
        recording = record_run(
            out,
            steps=int(steps),
            level=level,
            program=program,
            operations_in_step=int(operations) or None,
            when_enough=lambda: end({"steps": int(steps)}),
        )
        with recording:
            run()
        ended = read_fingerprints(out)[-1]
        end({"steps": ended.get("step", 0)})

    run_watched(result, program[0], program[1:], watch, writes_to=out)


@click.command("locate", cls=ScreenCommand, example="A B --op")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--op", "names_operation", is_flag=True, help="Run both again, and name the operation."
)
@json_option()
def locate_command(a: str, b: str, names_operation: bool, json_path: str | None) -> None:
    """Name the first place at which two recorded runs differ.

    A and B are folders that `runs record` or `record_run` has written. Exit status: 0 equal,
    1 they differ, 2 a record can't be read.
    """
    num_ranks = min(len(list(Path(folder).glob("rank-*.jsonl"))) for folder in (a, b))
    runs = [[read_fingerprints(it, rank) for it in (a, b)] for rank in range(max(1, num_ranks))]
    located = [locate(*pair) for pair in runs]
    # The rank that differs first. All make the same calls, so the number of equal ones is a time.
    rank = min(
        range(len(runs)),
        key=lambda it: (located[it].place.get("step", float("inf")), located[it].num_compared),
    )
    found = located[rank]
    suffix = f" (rank {rank} of {num_ranks})" if num_ranks > 1 and not found.is_equal else ""
    click.echo(fill_screen(f"{found.headline}{suffix}"))
    operation = None
    if names_operation and found.place.get("phase") not in (None, "nothing", "data", "state"):
        operation = _operation(runs[rank], found, rank=rank)
        click.echo(fill_screen(f"operation: {operation}"))
    for note in found.notes:
        click.echo(fill_screen(f"  {note}", indent="    "))
    if json_path:
        write_json(json_path, found.to_json() | {"rank": rank, "operation": operation})
    sys.exit(0 if found.is_equal else 1)


def _operation(pair: list[list[dict[str, Any]]], found: Located, *, rank: int) -> str:
    """Run both programs again up to the step, and compare their operations there."""
    again = []
    step = found.place["step"]
    with tempfile.TemporaryDirectory(prefix="curry-train-") as folder:
        for name, one in zip("AB", pair, strict=True):
            if not one[0]["program"]:
                raise UnusableInput(f"{name} was recorded in a loop: --op needs `runs record`")
            num_ranks = one[0]["environment"]["world_size"]
            out = str(Path(folder, name))
            _record(out, step, one[0]["level"], num_ranks, one[0]["program"], operations=step)
            again.append(read_fingerprints(out, rank))
    for name, before, after in zip("AB", pair, again, strict=True):
        repeated = locate(before, after)
        if not repeated.is_equal and repeated.num_compared < found.num_compared:
            return f"{name} does not repeat itself ({repeated.headline})"
    return first_operation(again[0], again[1], found.place)


if __name__ == "__main__":
    _main(*sys.argv[1:])
