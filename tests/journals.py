"""Write journals for the tests of reading, comparing and drawing."""

import contextlib
import itertools
import json
from pathlib import Path

from curry_train.runs import Journal


def clock():
    """Return a clock that moves by one second with each event."""
    return itertools.count(1_700_000_000).__next__


def facts(**config):
    return {
        "config": {"steps": 300, "optimizer": {"name": "adamw", "learning_rate": 3e-3}, **config},
        "code": {"revision": "a" * 40, "dirty": False},
        "environment": {
            "device": "cpu (x86_64)",
            "world_size": 1,
            "packages": {"torch": "2.13.0", "numpy": "2.0.0"},
        },
        "command": "python -m curry_train train",
    }


def loss_of(step):
    return 4.0 + 1.0 / step


def train(journal, steps, *, loss=loss_of, learning_rate=1e-3, **more):
    for step in steps:
        journal.write(
            "step",
            step=step,
            loss=loss(step),
            learning_rate=learning_rate,
            peak_bytes=2**30,
            seconds=0.1,
            **more,
        )
        if step % 10 == 0:
            journal.write("save", step=step, checkpoint=f"rollback/step-{step:08d}.dcp")


def plant(folder, *, last=20, loss=loss_of, **config):
    """Write an uneventful run from step 1 to `last`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with Journal(folder, facts=facts(**config), clock=clock()) as journal:
        train(journal, range(1, last + 1), loss=loss)
        journal.write("stop", step=last, reason="steps")
    return folder


def plant_eventful(folder):
    """Write 20 steps, a spike, back to 10, a kill at 30, a resume at 20, and the end at 40."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    with Journal(folder, facts=facts(), clock=clock()) as journal:
        train(journal, range(1, 19))
        train(journal, range(19, 21), loss=lambda step: 9.0)
        journal.write("spike", step=20, loss=9.0, reason="9 after 4.05")
        journal.write("rollback", step=10, from_step=20, reason="a spike")
        journal.write("skip", step=10, reason="64 samples")
        train(journal, range(11, 31), loss=lambda step: loss_of(step) + 0.001)
    resumed = facts(steps=40) | {"checkpoint": "rollback/step-00000020.dcp"}
    with Journal(folder, step=20, facts=resumed, clock=clock()) as journal:
        train(journal, range(21, 41), loss=lambda step: loss_of(step) + 0.002)
        journal.write("eval", step=40, metric="dev_loss", value=4.5)
        journal.write("stop", step=40, reason="steps")
    return folder


def lines_of(folder):
    """Return the events of a journal; a line that a kill has torn is none."""
    lines = []
    for line in Path(folder, "journal.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def column(folder, kind, name):
    """Return a fact of each event of a kind."""
    return [line[name] for line in lines_of(folder) if line["kind"] == kind]
