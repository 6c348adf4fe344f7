"""Find who owns each byte at the peak of a recorded CUDA training, and what would lower it.

    owned = OwnedBlocks(snapshot.devices[0])
    owned.owners                 # bytes at the peak by owner; they add up to the allocated peak
    levers(owned)                # what lowers it, largest effect first, by replay in the allocator

A record has no owners, only sizes, times and stacks. A block made in backward that outlives it is
a gradient, one made by the optimizer that outlives the step is its state, and one made in forward
that is alive when backward begins is an activation. Blocks that were there before the record are
recognized by the sizes of the gradients.

Proof: `python -m pytest tests/plan/test_owners.py`.
"""

import bisect
import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..core.memory_recorder import memory_record as memory_record
from .cuda_allocator import MIB, CudaAllocator, MemoryBlock
from .cuda_step import HOPPER_WORKSPACE_BYTES, WORKSPACE_BYTES
from .profiler import (
    ACTIVATIONS_GROUP,
    BATCH_GROUP,
    GRADIENTS_GROUP,
    OPTIMIZER_STATE_GROUP,
    PARAMETERS_GROUP,
)
from .snapshot import (
    AT_START,
    BACKWARD_PHASE,
    BLOCK_FREED,
    FORWARD_PHASE,
    RECOMPUTE_PHASE,
    SEGMENT_GIVEN_BACK,
    STEP_PHASE,
    UNKNOWN_PHASE,
    BlockHistory,
    BlockLife,
)

WORKSPACES_OWNER = "workspaces"
FORWARD_TEMPORARIES = "temporaries of forward"
BACKWARD_TEMPORARIES = "temporaries of backward"
STEP_TEMPORARIES = "temporaries of the optimizer"
LOGITS_OWNER = "logits and loss"
RESTS_OWNER = "unsplit rests"
FREE_OWNER = "free blocks"
EARLIER_OWNER = "made before the record"
NO_STACK_OWNER = "without a stack"
# In the order of a picture: what lives through the whole step is first.
ALL_OWNERS = (
    PARAMETERS_GROUP,
    BATCH_GROUP,
    EARLIER_OWNER,
    OPTIMIZER_STATE_GROUP,
    GRADIENTS_GROUP,
    ACTIVATIONS_GROUP,
    LOGITS_OWNER,
    FORWARD_TEMPORARIES,
    BACKWARD_TEMPORARIES,
    STEP_TEMPORARIES,
    NO_STACK_OWNER,
    WORKSPACES_OWNER,
    RESTS_OWNER,
)

# A run of so many allocations in forward begins the next microbatch or step.
FORWARD_RUN = 8
# Threads that multiply matrices: forward and autograd.
MOST_WORKSPACES = 2
# Frames in which a library's function shows what it allocates for.
INNER_FRAMES = 12
# Logits are made at most so many allocations before the loss reads them.
LOGITS_WINDOW = 8
SMALLEST_LOGITS = MIB
# Numbers that a training can hold for each parameter, besides the parameter.
MOST_COPIES = 8
SMALLEST_MATRIX = 64 * 1024
CHUNKS_OF_LOSS = 8
# Of two moments in float32, what an optimizer with 8 bits leaves.
EIGHT_BIT_FRACTION = 0.25
# A lever that takes off less of the peak is not named.
MIN_LEVER_FRACTION = 0.005
# Of a longer record, the events before and after the peak are replayed.
MOST_REPLAYED_EVENTS = 200_000


def _workspaces(lives: Sequence[BlockLife]) -> set[BlockLife]:
    """Return the blocks that are workspaces of cuBLAS, by their stacks or sizes."""
    staying = [life for life in lives if life.freed is None]
    found = set[BlockLife]()
    for life in staying:
        inner = life.stack[:INNER_FRAMES]
        if any("orkspace" in frame.function and not frame.path for frame in inner):
            found.add(life)
    for size in (WORKSPACE_BYTES, HOPPER_WORKSPACE_BYTES):
        same = [life for life in staying if life.requested_bytes == size]
        # Each thread that multiplies has one; parameters of that size are more, with their state.
        if len(same) <= MOST_WORKSPACES or size == WORKSPACE_BYTES:
            found.update(same)
    return found


# The owners of all blocks.


@dataclass(frozen=True)
class LineBytes:
    """Bytes at the peak that one line of code allocated."""

    owner: str
    line: str
    bytes: int
    blocks: int


