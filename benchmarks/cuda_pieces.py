"""Measure one piece of the figures for a CUDA device, a row at a time.

    python benchmarks/cuda_pieces.py memory --folder evidence/cuda --minutes 8

A piece is a list of rows, and its file is written after each: a call that is cut off loses one row,
and the next call goes on after the rows that are there. A row that raises is recorded with its
error, and measured again by `--again`. `benchmarks/evidence_cuda.py` runs all pieces.

Why so long: the pieces share a setting, a stand-in and the way to keep rows.

With `--dry-run` toy sizes run on the CPU, and a stand-in answers what torch.cuda is asked.

Proof: `python -m pytest tests/benchmarks/test_evidence_cuda.py`.
"""

import argparse
import contextlib
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "template"))

from curry_train.bench.steps import Lever, TrainingStep, find_lever
from curry_train.core.measure import is_out_of_memory, peak_of_step
from curry_train.core.timing import paired_ratio, spread_of, time_in_turns
from curry_train.core.wording import provenance, write_json
from curry_train.plan.cuda_allocator import AllocatorSettings
from curry_train.plan.cuda_step import cuda_memory, workspace_of
from curry_train.plan.estimate import Sketch
from curry_train.plan.planner import Infeasible, Planner
from curry_train.primitives.chunked_loss import chunked_cross_entropy
from curry_train.primitives.recompute import recompute_blocks
from curry_train.primitives.strategies import Sample
from curry_train.runs.background import BackgroundSaver
from curry_train.runs.state import TrainingState
from curry_train.runs.store import Store
from curry_train.workloads.models import BUILTIN_WORKLOADS, transformer
from curry_train.workloads.workload import Case, Workload

