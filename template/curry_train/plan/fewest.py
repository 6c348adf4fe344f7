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

import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from .. import primitives
from ..core.wording import format_bytes, format_seconds, require_whole
from ..primitives.chunked_loss import UnsuitableHead
from ..workloads.workload import Workload
from .cuda_step import context_of, cuda_memory, workspace_of
from .device import DeviceProfile
from .estimate import Sketch, StepEstimate, time_of_window
from .parallel import Sharding, offload_note
from .profiler import BATCH_GROUP
from .rank_step import MOST_RANKS
from .rank_time import (
    OTHER_LINKS,
    Links,
    RankSeconds,
    links_of,
)

TABLE_WIDTH = 80
# Rows of the table above the fewest GPUs: what more of them make unnecessary.
MORE_ROWS = 2


@dataclass(frozen=True)
class FittingChange:
    """A change of the training; those that cost more time come later."""

    name: str
    smallest_microbatch: bool = False
    recompute: bool = False
    chunked_loss: bool = False

    # Gradients of every microbatch are synced, so that none stays whole.
    syncs_each: bool = False


CHANGES = (
    FittingChange("nothing"),
    FittingChange("chunked loss", chunked_loss=True),
    FittingChange("microbatches of 1", smallest_microbatch=True),
    FittingChange("full recompute", recompute=True),
    FittingChange("full recompute, chunked loss", recompute=True, chunked_loss=True),
    FittingChange("full recompute, microbatches of 1", recompute=True, smallest_microbatch=True),
    FittingChange(
        "full recompute, chunked loss, microbatches of 1",
        recompute=True,
        chunked_loss=True,
        smallest_microbatch=True,
    ),
    FittingChange(
        "the same, with a gradient sync for each microbatch",
        recompute=True,
        chunked_loss=True,
        smallest_microbatch=True,
        syncs_each=True,
    ),
)


@dataclass(frozen=True)
class GpuCount:
    """A number of GPUs, with the cheapest change that fits, or the one with the least peak."""

    sharding: Sharding
    change: FittingChange
    microbatch: int
    steps: int
    peak_bytes: int
    limit_bytes: int

    # Predicted time of the optimizer step, by the rates of the device and of its links.
    seconds: RankSeconds

    # Parameters and optimizer state of this GPU, which no change makes less.
    state_bytes: int = 0

    # Whether every change was tried, so that this is the least peak.
    is_least: bool = True

    # The peak where all tokens choose the experts of this GPU; None where shapes do not depend on
    # the routing. Tokens are spread evenly in `peak_bytes`.
    worst_routing_bytes: int | None = None

    # What the host holds for this GPU, where FSDP2 offloads to it.
    host_bytes: int = 0

    @property
    def num_gpus(self) -> int:
        return self.sharding.ranks

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    @property
    def is_hopeless(self) -> bool:
        """Check whether no change can make it fit."""
        return self.state_bytes > self.limit_bytes

    @property
    def margin_bytes(self) -> int:
        """Bytes that are left; negative where some are missing."""
        return self.limit_bytes - self.peak_bytes

    @property
    def change_text(self) -> str:
        """Describe what has to change, for the table."""
        if self.fits:
            return self.change.name
        return f"too large with {self.change.name if self.is_least else 'any change'}"


