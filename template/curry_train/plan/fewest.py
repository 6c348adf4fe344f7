"""Find the fewest GPUs on which a training fits, and what has to change for each number.

    found = fewest_gpus("transformer", find_profile("h100"), global_batch=64)
    print(found.table())

Each number of GPUs is a rank of the wrapped program, estimated on shapes with what the allocator of
CUDA reserves. Changes are tried in the order of their cost in time, and the first that fits counts.
All numbers are tried from the least on, because more GPUs may need more memory: gathered parameters
and buffers come with the second one. Where parameters and optimizer state alone are too large, no
change is tried.

Proof: `python -m pytest tests/plan/test_fewest.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any

from ..core.wording import format_bytes, format_seconds, require_whole
from ..primitives.chunked_loss import UnsuitableHead
from ..workloads.workload import Workload
from .card import Card
from .device import DeviceProfile
from .estimate import Sketch, StepEstimate, time_of_window
from .parallel import Sharding
from .profiler import BATCH_GROUP
from .rank_step import MOST_RANKS
from .rank_time import Links, RankSeconds, links_of
from .saved import FULL_KIND, Candidate, Option
from .whole_step import WholeSteps

# Rows of the table above the fewest GPUs: what more of them make unnecessary.
MORE_ROWS = 2


# Changes of the training; combinations that cost more time come later.
CHUNKED = "chunked loss"
SMALLEST = "microbatches of 1"
RECOMPUTE = "full recompute"
# So that no gradient stays whole.
SYNC_EACH = "a gradient sync for each microbatch"
Change = tuple[str, ...]
CHANGES: tuple[Change, ...] = (
    (),
    (CHUNKED,),
    (SMALLEST,),
    (RECOMPUTE,),
    (RECOMPUTE, CHUNKED),
    (RECOMPUTE, SMALLEST),
    (RECOMPUTE, CHUNKED, SMALLEST),
    (RECOMPUTE, CHUNKED, SMALLEST, SYNC_EACH),
)


@dataclass(frozen=True)
class GpuCount:
    """A number of GPUs, with the cheapest change that fits, or the one with the least peak."""

    sharding: Sharding
    change: Change
    microbatch: int
    steps: int
    peak_bytes: int
    limit_bytes: int

    # Predicted time of the optimizer step, by the rates of the device and of its links.
    seconds: RankSeconds

    # Parameters and optimizer state of this GPU, which no change makes less.
    state_bytes: int

    # The least bytes that this change needs if the loss is computed in chunks too.
    floor_bytes: int

    @property
    def num_gpus(self) -> int:
        return self.sharding.ranks

    @property
    def fits(self) -> bool:
        return self.margin_bytes >= 0

    @property
    def is_hopeless(self) -> bool:
        """Whether no change can make it fit."""
        return self.state_bytes > self.limit_bytes

    @property
    def margin_bytes(self) -> int:
        """Bytes that are left; negative where some are missing."""
        return self.limit_bytes - self.peak_bytes

    @property
    def change_text(self) -> str:
        return ", ".join(self.change) or "nothing"

    @property
    def lack_text(self) -> str:
        """Describe what is missing, at the least."""
        if self.is_hopeless:
            return (
                "parameters and optimizer state alone lack "
                f"{format_bytes(self.state_bytes - self.limit_bytes)}"
            )
        return format_bytes(-self.margin_bytes)


@dataclass(frozen=True)
class FewestGpus:
    """All numbers of GPUs that were tried; `best` is None if none fits."""

    workload: str
    device: str
    global_batch: int
    attempts: tuple[GpuCount, ...]
    links: Links

    @property
    def best(self) -> GpuCount | None:
        return next((one for one in self.attempts if one.fits), None)

    def table(self) -> str:
        """Format the attempts at 80 columns, and name the fewest GPUs and what fewer lack."""
        lines = wrap(self._describe_verdict(), 80)
        wide = max(len(one.sharding.mesh_text) for one in self.attempts)
        lines += [
            "",
            f"{'GPUs':>5}  {'mesh':<{wide}} {'peak':>9} {'margin':>10} {'step':>8}  "
            "what has to change",
        ]
        for one in self.attempts:
            row = (
                f"{one.num_gpus:>5}  {one.sharding.mesh_text:<{wide}} "
                f"{format_bytes(one.peak_bytes):>9} {format_bytes(one.margin_bytes):>10} "
                f"{format_seconds(one.seconds.total):>8}  "
            )
            change = one.change_text
            if not one.fits:
                change = f"too large with {'any change' if one.is_hopeless else change}"
            more = wrap(change, 80 - len(row))
            lines += [row + more[0], *(" " * len(row) + text for text in more[1:])]
        # The fewest GPUs that fit, if they are several; else the most that were tried.
        several = [one for one in self.attempts if one.fits and one.num_gpus > 1]
        one = several[0] if several else self.attempts[-1]
        note = (
            f"Step times are estimated, not measured: with {one.num_gpus}, "
            f"{format_seconds(one.seconds.exposed)} wait for "
            f"{format_seconds(one.seconds.communication)} of communication. Links: {self.links}."
        )
        lines += ["", *wrap(note, 80), *wrap(OUTSIDE_NOTE, 80)]
        return "\n".join(lines)

    def _describe_verdict(self) -> str:
        best = self.best
        start = f"{self.workload}, a global batch of {self.global_batch}, on {self.device}: "
        if best is None:
            least = min(self.attempts, key=lambda one: one.peak_bytes)
            return start + (
                f"nothing fits. With {least.num_gpus} GPUs, missing: {least.lack_text}."
            )
        text = (
            f"{best.num_gpus} GPU{'s' if best.num_gpus > 1 else ''}, {best.steps} x "
            f"{best.microbatch} sample{'s' * (best.microbatch > 1)} on each, with "
            f"{format_bytes(best.margin_bytes)} left."
        )
        fewer = [one for one in self.attempts if one.num_gpus < best.num_gpus]
        if fewer:
            nearest = max(fewer, key=lambda one: (one.num_gpus, one.margin_bytes))
            text += f" With {nearest.num_gpus}, missing: {nearest.lack_text}."
        return start + text

    def to_json(self) -> dict[str, Any]:
        """Return the attempts for a file."""
        rows = [
            {
                "gpus": one.num_gpus,
                "mesh": dict(one.sharding.mesh),
                "fits": one.fits,
                "every_change_tried": not one.is_hopeless,
                "change": one.change_text,
                "microbatch": one.microbatch,
                "steps": one.steps,
                "peak_bytes": one.peak_bytes,
                "limit_bytes": one.limit_bytes,
                **one.seconds.to_json(),
            }
            for one in self.attempts
        ]
        return {
            "fewest_gpus": self.best and self.best.num_gpus,
            "global_batch": self.global_batch,
            "links": vars(self.links),
            "attempts": rows,
        }


# Buffers of NCCL are no tensors. The size of one is NCCL's documented default of NCCL_BUFFSIZE.
OUTSIDE_NOTE = (
    "Not in these figures: the buffers of NCCL, by its documentation 4 MiB (NCCL_BUFFSIZE) for "
    "each connection of each channel of each communicator."
)


def fewest_gpus(
    workload: Workload | str,
    device: DeviceProfile,
    *,
    global_batch: int | None = None,
    sharding: Sequence[Sharding] = (),
    most: int = MOST_RANKS,
    links: Links | None = None,
    context_bytes: int | None = None,
    margin: float = 0.0,
    tell: Callable[[str], None] = lambda message: None,
    **options: Any,
) -> FewestGpus:
    """Find the fewest GPUs of a kind on which a training fits.

    The first dimension of the mesh grows by powers of two, as far as the global batch can be
    shared. Of several in `sharding` the quickest that fits counts; FSDP2 is tried unless any is
    given. `context_bytes` and `margin` are those of `Card`, and `options` those of `Sketch`. The
    global batch is the workload's own if none is given.
    """
    if global_batch is None:
        with Sketch(workload, **options) as sketch:
            global_batch = sketch.own_global_batch
    require_whole("global_batch", global_batch, least=1)
    card = Card(device, context_bytes, margin)
    if device.usable_bytes is None:
        raise ValueError(f"the memory of {device.name} is not known: name a GPU, as h100")
    candidates = [
        grown
        for template in sharding or [Sharding("fsdp2")]
        for grown in _list_shardings(template, global_batch, most=most)
    ]
    if not candidates:
        raise ValueError(
            f"a global batch of {global_batch} can't be shared by the ranks of this mesh: use a "
            "multiple of them"
        )
    links = links or links_of(device.name)
    search = _Search(workload, card, global_batch, tell, options, links)
    attempts = search.run(candidates)
    return FewestGpus(search.name, device.name, global_batch, attempts, links)


def _list_shardings(template: Sharding, global_batch: int, *, most: int) -> Iterator[Sharding]:
    """Yield shardings whose first dimension grows, each with samples for every data rank."""
    first, *_ = template.mesh
    size = 1
    while True:
        grown = replace(template, ranks=1, mesh={**template.mesh, first: size})
        if grown.ranks > most or grown.data_ranks > global_batch:
            return
        if global_batch % grown.data_ranks == 0:
            yield grown
        size *= 2


def floor_of(step: StepEstimate) -> int:
    """Return what a step with the whole loss needs with a chunked one at least.

    Activations of blocks stay until the loss has run, whatever it does.
    """
    return step.fixed + sum(block.held for block in step.blocks.values())


@dataclass
class _Search:
    """Attempts on the least numbers of GPUs, up to the first that fits and some more."""

    workload: Workload | str
    card: Card
    global_batch: int
    tell: Callable[[str], None]
    options: Mapping[str, Any]
    links: Links
    name: str = ""
    # Whether the model takes a chunked loss, which needs an output layer.
    has_chunks: bool = True

    def run(self, candidates: Sequence[Sharding]) -> tuple[GpuCount, ...]:
        """Try numbers of GPUs from the least on, and return the attempts in this order.

        Of equal numbers those that fit come first, the quickest before the others.
        """
        found: list[GpuCount] = []
        num_more = 0
        meshes = {(one.ranks, one.name, one.mesh_text): one for one in candidates}
        for ranks in sorted({one.ranks for one in candidates}):
            tried = [self.attempt(one) for key, one in meshes.items() if key[0] == ranks]
            num_more += any(one.fits for one in found)
            found += sorted(tried, key=lambda one: (not one.fits, one.seconds.total))
            if num_more == MORE_ROWS:
                break
        return tuple(found)

    def attempt(self, sharding: Sharding) -> GpuCount:
        """Return the cheapest change that fits on so many GPUs, or the least peak."""
        found: list[GpuCount] = []
        with Sketch(self.workload, kernels="cuda", sharding=sharding, **self.options) as sketch:
            self.name = sketch.case.workload.name
            for change in CHANGES:
                whole = tuple(part for part in change if part != CHUNKED)
                tried_whole = (one for one in found if one.change == whole)
                # Many chunks take long to estimate.
                if any(one.floor_bytes > one.limit_bytes for one in tried_whole):
                    continue
                sketch.sharding = replace(sharding, sync_each_microbatch=SYNC_EACH in change)
                tried = self._with(sketch, change)
                if tried is None:
                    continue
                found.append(tried)
                if tried.fits or tried.is_hopeless:
                    return tried
        return min(found, key=lambda one: (one.peak_bytes, CHANGES.index(one.change)))

    def _with(self, sketch: Sketch, change: Change) -> GpuCount | None:
        """Return the attempt with a change; None if the change does nothing here."""
        card = self.card
        sharding = sketch.sharding
        own = self.global_batch // sharding.data_ranks
        microbatch = 1 if SMALLEST in change else own
        steps = own // microbatch
        is_idle = SMALLEST in change and own == 1
        is_idle |= SYNC_EACH in change and not sharding.is_shared
        if is_idle or (CHUNKED in change and not self.has_chunks):
            return None
        self.tell(f"{sharding.ranks} GPUs, change: {', '.join(change) or 'nothing'}")

        blocks = sketch.blocks(sketch.build()) if RECOMPUTE in change else {}
        options = dict.fromkeys(blocks, Option(FULL_KIND))
        candidate = Candidate(microbatch, steps, CHUNKED in change, options=options)
        try:
            step = WholeSteps(sketch, card=card, links=self.links).step(candidate)
        except UnsuitableHead:
            self.has_chunks = False
            return None
        state = step.fixed - max(step.timeline.owners.get(BATCH_GROUP, [0]))
        context = card.context(step.trace)
        return GpuCount(
            sharding,
            change,
            microbatch,
            steps,
            card.bytes_needed(step),
            card.limit()[0],
            time_of_window(step, card.profile, self.links, steps=steps),
            state + context,
            context + floor_of(step),
        )
