"""Replay boxes of bad steps with planted faults, and count what is named.

    python benchmarks/boxes.py --json evidence/boxes.json

40 boxes of NaN, overflow and spikes have to repeat to the bit and name the planted operation or
module; 40 of steps that depend on a clock, on entropy, on the process or on a count of calls must
not pass as repeated. Each training and each repeat is a process, as a user starts it.
Proof: `python -m pytest tests/benchmarks/test_recorders.py`.
"""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import boxes_program
from boxes_program import CHANGING, FAULTS, PLACES, build
from curry_train.cli.runs_replay import describe, repeat
from curry_train.runs.box import read_facts
from recording import Figures, record_parser, write_record

PROGRAM = str(Path(boxes_program.__file__).resolve())
Case = tuple[str, str, int]
TIMES = 3  # that a step is repeated which is to change


def cases(num_each: int) -> Iterator[Case]:
    """Yield faults in turns over the models, as many that repeat as that do not."""
    models = list(PLACES)
    for faults in (list(FAULTS), list(CHANGING)):
        for number in range(num_each):
            fault = faults[number % len(faults)]
            # One more model in each round of faults, and another place.
            name = models[(number + number // len(faults)) % len(models)]
            yield name, fault, number


def replayed(case: Case, folder: str) -> Figures:
    """Make the box of a case and replay it; return what was said, and whether that is right."""
    name, fault, seed = case
    words = [PROGRAM, *map(str, case)]
    times = 1 if fault in FAULTS else TIMES
    with contextlib.chdir(folder):
        subprocess.run([sys.executable, *words], check=True)
        (box,) = Path("run/boxes").iterdir()
        facts = read_facts(box)
        found = repeat(str(box), facts, ["script", *words], times=times, show=lambda message: None)
    first = found["repeats"][0]
    difference = found["difference"]
    lines = [difference or "repeats to the bit", *describe(found["step"], first)]
    is_right = difference is not None
    if fault in FAULTS:
        is_right = difference is None and _is_named(case, first)
    return {"model": name, "fault": fault, "seed": seed, "right": is_right, "said": lines}


def _is_named(case: Case, found: Figures) -> bool:
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


def main() -> None:
    """Count boxes that repeat and are named, and boxes that are said not to repeat."""
    parser = record_parser(__doc__)
    parser.add_argument("--each", type=int, default=40, help="boxes of either kind (default: 40)")
    options = parser.parse_args()
    rows = []
    for case in cases(options.each):
        with tempfile.TemporaryDirectory(prefix="boxes-") as folder:
            rows.append(replayed(case, folder))
        print(*rows[-1].values(), sep=", ", flush=True)
        named = [row["right"] for row in rows if row["fault"] in FAULTS]
        told = [row["right"] for row in rows if row["fault"] in CHANGING]
        figures = {
            "repeating": {"boxes": len(named), "to_the_bit_and_named": sum(named)},
            "changing": {"boxes": len(told), "said_so": sum(told)},
            "cases": rows,
        }
        # After each case, so that an interruption loses none.
        write_record(options.json, figures)


if __name__ == "__main__":
    main()
