"""The command `runs replay`: repeat a bad step, and name the operation that made it bad.

Proof: `python -m pytest tests/cli/test_runs_replay.py`.
"""

import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from ..core.wording import three_digits
from ..gates.loop_run import End, run_ranks
from ..runs.box import BoxFacts, read_facts
from ..runs.fingerprints import read_fingerprints
from ..runs.replay import Replay, examine
from ..runs.values import Facts
from .options import program_option
from .parameters import argument, number_option
from .screen import Ended, echo_lines, messages_on_screen, screen_command


@screen_command("replay", example="run/boxes/step-00000003 --script night.py")
def replay_command(
    box: str = argument(),
    program: list[str] = program_option(otherwise=""),
    times: int = number_option(
        "Repeat it so often, and compare the operations of the repeats.", default=1
    ),
) -> Ended:
    """Repeat a bad step that a run has kept in a box.

    It runs your script, with the ARGUMENTS of the run, from the state of the box to the bad step,
    and saves nothing. Exit status: 0 the step repeats to the bit, 1 it does not, 2 wrong usage.
    """
    facts = read_facts(box)
    if not program[0]:
        raise click.UsageError(f"give the script of the run, which was: {facts.program:.200}")
    with messages_on_screen() as show_message:
        found = repeat(box, facts, program, times=times, show=show_message)
    first = found["repeats"][0]
    difference = found["difference"]
    num_equal = len(facts.losses.keys() & first["steps"].keys())
    after = ", and the parameters after them" if facts.parameters else ""
    equal = f"repeats to the bit: {num_equal} losses of the run are equal{after}"
    echo_lines(
        f"step {facts.step} of the box: {facts.reason}",
        difference or equal,
        *(f"  note: {note}" for note in first["notes"]),
        *describe(found["step"], first),
        indent="    ",
    )
    # They are thousands of lines of JSON.
    del first["operations"]
    results = {"box": box, "bad_step": facts.step} | found | {"repeats": first}
    return results, bool(difference)


def repeat(
    box: str, facts: BoxFacts, program: list[str], *, times: int, show: Callable[[str], None]
) -> Facts:
    """Repeat the step; return the repeats, the step that is to be looked at, and a difference.

    That step is an earlier one, where that could not be made, left parameters that are not finite,
    or differed.
    """
    until = facts.step
    differed = False
    while True:
        repeats: list[Facts] = []
        while len(repeats) < times:
            show(f"step {until}, repeat {len(repeats) + 1} of {times}")
            repeats.append(_run(box, until, program, facts.world_size))
            # Only a second repeat tells what differs each time from what differs here.
            if times == 1 and until == facts.step and _find_unlike_step(facts, repeats[0]):
                times = 2
        steps = zip(*(one["steps"].items() for one in repeats), strict=False)
        unlike = (int(same[0][0]) for same in steps if any(one != same[0] for one in same))
        last = max(map(int, repeats[0]["steps"]))
        earlier = [last, repeats[0]["not finite"], next(unlike, None)]
        differed |= earlier[2] is not None
        least = min(one for one in earlier if one is not None)
        if least >= until:
            break
        until = least
    difference = _find_difference(facts, until, repeats)
    if differed and difference is None:
        difference = f"does not repeat: the repeats differed in step {until}, and once not"
    return {"step": until, "difference": difference, "repeats": repeats}


def _run(box: str, until: int, program: list[str], num_ranks: int) -> Facts:
    """Return what the ranks have found: the operation is the first one of any rank."""
    with tempfile.TemporaryDirectory(prefix="curry-train-replay-") as record:

        def ran(folder: str | None) -> Facts:
            job = functools.partial(_replay, box, until, folder)
            found = run_ranks(job, program, num_ranks=num_ranks, saves=True, ignored=[record])
            if not all("steps" in one for one in found):
                raise ValueError(f"the program ended before step {until}: give the run's ARGUMENTS")
            # The losses of the box are those of the first rank.
            return found[0]

        first = ran(record)
        if first["compiled"]:
            first = ran(None)
            first["notes"].append(
                "it calls torch.compile: the operations are those of a repeat without it"
            )
        examined = [examine(read_fingerprints(record, rank)) for rank in range(num_ranks)]
    bad = [rank for rank, one in enumerate(examined) if one["origin"]]
    # The other ranks got the value from the one where it came first.
    rank = min(bad, key=lambda rank: examined[rank]["origin"]["place"], default=0)
    return first | examined[rank] | {"rank": rank if num_ranks > 1 else None}


