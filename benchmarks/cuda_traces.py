"""Replay recorded CUDA memory traces in the allocator model, and predict training steps.

    python benchmarks/cuda_traces.py FOLDER --json evidence/cuda_traces.json

A trace is a JSON file: the segments at its start, then sizes in order of allocation, releases,
segments made and segments given back. For native segments every block must lie at its recorded
address; for expandable segments every growth must be the recorded one.

Some traces are of training steps whose program is known: a language model of a known size, length
and optimizer. Their memory is also predicted from shapes alone, and compared with the record.

Proof: `python -m pytest tests/plan/test_cuda_allocator.py`.
"""

import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from curry_train.plan.cuda_allocator import SMALL_SEGMENT, CudaAllocator, MemoryBlock
from curry_train.plan.cuda_step import NUM_STEPS, WORKSPACE_BYTES, cuda_memory
from curry_train.plan.estimate import Sketch
from curry_train.workloads.workload import Workload
from recording import ROOT, Figures, record_parser, write_record

ADDRESS_UNIT = 512
CHECK_MODULUS = 2**61 - 1


def add_segment(
    allocator: CudaAllocator,
    address: int,
    num_bytes: int,
    *,
    stream: int,
    small: bool,
    used: list[tuple[int, int]],
) -> list[MemoryBlock]:
    """Add a segment that exists already, with its used blocks as (address, bytes).

    Returns those blocks. The ranges between them are free.
    """
    pool = allocator._pool(stream, small=small)
    allocator._add_reserved(address, num_bytes)
    blocks = []
    before = None
    position = address
    # Each used range ends a free one, as the end of the segment does.
    for start, size in [*sorted(used), (address + num_bytes, 0)]:
        for end, free in ((start, True), (start + size, False)):
            if end == position:
                continue
            block = MemoryBlock(position, end - position, pool, free=free, before=before)
            if before is not None:
                before.after = block
            before = block
            position = end
            if free:
                pool.add(block)
            else:
                blocks.append(block)
                allocator.allocated += size
    allocator.peak_allocated = max(allocator.peak_allocated, allocator.allocated)
    return blocks


