"""Measure what saving costs: a commit, its memory, the steps next to it, a bounded cadence.

    python benchmarks/saving_cost.py commit --json evidence/checkpoint_save.json
    python benchmarks/saving_cost.py memory --mib 7629 --json evidence/checkpoint_memory.json
    python benchmarks/saving_cost.py steps --json evidence/saving_cost.json
    python benchmarks/saving_cost.py cadence --json evidence/checkpoint_cadence.json

`commit` compares a save with a plain `dcp.save` of the same tensors, a load with a `dcp.load`, and
the stall of a save in the background with a save in the foreground. `memory` compares the highest
host memory of a training that saves, or loads, with that of one that calls torch's functions.
`steps` compares rounds of 35 steps after a save with rounds without one, and the whole loop of a
small model. `cadence` trains with a bound on the time of all saves. What is compared runs in turns,
and the median of the pairs' ratios counts.
Proof: `python -m pytest tests/benchmarks/test_recorders.py`.
"""

import argparse
import functools
import itertools
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from curry_train.core.timing import paired_ratio, time_in_turns
from curry_train.runs import load_chosen, saving
from curry_train.runs.background import BackgroundSaver
from curry_train.runs.policy import SavingPolicy
from curry_train.runs.policy_config import PolicyConfig
from curry_train.runs.state import TrainingState
from curry_train.runs.store import Store
from recording import Figures, record_parser, write_record

BYTES_PER_PARAMETER = 12  # float32 weights and the two moments of Adam
LAYER_WIDTH = 1024
SMALL_WIDTH = 135  # six layers, 1.3 MB with the moments
# A save takes about as long whatever a step takes, so its part of the loop falls with longer steps.
SMALL_BATCHES = (32, 512)
OVERHEAD = 0.035
# From one save to the next, next to which steps are timed, and of their batches.
NUM_STEPS = 35
NUM_ROWS = 128