def _replay(box: str, until: int, record: str | None, run: Callable[[], None], end: End) -> None:
    """Run the script, whose call of `saving` begins at the state of the box, up to a step."""
    root = Path(tempfile.mkdtemp(prefix="curry-train-replay-"))
    with Replay(box, until=until, root=root, record=record, end=end).running():
        run()


def _find_unlike_step(facts: BoxFacts, found: Facts) -> str | None:
    """Name the first step that is not what the run has computed."""
    for step, (loss, parameters) in found["steps"].items():
        if step in facts.losses and loss != facts.losses[step]:
            was, now = (float.fromhex(one) for one in (facts.losses[step], loss))
            return f"the loss of step {step} was {was!r} and is {now!r}"
        if int(step) == facts.step and facts.parameters not in (None, parameters):
            return f"the parameters after step {step} are not those of the run"
    return None


def _find_difference(facts: BoxFacts, step: int, repeats: Sequence[Facts]) -> str | None:
    for one in repeats[1:]:
        for was, now in zip(repeats[0]["operations"], one["operations"], strict=False):
            if was != now:
                what = (
                    "does not repeat: hardware, a race, or a value that changes from start to start"
                )
                operation = _describe_operation(now[0])
                return f"{what}; the repeats differ from {operation} of step {step} on"
        if one["steps"] != repeats[0]["steps"]:
            return f"does not repeat: the repeats differ after the operations of step {step}"
    if unlike := _find_unlike_step(facts, repeats[0]):
        return (
            f"does not repeat what the run computed, though the repeats are equal: {unlike}. It "
            "depends on a value that the state lacks, or on the machine or versions"
        )
    return None


def _describe_operation(one: Facts) -> str:
    place = f", {one['line']}" if one["line"] else ""
    return f"{one['phase']}: {one['name']} in {one['module']}{place}"


def describe(step: int, found: Facts) -> list[str]:
    """Name the first operation that is not finite, or what has grown where all is finite."""
    origin = found["origin"]
    if origin is not None:
        result = _format_range(origin["result"])
        if origin["phase"] == "data":
            return [f"step {step}, data: {origin['name']} is {result}"]
        inputs = [
            f"  input {number}: {_format_range(one)}" for number, one in enumerate(origin["inputs"])
        ]
        rank = "" if found["rank"] is None else f" (rank {found['rank']})"
        where = f"step {step}, {_describe_operation(origin)}"
        return [f"{where} is the first with {result}{rank}", *inputs]
    loss = float.fromhex(found["steps"][str(step)][0])
    line = f"step {step}: loss {loss:.6g}, gradient norm {found['gradient']:.6g}"
    grown = found["growth"]
    if grown is None:
        return [line, "  no state from before an earlier step is saved, to compare it with"]
    line += f"; in step {step - 1} the norm was {found['gradient before']:.6g}"
    lines = [line]
    if grown["batch"] >= max(2.0, grown["gain"]):
        lines.append(f"  the input of the model is {three_digits(grown['batch'])} times as large")
    elif grown["gain"] >= 2:
        before, now = grown["sizes"]
        where = grown["module"] or "the model"
        lines.append(f"  outputs of {where} have grown: up to {now:.4g}, before {before:.4g}")
    else:
        lines.append("  no module's outputs have grown: look at the targets of the batch")
    times = three_digits(grown["gradient"])
    return [*lines, f"  the gradient of {grown['parameter']} has grown most, {times} times"]


def _format_range(ends: Sequence[float]) -> str:
    low, high = ends
    return "NaN" if math.isnan(low) else f"{low:.6g} to {high:.6g}"
