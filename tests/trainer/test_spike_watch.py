"""Roll a training back from a spike, the same on every rank and after a resume.

Run with `python -m pytest tests/trainer/test_spike_watch.py`.
"""

import contextlib

import pytest
import torch
from journals import lines_of

from curry_train.cli.train import open_named_run
from curry_train.config import load_config
from curry_train.trainer import train_run

WORDS = (
    "model=training_models:with_dropout", "device=cpu", "steps=48", "batch_size=4", "microbatch=2",
    "evaluate={every: null}", "checkpoint={rollback_every: 6}", "data.dev_fraction=0",
    "spike={action: rollback, window: 16, skip_around: 2, threshold: 8}",
    "optimizer.learning_rate=1e-3",
)  # fmt: skip
BAD = (34, 36)  # steps


def plant(run, steps=BAD, times=20.0):
    """Multiply the loss of the samples of these steps, and so their gradient."""
    stream = run.stream
    places = range((steps[0] - 1) * stream.batch_size, steps[1] * stream.batch_size)
    stream.dataset = Marked(stream.dataset, {int(one) for one in stream.order(list(places))}, times)
    sound = run.task.loss
    run.task.loss = lambda module, batch: sound(module, batch) * batch["times"]


class Marked:
    """A dataset whose batches carry the factor of their loss."""

    def __init__(self, dataset, bad, times):
        self.dataset, self.bad, self.times = dataset, bad, times

    def __len__(self):
        return len(self.dataset)

    def batch(self, samples):
        is_bad = any(int(sample) in self.bad for sample in samples)
        return self.dataset.batch(samples) | {"times": torch.tensor(self.times if is_bad else 1.0)}


def trained(runs, *words, resume=None, steps=BAD, at_step=None, planted=True):
    @contextlib.contextmanager
    def watch(run):
        yield at_step or (lambda report: None)

    config = load_config(None, [*WORDS, f"runs={runs}", *words])
    with open_named_run(config, resume=resume) as run:
        if planted:
            plant(run, steps)
        return train_run(run, watch=[watch])


def events_of(folder, *kinds):
    return [line for line in lines_of(folder) if line["kind"] in kinds]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["checkpoint={rollback_every: null, recovery_every: null}"],
            "spike.action must be warn or none, or",
        ),
        (
            ["checkpoint={rollback_every: 1}"],
            r"rollback_every x \(checkpoint.retention.rollback_keep - 1\) at least 5",
        ),
        (
            ["data.skip=[[400, 500]]"],
            r"data.skip must be of positions that the run reaches; 48 steps of 4 end at 192",
        ),
        (["data.skip=[[5, 5]]"], r"data.skip must be pairs such as \[\[5760, 5888\]\]"),
    ],
)
def test_settings_that_can_not_work_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        load_config(None, [*WORDS, *words])
