"""Run many small trainings under the watchdog, sound ones and ones with planted spikes.

`make spikes` runs it; evidence/loss_spike.json is its record. Proof:
`python -m pytest tests/runs/test_spike.py -k trainings`.
"""

import itertools
import math

import numpy
import torch
from torch import nn

from curry_train.runs.policy_config import SpikeConfig
from curry_train.runs.spike import SpikeWatchdog
from recording import record_parser, write_record

NUM_HEALTHY = 400
NUM_PLANTED = 100
FAULTS = ("bad_samples", "learning_rate", "not_a_number")
NUM_STEPS = 160
LASTS = 4  # steps of a planted fault


def small_training(seed, *, fault=None, at=None):
    """Train a small classifier or regression and return its losses.

    Seeds vary the optimizer (SGD or AdamW), the learning rate over a decade and batches from 2 to
    256. A fault begins at step `at`: samples 100 times as large, the rate times 300, or NaN.
    """
    random = numpy.random.default_rng(seed)
    torch.manual_seed(seed)
    inputs, teacher = torch.randn(256, 16), torch.randn(16, 10)
    targets = (inputs @ teacher + 1.5 * torch.randn(256, 10)).argmax(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    kind = torch.optim.AdamW if random.random() < 0.6 else torch.optim.SGD
    rate = 10 ** random.uniform(-3, -1.7)
    optimizer = kind(model.parameters(), lr=rate)
    size = int(random.choice([2, 4, 8, 32, 256]))
    regression = random.random() < 0.3
    losses = []
    for step in range(1, NUM_STEPS + 1):
        now = fault if at is not None and at <= step < at + LASTS else None
        rows = torch.randint(256, (size,))
        taken = inputs[rows]
        if now == "bad_samples":
            taken = taken * 100.0
        elif now == "not_a_number":
            taken = taken * math.nan
        optimizer.param_groups[0]["lr"] = rate * (300.0 if now == "learning_rate" else 1.0)
        outputs = model(taken)
        if regression:
            loss = (outputs - (inputs @ teacher)[rows]).square().mean()
        else:
            loss = nn.functional.cross_entropy(outputs, targets[rows])
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def alarms(losses, **config):
    watchdog = SpikeWatchdog(SpikeConfig(**config))
    return [*filter(None, itertools.starmap(watchdog.observe, enumerate(losses, start=1)))]


def planted_case(seed, fault):
    """Plant a fault and return whether its spike was found in time, or None without a spike.

    In time means by the third loss in a row above three times the greatest of the 40 before, or by
    the first that is not finite.
    """
    at = 60 + int(numpy.random.default_rng(seed).integers(60))
    losses, patience = small_training(seed, fault=fault, at=at), SpikeConfig().patience
    limit = 3 * max(losses[at - 41 : at - 1])
    row = 0
    for step, loss in enumerate(losses[at - 1 :], start=at):
        row = row + 1 if loss > limit else 0
        if row == patience or not math.isfinite(loss):
            due = step
            break
    else:
        return None
    found = alarms(losses)
    return bool(found) and at <= found[0].step <= due


def measure(num_healthy, num_planted):
    num_alarms = dict.fromkeys((1, 3), 0)
    for seed in range(num_healthy):
        losses = small_training(seed)
        for patience in num_alarms:
            num_alarms[patience] += bool(alarms(losses, patience=patience))
    found = {}
    for fault in FAULTS:
        held = [planted_case(seed, fault) for seed in range(num_planted)]
        found[fault] = {"spikes": num_planted - held.count(None), "in_time": held.count(True)}
    false_alarms = {f"patience_{patience}": number for patience, number in num_alarms.items()}
    return {"sound": {"trainings": num_healthy, "false_alarms": false_alarms}, "planted": found}


def main():
    parser = record_parser(__doc__)
    parser.set_defaults(json="-")
    options = parser.parse_args()
    torch.set_num_threads(1)
    write_record(options.json, measure(NUM_HEALTHY, NUM_PLANTED))


if __name__ == "__main__":
    main()
