"""Read CUDA memory snapshots, and rebuild the blocks that lived while they were recorded.

    snapshot = read_snapshot("oom.pickle")     # written by torch.cuda.memory._dump_snapshot
    history = snapshot.devices[0]
    history.peak_allocated, history.alive_at(history.peak_index)

A snapshot is a pickle of plain containers. It is read by an unpickler that imports and calls
nothing, because such files are sent from one person to another.

Blocks are placed at their recorded addresses, so that their sizes need no model of the allocator:
of a large native block, the rest of its gap belongs to it where torch does not split that off.

Proof: `python -m pytest tests/plan/test_snapshot.py`.
"""

import bisect
import functools
import itertools
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..core.unpickle import read_plain
from ..core.wording import format_bytes
from .cuda_allocator import LARGEST_SMALL_BLOCK, MIB, rounded

# A snapshot of 512 MiB has about 4 million events, and takes about 5 GiB of host memory.
MOST_FILE_BYTES = 2**29
# Before the first event of the record.
AT_START = -1

SEGMENT_MADE = ("segment_alloc", "segment_map")
SEGMENT_GIVEN_BACK = ("segment_free", "segment_unmap")
BLOCK_FREED = ("free_completed", "free")
OUT_OF_MEMORY = "oom"
LIVE_STATES = ("active_allocated", "active_pending_free", "active_awaiting_free")


class UnusableSnapshot(ValueError):
    """A file that is no snapshot, or that contradicts itself."""


class Frame(NamedTuple):
    """A line of a stack; the innermost call is first."""

    function: str
    file: str
    line: int

    @property
    def path(self) -> str:
        """The path with the slashes of Linux; empty where the file is not of Python."""
        path = self.file.replace("\\", "/")
        return path if path.endswith(".py") else ""


Stack = tuple[Frame, ...]


class MemoryEvent(NamedTuple):
    """A recorded action of the allocator."""

    action: str
    address: int  # of an out-of-memory error: the bytes of the device that were free
    num_bytes: int
    stream: int
    stack: Stack


@dataclass(slots=True, eq=False)
class BlockLife:
    """A block from its allocation to its release."""

    address: int
    requested_bytes: int
    stream: int
    born: int  # index of the event; AT_START if it was there before the record
    stack: Stack
    num_bytes: int = 0  # with the rounding, and with a rest that was not split off
    freed: int | None = None  # index of the event; None if it was alive at the end
    # Of the training, once `OwnedBlocks` has found them.
    phase: str = ""
    owner: str = ""

    def is_alive(self, index: int) -> bool:
        return self.born <= index and (self.freed is None or self.freed > index)

    @property
    def own_bytes(self) -> int:
        """The bytes without a rest that was not split off."""
        return min(rounded(self.requested_bytes), self.num_bytes)

    @property
    def origin(self) -> "Origin":
        """The origin that the stack shows: an empty one is of a thread of autograd."""
        return origin_of(self.stack)


@dataclass(frozen=True, slots=True)
class RecordedSegment:
    """A segment as it was when the snapshot was taken, with the blocks that were in use."""

    address: int
    num_bytes: int
    is_expandable: bool
    blocks: tuple[BlockLife, ...]


@dataclass(frozen=True)
class MemorySnapshot:
    """The devices of a snapshot that hold memory or have events."""

    devices: tuple["BlockHistory", ...]
    # What the settings of the allocator hold that a replay does not follow.
    notes: tuple[str, ...]


def read_snapshot(path: str | Path) -> MemorySnapshot:
    """Read a snapshot; raises UnusableSnapshot for any other file."""
    num_bytes = Path(path).stat().st_size
    if num_bytes > MOST_FILE_BYTES:
        raise UnusableSnapshot(
            f"{path} is too large: {format_bytes(num_bytes)}, and {format_bytes(MOST_FILE_BYTES)} "
            "can be read. Record fewer events: _record_memory_history(max_entries=1_000_000)"
        )
    try:
        return _snapshot_of(read_plain(Path(path).read_bytes()))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise UnusableSnapshot(f"{path} is no CUDA memory snapshot: {why}") from error


