"""Measure one piece of the figures for a CUDA device, a row at a time.

    python benchmarks/cuda_pieces.py memory --folder evidence/cuda --minutes 8

A piece is a list of rows, and its file is written after each: a call that is cut off loses one row,
and the next call goes on after the rows that are there. A row that raises is recorded with its
error; a row in which the process ended twice is, too. `--again` measures rows with an error again.
`benchmarks/evidence_cuda.py` runs all pieces.

With `--dry-run` toy sizes run on the CPU, and a stand-in answers what torch.cuda is asked.

Proof: `python -m pytest tests/benchmarks/test_evidence_cuda.py`.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cuda_peaks
import cuda_strategies
from cuda_peaks import NotFresh
from cuda_setting import (
    DRY_RUN,
    EVIDENCE,
    ROOT,
    Figures,
    Row,
    Setting,
    StandInCuda,
    case_of,
    cuda,
    fresh_device,
    recorded,
    timed_in_turns,
)
from curry_train.bench.steps import Lever, TrainingStep, find_lever
from curry_train.core.measure import is_out_of_memory, peak_of_step
from curry_train.core.timing import paired_ratio, spread_of
from curry_train.core.wording import provenance
from curry_train.plan.planner import Planner
from curry_train.primitives.cross_entropy import chunked_cross_entropy
from curry_train.runs.background import BackgroundSaver
from curry_train.runs.state import TrainingState
from curry_train.runs.store import Store
from curry_train.workloads.models import BUILTIN_WORKLOADS
from curry_train.workloads.workload import Case

# Gates.

GATE_SECONDS = 150


def gates(setting: Setting) -> Iterator[Row]:
    """All gates of the built-in models, on the device."""
    # In a dry run only the way to the gates is new: the gates themselves have tests.
    names = ["mlp"] if setting.is_dry else [*BUILTIN_WORKLOADS]
    for name in names:
        yield Row(name, partial(_gates_of, setting, name), seconds=60)


def _gates_of(setting: Setting, model: str) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "gates.json"
        words = [sys.executable, str(ROOT / "scripts" / "validate_checkpointing.py")]
        words += ["--model", model, "--device", setting.device.type, "--json", str(written)]
        if setting.is_dry:
            words += ["--gate", "grad-accum/equal"]
        # The gates use the card alone, so this process gives back what it cached.
        fresh_device()
        ended = subprocess.run(words, capture_output=True, text=True, timeout=GATE_SECONDS)
        if not written.exists():
            raise RuntimeError(f"validate ended with {ended.returncode}: {ended.stderr[-300:]}")
        results = json.loads(written.read_text())["results"]
    return {
        "status": ended.returncode,
        "held": sum(row["passed"] is True for row in results),
        "failed": [row["gate"] for row in results if row["passed"] is False],
        "not_applicable": sum(row["passed"] is None for row in results),
        "results": results,
    }


# The largest batch under a limit.

BATCH_LEVERS = (
    "none",
    "full",
    "regions",
    "sac_every_second",
    "chunked_loss",
    "full+chunked_loss",
    "regions+chunked_loss",
)
STEPS_OF_A_TRIAL = 3


def batch(setting: Setting) -> Iterator[Row]:
    """The largest batch that trains within a limit of reserved memory, and a plan for it."""
    for limit in setting.limits:
        keys = []
        for lever in BATCH_LEVERS:
            keys.append(f"{limit} GiB, {lever}")
            yield Row(keys[-1], partial(_largest_batch, setting, limit, lever), seconds=45)
        yield Row(f"{limit} GiB, plan", partial(_plan_within, setting, limit, keys), seconds=60)


def _largest_batch(setting: Setting, limit: float, lever: str) -> Figures:
    timed = setting.timed[0]
    fits = 0
    fails = setting.most_samples + 1
    samples = 1
    with _limited(limit):
        while fails - fits > 1:
            if _trains(case_of(setting, timed.model, timed.length, samples), find_lever(lever)):
                fits = samples
                samples = min(2 * samples, (fits + fails) // 2)
            else:
                fails = samples
                samples = (fits + fails) // 2
    return {"model": timed.model, "length": timed.length, "samples": fits}


def _plan_within(setting: Setting, limit: float, keys: Sequence[str]) -> Figures:
    """Plan for the limit and the largest batch that a strategy alone reached, and train by it."""
    known = read_rows(setting.folder, "batch")
    samples = max((known.get(key, {}).get("samples", 0) for key in keys), default=0)
    timed = setting.timed[0]
    with Planner(
        setting.models[timed.model].workload(timed.length),
        device=setting.profile,
        dtype=setting.dtype,
        optimizer="adamw",
        context_bytes=0,
    ) as planner:
        plan = planner.plan(int(limit * 2**30), global_batch=samples, microbatch=samples)
    lever = Lever("plan", (lambda module, sample: plan.apply(module),))
    with _limited(limit):
        trains = _trains(case_of(setting, timed.model, timed.length, samples), lever)
    found = {"samples": samples if trains else 0, "planned_samples": samples}
    return {**found, "predicted": plan.cuda, "predicted_seconds": plan.step_seconds}


@contextlib.contextmanager
def _limited(limit: float) -> Iterator[None]:
    """Let the process reserve no more than a limit, in GiB."""
    total = cuda.mem_get_info()[1]
    cuda.set_per_process_memory_fraction(min(1.0, limit * 2**30 / total))
    try:
        yield
    finally:
        cuda.set_per_process_memory_fraction(1.0)


def _trains(case: Case, lever: Lever) -> bool:
    fresh_device()
    try:
        step = TrainingStep(case, lever)
        for _ in range(STEPS_OF_A_TRIAL):
            step()
        cuda.synchronize()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


# The loss of a head, alone.


def loss(setting: Setting) -> Iterator[Row]:
    """Peak and time of the loss of a head: whole, in chunks, and by torch's own chunks."""
    yield Row("in turns", partial(_losses, setting), seconds=60)


