"""The commands `runs record` and `runs locate`: find where two runs part.

Proof: `python -m pytest tests/cli/test_runs_locate.py`.
"""

import contextlib
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import click

from ..gates.loop_run import End, run_ranks
from ..runs.fingerprints import LEVELS, VARIABLES, Record, read_fingerprints, record_run
from ..runs.locate import Located, expected_values, first_operation, locate, settings_of
from ..runs.rounding import NUM_NOISES, Exchange
from ..runs.values import Facts, Values
from ..workloads.from_script import NO_STEP
from .options import RANKS_OPTION, program_option, steps_option
from .parameters import argument, option
from .screen import Ended, echo_lines, messages_on_screen, screen_command

NOT_RECORDED = "a setting that is not recorded, such as a file or a variable of your own"


@screen_command("record", example="--script train.py --out before -- --rate 0.1")
def record_command(
    program: list[str] = program_option(),
    num_steps: int = steps_option(3),
    num_ranks: int = RANKS_OPTION,
    level: str = option(
        "Level modules leaves out parameters, gradients and optimizer, and costs less.",
        type=click.Choice(LEVELS),
        default=LEVELS[0],
        show_default=True,
    ),
    out: str = option("The new folder of the record.", "FOLDER", required=True),
) -> None:
    """Record digests of what a script or Trainer computes.

    It runs the first steps in a process of its own, saves nothing else, and puts changed files
    back. Compare two records by `runs locate`.
    """
    recorded = _record(out, program, num_ranks, steps=num_steps, level=level)
    echo_lines(f"recorded {recorded} of {num_steps} steps in {out}")


def _record(out: str, program: Sequence[str], num_ranks: int, **options: Any) -> int:
    """Record a program in processes of its own, and return the number of its steps.

    The options are those of `record_run`.
    """
    # Folders that the program's process makes are removed after it.
    Path(out).mkdir(parents=True, exist_ok=True)
    if any(Path(out).iterdir()):
        raise ValueError(f"{out} is there already: give a new folder")
    job = functools.partial(_watch, out, program, options)
    try:
        run_ranks(job, program, num_ranks=num_ranks, ignored=[out])
        made = [one.step for one in read_fingerprints(out) if one.kind == "update"]
    finally:
        # A record without a step is in the way of the next one.
        if not any('"update"' in one.read_text() for one in Path(out).glob("*.jsonl")):
            shutil.rmtree(out)
    if not made:
        raise ValueError(NO_STEP)
    return int(max(made))


def _watch(
    out: str, program: Sequence[str], options: Facts, run: Callable[[], None], end: End
) -> None:
    """Run a program until its steps are recorded."""
    exchange = options.pop("exchange", None)
    with record_run(
        out,
        program=program,
        exchange=Exchange(**exchange) if exchange else None,
        when_enough=lambda: end({"ended": True}),
        **options,
    ):
        run()


Pair = tuple[Record, Record]


@screen_command("locate", example="A B --op")
def locate_command(
    a: str = argument(),
    b: str = argument(),
    names_operation: bool = option("Run both again, and name the operation.", flags="--op"),
    tolerance: str = option(
        "auto: run both again, measure at each place what rounding does, and accept that.",
        type=click.Choice(("none", "auto")),
        default="none",
        show_default=True,
    ),
    command: str | None = option(
        "Find the setting that makes the difference: COMMAND records into {out}, with one setting "
        "of B at a time. Variables are set for it; {arguments}, {torch}, {numpy} ... are filled "
        "in.",
        "COMMAND",
        "--bisect",
    ),
) -> Ended:
    """Name the first place at which two recorded runs differ.

    A and B are folders that `runs record` or `record_run` has written. Exit status: 0 equal,
    1 they differ, 2 a record can't be read.
    """
    num_ranks = min(len(list(Path(folder).glob("rank-*.jsonl"))) for folder in (a, b))
    ranks = range(max(1, num_ranks))
    runs = [(read_fingerprints(a, rank), read_fingerprints(b, rank)) for rank in ranks]
    located = [locate(*pair) for pair in runs]
    with tempfile.TemporaryDirectory(prefix="curry-train-") as folder:
        again = Again(Path(folder), runs)
        rank, found = _find_first(located)
        if tolerance == "auto" and found.kind:
            rank, found = _find_first(again.with_tolerance(found))
        suffix = f" (rank {rank} of {num_ranks})" if num_ranks > 1 and not found.is_equal else ""
        echo_lines(f"{found.headline}{suffix}")
        operation = None
        if names_operation and found.kind:
            operation = again.operation(found, rank)
            echo_lines(f"operation: {operation}")
        bisected: dict[str, str] = {}
        if command and found.kind:
            bisected = _bisect(command, runs[rank], rank, Path(folder))
        echo_lines(*(f"{name}: {result}" for name, result in bisected.items()))
    echo_lines(*(f"  {note}" for note in found.notes), indent="    ")
    others = {"rank": rank, "operation": operation, "settings": bisected}
    return found.to_json() | others, not found.is_equal


def _find_first(located: Sequence[Located]) -> tuple[int, Located]:
    """Return the rank that differs first, and its difference."""
    # All make the same calls, so the number of equal ones is a time.
    return min(
        enumerate(located),
        key=lambda one: (
            one[1].place.get("step", float("inf")),
            one[1].num_compared,
            one[1].is_of_another_rank,
        ),
    )