class Replay:
    """Replays a trace, and counts what the allocator model computes next to what is recorded."""

    def __init__(self, trace: Mapping[str, Any]) -> None:
        self.trace = trace
        self.expandable = bool(trace["expandable"])
        self.allocator = CudaAllocator(
            expandable_segments=self.expandable, new_address=self._address
        )
        self.blocks = []
        self.num_allocations = 0
        self.address_sum = 0
        self.computed = Counter()
        self.recorded = Counter()
        # The segments that the trace records for the next allocation.
        self.expected = []
        # Some traces of expandable segments record only the totals.
        self.records_segments = not self.expandable or any(
            isinstance(event, dict) and "s" in event for event in trace["trace"]
        )
        self._start()
        self._play()
        self._compare()

    @property
    def exact(self) -> bool:
        """Return whether the model computed everything that the trace records."""
        return self.computed == self.recorded

    def _address(self, num_bytes: int) -> int:
        if self.expected and "at" in self.expected[-1]:
            return self.expected[-1]["at"] * ADDRESS_UNIT
        return self.allocator._next_address_down(num_bytes)

    def _start(self) -> None:
        for item in self.trace["start"]:
            if self.expandable:
                self.blocks.append(self.allocator.allocate(item))
                continue
            address, num_bytes, stream, used = item
            base = address * ADDRESS_UNIT
            self.blocks += add_segment(
                self.allocator,
                base,
                num_bytes,
                stream=stream,
                small=num_bytes == SMALL_SEGMENT,
                used=[(base + offset * ADDRESS_UNIT, size) for offset, size in used],
            )

    def _play(self) -> None:
        released = 0
        # None ends a release at the end of the trace.
        for event in [*self.trace["trace"], None]:
            if isinstance(event, dict) and "r" in event:
                released += 1
                continue
            if released:
                self._count("given back", len(self.allocator.empty_cache()), released)
                released = 0
            if isinstance(event, dict):
                self.expected.append(event)
            elif isinstance(event, int) and event < 0:
                self.allocator.free(self.blocks[-1 - event])
            elif event is not None:
                self._allocate(event)

    def _allocate(self, event: int | list[int]) -> None:
        num_bytes, stream = (event, 0) if isinstance(event, int) else event
        before = self.allocator.reserved
        block = self.allocator.allocate(num_bytes, stream=stream)
        grown = self.allocator.reserved - before
        expected = sum(segment["s"] for segment in self.expected)
        if self.records_segments and (expected or grown):
            self._count("segments", grown, expected)
        self.expected.clear()
        self.blocks.append(block)
        self.num_allocations += 1
        self.address_sum += self.num_allocations * (block.address // ADDRESS_UNIT)

    def _count(self, name: str, computed: int, recorded: int) -> None:
        self.recorded[name] += 1
        self.computed[name] += computed == recorded

    def _compare(self) -> None:
        """Add the peaks and the end, and for native segments the sum of number times address."""
        self.computed["reserved peak"] = self.allocator.peak_reserved
        self.computed["reserved end"] = self.allocator.reserved
        self.recorded["reserved peak"] = self.trace["reserved_peak"]
        self.recorded["reserved end"] = self.trace["reserved_end"]
        if self.trace["peak_blocks"] is not None:
            self.computed["allocated peak"] = self.allocator.peak_allocated
            self.recorded["allocated peak"] = self.trace["peak_blocks"]
        if not self.expandable:
            self.computed["addresses"] = self.address_sum % CHECK_MODULUS
            self.recorded["addresses"] = self.trace["address_check"]


# Training steps whose program is known, predicted from shapes. The model is that of an eval case.

FILE = ROOT / "evals/memory-plan/card-not-here/fixture/train.py"
spec = importlib.util.spec_from_file_location("card_not_here", FILE)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

NUM_SAMPLES = 4
MODEL_SIZES = {
    "medium": {"WIDTH": 1024, "HIDDEN": 4096, "DEPTH": 24, "HEADS": 16},
    "2.7B": {"WIDTH": 2560, "HIDDEN": 10240, "DEPTH": 32, "HEADS": 32},
}


def written_out_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, operation by operation in the dtype of the logits."""
    negative = -written_out_log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


def written_out_log_softmax(logits: Tensor) -> Tensor:
    shifted = logits - torch.max(logits, dim=-1, keepdim=True)[0]
    return shifted - torch.log(torch.sum(torch.exp(shifted), dim=-1, keepdim=True))


def torchs_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class MomentsMadeAnew(torch.optim.Optimizer):
    """AdamW by hand, which replaces its moments, parameter after parameter."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters(), {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad.data
            state = self.state[parameter]
            parameter.data -= 1e-5 * parameter.data
            first = state.get("first", torch.zeros_like(gradient))
            second = state.get("second", torch.zeros_like(gradient))
            first = 0.9 * first + (0.1 * gradient)
            second = 0.999 * second + (0.001 * torch.square(gradient))
            parameter.data -= 1e-3 * first / (torch.sqrt(second) + 1e-8)
            state["first"] = first
            state["second"] = second


@dataclass(frozen=True)
class Program:
    """A recorded training program."""

    trace: str
    size: str
    length: int
    loss: Callable[[Tensor, Tensor], Tensor]
    # None for torch's AdamW.
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    autocast: bool = False

    def build(self) -> nn.Module:
        vars(script).update(MODEL_SIZES[self.size])
        return script.Decoder(self.length)

    def workload(self) -> Workload:
        return Workload(
            f"{self.size}, {self.length} tokens",
            self.build,
            lambda size: torch.randint(script.VOCABULARY, (size, self.length + 1)),
            self._loss,
            count=lambda batch: 1,
            optimizer=self.optimizer,
            output_until="step",
        )

    def _loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            return self.loss(module(batch[:, :-1]), batch[:, 1:])


PROGRAMS = (
    Program("46687ead", "2.7B", 128, torchs_loss),
    Program("ec8d8313", "2.7B", 512, torchs_loss),
    Program("490616d9", "medium", 128, written_out_loss, MomentsMadeAnew),
    Program("e9e79f9d", "medium", 256, written_out_loss, MomentsMadeAnew),
    Program("5e4daf77", "medium", 512, written_out_loss, MomentsMadeAnew, autocast=True),
)


def predict_steps(folder: Path) -> Figures:
    """Predict all programs whose trace is in the folder, and summarize the errors."""
    steps = []
    for program in PROGRAMS:
        path = folder / f"{program.trace}.json"
        if not path.exists():
            continue
        facts = json.loads(path.read_text())
        with Sketch(program.workload(), kernels="cuda") as sketch:
            trace = sketch.step(NUM_SAMPLES).trace
        found = cuda_memory(trace, workspace_bytes=WORKSPACE_BYTES, num_steps=NUM_STEPS)
        recorded = {"allocated": facts["peak_blocks"], "reserved": facts["reserved_peak"]}
        predicted = {"allocated": found.allocated_bytes, "reserved": found.reserved_bytes}
        row = {
            "trace": program.trace,
            "model": program.size,
            "length": program.length,
            "predicted": predicted,
            "recorded": recorded,
            "error": {name: predicted[name] / recorded[name] - 1 for name in predicted},
        }
        steps.append(row)
        print(row)
    worst = {
        f"worst_{name}_error": max((abs(row["error"][name]) for row in steps), default=None)
        for name in ("allocated", "reserved")
    }
    return {"steps": steps, **worst}


def main() -> None:
    """Replay every trace of a folder, and predict known steps; status 1 if one is not exact."""
    parser = record_parser(__doc__)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    paths = sorted(options.folder.glob("*.json"))
    if not paths:
        parser.error(f"{options.folder} has no *.json: give a folder of traces")
    rows = []
    for path in paths:
        found = Replay(json.loads(path.read_text()))
        counts = {"allocations": found.num_allocations, "exact": found.exact}
        rows.append({"name": path.stem} | counts | found.computed)
        if not found.exact:
            print(f"{path.stem} is not exact: {found.computed}, recorded {found.recorded}")
    exact = sum(row["exact"] for row in rows)
    print(f"{exact} of {len(rows)} traces exact")
    if options.json:
        figures = {"exact": exact, "traces": len(rows), "rows": rows}
        write_record(options.json, figures | predict_steps(options.folder))
    sys.exit(exact != len(rows))


if __name__ == "__main__":
    main()
