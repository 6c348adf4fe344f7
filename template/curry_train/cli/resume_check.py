"""The resume-check command: kill a training, resume it, and compare it with one that was not.

It runs straight through, killed by SIGKILL within a step, and resumed, each in a process of its
own, and compares the state at each step to the bit. Then it resumes once for each part of the state
with that part as at the start, as if it had not been saved, and the comparison has to name it.

Proof: `python -m pytest tests/cli/test_resume_check.py`.
"""

import contextlib
import functools
import itertools
import os
import re
import shlex
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from ..core.wording import provenance, some_of
from ..gates.loop_run import (
    End,
    LoopFailed,
    put_back,
    read_changes,
    run_ranks,
    stopped_by_signals,
    train_by,
)
from ..runs.files import remove_folder
from ..runs.values import Facts
from .options import program_option, steps_option
from .parameters import number_option, option
from .resume_watch import PARTS, StateWatch
from .screen import Ended, echo_lines, messages_on_screen, screen_command
from .train import train_command

Steps = list[Facts]

# As a shell's command begins; in capitals, as `rate=1` may be an argument.
VARIABLE = re.compile("[A-Z_][A-Z0-9_]*=")


def check_resume(
    folder: Path,
    start: list[str],
    again: list[str],
    *,
    num_steps: int,
    kill_at: int,
    show: Callable[[str], None],
    variables: Mapping[str, str],
) -> Facts:
    """Run a program straight, killed, resumed, and resumed without each part; compare.

    `start` and `again` are kind and words of the program at its start and at its resume, which has
    these environment variables.
    """

    def run(mode: str, last: int, program: list[str]) -> Steps:
        show(f"without its {mode}" if mode in PARTS else mode)
        undo = folder if mode == "killed" else None
        # The files that the killed process has left stay as well.
        ignored = [folder, *read_changes(folder)]
        more = {} if mode in ("straight", "killed") else variables
        job = functools.partial(_watch, mode, last, folder, program, more)
        steps: Steps = run_ranks(job, program, saves=True, undo=undo, ignored=ignored)[0]["steps"]
        forget(steps, unseeded)
        return steps

    # Generators that begin differently in each process. If the training drew from one of them, its
    # batches or parameters would differ too.
    unseeded: set[str] = set()

    straight = run("straight", num_steps, start)
    if len(straight) < num_steps:
        raise ValueError(
            f"it ended after {len(straight)} of {num_steps} steps of an optimizer: give fewer "
            "--steps, or a program that trains"
        )
    try:
        killed = run("killed", kill_at, start)
        states = straight[0]["generators"], killed[0]["generators"]
        unseeded |= {name for name in states[0] if states[0][name] != states[1].get(name)}
        forget(straight, unseeded)
        forget(killed, unseeded)
        if apart := differences(straight, killed, 0):
            part, text = next(iter(apart.items()))
            raise ValueError(f"two starts differ already, {part}: {text}. Seed the program first")
        restore = archived_changes(folder)
        try:
            resumed = run("resumed", num_steps - 1, again)
        except LoopFailed as error:
            raise click.ClickException(f"NOT equal, the resume fails: {error}") from error
        begun = began_after(straight, resumed, kill_at)
        last = num_steps - begun
        withheld = {}
        for part in PARTS:
            if any(step[part] for step in resumed):
                restore()
                withheld[part] = differences(straight, run(part, last, again), begun)
    finally:
        put_back(folder)
    compared = resumed[:last]
    found = differences(straight, compared, begun)
    pairs = enumerate(zip(compared, straight[begun:], strict=False), begun + 1)
    # A copy of the weights, such as an average, may differ alone.
    own = {"copies": None}
    unequal = [step for step, (now, was) in pairs if now["after"] | own != was["after"] | own]
    return {
        "steps": num_steps,
        "killed_at": kill_at,
        "resumed_from": begun,
        "compared": len(compared),
        "equal": not found,
        "unequal_results": unequal,
        "differences": found,
        "withheld": withheld,
    }


def forget(steps: Steps, generators: set[str]) -> None:
    """Leave generators out of what is compared."""
    for step in steps:
        for name in generators:
            step["generators"].pop(name, None)


def archived_changes(folder: Path) -> Callable[[], None]:
    """Archive the files that a killed process left; return a function that restores them."""
    places = list(read_changes(folder))
    archive = folder / "left.tar"
    with tarfile.open(archive, "w") as packed:
        for place in filter(os.path.lexists, places):
            packed.add(place)

    def restore() -> None:
        for place in places:
            remove_folder(place)
        with tarfile.open(archive) as packed:
            packed.extractall("/", filter="fully_trusted")

    return restore


def began_after(straight: Steps, resumed: Steps, kill_at: int) -> int:
    """Return the step whose state the resume has loaded: most parts are those after it.

    A part that is as at the start was not loaded.
    """
    if not resumed:
        raise ValueError(
            "the second start made no step: leave no checkpoints of earlier runs in its folder"
        )

    first = resumed[0]
    loaded = [part for part in PARTS if first[part] != straight[0][part]]
    same, begun = max(
        (sum(straight[step][part] == first[part] for part in loaded), step)
        for step in range(kill_at)
    )
    if not same:
        raise ValueError(
            f"the second start began anew. Let the program save within {kill_at - 1} steps, give "
            "what makes it resume by --resume-with, and let it load that"
        )
    return begun