ROOT = Path(__file__).resolve().parents[1]
Figures = dict[str, Any]
Row = tuple[str, Callable[[], Figures]]


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama-like model."""

    depth: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int

    def workload(self, length: int) -> Workload:
        return transformer(length=length, **asdict(self))


LLAMAS = {
    "1B": LlamaShape(16, 2048, 32, 8, 8192, 128_256),
    "3B": LlamaShape(28, 3072, 24, 8, 8192, 128_256),
    "8B": LlamaShape(32, 4096, 32, 8, 14336, 128_256),
}
TOYS = {"toy": LlamaShape(3, 32, 2, 1, 64, 256)}


@dataclass(frozen=True)
class Setting:
    """Sizes and device of a run: those of the evidence, or toy sizes on the CPU."""

    device: torch.device
    dtype: torch.dtype
    models: Mapping[str, LlamaShape]
    lengths: tuple[int, ...]
    # The model whose step times are compared, with length, batch size and rounds.
    timed: tuple[str, int, int, int]
    # Memory limits in GiB for the largest batch, and the largest batch that is tried.
    limits: tuple[float, ...]
    most_samples: int
    # Tokens, width and classes of a head; bytes of a state that is saved, and steps between saves.
    head: tuple[int, int, int]
    state_bytes: int
    steps_between_saves: int
    is_dry: bool = False
    # Where the pieces' files are.
    folder: Path = Path()

    @property
    def card(self) -> str:
        return cuda.get_device_name() if not self.is_dry else "h200"


EVIDENCE = Setting(
    device=torch.device("cuda"),
    dtype=torch.bfloat16,
    models=LLAMAS,
    lengths=(2048, 4096, 8192),
    timed=("1B", 4096, 4, 20),
    limits=(24, 80),
    most_samples=256,
    head=(8192, 4096, 128_256),
    state_bytes=8 * 2**30,
    steps_between_saves=35,
)
DRY_RUN = Setting(
    device=torch.device("cpu"),
    dtype=torch.float32,
    models=TOYS,
    lengths=(16,),
    timed=("toy", 16, 2, 2),
    limits=(1,),
    most_samples=2,
    head=(64, 16, 128),
    state_bytes=2**20,
    steps_between_saves=2,
    is_dry=True,
)


class StandInCuda:
    """Answers what the pieces ask of `torch.cuda`, without a device; its figures mean nothing."""

    class memory:  # noqa: N801  a module of torch by this name
        @staticmethod
        def _record_memory_history(*options: Any, **named: Any) -> None:
            """Record nothing."""

        @staticmethod
        def _snapshot() -> dict[str, Any]:
            made = [
                {"action": "segment_alloc", "addr": 2**21, "size": 2**21, "stream": 0},
                {"action": "alloc", "addr": 2**21, "size": 2**20, "stream": 0},
                {"action": "free_requested", "addr": 2**21, "size": 2**20, "stream": 0},
                {"action": "free_completed", "addr": 2**21, "size": 2**20, "stream": 0},
                {"action": "segment_free", "addr": 2**21, "size": 2**21, "stream": 0},
            ]
            return {"device_traces": [made], "segments": []}

    def get_device_name(self) -> str:
        return "a stand-in"

    def mem_get_info(self) -> tuple[int, int]:
        return 2**30, 2**30

    def max_memory_allocated(self) -> int:
        return 2**20

    def max_memory_reserved(self) -> int:
        return 2**21

    def memory_allocated(self) -> int:
        return 0

    def empty_cache(self) -> None:
        """Give nothing back."""

    reset_peak_memory_stats = synchronize = empty_cache

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        assert fraction > 0


cuda: Any = torch.cuda


def fresh_device() -> None:
    """Give back all memory, also the workspaces of matrix products, and forget the peaks."""
    gc.collect()
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    cuda.empty_cache()
    cuda.reset_peak_memory_stats()


def on_device(workload: Workload, setting: Setting) -> Workload:
    """Return a workload whose model is built on the device in its dtype, not moved there."""

    def build() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(setting.dtype)
        try:
            with torch.device(setting.device):
                return workload.build()
        finally:
            torch.set_default_dtype(before)

    return replace(workload, build=build)


def case_of(setting: Setting, model: str, length: int, samples: int = 1) -> Case:
    workload = on_device(setting.models[model].workload(length), setting)
    return Case(workload, device=setting.device, dtype=setting.dtype, batch_size=samples)


# Gates.


def gates(setting: Setting) -> Iterator[Row]:
    """All gates of the built-in models, on the device."""
    for name in BUILTIN_WORKLOADS:
        yield name, partial(_gates_of, setting, name)


def _gates_of(setting: Setting, model: str) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "gates.json"
        words = [sys.executable, str(ROOT / "scripts" / "validate_checkpointing.py")]
        words += ["--model", model, "--device", setting.device.type, "--json", str(written)]
        if setting.is_dry:
            words += ["--gate", "grad-accum/equal"]
        ended = subprocess.run(words, capture_output=True, text=True)
        if not written.exists():
            raise RuntimeError(f"validate ended with {ended.returncode}: {ended.stderr[-300:]}")
        results = json.loads(written.read_text())["results"]
    return {
        "status": ended.returncode,
        "held": sum(row["passed"] is True for row in results),
        "failed": {row["gate"]: row["measured"] for row in results if row["passed"] is False},
        "not_applicable": sum(row["passed"] is None for row in results),
    }


# Memory: predicted from shapes, and measured.

MEMORY_LEVERS = ("none", "full", "regions", "sac:every_second_matmul")
NUM_STEPS = 4


@dataclass(frozen=True)
class MemoryConfig:
    """One training whose memory is predicted and measured."""

    model: str
    length: int
    lever: str
    optimizer: str = "adamw"
    expandable: bool = False

    @property
    def key(self) -> str:
        words = [self.model, str(self.length), self.lever, self.optimizer]
        return " ".join([*words, *(["expandable"] if self.expandable else [])])


def memory_configs(setting: Setting) -> list[MemoryConfig]:
    """List 40 trainings: all lengths and levers of all models, and some with other settings."""
    configs = [
        MemoryConfig(model, length, lever)
        for model in setting.models
        for length in setting.lengths
        for lever in MEMORY_LEVERS
    ]
    first = next(iter(setting.models))
    length = setting.lengths[0]
    return [
        *configs,
        MemoryConfig(first, length, "none", optimizer="sgd"),
        MemoryConfig(first, length, "chunked_loss"),
        MemoryConfig(first, length, "none", expandable=True),
        MemoryConfig(first, length, "full", expandable=True),
    ]


def predict(setting: Setting) -> Iterator[Row]:
    """Memory from shapes alone; needs no device."""
    for config in memory_configs(setting):
        yield config.key, partial(_predicted, setting, config)


def _predicted(setting: Setting, config: MemoryConfig) -> Figures:
    started = time.monotonic()
    workload = setting.models[config.model].workload(config.length)
    change = partial(_apply_lever, find_lever(config.lever), _sample(workload, setting))
    with Sketch(
        workload, dtype=setting.dtype, kernels="cuda", optimizer=config.optimizer
    ) as sketch:
        trace = sketch.step(1, change=None if config.lever == "none" else change).trace
    if trace is None:
        raise RuntimeError("the step has no trace")
    found = cuda_memory(
        trace,
        workspace_bytes=workspace_of(setting.card),
        settings=AllocatorSettings(expandable_segments=config.expandable),
        num_steps=NUM_STEPS,
    )
    return {**asdict(found), "seconds": round(time.monotonic() - started, 1)}


def _sample(workload: Workload, setting: Setting) -> Sample:
    return Sample(workload.batch(1), workload.mean_loss, None)


def _apply_lever(lever: Lever, sample: Sample, module: nn.Module) -> None:
    for change in lever.changes:
        change(module, sample)


def memory(setting: Setting) -> Iterator[Row]:
    """Allocated and reserved peaks of real steps, beside the predictions."""
    for config in memory_configs(setting):
        if not config.expandable:
            yield config.key, partial(_measured, setting, config)


def expandable(setting: Setting) -> Iterator[Row]:
    """The same with expandable segments, which a process must be started with."""
    for config in memory_configs(setting):
        if config.expandable:
            yield config.key, partial(_measured, setting, config)


def _measured(setting: Setting, config: MemoryConfig) -> Figures:
    predicted = _read_rows(setting.folder, "predict").get(config.key)
    if predicted is None or "error" in predicted:
        predicted = _predicted(setting, config)
    fresh_device()
    base = cuda.memory_allocated()
    # The history holds the stacks of no frames: sizes and addresses alone.
    cuda.memory._record_memory_history(max_entries=2_000_000, context=None, stacks="python")
    try:
        first, found = _peaks_of_steps(setting, config)
        history = cuda.memory._snapshot()
    finally:
        cuda.memory._record_memory_history(enabled=None)
    measured = {"allocated_bytes": found[0] - base, "reserved_bytes": found[1]}
    measured["first_step_reserved_bytes"] = first
    return {
        "predicted": predicted,
        "measured": measured,
        "ratio": {name: predicted[name] / value for name, value in measured.items()},
        "trace": trace_numbers(history, source=config.key, reserved=found[1], allocated=found[0]),
    }


def _peaks_of_steps(setting: Setting, config: MemoryConfig) -> tuple[int, tuple[int, int]]:
    """Train for some steps; return the reserved peak of the first one, and all steps' peaks.

    As scripts do, the loop keeps output and loss until the next ones are there.
    """
    case = case_of(setting, config.model, config.length)
    step = TrainingStep(case, find_lever(config.lever), optimizer=config.optimizer)
    step.drop_gradients()
    kept: dict[str, Any] = {}
    step.model.register_forward_hook(lambda module, given, output: kept.update(output=output))
    cuda.empty_cache()
    cuda.reset_peak_memory_stats()
    first = 0
    for number in range(NUM_STEPS):
        step.optimizer.zero_grad()
        kept["loss"] = step.mean_loss(step.model, step.window.microbatches[0])
        kept["loss"].backward()
        step.optimizer.step()
        first = first if number else cuda.max_memory_reserved()
    cuda.synchronize()
    return first, (cuda.max_memory_allocated(), cuda.max_memory_reserved())


def trace_numbers(
    snapshot: Mapping[str, Any], *, source: str, reserved: int, allocated: int
) -> dict[str, Any]:
    """Turn a recorded history that starts empty into the numbers that `cuda_traces.py` replays.

    It has sizes in order of allocation, releases by number, and segments with their addresses.
    """
    (events,) = [trace for trace in snapshot["device_traces"] if trace] or [[]]
    order: list[Any] = []
    numbers: dict[int, int] = {}
    addresses: list[int] = []
    lowest = min((event["addr"] for event in events), default=0)
    for event in events:
        action = event["action"]
        address = event["addr"]
        size = event["size"]
        if action == "alloc":
            numbers[address] = len(addresses)
            addresses.append(address)
            stream = event.get("stream", 0)
            order.append([size, stream] if stream else size)
        elif action == "free_completed" and address in numbers:
            order.append(-1 - numbers.pop(address))
        elif action in ("segment_alloc", "segment_map"):
            order.append({"s": size, "at": (address - lowest) // 512})
        elif action in ("segment_free", "segment_unmap"):
            order.append({"r": size})
    check = sum(place * ((at - lowest) // 512) for place, at in enumerate(addresses, start=1))
    is_expandable = any(event["action"] == "segment_map" for event in events)
    return {
        "source": source,
        "expandable": is_expandable,
        "starts_empty": True,
        "start": [],
        "address_check": check % (2**61 - 1),
        "reserved_peak": reserved,
        "peak_blocks": allocated,
        "trace": order,
    }


# Step times: strategies, plans and peers at their peaks, in one run.


def strategies(setting: Setting) -> Iterator[Row]:
    """Peak and time of each strategy and peer, and of a plan at the peak of each."""
    yield "in turns", partial(_strategies, setting)


def _peers(setting: Setting) -> dict[str, Lever]:
    """Return what people use today, and our own strategies."""
    depth = setting.models[setting.timed[0]].depth
    half = [f"layers.{index}" for index in range(0, depth, 2)]

    def whole(model: nn.Module, sample: Sample, **options: Any) -> list[str]:
        return recompute_blocks(model, **options)

    return {
        "none": Lever("none"),
        "full": find_lever("full"),
        "full, without early stop": Lever("full", (partial(whole, early_stop=False),)),
        "full for every second block": Lever("half", (partial(whole, blocks=half),)),
        "sac, attention and every second product": find_lever("sac_every_second"),
        "sac, attention and all products": find_lever("sac:save_matmuls_and_attention"),
        "regions": find_lever("regions"),
        "compile, budget 0.5": find_lever("memory_budget"),
        "offload": find_lever("offload"),
    }


def _strategies(setting: Setting) -> Figures:
    model, length, samples, rounds = setting.timed
    case = case_of(setting, model, length, samples)
    plain = TrainingStep(case)
    plain()
    peers = _peers(setting)
    steps: dict[str, TrainingStep] = {}
    errors: dict[str, str] = {}
    peaks: dict[str, int] = {}
    for name, lever in peers.items():
        with _recorded(errors, name):
            step = TrainingStep(case, lever, like=plain)
            peaks[name] = _peak(step)
            steps[name] = step
    for name in [*steps]:
        with _recorded(errors, f"plan at the peak of {name}"):
            lever = _planned(setting, case, peaks[name])
            step = TrainingStep(case, lever, like=plain)
            peaks[f"plan at the peak of {name}"] = _peak(step)
            steps[f"plan at the peak of {name}"] = step
    seconds = time_in_turns(
        [*steps.values()],
        rounds=rounds,
        warmup=2 if setting.is_dry else 5,
        wait=cuda.synchronize,
    )
    return {
        "model": model,
        "length": length,
        "batch_size": samples,
        "rows": _compared(dict(zip(steps, seconds, strict=True)), peaks),
        "not_measured": errors,
    }


def _compared(seconds: Mapping[str, Sequence[float]], peaks: Mapping[str, int]) -> list[Figures]:
    """Return peak and time of each, as ratios to no recompute, and of plans to their peers."""
    rows = []
    for name, times in seconds.items():
        row = {
            "name": name,
            "peak_bytes": peaks[name],
            "peak_ratio": peaks[name] / peaks["none"],
            "seconds": asdict(spread_of(times)),
            "time_ratio": asdict(paired_ratio(times, seconds["none"])),
        }
        peer = name.removeprefix("plan at the peak of ")
        if peer != name:
            row["time_of_peer"] = asdict(paired_ratio(times, seconds[peer]))
            row["peak_of_peer"] = peaks[name] / peaks[peer]
        rows.append(row)
    return rows


def _peak(step: TrainingStep) -> int:
    """Return the peak of a second step, with all that is alive."""
    step()
    step.drop_gradients()
    fresh_device()
    peak = peak_of_step(step, step._there(), step.device)
    step.drop_gradients()
    return peak


def _planned(setting: Setting, case: Case, peak_bytes: int) -> Lever:
    """Plan for a peak of tensors, and return what applies the plan."""
    length = setting.timed[1]
    workload = setting.models[setting.timed[0]].workload(length)
    profile = "cpu" if setting.is_dry else setting.card
    with Planner(
        workload, device=profile, dtype=setting.dtype, optimizer="adamw", by_reserved=False
    ) as planner:
        plan = planner.plan(peak_bytes, global_batch=case.batch_size, microbatch=case.batch_size)
    return Lever("plan", (lambda module, sample: plan.apply(module),))


@contextlib.contextmanager
def _recorded(errors: dict[str, str], name: str) -> Iterator[None]:
    """Record what a device or a library can't do, and go on with the next."""
    try:
        yield
    except (RuntimeError, ValueError, ImportError, Infeasible) as error:
        errors[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        fresh_device()


# The largest batch under a limit.

BATCH_LEVERS = ("none", "full", "regions", "sac_every_second")


def batch(setting: Setting) -> Iterator[Row]:
    """The largest batch that trains within a limit of reserved memory."""
    for limit in setting.limits:
        for lever in BATCH_LEVERS:
            yield f"{limit} GiB, {lever}", partial(_largest_batch, setting, limit, lever)


def _largest_batch(setting: Setting, limit: float, lever: str) -> Figures:
    total = cuda.mem_get_info()[1]
    cuda.set_per_process_memory_fraction(min(1.0, limit * 2**30 / total))
    model, length = setting.timed[:2]
    fits = 0
    fails = setting.most_samples + 1
    samples = 1
    try:
        while fails - fits > 1:
            if _trains(case_of(setting, model, length, samples), lever):
                fits = samples
                samples = min(2 * samples, (fits + fails) // 2)
            else:
                fails = samples
                samples = (fits + fails) // 2
    finally:
        cuda.set_per_process_memory_fraction(1.0)
    return {"model": model, "length": length, "samples": fits}


def _trains(case: Case, lever: str) -> bool:
    fresh_device()
    try:
        step = TrainingStep(case, find_lever(lever))
        for _ in range(2):
            step()
        cuda.synchronize()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


# The loss of a head, alone.


def loss(setting: Setting) -> Iterator[Row]:
    """Peak and time of the loss of a head: whole, in chunks, and by each backend."""
    yield "in turns", partial(_losses, setting)


def _losses(setting: Setting) -> Figures:
    tokens, width, classes = setting.head
    make = partial(torch.randn, device=setting.device, dtype=setting.dtype)
    hidden = make(tokens, width).requires_grad_()
    weight = make(classes, width).requires_grad_()
    targets = torch.randint(classes, (tokens,), device=setting.device)

    def whole() -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets)

    def in_chunks(backend: str | None = None) -> Tensor:
        return chunked_cross_entropy(hidden, weight, targets, backend=backend)

    def run(compute: Callable[[], Tensor]) -> None:
        for leaf in (hidden, weight):
            leaf.grad = None
        compute().backward()

    ways: dict[str, Callable[[], None]] = {}
    peaks: dict[str, int] = {}
    errors: dict[str, str] = {}
    named = {"whole": whole, "chunks": in_chunks}
    named |= {name: partial(in_chunks, name) for name in ("torch", "liger", "cce")}
    for name, compute in named.items():
        with _recorded(errors, name):
            run(compute)
            hidden.grad = weight.grad = None
            fresh_device()
            peaks[name] = peak_of_step(partial(run, compute), [hidden, weight], setting.device)
            ways[name] = partial(run, compute)
    seconds = time_in_turns(
        [*ways.values()], rounds=setting.timed[3], warmup=2, wait=cuda.synchronize
    )
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


def saving(setting: Setting) -> Iterator[Row]:
    """Cost of a save in the background for the steps around it."""
    yield "background", partial(_saving, setting)


def _saving(setting: Setting) -> Figures:
    width = 4096 if not setting.is_dry else 64
    layers = max(1, setting.state_bytes // (12 * width * width))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    model.to(setting.device)
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainingState(model, [optimizer])
    rows = torch.randn(64, width, device=setting.device)

    def step() -> float:
        started = time.perf_counter()
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        cuda.synchronize()
        return time.perf_counter() - started

    for _ in range(3):
        step()
    between = setting.steps_between_saves
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder)) as store:
        saver = BackgroundSaver(store)
        plain = [step() for _ in range(between)]
        during = []
        for number in range(1, 4):
            state.step = number
            saver.save("recovery", number, state)
            during += [step() for _ in range(between)]
        stalled = saver.stalled
        saver.close()
    usual = statistics.median(plain)
    return {
        "state_bytes": sum(tensor.nbytes for tensor in state.snapshot().tensors.values()),
        "steps_between_saves": between,
        "plain_seconds": asdict(spread_of(plain)),
        "seconds": asdict(spread_of(during)),
        "slow_down": (sum(during) + stalled) / len(during) / (sum(plain) / len(plain)) - 1,
        "worst_step": max(during) / usual,
        "stalled_seconds": stalled,
    }