@dataclass(frozen=True)
class FewestGpus:
    """All numbers of GPUs that were tried; `best` is None if none fits."""

    workload: str
    device: str
    global_batch: int
    attempts: tuple[GpuCount, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    links: Links = OTHER_LINKS

    @property
    def best(self) -> GpuCount | None:
        return next((one for one in self.attempts if one.fits), None)

    def table(self) -> str:
        """Format the attempts at 80 columns, and name the fewest GPUs and what fewer lack."""
        lines = textwrap.wrap(self._verdict(), TABLE_WIDTH)
        wide = max(len(one.sharding.mesh_text) for one in self.attempts)
        lines += [
            "",
            f"{'GPUs':>5}  {'mesh':<{wide}} {'peak':>9} {'margin':>10} {'step':>8}  "
            "what has to change",
        ]
        for one in self.attempts:
            sign = "-" if one.margin_bytes < 0 else ""
            margin = sign + format_bytes(abs(one.margin_bytes))
            row = (
                f"{one.num_gpus:>5}  {one.sharding.mesh_text:<{wide}} "
                f"{format_bytes(one.peak_bytes):>9} {margin:>10} "
                f"{format_seconds(one.seconds.total):>8}  "
            )
            more = textwrap.wrap(one.change_text, TABLE_WIDTH - len(row))
            lines += [row + more[0], *(" " * len(row) + text for text in more[1:])]
        one = self._shown_several
        lines += ["", *textwrap.wrap(self._time_note(one), TABLE_WIDTH)]
        if one.host_bytes:
            lines += textwrap.wrap(offload_note(one.host_bytes), TABLE_WIDTH)
        lines += textwrap.wrap(OUTSIDE_NOTE, TABLE_WIDTH)
        return "\n".join(lines)

    @property
    def _shown_several(self) -> GpuCount:
        """The fewest GPUs that fit, if they are several; else the most that were tried."""
        several = [one for one in self.attempts if one.fits and one.num_gpus > 1]
        return several[0] if several else self.attempts[-1]

    def _time_note(self, one: GpuCount) -> str:
        """Describe the communication in a step."""
        exposed = format_seconds(one.seconds.exposed)
        return (
            f"Step times are estimated, not measured: with {one.num_gpus}, {exposed} wait for "
            f"{format_seconds(one.seconds.communication)} of communication. Links: {self.links}."
        )

    def _verdict(self) -> str:
        best = self.best
        start = f"{self.workload}, {self.global_batch} samples a step, on {self.device}: "
        if best is None:
            least = min(self.attempts, key=lambda one: one.peak_bytes)
            return start + (
                f"nothing fits. {least.num_gpus} GPUs lack {format_bytes(-least.margin_bytes)}"
            )
        text = (
            f"{best.num_gpus} GPU{'s' if best.num_gpus > 1 else ''}, {best.steps} x "
            f"{best.microbatch} samples on each, with {format_bytes(best.margin_bytes)} left."
        )
        fewer = [one for one in self.attempts if one.num_gpus < best.num_gpus]
        if fewer:
            nearest = max(fewer, key=lambda one: (one.num_gpus, one.margin_bytes))
            lacks = format_bytes(-nearest.margin_bytes)
            text += f" With {nearest.num_gpus}, {lacks} are missing."
        if best.worst_routing_bytes is not None:
            lacking = best.worst_routing_bytes - best.limit_bytes
            text += (
                f" Tokens are spread evenly over experts: where all choose those of one GPU, it "
                f"needs {format_bytes(best.worst_routing_bytes)}"
                + (f", {format_bytes(lacking)} too much." if lacking > 0 else ".")
            )
        return start + text

    def to_json(self) -> dict[str, Any]:
        """Return the attempts for a file."""
        rows = [
            {
                "gpus": one.num_gpus,
                "mesh": dict(one.sharding.mesh),
                "fits": one.fits,
                "every_change_tried": one.is_least,
                "change": one.change.name,
                "microbatch": one.microbatch,
                "steps": one.steps,
                "peak_bytes": one.peak_bytes,
                "limit_bytes": one.limit_bytes,
                "worst_routing_bytes": one.worst_routing_bytes,
                "host_bytes": one.host_bytes,
                **one.seconds.to_json(),
            }
            for one in self.attempts
        ]
        best = self.best
        return {
            "fewest_gpus": None if best is None else best.num_gpus,
            "global_batch": self.global_batch,
            "links": self.links.to_json(),
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
    global_batch: int,
    sharding: Sharding | Sequence[Sharding] = (),
    most: int = MOST_RANKS,
    links: Links | None = None,
    tell: Callable[[str], None] = lambda message: None,
    **options: Any,
) -> FewestGpus:
    """Find the fewest GPUs of a kind on which a training fits.

    The first dimension of the mesh grows by powers of two, as far as the global batch can be
    shared. `sharding` is one or several, of which the quickest that fits counts; FSDP2 unless it is
    given. `options` are those of `Sketch`.
    """
    require_whole("global_batch", global_batch, least=1)
    limit = device.usable_bytes
    if limit is None:
        raise ValueError(f"the memory of {device.name} is not known: name a GPU, as h100")
    templates = [sharding] if isinstance(sharding, Sharding) else [*sharding]
    candidates = [
        grown
        for template in templates or [Sharding("fsdp2")]
        for grown in _shardings(template, global_batch, most=most)
    ]
    if not candidates:
        raise ValueError(
            f"a global batch of {global_batch} can't be shared by the ranks of this mesh: use a "
            "multiple of them"
        )
    links = links or links_of(device.name)
    search = _Search(workload, device, limit, global_batch, tell, options, links)
    attempts = search.run(candidates)
    return FewestGpus(search.name, device.name, global_batch, attempts, options, links)


def _shardings(template: Sharding, global_batch: int, *, most: int) -> Iterator[Sharding]:
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


def without_chunks(change: FittingChange) -> FittingChange:
    """Return a change with the whole loss, and without its name."""
    return replace(change, name="", chunked_loss=False)


def floor_of(step: StepEstimate) -> int:
    """Return what a step with the whole loss needs with a chunked one at least.

    Activations of blocks stay until the loss has run, whatever it does.
    """
    context = 0 if step.trace is None else context_of(step.trace)
    return context + step.fixed + sum(block.held for block in step.blocks.values())


class _Search:
    """Attempts on the least numbers of GPUs, up to the first that fits and some more."""

    def __init__(
        self,
        workload: Workload | str,
        device: DeviceProfile,
        limit_bytes: int,
        global_batch: int,
        tell: Callable[[str], None],
        options: Mapping[str, Any],
        links: Links,
    ) -> None:
        self.links = links
        self.workload = workload
        self.device = device
        self.limit_bytes = limit_bytes
        self.global_batch = global_batch
        self.tell = tell
        self.options = options
        self.name = workload if isinstance(workload, str) else workload.name
        # Changes that the model does not take, such as chunks of a loss without an output layer.
        self.not_for_it: set[str] = set()
        # What is needed at least, by the change without chunks. Many chunks take long to estimate.
        self.floors: dict[FittingChange, int] = {}

    def run(self, candidates: Sequence[Sharding]) -> tuple[GpuCount, ...]:
        """Try numbers of GPUs from the least on, and return the attempts in this order.

        Of equal numbers those that fit come first, the quickest before the others.
        """
        found: list[list[GpuCount]] = []
        ordered = sorted(candidates, key=lambda one: one.ranks)
        for _, group in itertools.groupby(ordered, key=lambda one: one.ranks):
            meshes = {(one.name, one.mesh_text): one for one in group}
            tried = [self.attempt(one) for one in meshes.values()]
            found.append(sorted(tried, key=lambda one: (not one.fits, one.seconds.total)))
            first = next((index for index, row in enumerate(found) if row[0].fits), None)
            if first is not None and len(found) > first + MORE_ROWS:
                break

        # How much the next smaller number lacks at best, or the largest if nothing fits.
        nearest = len(found) - 1 if first is None else first - 1
        if nearest >= 0:
            found[nearest] = [
                one if one.is_least else self.attempt(one.sharding, every_change=True)
                for one in found[nearest]
            ]
        return tuple(itertools.chain.from_iterable(found))

    def attempt(self, sharding: Sharding, *, every_change: bool = False) -> GpuCount:
        """Return the cheapest change that fits on so many GPUs, or the least peak.

        Without `every_change` the changes end where the state alone is too large.
        """
        found: list[GpuCount] = []
        postponed: list[FittingChange] = []
        self.floors.clear()
        shared = replace(sharding, ranks=1)
        with Sketch(self.workload, kernels="cuda", sharding=shared, **self.options) as sketch:
            self.name = sketch.case.workload.name
            for change in CHANGES:
                sketch.sharding = replace(shared, sync_each_microbatch=change.syncs_each)
                if self._floor(change) > self.limit_bytes:
                    postponed.append(change)
                    continue
                found += self._with(sketch, change)
                if found and found[-1].fits:
                    return found[-1]
                if found and found[-1].is_hopeless and not every_change:
                    return replace(found[-1], is_least=False)
            least = min(one.peak_bytes for one in found)
            for change in postponed:
                if self._floor(change) <= least:
                    sketch.sharding = replace(shared, sync_each_microbatch=change.syncs_each)
                    found += self._with(sketch, change)
        return min(found, key=lambda one: (one.peak_bytes, CHANGES.index(one.change)))

    def _floor(self, change: FittingChange) -> int:
        """Return bytes that a change needs at least, by a step that was estimated; 0 if unknown."""
        return self.floors.get(without_chunks(change), 0)

    def _with(self, sketch: Sketch, change: FittingChange) -> Sequence[GpuCount]:
        """Return the attempt with a change; none if the change does nothing here."""
        sharding = sketch.sharding
        own = self.global_batch // sharding.data_ranks
        microbatch = 1 if change.smallest_microbatch else own
        steps = own // microbatch
        is_idle = change.smallest_microbatch and own == 1
        if is_idle or (change.syncs_each and not sharding.is_shared):
            return ()
        if change.chunked_loss and "chunked loss" in self.not_for_it:
            return ()
        self.tell(f"{sharding.ranks} GPUs, {change.name}")

        def apply(module: nn.Module) -> None:
            if change.recompute:
                primitives.recompute_blocks(module, blocks=[*sketch.blocks(module)])
            if change.chunked_loss:
                primitives.apply_chunked_loss(module)

        try:
            step = sketch.step(microbatch, accumulated=steps > 1, change=apply)
        except UnsuitableHead:
            self.not_for_it.add("chunked loss")
            return ()
        if not change.chunked_loss:
            self.floors[without_chunks(change)] = floor_of(step)
        peak = self._peak(step)
        state = step.fixed - max(step.timeline.owners.get(BATCH_GROUP, [0]))
        if step.trace is not None:
            state += context_of(step.trace)
        seconds = self._seconds(step, sketch, steps)
        count = GpuCount(sharding, change, microbatch, steps, peak, self.limit_bytes, seconds)
        worst = None
        if sketch.routing is not None and count.fits:
            with sketch.routing.worst():
                worst = self._peak(sketch.step(microbatch, accumulated=steps > 1, change=apply))
            worst = worst if worst > peak else None
        count = replace(count, state_bytes=state, host_bytes=step.host_bytes)
        return (replace(count, worst_routing_bytes=worst),)

    def _peak(self, step: StepEstimate) -> int:
        """Return the memory of a GPU for a step: what is reserved, and the context."""
        if step.trace is None:
            return step.peak_bytes
        memory = cuda_memory(step.trace, workspace_bytes=workspace_of(self.device.name))
        return max(step.peak_bytes, memory.reserved_bytes) + context_of(step.trace)

    def _seconds(self, step: StepEstimate, sketch: Sketch, steps: int) -> RankSeconds:
        """Predict the time of an optimizer step of `steps` microbatches."""
        dtype = sketch.sharding.precision or str(sketch.case.dtype).removeprefix("torch.")
        if step.course is not None:
            return time_of_window(step, self.device, self.links, dtype=dtype, steps=steps)
        times = self.device.operation_seconds(step.flops, step.moved, dtype=dtype)
        one = float(times[step.moved > 0].sum())
        return RankSeconds(
            steps * one, optimizer=self.device.optimizer_seconds(step.fixed, step.gradients)
        )