def differences(straight: Steps, resumed: Steps, begun: int) -> dict[str, str]:
    """Return the parts that differ in the first step that is not equal, each with a text."""
    pairs = [*zip(straight[begun:], resumed, strict=False)]
    rates = (
        f"rate {now:.3g}, not {was:.3g} (step {step})"
        for step, pair in enumerate(pairs, begun + 1)
        for was, now in zip(*(one["rates"] for one in pair), strict=True)
        if was != now
    )
    for number, (was, now) in enumerate(pairs):
        parts = {
            part: _describe_difference(part, was[part], now[part])
            for part in PARTS
            if was[part] != now[part]
        }
        # After a step that was equal, something else has changed the weights.
        is_between = number and [*parts] == ["model"]
        if is_between or (not parts and was["after"] != now["after"]):
            parts = {
                "result": "another one, with all else equal: some value, such as the number of the "
                "step or an average of the weights, is not restored"
            }
        if not parts:
            continue
        earlier = straight[: begun + number]
        again = [
            step for step, one in enumerate(earlier, 1) if one["data order"] == now["data order"]
        ]
        if "data order" in parts and again:
            parts["data order"] = f"batch {again[-1]} came again"
        texts = {part: f"{text} (step {begun + number + 1})" for part, text in parts.items()}
        if rate := next(rates, None):
            if "scheduler" in texts:
                texts["scheduler"] = rate
            elif "result" in texts:
                texts = {"learning rate": rate}
        return texts
    return {}


def _describe_difference(part: str, was: Any, now: Any) -> str:
    if part == "data order":
        return "another batch"
    keys = [key for key in {**was, **now} if was.get(key) != now.get(key)]
    if part in ("scheduler", "scaler") or "param_groups" in keys[0]:
        return f"{keys[0]} {now.get(keys[0])}, not {was.get(keys[0])}"
    return some_of(keys, 1)


# What a process does.


def _watch(
    mode: str,
    last: int,
    folder: Path,
    program: list[str],
    variables: Mapping[str, str],
    run: Callable[[], None],
    end: End,
) -> None:
    """Watch the state of a program until a step, in a mode of `StateWatch`."""

    def finish() -> None:
        end({"steps": watched.steps})

    os.environ |= variables
    kind, *words = program
    watched = StateWatch(last, finish, folder / "fresh.pt", mode)
    with watched.watching():
        if kind == "train":
            with contextlib.suppress(SystemExit):
                train_command.main(words, standalone_mode=False)
        elif kind == "resumed trainer":
            train_by(words[0], resume_from=lambda: _find_newest_checkpoint(folder))
        else:
            run()
    finish()


def _find_newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint that the killed process has left."""
    places = read_changes(folder)
    found = [one for place in places for one in [place, *place.rglob("*")] if one.suffix == ".ckpt"]
    return max(found, key=lambda one: one.stat().st_mtime, default=None)


# The command.


@screen_command("resume-check", example="--steps 6 batch_size=16")
def resume_check_command(
    program: list[str] = program_option(otherwise="train"),
    num_steps: int = steps_option(12, 3),
    kill_at: int | None = number_option(
        "Step in which the second run is killed; default: two thirds of the steps.", least=2
    ),
    resume_with: str = option(
        "Arguments that make the script resume, such as '--resume latest', after environment "
        "variables in capitals, such as RESUME=1.",
        "WORDS",
        default="",
    ),
) -> Ended:
    """Check that a resumed run is bit-equal.

    Without --script or --trainer it is the training of `curry-train train`, with its ARGUMENTS.
    Start it where no earlier run has left checkpoints, which the resume would load. A step is one
    of an optimizer: a GAN makes two in each iteration. Files that the runs make are removed. Exit
    status: 0 equal, 1 not equal, 2 wrong usage.
    """
    kill_step = kill_at or max(2, num_steps * 2 // 3)
    if not kill_step < num_steps:
        raise ValueError(f"--kill-at {kill_step} has to be below --steps {num_steps}")
    if resume_with and program[0] != "script":
        raise click.UsageError("--resume-with is for --script")
    kind, *words = program
    if kind == "train":
        every = f"checkpoint.rollback_every={max(1, kill_step // 2)}"
        words = [f"steps={num_steps}", every, *words]
        resume_with = "--resume latest"
    resume_words = shlex.split(resume_with)
    variables = [*itertools.takewhile(VARIABLE.match, resume_words)]
    words_again = [*words, *resume_words[len(variables) :]]
    again = ["resumed trainer" if kind == "trainer" else kind, *words_again]
    # Between two runs, too, a signal must leave no checkpoints of the killed one.
    with (
        stopped_by_signals(),
        tempfile.TemporaryDirectory() as folder,
        messages_on_screen() as show,
    ):
        found = check_resume(
            Path(folder),
            [kind, *words],
            again,
            num_steps=num_steps,
            kill_at=kill_step,
            show=show,
            variables=dict(one.split("=", 1) for one in variables),
        )
    echo_lines(*describe(found), indent="    ")
    return provenance() | found, not found["equal"]


def describe(found: Facts) -> list[str]:
    """Return the verdict first, then what the check would have noticed."""
    lines = [
        f"{found['steps']} steps, killed in step {found['killed_at']}, resumed after step "
        f"{found['resumed_from']}",
        f"equal to the bit: {found['compared']} steps",
    ]
    if not found["equal"]:
        lines[1:] = [f"NOT equal, {part}: {text}" for part, text in found["differences"].items()]
        lines.append("the weights after each step are equal all the same")
        if found["unequal_results"]:
            lines[-1] = f"the weights differ from step {found['unequal_results'][0]} on"
    lines.append("resumed without a part of the state, the check finds:")
    for part in PARTS:
        named = found["withheld"].get(part)
        if part in found["differences"]:
            text = "is not restored as it is"
        elif named is None:
            text = "proves nothing: there is none in this run"
        else:
            text = named.get(part, "proves nothing: the steps are equal without it")
        lines.append(f"  {part}: {text}")
    return [*lines, "not compared: values that no step reads, such as the best loss so far"]