def _losses(setting: Setting) -> Figures:
    tokens, width, classes = setting.head
    make = partial(torch.randn, device=setting.device, dtype=setting.dtype)
    hidden = make(tokens, width).requires_grad_()
    weight = make(classes, width).requires_grad_()
    targets = torch.randint(classes, (tokens,), device=setting.device)

    def whole() -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets)

    def in_chunks() -> Tensor:
        return chunked_cross_entropy(hidden, weight, targets)

    def by_torch() -> Tensor:
        # torch 2.11 has neither of the two names.
        functions: Any = F
        modules: Any = nn
        options = modules.LinearCrossEntropyOptions()
        found: Tensor = functions.linear_cross_entropy(hidden, weight, targets, options=options)
        return found

    def run(compute: Callable[[], Tensor]) -> None:
        for leaf in (hidden, weight):
            leaf.grad = None
        compute().backward()

    ways: dict[str, Callable[[], None]] = {}
    peaks: dict[str, int] = {}
    errors: dict[str, str] = {}
    named = {"whole": whole, "chunks": in_chunks, "torch": by_torch}
    for name, compute in named.items():
        with recorded(errors, name):
            run(compute)
            hidden.grad = weight.grad = None
            cuda.empty_cache()
            peaks[name] = peak_of_step(partial(run, compute), [hidden, weight], setting.device)
            ways[name] = partial(run, compute)
    seconds = timed_in_turns([*ways.values()], setting, rounds=setting.timed[0].rounds, warmup=1)
    return {
        "tokens": tokens,
        "width": width,
        "classes": classes,
        "rows": [
            {
                "name": name,
                "peak_bytes": peaks[name],
                "seconds": asdict(spread_of(times)),
                "time_ratio": asdict(paired_ratio(times, seconds[0])),
            }
            for name, times in zip(ways, seconds, strict=True)
        ],
        "not_measured": errors,
    }


# Saving in the background.

NUM_SAVES = 3
# A save is over before the next one begins, as in a training with minutes between them.
STEPS_PER_SAVE_TIME = 1.3
LONGEST_INTERVAL_SECONDS = 30.0
SHARE_OF_DISK = 0.15


def saving(setting: Setting) -> Iterator[Row]:
    """Cost of a save in the background for the steps around it."""
    yield Row("background", partial(_saving, setting), seconds=180)


def _saving(setting: Setting) -> Figures:
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder)) as store:
        num_bytes = min(setting.state_bytes, int(SHARE_OF_DISK * shutil.disk_usage(folder).free))
        state, step = _trained_state(setting, num_bytes)
        usual = statistics.median(step() for _ in range(5))
        saver = BackgroundSaver(store)
        # The first save allocates the host's buffers, and shows how long one takes.
        began = time.perf_counter()
        first = [_saved(saver, state, 0) + step()]
        while saver.busy:
            first.append(step())
        one_save = time.perf_counter() - began
        interval = min(STEPS_PER_SAVE_TIME * one_save, LONGEST_INTERVAL_SECONDS)
        between = max(2, math.ceil(interval / usual))
        plain = [step() for _ in range(between)]
        stalled_before = saver.stalled
        during = []
        for number in range(1, NUM_SAVES + 1):
            stall = _saved(saver, state, number)
            during += [stall + step(), *(step() for _ in range(between - 1))]
        stalled = saver.stalled - stalled_before
        saver.close()
        return {
            "state_bytes": sum(tensor.nbytes for tensor in state.snapshot().tensors.values()),
            "steps_between_saves": between,
            "seconds_of_first_save": one_save,
            "worst_step_of_first_save": max(first) / usual,
            "plain_seconds": asdict(spread_of(plain)),
            "seconds": asdict(spread_of(during)),
            "slow_down": statistics.fmean(during) / statistics.fmean(plain) - 1,
            "worst_step": max(during) / statistics.median(plain),
            "stalled_seconds_per_save": stalled / NUM_SAVES,
        }


