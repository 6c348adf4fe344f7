"""Replay boxes of bad steps with planted faults, and count what is named.

    python benchmarks/boxes.py --json evidence/boxes.json

40 boxes of NaN, overflow and spikes have to repeat to the bit and name the planted operation or
module; 40 of steps that depend on a clock, on entropy, on the process or on a count of calls must
not pass as repeated. Each training and each repeat is a process that is forked from one that has
only imported torch. Proof: `python -m pytest tests/benchmarks/test_recorders.py`.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch

import boxes_program
from boxes_program import CHANGING, FAULTS, PLACES, build
from curry_train.cli import runs_replay
from curry_train.cli.options import json_option
from curry_train.core.wording import provenance, write_json
from curry_train.gates.loop_run import Job, LoopFailed, put_back, run_watched
from curry_train.runs.box import read_facts
from curry_train.workloads.from_script import run_as_main

PROGRAM = Path(boxes_program.__file__)
Case = tuple[str, str, int]


def cases(num_each: int) -> Iterator[Case]:
    """Yield faults in turns over the models, as many that repeat as that do not."""
    models = list(PLACES)
    for faults in (list(FAULTS), list(CHANGING)):
        for number in range(num_each):
            fault = faults[number % len(faults)]
            # One more model in each round of faults, and another place.
            name = models[(number + number // len(faults)) % len(models)]
            yield name, fault, number


def forked(job: Job, program: Sequence[str], log: Path, **options: Any) -> dict[str, Any]:
    """Run one repeat in a forked process, as `run_ranks` starts one."""
    shutil.rmtree(log.with_suffix(""), ignore_errors=True)
    result = log.with_suffix("") / "found.json"
    result.parent.mkdir()
    child = os.fork()
    if not child:
        with log.open("a") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
            run_watched(str(result), job, program, **options)
    os.waitpid(child, 0)
    put_back(result.parent)
    found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    if "error" in found:
        raise LoopFailed(found["error"])
    return found


def train(case: Case, log: Path) -> None:
    """Train in a forked process in this folder, to its end."""
    child = os.fork()
    if not child:
        status = 1
        with log.open("a") as stream, contextlib.suppress(SystemExit):
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
            sys.argv = [str(PROGRAM), *map(str, case)]
            run_as_main(PROGRAM)
            status = 0
        os._exit(status)
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"the training {case} failed:\n{log.read_text()[-2000:]}")


def replayed(case: Case, folder: Path, *, times: int) -> dict[str, Any]:
    """Make the box of a case and replay it; return what was said, and whether that is right."""
    name, fault, seed = case
    log = folder / "log.txt"
    with contextlib.chdir(folder):
        train(case, log)
        (box,) = Path("run/boxes").iterdir()
        facts = read_facts(box)
        program = ["script", str(PROGRAM), *map(str, case)]
        ranks = mock.patch.object(
            runs_replay,
            "run_ranks",
            lambda job, program, num_ranks, **options: [
                forked(job, program, log.resolve(), **options)
            ],
        )
        with ranks:
            found = runs_replay.repeat(
                str(box), facts, program, times=times, show=lambda message: None
            )
    first = found["repeats"][0]
    lines = [
        found["difference"] or "repeats to the bit",
        *runs_replay.describe(found["step"], first),
    ]
    is_right = found["difference"] is not None
    if fault in FAULTS:
        is_right = found["difference"] is None and _is_named(case, first)
    return {"model": name, "fault": fault, "seed": seed, "right": is_right, "said": lines}


def _is_named(case: Case, found: dict[str, Any]) -> bool:
    """Return whether the planted operation is named, or of a spike the planted module."""
    name, fault, seed = case
    *_, path = build(name, fault, seed)
    _, phase, operation = FAULTS[fault]
    origin = found["origin"]
    if phase == "spike":
        return origin is None and found["growth"]["module"] == path
    return origin is not None and (
        origin["phase"] == phase
        and origin["module"] == path
        and origin["name"].startswith(operation)
    )


@click.command()
@click.option("--each", "num_each", default=40, show_default=True, help="Boxes of either kind.")
@click.option("--times", default=3, show_default=True, help="Repeats of what does not repeat.")
@json_option()
def main(num_each: int, times: int, json_path: str | None) -> None:
    """Count boxes that repeat and are named, and boxes that are said not to repeat."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(cases(num_each), start=1):
        with tempfile.TemporaryDirectory(prefix="boxes-") as folder:
            row = replayed(case, Path(folder), times=1 if case[1] in FAULTS else times)
        rows.append(row)
        verdict = "right" if row["right"] else f"WRONG: {row['said']}"
        click.echo(f"{number}/{2 * num_each} {' '.join(map(str, case))}: {verdict}", err=True)
        if json_path:
            # After each case, so that an interruption loses none.
            write_json(json_path, provenance(torch.device("cpu")) | counted(rows, times))
    if not json_path:
        click.echo(json.dumps(counted(rows, times)))


def counted(rows: list[dict[str, Any]], times: int) -> dict[str, Any]:
    named = [row["right"] for row in rows if row["fault"] in FAULTS]
    told = [row["right"] for row in rows if row["fault"] in CHANGING]
    return {
        "repeating": {"boxes": len(named), "to_the_bit_and_named": sum(named)},
        "changing": {"boxes": len(told), "said_so": sum(told), "times": times},
        "cases": rows,
    }


if __name__ == "__main__":
    main()