def _forward_runs(made: Sequence[BlockLife]) -> Iterator[int]:
    """Yield when the forward of each microbatch or step begins."""
    in_forward = False
    for phase, run in itertools.groupby(made, key=lambda life: life.phase):
        lives = list(run)
        if phase in (BACKWARD_PHASE, STEP_PHASE):
            in_forward = False
        elif phase == FORWARD_PHASE and not in_forward and len(lives) >= FORWARD_RUN:
            in_forward = True
            yield lives[0].born


class OwnedBlocks:
    """Sets the phase and the owner of each block of a device."""

    def __init__(self, history: BlockHistory) -> None:
        self.history = history
        made = [life for life in history.lives if life.born != AT_START]
        # Where nothing has a stack, an empty one shows nothing.
        self.has_stacks = any(life.stack for life in made)
        for life in made:
            life.phase = life.origin.phase if self.has_stacks else UNKNOWN_PHASE
        # Times of the phases, as sorted indices of events: where a run of allocations in forward
        # begins, and each allocation in backward and in the optimizer's step.
        self._forwards = list(_forward_runs(made))
        self._backwards = [life.born for life in made if life.phase == BACKWARD_PHASE]
        self._steps = [life.born for life in made if life.phase == STEP_PHASE]
        self._stops = [index for index, _ in history.out_of_memory()]
        self._end = len(history.events)
        calls = [life.born for life in made if life.origin.in_module]
        self._first_call = min(calls, default=AT_START)
        # Sizes of blocks that were there before the model ran, such as those of parameters.
        earlier = [life for life in history.lives if life.born < self._first_call]
        self._earlier_sizes = {life.requested_bytes for life in earlier}
        self._workspaces = _workspaces(history.lives)
        # By the last allocation of a backward, what is released between it and the next forward.
        self._late: dict[int, list[BlockLife]] = {}
        self.logits_sizes: set[int] = set()
        self._assign(made)

    @property
    def owners(self) -> dict[str, int]:
        """Bytes by owner at the allocated peak, which they add up to; largest first."""
        return self.owners_at(self.history.peak_index)

    def owners_at(self, index: int) -> dict[str, int]:
        found: Counter[str] = Counter()
        for life in self.history.alive_at(index):
            found[life.owner] += life.own_bytes
            found[RESTS_OWNER] += life.num_bytes - life.own_bytes
        return {name: size for name, size in found.most_common() if size}

    def lines(self) -> list[LineBytes]:
        """Return the source lines that allocated bytes of the peak, largest first."""
        sizes: dict[tuple[str, str], list[int]] = {}
        for life in self.history.alive_at(self.history.peak_index):
            if line := life.origin.line:
                sizes.setdefault((life.owner, line), []).append(life.own_bytes)
        found = [LineBytes(*key, sum(own), len(own)) for key, own in sizes.items()]
        return sorted(found, key=lambda one: -one.bytes)

    @property
    def peak_phase(self) -> str:
        """The phase of the training in which the most is allocated."""
        index = self.history.peak_index
        before = [life for life in self.history.lives if AT_START < life.born <= index]
        return before[-1].phase if before else UNKNOWN_PHASE

    def steps(self) -> list[tuple[int, int]]:
        """Return the first and the last event of each optimizer step, as far as it is recorded."""
        starts = [0]
        gradients = [life for life in self.history.lives if life.owner == GRADIENTS_GROUP]
        freed = sorted(life.freed for life in gradients if life.freed is not None)
        for start in self._forwards:
            since = starts[-1]
            has_step = self._find_next(self._steps, since - 1) < start
            # An optimizer that allocates nothing is known by the gradients that are dropped.
            if (has_step or self._find_next(freed, since) <= start) and bisect.bisect_left(
                self._backwards, start
            ):
                starts.append(start)
        ends = [start - 1 for start in starts[1:]]
        return list(zip(starts, [*ends, self._end - 1], strict=True))

    def phase_spans(self) -> Iterator[tuple[str, int, int]]:
        """Yield the phases of each step with their first and last event."""
        for start, end in self.steps():
            phase = FORWARD_PHASE
            for name, found in ((BACKWARD_PHASE, self._backwards), (STEP_PHASE, self._steps)):
                begins = self._find_next(found, start)
                if begins <= end:
                    yield phase, start, begins
                    phase = name
                    start = begins
            yield phase, start, end

    def _find_next(self, times: Sequence[int], index: int) -> int:
        """Return the first of sorted times after an event, or the end of the record."""
        place = bisect.bisect_right(times, index)
        return times[place] if place < len(times) else self._end

    def _assign(self, made: Sequence[BlockLife]) -> None:
        """Choose the owner of each block."""
        rules = {
            FORWARD_PHASE: self._choose_in_forward,
            RECOMPUTE_PHASE: self._choose_in_forward,
            BACKWARD_PHASE: self._choose_in_backward,
            STEP_PHASE: self._choose_in_step,
        }
        for life in made:
            if life in self._workspaces:
                life.owner = WORKSPACES_OWNER
            else:
                rule = rules.get(life.phase)
                life.owner = rule(life) if rule else NO_STACK_OWNER
        self._find_dropped_gradients()
        self._find_logits(made)
        self._divide_earlier()

    def _choose_in_forward(self, life: BlockLife) -> str:
        backward = self._find_next(self._backwards, life.born)
        if backward == self._end:
            is_held = life.is_alive(self._find_next(self._stops, life.born) - 1)
            return ACTIVATIONS_GROUP if is_held else FORWARD_TEMPORARIES
        if not life.is_alive(backward):
            return FORWARD_TEMPORARIES
        origin = life.origin
        is_outside = self._first_call != AT_START and not origin.in_module and not origin.in_loss
        return BATCH_GROUP if is_outside or self._outlives_steps(life) else ACTIVATIONS_GROUP

    def _outlives_steps(self, life: BlockLife) -> bool:
        """Check that a block is alive in the second forward after its own."""
        starts = self._forwards
        place = bisect.bisect_right(starts, life.born) + 1
        return place < len(starts) and life.is_alive(starts[place])

    def _choose_in_backward(self, life: BlockLife) -> str:
        end = min(self._find_next(times, life.born) for times in (self._steps, self._forwards))
        if end == self._end:
            end = self._find_next(self._stops, life.born)
        elif life.is_alive(end):
            return GRADIENTS_GROUP
        # Without events of the optimizer, gradients are released between backward and forward.
        last = self._backwards[bisect.bisect_left(self._backwards, end) - 1]
        is_known = life.requested_bytes in self._earlier_sizes
        if life.is_alive(last) and (is_known or not self._earlier_sizes):
            if life.is_alive(end - 1):
                return GRADIENTS_GROUP
            self._late.setdefault(last, []).append(life)
        return BACKWARD_TEMPORARIES

    def _find_dropped_gradients(self) -> None:
        """Recognize gradients that are dropped before the next forward by their number.

        A single one is what the last operation adds to a gradient that was there before.
        """
        for released in self._late.values():
            for life in released if len(released) > 1 else ():
                life.owner = GRADIENTS_GROUP

    def _choose_in_step(self, life: BlockLife) -> str:
        end = self._find_next(self._forwards, life.born)
        if end == self._end:
            end = self._find_next(self._stops, life.born) - 1
        return OPTIMIZER_STATE_GROUP if life.is_alive(end) else STEP_TEMPORARIES

    def _find_logits(self, made: Sequence[BlockLife]) -> None:
        """Let the loss own its tensors, and the logits that it reads."""
        forward = [life for life in made if life.phase == FORWARD_PHASE]
        for index, life in enumerate(forward):
            if not life.origin.in_loss:
                continue
            life.owner = LOGITS_OWNER
            size = life.requested_bytes
            if size < SMALLEST_LOGITS:
                continue
            self.logits_sizes |= {size, size // 2}
            for earlier in forward[max(index - LOGITS_WINDOW, 0) : index]:
                # In the dtype of the model or of the loss.
                same = earlier.requested_bytes in (size, 2 * size, size // 2)
                if same and earlier.owner == ACTIVATIONS_GROUP:
                    earlier.owner = LOGITS_OWNER

    # Blocks that were there before the model ran.

    def _divide_earlier(self) -> None:
        gradients = self._gradient_sizes()
        parameters: Counter[int] = Counter()
        unclear: dict[int, list[BlockLife]] = {}
        for life in self.history.lives:
            if life.born >= self._first_call and life.born != AT_START:
                continue
            owner = self._choose_by_stack(life)
            life.owner = owner or _name_unrecognized(life)
            parameters[life.requested_bytes] += owner == PARAMETERS_GROUP
            if owner is None:
                unclear.setdefault(life.requested_bytes, []).append(life)
        copies = _count_copies(gradients, unclear, parameters)
        for size, count in gradients.items():
            room = {
                PARAMETERS_GROUP: count - parameters[size],
                OPTIMIZER_STATE_GROUP: (copies - 1) * count,
            }
            for life in unclear.get(size, ()):
                life.owner = self._choose_by_size(life, room)
                if life.owner in room:
                    room[life.owner] -= 1

    def _choose_by_stack(self, life: BlockLife) -> str | None:
        """Return the owner that a block's own stack shows."""
        if life in self._workspaces:
            return WORKSPACES_OWNER
        if not life.stack:
            was_kept = life.freed is not None and life.requested_bytes in self.logits_sizes
            return LOGITS_OWNER if was_kept else None
        origin = life.origin
        if origin.phase != FORWARD_PHASE:
            groups = {STEP_PHASE: OPTIMIZER_STATE_GROUP, BACKWARD_PHASE: GRADIENTS_GROUP}
            return groups.get(origin.phase, ACTIVATIONS_GROUP)
        if origin.builds_model:
            return PARAMETERS_GROUP
        return ACTIVATIONS_GROUP if origin.in_module else None

    def _choose_by_size(self, life: BlockLife, room: dict[str, int]) -> str:
        """Return the owner of a block with the size of a gradient."""
        first_backward = self._backwards[0] if self._backwards else self._end
        if life.freed is not None and life.freed < first_backward:
            return GRADIENTS_GROUP  # of the step before
        order = [PARAMETERS_GROUP, OPTIMIZER_STATE_GROUP]
        if life.freed is not None:
            # Parameters stay; an optimizer may make its state anew.
            order.reverse()
        return next((owner for owner in order if room[owner] > 0), _name_unrecognized(life))

    def _gradient_sizes(self) -> Counter[int]:
        """Count the gradients of the fullest step by their sizes."""
        by_step: dict[int, Counter[int]] = {}
        for life in self.history.lives:
            if life.owner == GRADIENTS_GROUP:
                step = bisect.bisect_right(self._forwards, life.born)
                by_step.setdefault(step, Counter())[life.requested_bytes] += 1
        return max(by_step.values(), key=lambda sizes: sizes.total(), default=Counter())


def _name_unrecognized(life: BlockLife) -> str:
    return EARLIER_OWNER if life.born == AT_START else BATCH_GROUP


def _count_copies(
    gradients: Counter[int], unclear: dict[int, list[BlockLife]], parameters: Counter[int]
) -> int:
    """Return how many numbers the training holds for each parameter, the parameter included."""
    large = [size for size in gradients if size >= SMALLEST_MATRIX] or list(gradients)
    whole = sum(size * gradients[size] for size in large)
    found = 0
    for size in large:
        # Gradients of the step before are released before the first backward.
        stay = [life for life in unclear.get(size, ()) if life.freed is None]
        found += size * min(len(stay) + parameters[size], MOST_COPIES * gradients[size])
    return max(1, round(found / whole)) if whole else 1


# What would lower the peak.


@dataclass(frozen=True)
class SnapshotLever:
    """A change of the training, and the bytes that it takes off the peaks by replay."""

    owner: str
    change: str
    allocated_saved_bytes: int
    reserved_saved_bytes: int

    @property
    def most_saved_bytes(self) -> int:
        return max(self.allocated_saved_bytes, self.reserved_saved_bytes)


# The part that a change leaves of a block; others stay whole.
Fractions = Mapping[BlockLife, float]


def replayed_peaks(
    history: BlockHistory, fractions: Fractions, *, expandable: bool = False
) -> tuple[int, int]:
    """Run the recorded blocks through the model of the allocator again, with other sizes.

    Return the allocated and the reserved peak; blocks of 0 bytes are left out.
    """
    start = max(AT_START, history.peak_index - MOST_REPLAYED_EVENTS)
    expandable |= history.has_expandable_segments
    allocator = CudaAllocator(expandable_segments=expandable)
    blocks: dict[BlockLife, MemoryBlock] = {}

    def make(life: BlockLife) -> None:
        if size := round(fractions.get(life, 1.0) * life.requested_bytes):
            blocks[life] = allocator.allocate(size, stream=life.stream)

    for life in sorted(history.alive_at(start), key=lambda life: (life.born, life.address)):
        make(life)
    born = {life.born: life for life in history.lives if life.born > start}
    freed = {life.freed: life for life in history.lives if life.freed is not None}
    given_back = False
    last = history.peak_index + MOST_REPLAYED_EVENTS
    for index, event in enumerate(history.events[start + 1 : last], start + 1):
        if event.action == "alloc":
            make(born[index])
        elif event.action in BLOCK_FREED and index in freed:
            block = blocks.pop(freed[index], None)
            if block is not None:
                allocator.free(block)
        elif event.action in SEGMENT_GIVEN_BACK and not given_back:
            allocator.empty_cache()
        given_back = event.action in SEGMENT_GIVEN_BACK
    return allocator.peak_allocated, allocator.peak_reserved


def levers(owned: OwnedBlocks) -> list[SnapshotLever]:
    """Return what lowers the peak; expandable segments first, being free, then by bytes."""
    history = owned.history
    changes = [
        (owners[0], change, _scale(owned, owners, fraction))
        for change, owners, fraction in SCALED_LEVERS
    ]
    for change, dropped in (_select_recomputed(owned), _attention_scores(owned)):
        if dropped:
            changes.append((ACTIVATIONS_GROUP, change, dict.fromkeys(dropped, 0.0)))
    base = replayed_peaks(history, {})
    found = []
    for owner, change, fractions in changes:
        allocated, reserved = replayed_peaks(history, fractions)
        found.append(SnapshotLever(owner, change, base[0] - allocated, base[1] - reserved))
    least = MIN_LEVER_FRACTION * history.peak_reserved
    found = [one for one in found if one.most_saved_bytes > least]
    found.sort(key=lambda one: -one.most_saved_bytes)
    if not history.has_expandable_segments:
        allocated, reserved = replayed_peaks(history, {}, expandable=True)
        saved = history.peak_reserved - reserved
        if saved > least:
            change = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            rests = max(history.peak_allocated - allocated, 0)
            found.insert(0, SnapshotLever(FREE_OWNER, change, rests, saved))
    return found


# What changes all bytes of some owners by a factor, under the first of the owners.
SCALED_LEVERS = (
    ("fused=True, or foreach=False, of the optimizer", (STEP_TEMPORARIES,), 0.0),
    ("a chunked loss: apply_chunked_loss(model)", (LOGITS_OWNER,), 1 / CHUNKS_OF_LOSS),
    ("an optimizer with 8 bits for each moment", (OPTIMIZER_STATE_GROUP,), EIGHT_BIT_FRACTION),
    (
        "two ranks with FSDP2, which halve parameters, gradients and state",
        (PARAMETERS_GROUP, GRADIENTS_GROUP, OPTIMIZER_STATE_GROUP),
        0.5,
    ),
    (
        "half the microbatch, accumulated twice (skill grad-accum)",
        (BACKWARD_TEMPORARIES, FORWARD_TEMPORARIES, ACTIVATIONS_GROUP, LOGITS_OWNER),
        0.5,
    ),
)


def _scale(owned: OwnedBlocks, owners: Sequence[str], fraction: float) -> dict[BlockLife, float]:
    # The gradient of the logits has their size.
    logits = owned.logits_sizes if LOGITS_OWNER in owners else set[int]()
    found = {}
    for life in owned.history.lives:
        is_gradient = life.owner == BACKWARD_TEMPORARIES and life.requested_bytes in logits
        if life.owner in owners or is_gradient:
            found[life] = fraction
    return found


def _select_recomputed(owned: OwnedBlocks) -> tuple[str, set[BlockLife]]:
    """Return activations of repeated blocks, but those of the last and one for each input."""
    dropped: set[BlockLife] = set()
    count = 0
    for phase, begins, _ in owned.phase_spans():
        if phase == BACKWARD_PHASE:
            found, blocks = _select_dropped(owned, begins - 1)
            dropped |= blocks
            count = max(count, found)
    return f"recompute the {count} blocks (skill recompute)", dropped


def _select_dropped(owned: OwnedBlocks, moment: int) -> tuple[int, set[BlockLife]]:
    """Return the number of repeated blocks, and the activations that recompute does not keep."""
    groups: dict[tuple[str, int], list[BlockLife]] = {}
    for life in owned.history.alive_at(moment):
        if life.owner == ACTIVATIONS_GROUP:
            groups.setdefault((life.origin.line, life.requested_bytes), []).append(life)
    by_count: Counter[int] = Counter()
    for (_, size), group in groups.items():
        by_count[len(group)] += size * len(group)
    repeated_counts = [number for number in by_count if number > 1]
    if not repeated_counts:
        return 0, set()
    # Blocks repeat as often as the lines do that hold the most.
    count = max(repeated_counts, key=lambda number: by_count[number])
    repeated = [group for group in groups.values() if len(group) % count == 0]
    # One activation of each block is its input.
    sizes = [group[0].requested_bytes for group in repeated]
    inputs = repeated[sizes.index(statistics.median_low(sizes))]
    dropped = {life for group in repeated for life in group[: -(len(group) // count)]}
    return count, dropped.difference(inputs[:: len(inputs) // count])


def _attention_scores(owned: OwnedBlocks) -> tuple[str, set[BlockLife]]:
    """Return what an attention that is written out keeps."""
    return "F.scaled_dot_product_attention in place of attention written out", {
        life
        for life in owned.history.lives
        if life.owner == ACTIVATIONS_GROUP and "softmax" in life.origin.line.lower()
    }