def _trained_state(setting: Setting, num_bytes: int) -> tuple[TrainingState, Callable[[], float]]:
    """Return a state of weights and two moments with that many bytes, and its timed step."""
    width = 4096 if not setting.is_dry else 64
    layers = max(1, num_bytes // (12 * width * width))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    model.to(setting.device)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.randn(setting.state_rows, width, device=setting.device)

    def step() -> float:
        started = time.perf_counter()
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        cuda.synchronize()
        return time.perf_counter() - started

    return TrainingState(model, [optimizer]), step


def _saved(saver: BackgroundSaver, state: TrainingState, number: int) -> float:
    """Begin a save, and return the seconds that the training waited for it."""
    started = time.perf_counter()
    state.step = number
    saver.save("recovery", number, state)
    return time.perf_counter() - started


# Run a piece, and keep each row as soon as it is there.

PIECES: dict[str, Callable[[Setting], Iterator[Row]]] = {
    **cuda_peaks.PIECES,
    "batch": batch,
    "loss": loss,
    "saving": saving,
    "gates": gates,
    **cuda_strategies.PIECES,
}
DONE_STATUS = 0
LEFT_STATUS = 3
# The rest of the rows needs a new process.
ANEW_STATUS = 4
MOST_STARTS = 2


def read_rows(folder: Path, piece: str) -> dict[str, Figures]:
    path = folder / f"{piece}.json"
    rows: dict[str, Figures] = json.loads(path.read_text())["rows"] if path.exists() else {}
    return rows


class PieceFile:
    """The file of a piece: its rows, and how often each row was started."""

    def __init__(self, name: str, setting: Setting, *, again: bool) -> None:
        self.path = setting.folder / f"{name}.json"
        self.rows: dict[str, Figures] = {}
        self.starts: dict[str, int] = {}
        device = torch.device("cpu") if name == "predict" else setting.device
        self.facts = provenance(device) | {"piece": name, "dry_run": setting.is_dry}
        self.facts |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        self.facts["allocator"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        if self.path.exists():
            self._read(again=again)

    def _read(self, *, again: bool) -> None:
        known = json.loads(self.path.read_text())
        # Predictions are made before, on another machine.
        facts = ["dry_run"] if self.facts["piece"] == "predict" else ["dry_run", "device", "torch"]
        for fact in facts:
            if known[fact] != self.facts[fact]:
                raise SystemExit(
                    f"{self.path} has rows of {fact} {known[fact]!r}, and this is "
                    f"{self.facts[fact]!r}: give another --folder, or move the file away"
                )
        self.rows = known["rows"]
        self.starts = known["starts"]
        if again:
            self.rows = {key: row for key, row in self.rows.items() if "error" not in row}
            self.starts = {key: number for key, number in self.starts.items() if key in self.rows}

    def start(self, key: str) -> bool:
        """Note that a row starts; record it as an error if the process ended in it before."""
        if self.starts.get(key, 0) >= MOST_STARTS:
            self.keep(key, {"error": f"the process ended in this row {MOST_STARTS} times"})
            return False
        self.starts[key] = self.starts.get(key, 0) + 1
        self._write()
        return True

    def keep(self, key: str, row: Figures) -> None:
        self.rows[key] = row
        self._write()

    def _write(self) -> None:
        text = json.dumps(self.facts | {"rows": self.rows, "starts": self.starts}, indent=2)
        # Replaced in one step, so that a process that is killed here leaves the rows before.
        made = self.path.with_suffix(".new")
        made.write_text(text + "\n")
        made.replace(self.path)


def run_piece(name: str, setting: Setting, *, again: bool = False) -> int:
    """Measure the rows of a piece that its file lacks; return the status of the process."""
    file = PieceFile(name, setting, again=again)
    for row in PIECES[name](setting):
        if row.key in file.rows:
            continue
        needed = 0 if setting.is_dry else row.seconds
        if setting.seconds_left <= needed:
            return LEFT_STATUS
        if not file.start(row.key):
            continue
        began = time.monotonic()
        try:
            figures = row.measure()
        except NotFresh as reason:
            print(f"{name}: {row.key}: {reason}; again in a new process", flush=True)
            return ANEW_STATUS
        except Exception as error:  # noqa: BLE001  a row that fails must not cost the others
            figures = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        figures["took_seconds"] = round(time.monotonic() - began, 1)
        file.keep(row.key, figures)
        print(f"{name}: {row.key}: {figures.get('error', 'measured')}", flush=True)
        if name != "predict" and not _is_usable():
            return ANEW_STATUS
    return DONE_STATUS


def _is_usable() -> bool:
    """Return whether the device still answers; after some errors a process can't use it again."""
    try:
        cuda.synchronize()
        fresh_device()
    except RuntimeError:
        return False
    return True


def main(arguments: list[str] | None = None) -> int:
    """Measure one piece; status 3 if rows are left, 4 if they need a new process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("piece", choices=PIECES)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--again", action="store_true", help="measure rows with an error again")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--target", default=EVIDENCE.target, help="card of predictions without one")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    setting = EVIDENCE
    if options.dry_run:
        cuda.api = StandInCuda()
        setting = DRY_RUN
    until = time.monotonic() + 60 * options.minutes
    setting = replace(setting, folder=options.folder, target=options.target, until=until)
    return run_piece(options.piece, setting, again=options.again)


if __name__ == "__main__":
    sys.exit(main())