def _snapshot_of(root: Any) -> MemorySnapshot:
    """Turn the containers of a pickle into records; raises the errors of missing or odd parts."""
    if "segments" not in root:
        raise ValueError("it has no segments; write one with torch.cuda.memory._dump_snapshot")
    settings = root.get("allocator_settings") or {}
    segments: defaultdict[int, list[RecordedSegment]] = defaultdict(list)
    for value in root["segments"]:
        segments[_number(value, "device", 0)].append(_segment(value))
    events = {
        device: tuple(map(_event, trace))
        for device, trace in enumerate(root.get("device_traces", ()))
    }
    devices = []
    for device in sorted(segments.keys() | {device for device in events if events[device]}):
        in_order = sorted(segments[device], key=lambda segment: segment.address)
        devices.append(BlockHistory(device, in_order, events.get(device, ())))
    if not devices:
        raise ValueError("it has neither segments nor events")
    return MemorySnapshot(tuple(devices), tuple(_list_notes(settings)))


def _stack(value: Any) -> Stack:
    frames = value.get("frames") or ()
    read = (
        Frame(_text(one, "name"), _text(one, "filename"), _number(one, "line", 0)) for one in frames
    )
    return _intern(tuple(read))


@functools.lru_cache(maxsize=2**16)
def _intern(stack: Stack) -> Stack:
    """Return one stack for all equal ones: events have few different ones."""
    return stack


def _event(value: Any) -> MemoryEvent:
    return MemoryEvent(
        _text(value, "action"),
        _number(value, "addr", value.get("device_free", 0)),
        _number(value, "size", 0),
        _number(value, "stream", 0),
        _stack(value),
    )


def _segment(value: Any) -> RecordedSegment:
    address = _number(value, "address")
    stream = _number(value, "stream", 0)
    blocks = []
    position = address
    for item in value["blocks"]:
        size = _number(item, "size")
        start = _number(item, "address", position)
        position = start + size
        requested = min(_number(item, "requested_size", size), size)
        if item.get("state") in LIVE_STATES:
            blocks.append(BlockLife(start, requested, stream, AT_START, _stack(item), size))
    is_expandable = value.get("is_expandable") is True
    return RecordedSegment(address, _number(value, "total_size"), is_expandable, tuple(blocks))


def _number(record: Any, name: str, default: int | None = None) -> int:
    value = operator.index(record[name] if default is None else record.get(name, default))
    if value < 0:
        raise ValueError(f"{name} is negative")
    return value


def _text(record: Any, name: str) -> str:
    return sys.intern(record.get(name, ""))


def _list_notes(settings: Any) -> Iterator[str]:
    """Name the settings of the allocator that a replay does not follow."""
    if any(step > 1 for step in settings.get("roundup_power2_divisions", {}).values()):
        yield "roundup_power2_divisions is set: sizes are rounded without it"
    if settings.get("garbage_collection_threshold"):
        yield "garbage_collection_threshold is set: a replay collects nothing"
    if 20 * MIB < settings.get("max_split_size", -1) < 2**62:
        yield "max_split_size_mb is set: rests that it leaves unsplit are not counted"


# The blocks that were alive, and when.


