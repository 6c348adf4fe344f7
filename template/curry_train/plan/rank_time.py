"""Estimate the time of a rank's step: computation, and communication that it waits for.

    course = sketch.step(4).course
    print(time_of_course(course, profile, links_of("h100"), dtype="bfloat16"))

The collectives are those of the rank's own program, with their bytes. Each waits for the tensors
that it sends, and the computation waits for the tensors that it receives; FSDP2 gathers the next
unit while this one computes. The rates of links are inputs, so the result is an estimate until a
step is measured on the machines themselves.

Proof: `python -m pytest tests/plan/test_rank_time.py`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import torch.distributed as dist

from ..core.measure import operands
from ..core.wording import parse_bytes
from .device import LINK_EFFICIENCY, PCIE4_BYTES_PER_SECOND, DeviceProfile

# Links between GPUs: what a collective's bytes pass through.

GPUS_PER_NODE = 8
# The time of a collective without bytes; typical of NCCL in a node, not measured.
COLLECTIVE_SECONDS = 20e-6
# A network of 100 Gbit/s that the GPUs of a node share.
SHARED_NETWORK_BYTES_PER_SECOND = 12.5e9 / GPUS_PER_NODE


@dataclass(frozen=True)
class Links:
    """Bytes per second of a GPU, in one direction, to GPUs of its node and to other nodes."""

    within_bytes_per_second: float
    between_bytes_per_second: float
    gpus_per_node: int = GPUS_PER_NODE
    source: str = "as given"

    def seconds(self, collective: "Collective") -> float:
        """Return the time of a collective over a ring of its ranks."""
        size = len(collective.ranks)
        if size < 2:
            return 0.0
        # How often its bytes pass the link of a rank, but for the rank's own part.
        passes = (2 if collective.kind == ALL_REDUCE_KIND else 1) * (size - 1) / size
        if collective.kind in POINT_TO_POINT_KINDS:
            passes = 1.0
        return COLLECTIVE_SECONDS + passes * collective.nbytes / self.rate(collective.ranks)

    def rate(self, ranks: Sequence[int]) -> float:
        """Return the rate of a ring, in which each GPU of a node has its own way to the next."""
        in_node = Counter(rank // self.gpus_per_node for rank in ranks)
        if len(in_node) == 1:
            return self.within_bytes_per_second
        between = min(in_node.values()) * self.between_bytes_per_second
        return min(self.within_bytes_per_second, between)

    def __str__(self) -> str:
        return (
            f"{self.within_bytes_per_second / 1e9:,.4g} GB/s within nodes of {self.gpus_per_node} "
            f"and {self.between_bytes_per_second / 1e9:,.4g} GB/s for each GPU between them, "
            f"{self.source}"
        )


def _of_cards(within: float, between: float, what: str) -> Links:
    source = f"{LINK_EFFICIENCY:.0%} of {what}"
    return Links(within * LINK_EFFICIENCY, between * LINK_EFFICIENCY, source=source)


# By the names of device profiles: NVLink as published, and the usual network of such machines.
LINKS_OF_PROFILES = {
    "h100": _of_cards(450e9, 50e9, "NVLink 4 and 400 Gbit/s for each GPU"),
    "h200": _of_cards(450e9, 50e9, "NVLink 4 and 400 Gbit/s for each GPU"),
    "a100": _of_cards(300e9, 25e9, "NVLink 3 and 200 Gbit/s for each GPU"),
}
OTHER_LINKS = _of_cards(
    PCIE4_BYTES_PER_SECOND, SHARED_NETWORK_BYTES_PER_SECOND, "PCIe 4 and 100 Gbit/s for each node"
)


def links_of(name: str) -> Links:
    """Return the links of a device profile by its name: PCIe where no other are known."""
    return LINKS_OF_PROFILES.get(name, OTHER_LINKS)


def parse_links(text: str) -> Links:
    """Read links as they are written: `450GB,50GB`, or `450GB,50GB,4` with the GPUs of a node."""
    parts = text.split(",")
    size = parts[2].strip() if len(parts) == 3 else str(GPUS_PER_NODE)
    if len(parts) not in (2, 3) or not size.isdecimal() or int(size) < 1:
        raise ValueError(
            f"{text!r} are no links: write bytes a second within and between nodes, and the GPUs "
            "of a node if they are not 8, as 450GB,50GB,4"
        )
    return Links(parse_bytes(parts[0]), parse_bytes(parts[1]), int(size))


# Collectives of a program, and the order in which its operations wait for each other.

ALL_GATHER_KIND = "all-gather"
REDUCE_SCATTER_KIND = "reduce-scatter"
ALL_REDUCE_KIND = "all-reduce"
ALL_TO_ALL_KIND = "all-to-all"
POINT_TO_POINT_KINDS = ("send", "recv", "broadcast")
# Parts of the names of operations, in the order in which they are looked for.
KINDS_OF_NAMES = {
    "reduce_scatter": REDUCE_SCATTER_KIND,
    "gather": ALL_GATHER_KIND,
    "allreduce": ALL_REDUCE_KIND,
    "all_reduce": ALL_REDUCE_KIND,
    "alltoall": ALL_TO_ALL_KIND,
    "all_to_all": ALL_TO_ALL_KIND,
    "broadcast": "broadcast",
    "send": "send",
    "recv": "recv",
}
C10D_NAMESPACE = "c10d"
FUNCTIONAL_NAMESPACE = "_c10d_functional"


@dataclass(frozen=True)
class Collective:
    """A call of a collective in a step."""

    kind: str

    # Bytes of the whole tensors: all that is gathered, all that is scattered.
    nbytes: int

    ranks: tuple[int, ...]

    # Whether the stream that calls it waits for its end.
    blocks_stream: bool


@dataclass
class StepCourse:
    """Operations of forward and backward of a rank, their streams, and what they wait for."""

    # FLOPs of each operation, and the bytes it reads and writes.
    flops: Sequence[int]
    moved: Sequence[int]

    streams: list[int] = field(default_factory=list)
    collectives: dict[int, Collective] = field(default_factory=dict)

    # Operations of other streams and collectives that an operation waits for.
    waits: dict[int, list[int]] = field(default_factory=dict)

    # The operation that wrote each storage last.
    writers: dict[int, int] = field(default_factory=dict)

    def add(self, func: Any, args: Any, kwargs: Any, out: Any, *, stream: int) -> None:
        """Add an operation that has run, in the order of the costs that are recorded with it."""
        index = len(self.streams)
        self.streams.append(stream)
        kind = kind_of_collective(func)
        if kind is None and not self.moved[index]:
            return  # a view
        inputs = _find_storages(args, kwargs)
        waits = {self.writers[key] for key in inputs & self.writers.keys()}
        waits = {one for one in waits if one in self.collectives or self.streams[one] != stream}
        if waits:
            self.waits[index] = sorted(waits)
        arguments = func._schema.arguments
        given = {one.name: value for one, value in zip(arguments, args, strict=False)} | kwargs
        if kind is not None:
            self.collectives[index] = _read_collective(kind, func, given, out)
            written = inputs
        else:
            written = _find_storages(
                *(
                    given.get(one.name)
                    for one in arguments
                    if one.alias_info is not None and one.alias_info.is_write
                )
            )
        self.writers.update(dict.fromkeys(_find_storages(out) | written, index))


def _find_storages(*values: Any) -> set[int]:
    """Return the storages of the tensors in arguments or results, by their address."""
    return {tensor.untyped_storage()._cdata for tensor in operands(*values)}


def kind_of_collective(func: Any) -> str | None:
    """Return the kind of a collective; None for any other operation."""
    namespace = getattr(func, "namespace", None)
    if namespace not in (C10D_NAMESPACE, FUNCTIONAL_NAMESPACE):
        return None
    name = func._schema.name.partition("::")[2]
    return next((kind for part, kind in KINDS_OF_NAMES.items() if part in name), None)


def _read_collective(kind: str, func: Any, given: dict[str, Any], out: Any) -> Collective:
    group: Any = given.get("process_group")
    if group is None:
        group = resolve_group(given["group_name"])
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    ranks = tuple(dist.get_process_group_ranks(group))

    is_functional = func.namespace == FUNCTIONAL_NAMESPACE
    if kind in (ALL_GATHER_KIND, REDUCE_SCATTER_KIND):
        # The whole tensors, and the rank's own parts of them, which are one in so many of these.
        both = _count_bytes([given, out] if is_functional else given)
        nbytes = both * len(ranks) // (len(ranks) + 1)
    elif kind == ALL_TO_ALL_KIND:
        nbytes = _count_bytes(given.get("input", given.get("input_tensors")))
    else:
        nbytes = _count_bytes(given)
    return Collective(kind, nbytes, ranks, not is_functional and given.get("async_op") is False)


def resolve_group(name: str) -> Any:
    """Return the process group of a name, as functional collectives have it."""
    return vars(dist.distributed_c10d)["_resolve_process_group"](name)


def _count_bytes(tree: Any) -> int:
    return sum(one.nbytes for one in operands(tree))


# Times of a course.


class RankSeconds(NamedTuple):
    """Predicted time of a step of one rank, and what it consists of."""

    compute: float = 0.0

    # Of all collectives, and what of it the computation waits for.
    communication: float = 0.0
    exposed: float = 0.0

    optimizer: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.optimizer

    def to_json(self) -> dict[str, float]:
        seconds = {f"{name}_seconds": value for name, value in self._asdict().items()}
        return seconds | {"step_seconds": self.total}


def time_of_course(
    course: StepCourse, profile: DeviceProfile, links: Links, *, dtype: str, scale: float = 1.0
) -> RankSeconds:
    """Predict the time of forward and backward of a rank, from its operations in their order.

    `scale` multiplies the work of each operation, for another number of samples.
    """
    flops, moved = (scale * numpy.array(one, float) for one in (course.flops, course.moved))
    # Views and collectives take no time of a stream.
    times = numpy.where(moved > 0, profile.operation_seconds(flops, moved, dtype=dtype), 0.0)
    times[[*course.collectives]] = 0.0
    # The copies around collectives run on streams of their own, in parallel with the computation.
    compute = float(times[numpy.array(course.streams) == 0].sum())
    communication = sum(links.seconds(one) for one in course.collectives.values())
    exposed = max(0.0, _end_of_course(course, links, times.tolist()) - compute)
    return RankSeconds(compute, communication, exposed)


def _end_of_course(course: StepCourse, links: Links, seconds: Sequence[float]) -> float:
    """Return the time at which all streams of a rank, and its links, are free again."""
    free: dict[int, float] = {}  # by stream
    link = 0.0  # one collective passes the links at a time
    # When the computation began to use what was gathered last: FSDP2 gathers no earlier.
    used = 0.0
    # The end of the last scatter, which the computation waits for before the next one.
    scattered = 0.0
    gathers = {index for index, one in course.collectives.items() if one.kind == ALL_GATHER_KIND}
    ends: list[float] = []
    for index, duration in enumerate(seconds):
        stream = course.streams[index]
        waits = course.waits.get(index, ())
        begin = max([free.get(stream, 0.0), *(ends[one] for one in waits)])
        collective = course.collectives.get(index)
        if collective is None:
            ends.append(begin + duration)
            if duration:
                free[stream] = ends[-1]
            if not gathers.isdisjoint(waits):
                used = max(used, ends[-1])
            continue

        link = max(begin, link, used if index in gathers else 0.0) + links.seconds(collective)
        ends.append(link)
        if collective.kind == REDUCE_SCATTER_KIND:
            free[0] = max(free.get(0, 0.0), scattered)
            scattered = link
        if collective.blocks_stream:
            free[stream] = link
    return max(link, *free.values(), 0.0)
