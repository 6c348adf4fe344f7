"""The allocator model reserves what CUDA reserved in traces, and keeps its invariants.

python -m pytest tests/plan/test_cuda_allocator.py
"""

import itertools
from pathlib import Path

import pytest
from command_runs import read_json
from hypothesis import given
from hypothesis import strategies as st

from cuda_traces import Replay
from curry_train.plan.cuda_allocator import (
    LARGE_SEGMENT,
    MIB,
    CudaAllocator,
    segment_size,
)

TRACES = sorted((Path(__file__).parent / "cuda_traces").glob("*.json"))


def test_the_recorded_traces_exist():
    assert len(TRACES) >= 12
    traces = [*map(read_json, TRACES)]
    assert {trace["expandable"] for trace in traces} == {True, False}
    assert all(trace["source"] for trace in traces)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_a_recorded_trace_is_reproduced_exactly(path):
    result = Replay(read_json(path))
    assert result.exact, (result.computed, result.recorded)
    assert result.num_allocations > 0


SIZES = st.integers(1, 64 * MIB)


@given(st.booleans(), st.lists(st.tuples(SIZES, st.integers(0, 1), st.booleans()), max_size=60))
def test_blocks_never_overlap_and_reserved_covers_allocated(expandable, steps):
    allocator = CudaAllocator(expandable_segments=expandable)
    live = []
    for num_bytes, stream, release in steps:
        block = allocator.allocate(num_bytes, stream=stream)
        assert block.num_bytes >= num_bytes
        live.append(block)
        if release:
            allocator.free(live.pop(len(live) // 2))
        ranges = sorted((block.address, block.address + block.num_bytes) for block in live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
        assert allocator.allocated == sum(block.num_bytes for block in live)
        assert allocator.allocated <= allocator.reserved == sum(allocator.segments.values())
        assert allocator.peak_reserved >= allocator.reserved
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.allocated == 0
    assert allocator.reserved == 0


def test_a_segment_of_its_own_begins_at_10_mib():
    """No recorded trace has a block of this size; the other classes are in the traces."""
    assert segment_size(10 * MIB - 512) == LARGE_SEGMENT
    assert segment_size(10 * MIB) == 10 * MIB


def test_a_block_is_freed_once():
    allocator = CudaAllocator()
    block = allocator.allocate(1)
    allocator.free(block)
    with pytest.raises(ValueError, match="is free already"):
        allocator.free(block)