class BlockHistory:
    """Every block of a device over the events of its record, which led to the segments."""

    def __init__(
        self, device: int, segments: Sequence[RecordedSegment], events: Sequence[MemoryEvent]
    ) -> None:
        self.device = device
        self.segments = segments
        self.events = events
        self.contradictions = 0
        self.lives = self._all_lives()
        if self.has_expandable_segments:
            # Rests are always split off.
            for life in self.lives:
                life.num_bytes = life.num_bytes or rounded(life.requested_bytes)
        else:
            _place_blocks(self)
        # Bytes after each event; the first figure is of the start.
        self.allocated, self.reserved = self._curves()
        self.peak_allocated = max(self.allocated)
        # Index of the event after which the most is allocated.
        self.peak_index = self.allocated.index(self.peak_allocated) - 1
        self.peak_reserved = max(self.reserved)

    @property
    def has_expandable_segments(self) -> bool:
        maps = any(event.action in ("segment_map", "segment_unmap") for event in self.events)
        return maps or any(segment.is_expandable for segment in self.segments)

    @property
    def reserved_at_peak(self) -> int:
        return self.reserved[self.peak_index + 1]

    @property
    def of_dropped_events(self) -> list[BlockLife]:
        """The blocks that have a stack but no recorded allocation."""
        return [life for life in self.lives if life.born == AT_START and life.stack]

    def alive_at(self, index: int) -> list[BlockLife]:
        return [life for life in self.lives if life.is_alive(index)]

    def out_of_memory(self) -> Iterator[tuple[int, MemoryEvent]]:
        """Yield the index and the event of each out-of-memory error."""
        for index, event in enumerate(self.events):
            if event.action == OUT_OF_MEMORY:
                yield index, event

    def _all_lives(self) -> list[BlockLife]:
        lives: list[BlockLife] = []
        live: dict[int, BlockLife] = {}
        for index, event in enumerate(self.events):
            address = event.address
            if event.action == "alloc":
                before = live.get(address)
                if before is not None:
                    # Its release is missing in the record.
                    before.freed = index
                    self.contradictions += 1
                life = BlockLife(address, event.num_bytes, event.stream, index, event.stack)
                live[address] = life
                lives.append(life)
            elif event.action in BLOCK_FREED:
                released = live.pop(address, None)
                if released is None:
                    # Stacks of releases are those of the release.
                    released = BlockLife(address, event.num_bytes, event.stream, AT_START, ())
                    lives.append(released)
                released.freed = index
        lives += self._find_alive_at_end(live)
        return sorted(lives, key=lambda life: life.born)

    def _find_alive_at_end(self, live: dict[int, BlockLife]) -> Iterator[BlockLife]:
        """Set the bytes of blocks in the segments, and yield those that no event made."""
        for segment in self.segments:
            for block in segment.blocks:
                known = live.pop(block.address, None)
                if known is None:
                    yield block
                else:
                    known.num_bytes = block.num_bytes
        for lost in live.values():
            # The segments do not have it: it was released while the snapshot was taken.
            lost.freed = len(self.events)

    def _curves(self) -> tuple[list[int], list[int]]:
        num_events = len(self.events)
        change = [0] * (num_events + 2)
        for life in self.lives:
            change[life.born + 1] += life.num_bytes
            if life.freed is not None:
                change[life.freed + 1] -= life.num_bytes
        allocated = list(itertools.accumulate(change[: num_events + 1]))
        grown = [0]
        for event in self.events:
            sign = (event.action in SEGMENT_MADE) - (event.action in SEGMENT_GIVEN_BACK)
            grown.append(grown[-1] + sign * event.num_bytes)
        at_end = sum(segment.num_bytes for segment in self.segments)
        at_start = max(at_end - grown[-1], 0)
        return allocated, [at_start + number for number in grown]


def _place_blocks(history: BlockHistory) -> None:
    """Set the bytes of blocks that are not in the final segments, all of them native."""
    # Where a block must end at the latest: ends of segments, and addresses of live blocks.
    bounds = _segment_ends_at_start(history)
    at_start = [life for life in history.lives if life.born == AT_START]
    for life in at_start:
        bisect.insort(bounds, life.address)
    for life in at_start:
        life.num_bytes = life.num_bytes or _block_bytes(life, bounds)
    by_birth = {life.born: life for life in history.lives}
    for index, event in enumerate(history.events):
        if event.action == "alloc":
            life = by_birth[index]
            life.num_bytes = life.num_bytes or _block_bytes(life, bounds)
            bisect.insort(bounds, life.address)
        elif event.action in BLOCK_FREED:
            _remove(bounds, event.address)
        elif event.action == "segment_alloc":
            bisect.insort(bounds, event.address + event.num_bytes)
        elif event.action == "segment_free":
            _remove(bounds, event.address + event.num_bytes)


def _segment_ends_at_start(history: BlockHistory) -> list[int]:
    """Return the sorted ends of the native segments before the first event."""
    ends = sorted(segment.address + segment.num_bytes for segment in history.segments)
    for event in reversed(history.events):
        if event.action == "segment_alloc":
            _remove(ends, event.address + event.num_bytes)
        elif event.action == "segment_free":
            bisect.insort(ends, event.address + event.num_bytes)
    return ends


def _block_bytes(life: BlockLife, bounds: Sequence[int]) -> int:
    """Return the bytes of a block, given where the next one begins."""
    size = rounded(life.requested_bytes)
    place = bisect.bisect_right(bounds, life.address)
    rest = bounds[place] - life.address - size if place < len(bounds) else 0
    has_rest = size > LARGEST_SMALL_BLOCK and 0 < rest <= LARGEST_SMALL_BLOCK
    return size + rest if has_rest else size


