"""Cost and score of preflight: what it adds to a loop, and which planted faults it finds.

    python benchmarks/preflight.py --json evidence/preflight.json

A step of a toy loop takes microseconds, so the seconds on top of it are recorded; loops of a usual
size are compared with the same steps alone. Seconds are those of the processor, with one thread.
The loops are those of `tests/gates`.
Proof: `python -m pytest tests/benchmarks/test_recorders.py`.
"""

import contextlib
import io
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.gates import faulty_loops, healthy_loops, known_bugs, loops
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from curry_train.gates.loop import judge
from curry_train.gates.loop_trace import observe
from curry_train.workloads.models import transformer
from locate_models import pooled
from recording import Figures, record_parser, write_record

STEPS = 8
FAULTY = (loops, faulty_loops, known_bugs)
HEALTHY = (loops, healthy_loops)


def of_language() -> None:
    # 5 million parameters.
    model = transformer(depth=4, dim=256, vocabulary=4096, length=128).build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    while True:
        for _ in range(2):
            tokens = torch.randint(4096, (4, 129))
            logits = model(tokens[:, :-1]).flatten(0, 1)
            (F.cross_entropy(logits, tokens[:, 1:].flatten()) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def of_images() -> None:
    blocks = itertools.starmap(pooled, itertools.pairwise((3, 32, 64, 128)))
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128 * 16, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    while True:
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(32, 3, 32, 32)), torch.randint(10, (32,))).backward()
        optimizer.step()


SIZED = {"language model of 5M, 2 microbatches": of_language, "convolutions, 32 images": of_images}


class Ended(BaseException):
    """The loop has made its steps."""


def seconds_alone(train: Callable[[], Any], num_steps: int) -> float:
    """Return the seconds of so many steps of a loop that nobody looks at."""
    made = itertools.count(1)

    def end(*_) -> None:
        if next(made) >= num_steps:
            raise Ended

    start = time.process_time()
    hook = register_optimizer_step_post_hook(end)
    with hook, contextlib.suppress(Ended), contextlib.redirect_stdout(io.StringIO()):
        train()
    return time.process_time() - start


def row(name: str, train: Callable[[], Any], expected: str = "") -> Figures:
    """Run a loop with preflight and alone, and return a row of the record."""
    torch.manual_seed(0)
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        trace = observe(train, num_steps=STEPS)
    found = {one.gate.removeprefix("loop/"): one for one in judge(trace) if one.passed is False}
    seconds = time.process_time() - start
    torch.manual_seed(0)
    alone = seconds_alone(train, len(trace.windows))
    measured = found[expected].measured if expected in found else ""
    place = measured.partition(": ")[0]
    return {
        "loop": name,
        "expected": expected,
        "found": sorted(found),
        "held": place == loops.wrong_line(train) if expected else not found,
        "seconds_on_top": seconds - alone,
        "ratio": seconds / alone,
    }


def cases() -> Iterator[tuple[str, Callable[[], Any], str]]:
    """Yield each loop with its name and the check that must find its fault, if it has one."""
    tables = [module.FAULTY for module in FAULTY] + [{"": module.HEALTHY} for module in HEALTHY]
    for check, several in itertools.chain(*(table.items() for table in tables)):
        for one in several:
            yield f"{one.__module__}.{one.__name__}".removeprefix("tests.gates."), one, check


def main() -> None:
    """Record what preflight costs and finds."""
    parser = record_parser(__doc__)
    parser.add_argument("--only", default="", help="loops with this in their name")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # The first loop of a process also pays for what torch imports then; this one is not counted.
    row("", loops.plain)
    rows = [row(*case) for case in cases() if options.only in case[0]]
    sized = []
    for name, train in SIZED.items() if not options.only else ():
        seconds_alone(train, 2)
        sized.append(row(name, train))
    faulty = [one for one in rows if one["expected"]]
    healthy = [one for one in rows if not one["expected"]]
    score = {
        "faults": len(faulty),
        "faults_found_at_their_line": sum(one["held"] for one in faulty),
        "healthy": len(healthy),
        "alarms": sum(not one["held"] for one in healthy),
        "most_seconds_on_top": max(one["seconds_on_top"] for one in rows),
        "largest_ratio": max((one["ratio"] for one in sized), default=None),
    }
    print(score)
    write_record(options.json, {"score": score, "sized": sized, "loops": rows})


if __name__ == "__main__":
    main()
