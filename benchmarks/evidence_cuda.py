"""Record on a CUDA device what the bundle promises; a call goes on where the last one stopped.

    make evidence-cuda PYTHON=python3                  # again, if it was interrupted
    make evidence-cuda ARGS='--only gates'             # what begins with a word
    make evidence-cuda ARGS='--dry-run --folder dry'   # toy sizes on the CPU, without the memory
    make evidence-cuda ARGS='--compare evidence/cuda_memory.json'  # anywhere, in four minutes

Each record is a command of its own that writes FOLDER/NAME.json: the gates of the built-in models,
step times of Llama-like models, a plan whose step is measured, and rows of memory with
their traces. `--compare` predicts the rows of memory from shapes, and replays their traces.
Proof: `python -m pytest tests/benchmarks/test_evidence_cuda.py`.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import large_models
from cuda_traces import ADDRESS_UNIT, CHECK_MODULUS, Replay
from curry_train.bench.steps import TrainingStep, find_lever
from curry_train.plan.cuda_step import cuda_memory, workspace_of
from curry_train.plan.estimate import Sketch
from curry_train.primitives.strategies import Sample
from curry_train.workloads.models import BUILTIN_WORKLOADS, transformer
from curry_train.workloads.workload import Case, Workload
from recording import ROOT, Figures, write_record

NUM_STEPS = 4
FIGURES = ("allocated_bytes", "reserved_bytes", "first_step_reserved_bytes")


def toy() -> Workload:
    return transformer(depth=2, dim=32, heads=2, kv_heads=1, hidden=64, vocabulary=256, length=16)


def llama_1b(length: int = 4096) -> Workload:
    sizes = {"depth": 16, "dim": 2048, "heads": 32, "kv_heads": 8, "hidden": 8192}
    return quickly_built(transformer(length=length, vocabulary=128_256, **sizes))


def llama_8b(length: int = 4096) -> Workload:
    return quickly_built(large_models.llama_8b(length=length))


def quickly_built(workload: Workload) -> Workload:
    """Return the workload with weights that repeat one draw: 8B random numbers take a minute."""

    def build() -> torch.nn.Module:
        noise = 0.02 * torch.randn(2**20)

        def fill(weight: torch.Tensor, *_, **__) -> None:
            size = weight.numel()
            weight.data = noise.repeat(-(-size // len(noise)))[:size].view(weight.shape)

        with mock.patch.multiple(torch.nn.init, kaiming_uniform_=fill, normal_=fill):
            return workload.build()

    return replace(workload, build=build)


# Memory: predicted from shapes, and measured.


@dataclass(frozen=True)
class MemoryConfig:
    """One training whose memory is predicted and measured."""

    model: str
    length: int
    lever: str
    optimizer: str = "adamw"
    expandable: bool = False

    @property
    def name(self) -> str:
        words = ["memory", self.model, str(self.length), self.lever, self.optimizer]
        return "-".join([*words, "expandable"] if self.expandable else words)

    @property
    def workload(self) -> Workload:
        return {"llama_1b": llama_1b, "llama_8b": llama_8b}[self.model](self.length)


MEMORY_CONFIGS = {
    config.name: config
    for config in [
        *(
            MemoryConfig(model, length, lever)
            for model in ("llama_1b", "llama_8b")
            for length in (2048, 4096, 8192)
            for lever in ("none", "full", "regions", "sac_every_second")
        ),
        MemoryConfig("llama_1b", 2048, "none", optimizer="sgd"),
        MemoryConfig("llama_1b", 2048, "chunked_loss"),
        MemoryConfig("llama_1b", 2048, "none", expandable=True),
        MemoryConfig("llama_1b", 2048, "full", expandable=True),
    ]
}


def predicted(
    workload: Workload, config: MemoryConfig, *, card: str, dtype: torch.dtype = torch.bfloat16
) -> Figures:
    """Predict the memory of a training from shapes alone; needs no device."""
    sample = Sample(workload.batch(1), workload.mean_loss, None)

    def change(module: torch.nn.Module) -> None:
        for apply in find_lever(config.lever).changes:
            apply(module, sample)

    with Sketch(workload, dtype=dtype, kernels="cuda", optimizer=config.optimizer) as sketch:
        trace = sketch.step(1, change=change).trace
    found = cuda_memory(
        trace, workspace_bytes=workspace_of(card), expandable=config.expandable, num_steps=NUM_STEPS
    )
    return asdict(found)


def measured(config: MemoryConfig) -> Figures:
    """Train some steps on the device; return the peaks, and the trace of the allocator.

    As scripts do, the loop keeps output and loss until the next ones are there.
    """
    # The history holds the stacks of no frames: sizes and addresses alone.
    torch.cuda.memory._record_memory_history(max_entries=2_000_000, context=None, stacks="python")
    case = Case(config.workload, device=torch.device("cuda"), dtype=torch.bfloat16, batch_size=1)
    step = TrainingStep(case, find_lever(config.lever), optimizer=config.optimizer)
    step.drop_gradients()
    alive = {}
    step.model.register_forward_hook(lambda module, given, output: alive.update(output=output))
    torch.cuda.empty_cache()
    # Levers that measure the model have run it; the trace has these steps too.
    reserved_before = torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    reserved = []
    for _ in range(NUM_STEPS):
        step.optimizer.zero_grad()
        alive["loss"] = step.mean_loss(step.model, step.window.microbatches[0])
        alive["loss"].backward()
        step.optimizer.step()
        reserved.append(torch.cuda.max_memory_reserved())
    torch.cuda.synchronize()
    allocated = torch.cuda.max_memory_allocated()
    recorded = {
        "reserved_peak": max(reserved_before, reserved[-1]),
        "reserved_end": torch.cuda.memory_reserved(),
        "peak_blocks": allocated,
    }
    return {
        "allocated_bytes": allocated,
        "reserved_bytes": reserved[-1],
        "first_step_reserved_bytes": reserved[0],
        "trace": trace_numbers(torch.cuda.memory._snapshot()) | recorded,
    }


MADE = ("segment_alloc", "segment_map")
GIVEN_BACK = ("segment_free", "segment_unmap")
ACTIONS = ("alloc", "free_completed", *MADE, *GIVEN_BACK)


def trace_numbers(snapshot: Mapping[str, Any]) -> Figures:
    """Turn a recorded history that starts empty into the numbers that `cuda_traces.py` replays.

    It has sizes in order of allocation, releases by number, and segments with their addresses. What
    was reserved and allocated is added to them.
    """
    (recorded_events,) = filter(None, snapshot["device_traces"])
    # An event of another kind, such as `snapshot` or `oom`, may have no address.
    events = [event for event in recorded_events if event["action"] in ACTIONS]
    order = []
    numbers = {}
    addresses = []
    lowest = min(event["addr"] for event in events)
    for event in events:
        action, address, size = event["action"], event["addr"], event["size"]
        if action == "alloc":
            numbers[address] = len(addresses)
            addresses.append(address)
            stream = event.get("stream", 0)
            order.append([size, stream] if stream else size)
        elif action == "free_completed" and address in numbers:
            order.append(-1 - numbers.pop(address))
        elif action in MADE:
            order.append({"s": size, "at": (address - lowest) // ADDRESS_UNIT})
        elif action in GIVEN_BACK:
            order.append({"r": size})
    places = enumerate(addresses, start=1)
    check = sum(place * ((at - lowest) // ADDRESS_UNIT) for place, at in places)
    return {
        "expandable": any(event["action"] == "segment_map" for event in events),
        "start": [],
        "address_check": check % CHECK_MODULUS,
        "trace": order,
    }


def compare_memory(folder: Path) -> Figures:
    """Compare all recorded memory with predictions from shapes, and replay the traces."""
    rows = []
    paths = sorted(folder.glob("memory-*.json"))
    if not paths:
        raise SystemExit(f"{folder} has no record of memory: make them by --only memory on a GPU")
    for path in paths:
        record = json.loads(path.read_text())
        config = MEMORY_CONFIGS[path.stem]
        replayed = Replay(record["measured"].pop("trace")).exact
        row = {name: record[name] for name in ("device", "torch", "date", "measured")}
        found = predicted(config.workload, config, card=record["device"])
        percent = {one: 100 * (found[one] / record["measured"][one] - 1) for one in FIGURES}
        row |= {"name": config.name, "predicted": found, "replayed": replayed, "percent": percent}
        print(row["name"], percent)
        rows.append(row)
    return {
        "rows": len(rows),
        "replayed_exactly": sum(row["replayed"] for row in rows),
        "reserved_exactly": sum(row["percent"]["reserved_bytes"] == 0 for row in rows),
        "worst_percent": {one: max(abs(row["percent"][one]) for row in rows) for one in FIGURES},
        "trainings": rows,
    }


# The records, each by a command of its own.


def records(*, dry: bool) -> dict[str, list[str]]:
    """Return the words behind `curry-train` for each record, in the order of their worth."""
    device = ["--device", "cpu" if dry else "cuda"]
    dtype = [] if dry else ["--dtype", "bfloat16"]
    small = f"benchmarks/evidence_cuda.py:{'toy' if dry else 'llama_1b'}"
    large = f"benchmarks/evidence_cuda.py:{'toy' if dry else 'llama_8b'}"
    budget = ["--budget", "1GiB" if dry else "24GiB", "--global-batch", "4"]
    rounds = ["--steps", "2", "--warmup", "1"] if dry else ["--steps", "12"]
    gate = ["--gate", "grad-accum/equal"] if dry else []
    found = {
        f"gates-{name}": ["validate", "--model", name, *device, *gate] for name in BUILTIN_WORKLOADS
    }
    found["plan"] = ["plan", "--model", small, *budget, *dtype, "--verify"]
    few = ["--lever", "full", "--lever", "sac_every_second", "--lever", "full+chunked_loss"]
    more = ["--lever", "regions", "--lever", "chunked_loss"]
    bench = ["bench", "--batch-size", "2", *device, *dtype, *rounds, *few, "--model"]
    return found | {"times-1b": [*bench, small, *more], "times-8b": [*bench, large]}


def main(arguments: list[str] | None = None) -> int:
    """Write each record that is not there; status 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="NAME", help="names that begin so")
    parser.add_argument("--folder", type=Path, default=ROOT / "evidence" / "cuda")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, without a device")
    parser.add_argument("--memory", metavar="NAME", help="measure one training here, and end")
    parser.add_argument("--compare", metavar="PATH", help="predict what was measured, and end")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if options.memory:
        config = MEMORY_CONFIGS[options.memory]
        figures = asdict(config) | {"measured": measured(config)}
        write_record(f"{folder}/{config.name}.json", figures, device="cuda")
        return 0

    if options.compare:
        write_record(options.compare, compare_memory(folder))
        return 0

    place = os.path.relpath(folder, ROOT)
    jobs = {
        name: ["scripts/curry_train.py", *words, "--json", f"{place}/{name}.json"]
        for name, words in records(dry=options.dry_run).items()
    }
    if not options.dry_run:
        own = ["benchmarks/evidence_cuda.py", "--folder", place, "--memory"]
        jobs = {name: [*own, name] for name in MEMORY_CONFIGS} | jobs
    statuses = []
    for name, words in jobs.items():
        if not name.startswith(options.only) or (folder / f"{name}.json").exists():
            continue
        # Expandable segments are chosen before the first allocation of a process.
        settings = "expandable_segments:True" if name.endswith("expandable") else ""
        environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": settings}
        with (folder / f"{name}.log").open("w") as log:
            command = [sys.executable, *words]
            ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        print(f"{name}: status {ended.returncode}", flush=True)
        statuses.append(ended.returncode)
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
