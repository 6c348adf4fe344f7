"""The allocator model reserves what CUDA reserved in recorded traces.

Random allocations of its own record are in test_snapshot.py.

python -m pytest tests/plan/test_cuda_allocator.py
"""

from pathlib import Path

import pytest

from cuda_traces import Replay
from curry_train.plan.cuda_allocator import (
    LARGE_SEGMENT,
    MIB,
    CudaAllocator,
    segment_size,
)

from ..command_runs import read_json

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


def test_a_segment_of_its_own_begins_at_10_mib():
    """No recorded trace has a block of this size; the other classes are in the traces."""
    assert segment_size(10 * MIB - 512) == LARGE_SEGMENT
    assert segment_size(10 * MIB) == 10 * MIB


@pytest.mark.parametrize("empties", [False, True])
def test_an_expandable_segment_that_is_free_again_is_one_block(empties):
    allocator = CudaAllocator(expandable_segments=True)
    first, second = (allocator.allocate(20 * MIB) for _ in range(2))
    allocator.free(second)
    if empties:
        allocator.empty_cache()
    allocator.free(first)
    allocator.allocate(40 * MIB)
    assert allocator.reserved == 40 * MIB


def test_a_block_is_freed_once():
    allocator = CudaAllocator()
    block = allocator.allocate(1)
    allocator.free(block)
    with pytest.raises(ValueError, match="is free already"):
        allocator.free(block)
