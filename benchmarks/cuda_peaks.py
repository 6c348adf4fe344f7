"""Predict the memory of trainings from shapes, and measure them on a CUDA device.

The measured trainings are recorded too, as numbers that `cuda_traces.py` replays, in
`traces.jsonl.gz` beside the rows.

Proof: `python -m pytest tests/benchmarks/test_evidence_cuda.py`.
"""

import gzip
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cuda_setting import Figures, Row, Setting, attention_kernel, case_of, cuda, fresh_device
from curry_train.bench.steps import Lever, TrainingStep, find_lever
from curry_train.plan.cuda_allocator import AllocatorSettings
from curry_train.plan.cuda_step import cuda_memory, workspace_of
from curry_train.plan.estimate import Sketch
from curry_train.primitives.strategies import Sample
from curry_train.workloads.workload import Workload

MEMORY_LEVERS = ("none", "full", "regions", "sac:every_second_matmul")
NUM_STEPS = 4
TRACES_NAME = "traces.jsonl.gz"


class NotFresh(Exception):
    """The process holds memory that a row must not begin with; a new one does not."""


@dataclass(frozen=True)
class MemoryConfig:
    """One training whose memory is predicted and measured."""

    model: str
    length: int
    lever: str
    optimizer: str = "adamw"
    expandable: bool = False
    # Flash attention, which predictions assume, where torch would choose cuDNN's.
    flash: bool = False

    @property
    def key(self) -> str:
        words = [self.model, str(self.length), self.lever, self.optimizer]
        words += [name for name in ("expandable", "flash") if getattr(self, name)]
        return " ".join(words)


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


def flash_configs(setting: Setting) -> list[MemoryConfig]:
    """List trainings that are measured with flash attention too."""
    length = setting.lengths[len(setting.lengths) // 2]
    return [
        MemoryConfig(model, length, lever, flash=True)
        for model in setting.models
        for lever in ("none", "full")
    ]


def predict(setting: Setting) -> Iterator[Row]:
    """Memory from shapes alone; needs no device."""
    for config in memory_configs(setting):
        yield Row(config.key, partial(_predicted, setting, config))


def _predicted(setting: Setting, config: MemoryConfig) -> Figures:
    started = time.monotonic()
    workload = setting.models[config.model].workload(config.length)
    change = partial(_apply_lever, find_lever(config.lever), _sample(workload))
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
    return {**asdict(found), "card": setting.card, "seconds": round(time.monotonic() - started, 1)}


def _sample(workload: Workload) -> Sample:
    return Sample(workload.batch(1), workload.mean_loss, None)


def _apply_lever(lever: Lever, sample: Sample, module: nn.Module) -> None:
    for change in lever.changes:
        change(module, sample)


def memory(setting: Setting) -> Iterator[Row]:
    """Allocated and reserved peaks of real steps."""
    for config in [*memory_configs(setting), *flash_configs(setting)]:
        if not config.expandable:
            yield Row(config.key, partial(_measured, setting, config), seconds=25)


def expandable(setting: Setting) -> Iterator[Row]:
    """The same with expandable segments, which a process must be started with."""
    for config in memory_configs(setting):
        if config.expandable:
            yield Row(config.key, partial(_measured, setting, config), seconds=25)


def _measured(setting: Setting, config: MemoryConfig) -> Figures:
    uses_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(uses_cudnn and not config.flash)
    try:
        # Before the device is fresh, since the segments of this would serve the training.
        kernel = attention_kernel(setting, config.model, config.length)
        fresh_device()
        if left := cuda.memory_reserved():
            raise NotFresh(f"{left} bytes are reserved before the first allocation")
        # The history holds the stacks of no frames: sizes and addresses alone.
        cuda.memory._record_memory_history(max_entries=2_000_000, context=None, stacks="python")
        first, (allocated, reserved) = _peaks_of_steps(setting, config)
        history = cuda.memory._snapshot()
        at_end = cuda.memory_reserved()
    finally:
        cuda.memory._record_memory_history(enabled=None)
        torch.backends.cuda.enable_cudnn_sdp(uses_cudnn)
    numbers = trace_numbers(history, source=config.key, reserved=reserved, allocated=allocated)
    numbers["reserved_end"] = at_end
    _add_trace(setting.folder / TRACES_NAME, numbers)
    return {
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "first_step_reserved_bytes": first,
        "attention": kernel,
        "num_events": len(numbers["trace"]),
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


MADE_ACTIONS = ("alloc", "segment_alloc", "segment_map")
GONE_ACTIONS = ("free_completed", "segment_free", "segment_unmap")


def trace_numbers(
    snapshot: Mapping[str, Any], *, source: str, reserved: int, allocated: int
) -> dict[str, Any]:
    """Turn a recorded history that starts empty into the numbers that `cuda_traces.py` replays.

    It has sizes in order of allocation, releases by number, and segments with their addresses.
    """
    (recorded_events,) = [trace for trace in snapshot["device_traces"] if trace] or [[]]
    # An event of another kind, such as `snapshot` or `oom`, may have no address.
    used = (*MADE_ACTIONS, *GONE_ACTIONS)
    events = [event for event in recorded_events if event["action"] in used]
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
    return {
        "source": source,
        "expandable": any(event["action"] == "segment_map" for event in events),
        "starts_empty": True,
        "start": [],
        "address_check": check % (2**61 - 1),
        "reserved_peak": reserved,
        "peak_blocks": allocated,
        "trace": order,
    }


def _add_trace(path: Path, numbers: Mapping[str, Any]) -> None:
    """Append a trace, compressed by itself: one that is cut off costs no other."""
    line = gzip.compress((json.dumps(numbers, separators=(",", ":")) + "\n").encode())
    with path.open("ab") as file:
        file.write(line)


PIECES: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "predict": predict,
    "memory": memory,
    "expandable": expandable,
}