def _remove(bounds: list[int], bound: int) -> None:
    place = bisect.bisect_left(bounds, bound)
    if bounds[place : place + 1] == [bound]:
        del bounds[place]


# What a stack shows.

FORWARD_PHASE = "forward"
RECOMPUTE_PHASE = "recompute"
BACKWARD_PHASE = "backward"
STEP_PHASE = "step"
UNKNOWN_PHASE = "unknown"


@dataclass(frozen=True)
class Origin:
    """Where in a training an allocation was made."""

    phase: str
    line: str  # the innermost lines of the user's own code
    in_module: bool = False
    in_loss: bool = False
    builds_model: bool = False


BUILDING_FUNCTIONS = {
    "_apply",
    "convert",
    "to_empty",
    "load_state_dict",
    "from_pretrained",
    "reset_parameters",
    "_load_from_state_dict",
}
LOSS_WORDS = ("loss", "entropy", "log_softmax")
NOT_OWN_CODE = ("/torch/", "/einops/", "/einx/", "/jaxtyping/", "/contextlib.py", "/functools.py")
RECOMPUTING_FUNCTIONS = {"recompute_fn", "unpack_hook", "inner_unpack"}
MODULE_CALLS = ("_call_impl", "_wrapped_call_impl")


@functools.lru_cache(maxsize=2**16)
def origin_of(stack: Stack) -> Origin:
    """Read the phase of a training and the source line from a stack."""
    python = [frame for frame in stack if frame.path]
    line = _own_lines(python)
    module_depth = _find_depth(stack, lambda frame: frame.function in MODULE_CALLS)
    backward_depth = _find_depth(stack, _is_backward)
    if any(_is_optimizer(frame) for frame in python):
        return Origin(STEP_PHASE, line)
    recomputes = any(frame.function in RECOMPUTING_FUNCTIONS for frame in python)
    if recomputes or module_depth < backward_depth < len(stack):
        return Origin(RECOMPUTE_PHASE, line, in_module=True)
    if backward_depth < len(stack) or not python:
        # Without Python frames it is the thread of autograd.
        return Origin(BACKWARD_PHASE, line)
    inner = stack[: module_depth + 1]
    return Origin(
        FORWARD_PHASE,
        line,
        in_module=module_depth < len(stack),
        in_loss=any(_is_loss(frame) for frame in inner),
        builds_model=any(_is_building(frame) for frame in python),
    )


def _find_depth(stack: Stack, matches: Callable[[Frame], bool]) -> int:
    return next((index for index, frame in enumerate(stack) if matches(frame)), len(stack))


def _is_backward(frame: Frame) -> bool:
    if frame.path:
        return frame.function == "backward"
    name = frame.function
    return "autograd::Engine" in name or "autograd::generated" in name or "AccumulateGrad" in name


def _is_optimizer(frame: Frame) -> bool:
    path = frame.path
    if frame.function in ("zero_grad", "__init__", "add_param_group"):
        return False
    if "/torch/optim/" in path or path.startswith("torch/optim/"):
        return "lr_scheduler" not in path
    # Clipping and unscaling read all gradients between backward and the step.
    if path.endswith(("/nn/utils/clip_grad.py", "/amp/grad_scaler.py")):
        return frame.function != "scale"
    return frame.function == "step" and "optim" in path.rsplit("/", 1)[-1].lower()


def _is_loss(frame: Frame) -> bool:
    if not frame.path:
        return "nll_loss" in frame.function or "log_softmax" in frame.function
    name = frame.function.lower()
    return any(word in name for word in LOSS_WORDS) or frame.path.endswith("/modules/loss.py")


def _is_building(frame: Frame) -> bool:
    if frame.function in BUILDING_FUNCTIONS:
        return True
    return frame.function == "__init__" and "/torch/nn/" in frame.path


def _own_lines(python: Sequence[Frame]) -> str:
    """Return the two innermost lines that are neither torch's nor of a tensor library."""
    own = [
        frame
        for frame in python
        if frame.function not in MODULE_CALLS
        and not any(part in f"/{frame.path}" for part in NOT_OWN_CODE)
    ]
    names = [f"{frame.function} {frame.path.rsplit('/', 1)[-1]}:{frame.line}" for frame in own]
    return " < ".join(names[:2])
