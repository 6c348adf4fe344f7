"""Replay recorded CUDA memory traces through the allocator model, and count the exact ones.

    python benchmarks/cuda_traces.py FOLDER --json evidence/cuda_traces.json

A trace is a JSON file: the segments at its start, then sizes in order of allocation, releases,
segments made and segments given back. For native segments every block must lie at its recorded
address; for expandable segments every growth must be the recorded one.

Proof: `python -m pytest tests/plan/test_cuda_allocator.py`.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "template"))

from curry_train.core.wording import provenance, write_json
from curry_train.plan.cuda_allocator import (
    SMALL_SEGMENT,
    AllocatorSettings,
    CudaAllocator,
    MemoryBlock,
)

ADDRESS_UNIT = 512
CHECK_MODULUS = 2**61 - 1


@dataclass
class Replay:
    """Figures that the allocator model computed for one trace, beside the recorded ones."""

    name: str
    expandable: bool
    allocations: int
    segments_recorded: int
    segments_as_recorded: int
    given_back_recorded: int
    given_back_as_recorded: int
    # Whether the sum over all allocations of number times address is the recorded one.
    addresses_as_recorded: bool | None
    reserved_peak: int
    reserved_peak_recorded: int
    allocated_peak: int
    allocated_peak_recorded: int | None
    reserved_end: int
    reserved_end_recorded: int

    @property
    def exact(self) -> bool:
        """Return whether the model computed everything that the trace records."""
        return (
            self.segments_as_recorded == self.segments_recorded
            and self.given_back_as_recorded == self.given_back_recorded
            and self.addresses_as_recorded is not False
            and self.reserved_peak == self.reserved_peak_recorded
            and self.reserved_end == self.reserved_end_recorded
            and self.allocated_peak_recorded in (None, self.allocated_peak)
        )


class _Player:
    """Replays one trace event by event."""

    def __init__(self, trace: Mapping[str, Any]) -> None:
        self.trace = trace
        self.expandable = bool(trace["expandable"])
        self.allocator = CudaAllocator(
            AllocatorSettings(expandable_segments=self.expandable), new_address=self._address
        )
        self.blocks: list[MemoryBlock] = []
        self.address_sum = 0
        self.num_allocations = 0
        self.recorded = 0
        self.as_recorded = 0
        self.given_back_recorded = 0
        self.given_back = 0
        # The segments that the trace records for the next allocation.
        self.expected: list[Mapping[str, int]] = []
        # Some traces of expandable segments record only the totals.
        self.records_segments = not self.expandable or any(
            isinstance(event, dict) and "s" in event for event in trace["trace"]
        )
        self.unrecorded_address = 2**46

    def _address(self, num_bytes: int) -> int:
        if self.expected and "at" in self.expected[-1]:
            return self.expected[-1]["at"] * ADDRESS_UNIT
        self.unrecorded_address -= 2**42 if self.expandable else num_bytes
        return self.unrecorded_address

    def start(self) -> None:
        for item in self.trace["start"]:
            if self.expandable:
                self.blocks.append(self.allocator.allocate(item))
                continue
            address, num_bytes, stream, used = item
            base = address * ADDRESS_UNIT
            self.blocks += self.allocator.add_segment(
                base,
                num_bytes,
                stream=stream,
                small=num_bytes == SMALL_SEGMENT,
                used=[(base + offset * ADDRESS_UNIT, size) for offset, size in used],
            )

    def play(self) -> None:
        released = 0
        for event in self.trace["trace"]:
            if isinstance(event, dict) and "r" in event:
                released += 1
                continue
            if released:
                self._empty_cache(released)
                released = 0
            if isinstance(event, dict):
                self.expected.append(event)
            elif isinstance(event, int) and event < 0:
                self.allocator.free(self.blocks[-1 - event])
            else:
                self._allocate(event)
        if released:
            self._empty_cache(released)

    def _empty_cache(self, recorded: int) -> None:
        given_back = len(self.allocator.empty_cache())
        self.given_back_recorded += recorded
        self.given_back += min(given_back, recorded) - abs(given_back - recorded)

    def _allocate(self, event: int | list[int]) -> None:
        num_bytes, stream = (event, 0) if isinstance(event, int) else event
        before = self.allocator.reserved
        block = self.allocator.allocate(num_bytes, stream=stream)
        grown = self.allocator.reserved - before
        expected = sum(segment["s"] for segment in self.expected)
        if self.records_segments:
            self.recorded += expected > 0 or grown > 0
            self.as_recorded += grown == expected and grown > 0
        self.expected.clear()
        self.blocks.append(block)
        self.num_allocations += 1
        self.address_sum += self.num_allocations * (block.address // ADDRESS_UNIT)


def replay(trace: Mapping[str, Any], *, name: str = "") -> Replay:
    """Run a trace through the model."""
    player = _Player(trace)
    player.start()
    player.play()
    allocator = player.allocator
    addresses = None
    if not player.expandable:
        addresses = player.address_sum % CHECK_MODULUS == trace["address_check"]
    return Replay(
        name=name,
        expandable=player.expandable,
        allocations=player.num_allocations,
        segments_recorded=player.recorded,
        segments_as_recorded=player.as_recorded,
        given_back_recorded=player.given_back_recorded,
        given_back_as_recorded=player.given_back,
        addresses_as_recorded=addresses,
        reserved_peak=allocator.peak_reserved,
        reserved_peak_recorded=trace["reserved_peak"],
        allocated_peak=allocator.peak_allocated,
        allocated_peak_recorded=trace["peak_blocks"],
        reserved_end=allocator.reserved,
        reserved_end_recorded=trace["reserved_end"],
    )


def main() -> None:
    """Replay every trace of a folder; exit status 1 if one is not exact."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", metavar="PATH", help="Write all figures; - is standard output.")
    options = parser.parse_args()
    paths = sorted(options.folder.glob("*.json"))
    if not paths:
        parser.error(f"{options.folder} has no *.json: give a folder of traces")
    results = []
    for path in paths:
        result = replay(json.loads(path.read_text()), name=path.stem)
        results.append(result)
        if not result.exact:
            print(f"not exact: {result}")
    exact = sum(result.exact for result in results)
    allocations = sum(result.allocations for result in results)
    print(f"{exact} of {len(results)} traces exact, {allocations} allocations")
    if options.json:
        facts = provenance(torch.device("cpu"))
        rows = [asdict(result) | {"exact": result.exact} for result in results]
        write_json(options.json, facts | {"exact": exact, "traces": len(rows), "rows": rows})
    sys.exit(0 if exact == len(results) else 1)


if __name__ == "__main__":
    main()