def made_state(mib: int) -> TrainingState:
    """Make a model and AdamW with its moments, together of about so many MiB."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    layers = max(1, round(mib * 2**20 / (BYTES_PER_PARAMETER * LAYER_WIDTH * LAYER_WIDTH)))
    model = nn.Sequential(*[nn.Linear(LAYER_WIDTH, LAYER_WIDTH) for _ in range(layers)])
    state = TrainingState(model, torch.optim.AdamW(model.parameters()))
    train_step(state, 8)
    return state


def train_step(state: TrainingState, rows: int) -> None:
    state.model(torch.randn(rows, LAYER_WIDTH)).square().mean().backward()
    state.optimizers[0].step()
    state.optimizers[0].zero_grad()


def seconds_of(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def discard_all(store: Store) -> None:
    for saved in store.committed():
        store.discard(saved)


def compared(plain: Sequence[float], ours: Sequence[float]) -> Figures:
    """Compare pairs of seconds."""
    return {"ratio": paired_ratio(ours, plain).median, "pairs": len(plain)}


# A commit.


def measure_stall(state: TrainingState, folder: Path, *, pairs: int) -> Figures:
    """Compare the stall by a background save with the time of a save in the foreground.

    After each background save, forward and backward passes run for as long as a synchronous save
    takes; then the optimizer steps.
    """
    synchronous = []
    stalled = []
    with Store(folder / "stall") as store, BackgroundSaver(store) as saver:
        for _ in range(pairs + 1):
            synchronous.append(seconds_of(lambda: store.save("recovery", 1, state)))
            stalled_before = saver.stalled
            saver.save("recovery", 2, state)
            until = time.perf_counter() + synchronous[-1]
            while time.perf_counter() < until:
                state.model(torch.randn(64, LAYER_WIDTH)).square().mean().backward()
            train_step(state, 64)
            stalled.append(saver.stalled - stalled_before)
            saver.finish()
            discard_all(store)
    return compared(synchronous[1:], stalled[1:])


def measure_commit(folder: Path, options: argparse.Namespace) -> Figures:
    """Compare the store's save and load with those of torch, of the same tensors.

    torch's save syncs its files too. The store's load verifies the files first.
    """
    state = made_state(options.mib)

    def compare(action: str, before: Callable[[], object] = lambda: None) -> Figures:
        ways = [functools.partial(ACTIONS[f"{saver}.{action}"], state, folder) for saver in SAVERS]
        return compared(*time_in_turns(ways, rounds=options.rounds, warmup=1, before=before))

    def remove() -> None:
        for saver in SAVERS:
            shutil.rmtree(folder / saver, ignore_errors=True)
        os.sync()  # otherwise a save would also wait for earlier writes

    for saver in SAVERS:
        ACTIONS[f"{saver}.save"](state, folder)
    return {
        # First, as a resume does it: saves would leave memory that `dcp.load` takes again, and it
        # would need half of the time.
        "loading": compare("load"),
        "integrity": compare("save", remove),
        "stall": measure_stall(state, folder, pairs=options.rounds),
    }


# The memory of a save and of a load.

ACTIONS = {
    "plain.save": lambda state, folder: save(_tensors(state), checkpoint_id=folder / "plain"),
    "ours.save": lambda state, folder: Store(folder / "ours").save("recovery", 1, state),
    "plain.load": lambda state, folder: load(
        _tensors(state),
        checkpoint_id=folder / "plain",
        planner=DefaultLoadPlanner(flatten_state_dict=False),
    ),
    "ours.load": lambda state, folder: load_chosen(folder / "ours", state),
}

SAVERS = ("plain", "ours")


def _tensors(state: TrainingState) -> dict[str, Any]:
    return dict(state.snapshot().tensors)


def highest_memory(name: str, folder: Path, mib: int) -> int:
    """Return the most resident bytes during an action, in a process that did nothing before."""
    state = made_state(mib)
    # Linux forgets what was resident before.
    Path("/proc/self/clear_refs").write_text("5")
    ACTIONS[name](state, folder)
    facts = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(facts["VmHWM"].split()[0])


def measure_memory(folder: Path, options: argparse.Namespace) -> Figures:
    found = {}
    for name in ACTIONS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found[name] = pool.apply(highest_memory, (name, folder, options.mib))
    ratios = {one: found[f"ours.{one}"] / found[f"plain.{one}"] for one in ("save", "load")}
    return found | {"memory": ratios}


# The steps next to a save.


def one_round(state: TrainingState, saver: BackgroundSaver | None) -> list[float]:
    """Begin a save, if there is a saver, and train until the next is due; return the seconds.

    The saver's hook waits before the optimizer's step, so that time is the step's.
    """
    os.sync()
    seconds = []
    for index in range(NUM_STEPS):
        began = time.perf_counter()
        if saver is not None and index == 0:
            saver.save("rollback", 1, state)
        train_step(state, NUM_ROWS)
        seconds.append(time.perf_counter() - began)
    if saver is not None:
        saver.finish()
        discard_all(saver.store)
    return seconds


def measure_rounds(folder: Path, options: argparse.Namespace) -> Figures:
    """Compare each round after a save with the round without one; the first pair warms up."""
    state = made_state(options.mib)
    all_steps = []
    slowest_step = []
    with Store(folder / "rounds") as store, BackgroundSaver(store) as saver:
        for number in range(options.rounds + 1):
            # In turns, because the second round finds the caches as the first one left them.
            if number % 2:
                plain, ours = one_round(state, None), one_round(state, saver)
            else:
                ours, plain = one_round(state, saver), one_round(state, None)
            all_steps.append(sum(ours) / sum(plain))
            slowest_step.append(max(ours) / statistics.median(plain))
    return {
        "all_steps": statistics.median(all_steps[1:]),
        "slowest_step": statistics.median(slowest_step[1:]),
    }


def small_loop(folder: Path | None, *, num_steps: int, rows: int) -> float:
    """Return the seconds of a loop of a small model, with saves where a folder is given."""
    torch.manual_seed(0)
    layers = [(nn.Linear(SMALL_WIDTH, SMALL_WIDTH), nn.ReLU()) for _ in range(6)]
    model = nn.Sequential(*itertools.chain(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [torch.randn(rows, SMALL_WIDTH)] * num_steps

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    if folder is None:
        return seconds_of(lambda: [step(batch) for batch in batches])
    often = {"rollback_every": 50, "recovery_every": None}
    with saving(model, optimizer, runs=folder, in_background=True, **often) as run:
        return seconds_of(lambda: [run.step(loss=step(batch)) for batch in run.batches(batches)])


def measure_steps(folder: Path, options: argparse.Namespace) -> Figures:
    """Compare rounds of steps, and in turns the small loop with saves with the loop alone."""
    small = []
    for rows in SMALL_BATCHES:
        loop = functools.partial(small_loop, num_steps=options.small_steps, rows=rows)
        pairs = [
            (loop(None), loop(folder / f"small-{rows}-{number}"))
            for number in range(options.rounds + 1)
        ]
        # The first pair warms up.
        plain, ours = zip(*pairs[1:], strict=True)
        small.append({"loop": paired_ratio(ours, plain).median, "batch": rows})
    return {"savers": {"ours": measure_rounds(folder, options)}, "small": small}


# A cadence with a bound.


def train_with_cadence(folder: Path, options: argparse.Namespace, *, background: bool) -> Figures:
    """Train for a time and return the share of the saves' time in that of all steps.

    `highest` is the largest share so far, taken after each save.
    """
    state = made_state(options.mib)
    config = PolicyConfig(rollback_every="auto", recovery_every=None, overhead=OVERHEAD)
    highest = 0.0
    saving_seconds = 0.0
    stepping_seconds = 0.0
    with Store(folder) as store, BackgroundSaver(store) as saver:
        policy = SavingPolicy(store, config, saver=saver if background else None)
        until = time.perf_counter() + options.seconds
        while time.perf_counter() < until:
            stalled_before = saver.stalled
            seconds = seconds_of(lambda: train_step(state, 64))
            state.step += 1
            # The optimizer step waits for a background save; that time belongs to the save.
            waited = saver.stalled - stalled_before
            stepping_seconds += seconds - waited
            began = time.perf_counter()
            committed = policy.after_step(state.step, state, {})
            saving_seconds += time.perf_counter() - began + waited
            if committed:
                highest = max(highest, saving_seconds / stepping_seconds)
        policy.finish()
    return {"at_the_end": saving_seconds / stepping_seconds, "highest": highest}


def measure_cadence(folder: Path, options: argparse.Namespace) -> Figures:
    return {
        name: train_with_cadence(folder / name, options, background=name == "background")
        for name in ("foreground", "background")
    }


MEASURES = {
    "commit": measure_commit,
    "memory": measure_memory,
    "steps": measure_steps,
    "cadence": measure_cadence,
}


def main() -> None:
    """Measure, print and write."""
    parser = record_parser(__doc__)
    parser.add_argument("what", choices=[*MEASURES])
    parser.add_argument("--mib", type=int, default=1024, help="size of the state in MiB")
    parser.add_argument("--rounds", type=int, default=7, help="timed pairs")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a training with a bound")
    parser.add_argument("--small-steps", type=int, default=1000, help="steps of the small loop")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = MEASURES[options.what](Path(name), options)
    print(found)
    write_record(options.json, found)


if __name__ == "__main__":
    main()