# Run a piece, and keep each row as soon as it is there.

PIECES: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "predict": predict,
    "memory": memory,
    "expandable": expandable,
    "strategies": strategies,
    "batch": batch,
    "loss": loss,
    "saving": saving,
    "gates": gates,
}


def _read_rows(folder: Path, piece: str) -> dict[str, Figures]:
    path = folder / f"{piece}.json"
    rows: dict[str, Figures] = json.loads(path.read_text())["rows"] if path.exists() else {}
    return rows


def run_piece(name: str, setting: Setting, *, seconds: float, again: Sequence[str] = ()) -> bool:
    """Measure the rows of a piece that its file lacks; return whether all are there."""
    known = _read_rows(setting.folder, name)
    started = time.monotonic()
    longest = 0.0
    for key, measure in PIECES[name](setting):
        if key in known and key not in again:
            continue
        if time.monotonic() - started + longest > seconds:
            return False
        began = time.monotonic()
        known[key] = _row(measure)
        longest = max(longest, time.monotonic() - began)
        known[key]["took_seconds"] = round(time.monotonic() - began, 1)
        facts = provenance(setting.device) | {"piece": name, "dry_run": setting.is_dry}
        write_json(str(setting.folder / f"{name}.json"), facts | {"rows": known})
        print(f"{name}: {key}: {known[key].get('error', 'measured')}", flush=True)
        fresh_device()
    return True


def _row(measure: Callable[[], Figures]) -> Figures:
    try:
        return measure()
    except Exception as error:  # noqa: BLE001  a row that fails must not cost the others
        return {"error": f"{type(error).__name__}: {str(error)[:500]}"}


def main(arguments: list[str] | None = None) -> int:
    """Measure one piece; status 3 if rows are left for another call."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("piece", choices=PIECES)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--again", nargs="*", default=[], metavar="ROW")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    setting = EVIDENCE
    if options.dry_run:
        global cuda
        cuda = StandInCuda()
        setting = DRY_RUN
    setting = replace(setting, folder=options.folder)
    done = run_piece(options.piece, setting, seconds=60 * options.minutes, again=options.again)
    return 0 if done else 3


if __name__ == "__main__":
    sys.exit(main())
