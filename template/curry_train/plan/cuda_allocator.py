"""Model torch's CUDA caching allocator: the memory that a sequence of allocations reserves.

    allocator = CudaAllocator()
    block = allocator.allocate(4096)
    allocator.free(block)
    allocator.reserved, allocator.peak_reserved, allocator.peak_allocated

A GPU runs out of reserved memory, not of allocated tensors. Both follow from sizes, streams and the
order of allocation and release alone, so they can be known without a GPU.

The native rules are checked against recorded traces of CUDA programs: each block at its recorded
address, each segment and the reserved peak. Expandable segments are checked by every recorded
growth. A device that is full is not modelled: no recorded trace shows how torch tries again then.

Proof: `python -m pytest tests/plan/test_cuda_allocator.py`.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

MIB = 2**20
# Every size is rounded up to this, and no smaller rest is split off.
SMALLEST_BLOCK = 512
# Up to this size, allocations come from the pool of small blocks.
LARGEST_SMALL_BLOCK = MIB
SMALL_SEGMENT = 2 * MIB
# Below this size, large allocations share segments of LARGE_SEGMENT; from it on, each segment is
# the size itself, rounded up to SEGMENT_ROUNDING.
SMALLEST_OWN_SEGMENT = 10 * MIB
LARGE_SEGMENT = 20 * MIB
SEGMENT_ROUNDING = 2 * MIB
# Segments of the model are numbered downwards from here, as the driver does.
FIRST_ADDRESS = 2**47


def rounded(num_bytes: int) -> int:
    """Return the bytes of the block that an allocation of `num_bytes` asks for."""
    return _round_up(max(1, num_bytes), SMALLEST_BLOCK)


def segment_size(block_bytes: int) -> int:
    """Return the bytes of a new native segment for a block of this size."""
    if block_bytes <= LARGEST_SMALL_BLOCK:
        return SMALL_SEGMENT
    if block_bytes < SMALLEST_OWN_SEGMENT:
        return LARGE_SEGMENT
    return _round_up(block_bytes, SEGMENT_ROUNDING)


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """A range of addresses in one segment, allocated or free."""

    address: int
    num_bytes: int
    pool: "_Pool"
    free: bool = True
    # Neighbours in the same segment.
    before: "MemoryBlock | None" = None
    after: "MemoryBlock | None" = None


@dataclass(eq=False, slots=True)
class _Pool:
    """The free blocks of one stream and size class."""

    small: bool
    # With their sizes and addresses, by which they are sorted.
    free: list[tuple[int, int, MemoryBlock]] = field(default_factory=list)
    # Of an expandable segment: its address and its last block.
    base: int = 0
    last: MemoryBlock | None = None

    def add(self, block: MemoryBlock) -> None:
        block.free = True
        bisect.insort(self.free, (block.num_bytes, block.address, block))

    def remove(self, block: MemoryBlock) -> None:
        del self.free[bisect.bisect_left(self.free, (block.num_bytes, block.address))]

    def find(self, num_bytes: int) -> MemoryBlock | None:
        """Return the smallest free block that is large enough, of equal ones the lowest.

        The end of an expandable segment counts as very large.
        """
        place = bisect.bisect_left(self.free, (num_bytes,))
        two = [block for _, _, block in self.free[place : place + 2]]
        return min(two, key=lambda block: block is self.last, default=None)


class CudaAllocator:
    """The caching allocator of one device.

    With `expandable_segments`, as PYTORCH_CUDA_ALLOC_CONF names it, each pool has one growing
    segment instead of many of fixed size.

    `new_address` returns the address of a new segment of the given size; the driver chooses it, so
    the model can't know it. It decides only which of several free blocks of one size is taken.
    """

    def __init__(
        self, *, expandable_segments: bool = False, new_address: Callable[[int], int] | None = None
    ) -> None:
        self.expandable_segments = expandable_segments
        self.allocated = 0
        self.reserved = 0
        self.peak_allocated = 0
        self.peak_reserved = 0
        # Bytes of each segment by address; of an expandable segment, its mapped bytes.
        self.segments: dict[int, int] = {}
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._lowest_address = FIRST_ADDRESS
        self._new_address = new_address or self._next_address_down

    def allocate(self, num_bytes: int, *, stream: int = 0) -> MemoryBlock:
        """Return the block that torch would take."""
        size = rounded(num_bytes)
        pool = self._pool(stream, small=size <= LARGEST_SMALL_BLOCK)
        block = pool.find(size)
        if block is not None:
            pool.remove(block)
        elif self.expandable_segments:
            block = self._grow(pool, size)
        else:
            needed = segment_size(size)
            block = MemoryBlock(self._new_address(needed), needed, pool)
            self._add_reserved(block.address, needed)
        self._split(block, size)
        block.free = False
        self.allocated += block.num_bytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: MemoryBlock) -> None:
        """Return a block to the cache, merged with its free neighbours."""
        if block.free:
            raise ValueError(f"the block at address {block.address} is free already")
        self.allocated -= block.num_bytes
        pool = block.pool
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                pool.remove(neighbour)
                block = _merged(block, neighbour)
        pool.add(block)

    def empty_cache(self) -> list[int]:
        """Give back what no block uses, as torch.cuda.empty_cache; return the segments' addresses.

        Of an expandable segment only its free end is given back.
        """
        given_back = []
        for pool in self._pools.values():
            if self.expandable_segments:
                given_back += self._unmap_end(pool)
                continue
            for _, _, block in list(pool.free):
                if block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= self.segments.pop(block.address)
                    given_back.append(block.address)
        return given_back

    def _pool(self, stream: int, *, small: bool) -> _Pool:
        return self._pools.setdefault((stream, small), _Pool(small))

    def _split(self, block: MemoryBlock, size: int) -> None:
        rest_bytes = block.num_bytes - size
        splits_all = block.pool.small or self.expandable_segments
        if rest_bytes < SMALLEST_BLOCK or (not splits_all and rest_bytes <= LARGEST_SMALL_BLOCK):
            return
        pool = block.pool
        rest = MemoryBlock(block.address + size, rest_bytes, pool, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.num_bytes = size
        if pool.last is block:
            pool.last = rest
        pool.add(rest)

    def _grow(self, pool: _Pool, size: int) -> MemoryBlock:
        """Map memory for a block at the end of an expandable segment; return its last block."""
        end = pool.last
        available = end.num_bytes if end is not None and end.free else 0
        num_bytes = _round_up(size - available, SMALL_SEGMENT if pool.small else LARGE_SEGMENT)
        mapped = self.segments.get(pool.base, 0)
        if mapped == 0:
            pool.base = self._new_address(num_bytes)
        if end is not None and end.free:
            pool.remove(end)
            end.num_bytes += num_bytes
        else:
            new = MemoryBlock(pool.base + mapped, num_bytes, pool, before=end)
            if end is not None:
                end.after = new
            end = pool.last = new
        self._add_reserved(pool.base, num_bytes)
        return end

    def _unmap_end(self, pool: _Pool) -> list[int]:
        end = pool.last
        step = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        unmapped = 0 if end is None or not end.free else end.num_bytes // step * step
        if end is None or unmapped == 0:
            return []
        pool.remove(end)
        end.num_bytes -= unmapped
        self.reserved -= unmapped
        self.segments[pool.base] -= unmapped
        if end.num_bytes:
            pool.add(end)
        else:
            pool.last = end.before
            if end.before is not None:
                end.before.after = None
        return [pool.base]

    def _add_reserved(self, address: int, num_bytes: int) -> None:
        self.segments[address] = self.segments.get(address, 0) + num_bytes
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _next_address_down(self, num_bytes: int) -> int:
        # An expandable segment reserves addresses for all that it may grow to.
        spacing = 2**42 if self.expandable_segments else num_bytes
        self._lowest_address -= _round_up(spacing, SEGMENT_ROUNDING)
        return self._lowest_address


def _merged(block: MemoryBlock, neighbour: MemoryBlock) -> MemoryBlock:
    """Merge two neighbours into the lower one."""
    lower, upper = (neighbour, block) if neighbour is block.before else (block, neighbour)
    lower.num_bytes += upper.num_bytes
    lower.after = upper.after
    if upper.after is not None:
        upper.after.before = lower
    if lower.pool.last is upper:
        lower.pool.last = lower
    return lower


def _round_up(num_bytes: int, step: int) -> int:
    return -(-num_bytes // step) * step
