"""Cost and score of preflight: what it adds to a loop, and which planted faults it finds.

    python benchmarks/preflight.py --json evidence/preflight.json

A step of a toy loop takes microseconds, so the seconds on top of it are recorded; loops of a usual
size are compared with the same steps alone. Seconds are those of the processor, with one thread.
The loops are those of `tests/gates`.
Proof: `python -m pytest tests/benchmarks/test_recorders.py`.
"""

import contextlib
import io
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from types import ModuleType
from typing import Any

import click
import faulty_loops
import healthy_loops
import known_bugs
import loops
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from curry_train.cli.options import json_option
from curry_train.core.wording import provenance, write_json
from curry_train.gates.loop import judge
from curry_train.gates.loop_trace import Trace, observe

STEPS = 8
FAULTY = (loops, faulty_loops, known_bugs)
HEALTHY = (loops, healthy_loops)


class Reader(nn.Module):
    """A language model of 5 million parameters."""

    def __init__(self, width: int = 256, vocabulary: int = 4096) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden: Tensor = self.layers(self.embed(tokens), mask=mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits


def of_language(num_microbatches: int) -> Callable[[], None]:
    def train() -> None:
        model = Reader()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for number in count(1):
            tokens = torch.randint(4096, (4, 129))
            logits = model(tokens[:, :-1]).flatten(0, 1)
            (F.cross_entropy(logits, tokens[:, 1:].flatten()) / num_microbatches).backward()
            if number % num_microbatches == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return train


def of_images() -> None:
    widths = (3, 32, 64, 128)
    blocks = [
        nn.Sequential(nn.Conv2d(one, two, 3, padding=1), nn.BatchNorm2d(two), nn.ReLU(), pool)
        for one, two, pool in zip(widths, widths[1:], [nn.MaxPool2d(2)] * 3, strict=False)
    ]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128 * 16, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    while True:
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(32, 3, 32, 32)), torch.randint(10, (32,))).backward()
        optimizer.step()


SIZED = {
    "language model of 5M": of_language(1),
    "the same, 4 microbatches": of_language(4),
    "convolutions, 32 images": of_images,
}


class Ended(BaseException):
    """The loop has made its steps."""


def seconds_alone(train: Callable[[], Any], num_steps: int) -> float:
    """Return the seconds of so many steps of a loop that nobody looks at."""
    made = count(1)

    def end(*_: Any) -> None:
        if next(made) >= num_steps:
            raise Ended

    hook = register_optimizer_step_post_hook(end)
    start = time.process_time()
    try:
        with contextlib.suppress(Ended), contextlib.redirect_stdout(io.StringIO()):
            train()
        return time.process_time() - start
    finally:
        hook.remove()


def observed(train: Callable[[], Any]) -> tuple[Trace, float]:
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        trace = observe(train, num_steps=STEPS)
    return trace, time.process_time() - start


def row(name: str, train: Callable[[], Any], expected: str = "") -> dict[str, Any]:
    """Run a loop with preflight and alone, and return a row of the record."""
    torch.manual_seed(0)
    trace, seconds = observed(train)
    start = time.process_time()
    found = {one.gate.removeprefix("loop/"): one for one in judge(trace) if one.passed is False}
    seconds += time.process_time() - start
    torch.manual_seed(0)
    steps = len(trace.windows)
    alone = seconds_alone(train, steps)
    measured = found[expected].measured if expected in found else ""
    place = measured.partition(": ")[0]
    return {
        "loop": name,
        "expected": expected,
        "found": sorted(found),
        "held": place == loops.wrong_line(train) if expected else not found,
        "steps": steps,
        "seconds_alone": alone,
        "seconds_on_top": seconds - alone,
    }


def cases(only: str) -> Iterator[tuple[str, Callable[[], Any], str]]:
    def chosen(module: ModuleType, train: Callable[[], Any]) -> bool:
        return only in f"{module.__name__}.{train.__name__}"

    for module in FAULTY:
        for check, several in module.FAULTY.items():
            yield from [(one.__name__, one, check) for one in several if chosen(module, one)]
    for module in HEALTHY:
        yield from [(one.__name__, one, "") for one in module.HEALTHY if chosen(module, one)]


@click.command()
@click.option("--only", default="", metavar="WORD", help="Only loops with this in their name.")
@json_option()
def main(only: str, json_path: str | None) -> None:
    """Record what preflight costs and finds."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # The first loop of a process also pays for what torch imports then; this one is not counted.
    row("", loops.plain)
    rows = [row(*case) for case in cases(only)]
    sized = []
    for name, train in SIZED.items() if not only else ():
        seconds_alone(train, 2)
        measured = row(name, train)
        measured["ratio"] = 1 + measured["seconds_on_top"] / measured["seconds_alone"]
        sized.append(measured)
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
    for name, value in score.items():
        click.echo(f"{name}: {value}")
    for one in rows:
        if not one["held"]:
            click.echo(f"  {one['loop']}: expected {one['expected'] or 'none'}, {one['found']}")
    if json_path:
        facts = provenance(torch.device("cpu"))
        write_json(json_path, facts | {"score": score, "sized": sized, "loops": rows})


if __name__ == "__main__":
    main()