@dataclass
class Again:
    """Runs the programs of A and B again."""

    folder: Path
    runs: Sequence[Pair]
    # How B's run is compared on equal inputs, once the tolerance was measured.
    exchange: Facts | None = None

    def _record(self, which: str, name: str, **options: Any) -> list[Record]:
        start = self.runs[0]["AB".index(which)][0]
        if not start.program:
            raise ValueError(
                f"{which} was recorded in a loop: --op and --tolerance need `runs record`"
            )
        # A script's own files may be named from the folder in which it was recorded.
        cwd = start.folder if Path(start.folder).is_dir() else "."
        message = f"{which} runs again ({name})"
        with contextlib.chdir(cwd), _set_variables(start.variables), messages_on_screen(message):
            out, num_ranks = str(self.folder / name), start.environment["world_size"]
            _record(out, start.program, num_ranks, level=start.level, **options)
        return [read_fingerprints(out, rank) for rank in range(len(self.runs))]

    def _repeat(self, which: str, name: str, **options: Any) -> list[Record]:
        """Run a program again, and require that it makes its record again."""
        again = self._record(which, name, **options)
        for pair, one in zip(self.runs, again, strict=True):
            if not (repeated := locate(pair["AB".index(which)], one)).is_equal:
                raise ValueError(
                    f"{which} does not repeat itself ({repeated.headline}): give it the files, "
                    "variables and versions with which it was recorded, and a seed; compiled "
                    "code may need one thread, OMP_NUM_THREADS=1"
                )
        return again

    def with_tolerance(self, found: Located) -> list[Located]:
        """Compare again where noise of the size of rounding errors is no difference."""
        steps = self.runs[0][0][-1].step
        # In the folder of this record, in which its processes may write.
        values: Facts = {"folder": str(self.folder / "kept" / "values")}
        kept = self._repeat("A", "kept", steps=steps, exchange=values)
        self._repeat("B", "again", steps=steps)
        expected = [expected_values(*pair, found.place["step"]) for pair in self.runs]
        of_a, of_b = zip(*expected, strict=True)
        exchange = values | {"expected": of_a}
        noises = [
            self._record("A", f"noise-{seed}", steps=steps, exchange=exchange | {"noise": seed})
            for seed in range(NUM_NOISES)
        ]
        self.exchange = values | {"expected": of_b}
        others = self._record("B", "other", steps=steps, exchange=self.exchange)
        return [locate(a, b, of_a) for a, b, *of_a in zip(kept, others, *noises, strict=True)]

    def operation(self, found: Located, rank: int) -> str:
        """Run both programs up to the step, and compare their operations there."""
        again = []
        step = found.place["step"]
        for which, before in zip("AB", self.runs[rank], strict=True):
            exchange = self.exchange if which == "B" else None
            name = f"operations-{which}"
            recorded = self._record(
                which, name, steps=step, operations_in_step=step, exchange=exchange
            )
            again.append(recorded[rank])
            repeated = locate(before, recorded[rank])
            is_early = repeated.num_compared < found.num_compared
            if not exchange and not repeated.is_equal and is_early:
                return f"{which} does not repeat itself ({repeated.headline})"
        # Compiled code has run uncompiled, with more calls of modules than were compared before.
        a, b = again
        inner = found if self.exchange else locate(a, b)
        return first_operation(a, b, inner if inner.kind else found)


def _set_variables(wanted: Mapping[str, str]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the variables of torch are as they were in a recorded run."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLES)}
    return mock.patch.dict(os.environ, {**others, **wanted}, clear=True)


def _bisect(command: str, pair: Pair, rank: int, folder: Path) -> dict[str, str]:
    """Record A with each setting of B that a command can set, and return what each one does."""
    a, b = map(settings_of, pair)
    differing = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    tried = [
        name
        for name in differing
        if name.startswith("variable ") or f"{{{name.rpartition(' ')[2]}}}" in command
    ]
    if not tried:
        raise ValueError(
            f"the command sets none of what differs: {', '.join(differing) or NOT_RECORDED}"
        )

    whole = locate(*pair)

    def effect(*changed: str) -> str:
        one = outcome(*changed)
        what = "another difference" if one.place != whole.place else "the difference"
        return "makes none" if one.is_equal else f"makes {what}: {one.headline}"

    def outcome(*changed: str) -> Located:
        settings = a | {name: b.get(name) for name in changed}
        out = str(Path(tempfile.mkdtemp(dir=folder), "record"))
        _run_template(command, settings, out)
        return locate(pair[0], read_fingerprints(out, rank))

    if not (repeated := outcome()).is_equal:
        raise ValueError(f"the command does not repeat A: {repeated.headline}")
    found = {name: effect(name) for name in tried}
    if not any("makes the difference" in text for text in found.values()):
        found["all of these"] = effect(*tried)
        if "makes the difference" not in found["all of these"]:
            found["what makes it"] = NOT_RECORDED
    return found | {name: "not tried" for name in differing if name not in tried}


def _run_template(command: str, settings: Values, out: str) -> None:
    """Run a command with its fields filled in and its variables set."""
    # Quoted, so that a value may stand inside of a word, as in `sh -c "..."`.
    fields = {
        name.rpartition(" ")[2]: shlex.join(map(str, value if isinstance(value, list) else [value]))
        for name, value in settings.items()
    }
    try:
        words = shlex.split(command.format(**fields, out=shlex.quote(out)))
    except (AttributeError, LookupError, ValueError) as error:
        raise ValueError(
            f"the command has an open quote, or a field that no record has: {error}"
        ) from error
    variables = {
        name.removeprefix("variable "): value
        for name, value in settings.items()
        if name.startswith("variable ") and value is not None
    }
    with _set_variables(variables):
        try:
            ended = subprocess.run(words, stdout=2, check=False)
        except OSError as error:
            raise ValueError(f"the command can't be run: {error}") from error
    if ended.returncode or not Path(out).exists():
        raise ValueError(
            f"the command ended with status {ended.returncode}, and has to write a record to "
            f"{{out}} and end with 0: {shlex.join(words)}"
        )
