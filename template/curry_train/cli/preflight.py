"""Command `curry-train preflight`: check the user's own training loop before it costs GPU hours.

Proof: `python -m pytest tests/cli/test_preflight.py`.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

from ..core.wording import provenance
from ..gates.loop import DEFAULT_STEPS
from ..gates.loop_events import grouped
from ..gates.loop_run import preflight_program
from ..gates.verdict import Verdict
from .options import RANKS_OPTION, program_option, steps_option
from .parameters import number_option
from .screen import Ended, UnusableInput, echo_lines, screen_command


@screen_command("preflight", example="--script train.py -- --rate 0.1")
def preflight_command(
    program: list[str] = program_option(),
    num_steps: int = steps_option(DEFAULT_STEPS, 2),
    num_ranks: int = RANKS_OPTION,
    num_layers: int | None = number_option(
        "Build models that have a configuration with so many layers, where they are too large.",
        "--shrink",
    ),
) -> Ended:
    """Check your own training loop, as it is.

    It runs a few steps, and a quick loop into its second epoch, in a process of its own. Changed
    files are put back. Exit status: 0 nothing is wrong, 1 a check failed, 2 the loop could not be
    checked.
    """
    kind, *words = program
    verdicts = preflight_program(
        kind, words, num_steps=num_steps, num_ranks=num_ranks, num_layers=num_layers or 0
    )
    echo_lines(*describe(shlex.join(words), verdicts), indent="    ")
    results = [asdict(verdict) for verdict in verdicts]
    facts = {"program": words, "steps": num_steps, "results": results}
    return provenance() | facts, status_of(verdicts, verdicts[0].hint)


def status_of(verdicts: Sequence[Verdict], reason: str) -> int | UnusableInput:
    """Return 1 if a gate failed, 0 if one held, else an error with the reason why none applied."""
    outcomes = {verdict.passed for verdict in verdicts}
    if False in outcomes:
        return 1
    return 0 if True in outcomes else UnusableInput(f"nothing was checked: {reason}")


# Failed checks that are printed with what is required.
MOST_IN_FULL = 3


def describe(program: str, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield the verdict first, then what failed, and what held or does not apply in a line each."""
    short = [replace(one, gate=one.gate.removeprefix("loop/")) for one in verdicts]
    held, failed, not_applicable = (
        [one for one in short if one.passed is outcome] for outcome in (True, False, None)
    )
    outcome = f"{len(failed)} of {len(failed) + len(held)} checks FAILED"
    yield f"{program}: {outcome if failed else f'{len(held)} checks held'}"
    for verdict in failed[:MOST_IN_FULL]:
        yield ""
        yield f"{verdict.gate}: {verdict.measured}"
        yield f"  required: {verdict.required}"
        yield f"  what to do: {verdict.hint}"
    yield ""
    # Mended faults often take others with them.
    for verdict in failed[MOST_IN_FULL:]:
        yield f"{verdict.gate}: {verdict.measured}"
    yield f"held: {', '.join(verdict.gate for verdict in held) or 'none'}"
    if not_applicable:
        texts = [
            f"{', '.join(verdict.gate for verdict in several)} ({several[0].hint})"
            for several in grouped(not_applicable, "hint")
        ]
        yield f"not applicable: {'; '.join(texts)}"
