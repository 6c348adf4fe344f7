"""Draw memory over time by owner: as a PNG, or as one page that needs no network.

    plot_course(course_of_timeline(timeline), "memory.png")
    write_page(course_of_blocks(owned, title="oom.pickle"), "memory.html")

The page shows the blocks that are alive at the moment under the pointer.

Proof: `python -m pytest tests/cli/test_memory_page.py`.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy

from ..core.measure import Life
from ..core.wording import format_mebibytes, write_output
from ..plan.owners import (
    ALL_OWNERS,
    BACKWARD_TEMPORARIES,
    EARLIER_OWNER,
    FORWARD_TEMPORARIES,
    LOGITS_OWNER,
    NO_STACK_OWNER,
    RESTS_OWNER,
    STEP_TEMPORARIES,
    WORKSPACES_OWNER,
    OwnedBlocks,
)
from ..plan.profiler import Timeline
from ..plan.saved import Plan
from .screen import render_template

CONTEXT_OWNER = "context"
# From Paul Tol's palettes for colour-blind readers. Bytes that live through the whole step are at
# the bottom, in grey or blue.
OWNER_COLOURS = {
    "parameters": "#BBBBBB",
    "buffers and batch": "#DDDDDD",
    "optimizer state": "#77AADD",
    "gradients": "#44BB99",
    "activations": "#EE8866",
    "temporaries": "#EEDD88",
    "gathered parameters": "#CCBB99",
    "collective buffers": "#88CCEE",
    "allocator": "#FFAABB",
    CONTEXT_OWNER: "#555555",
    EARLIER_OWNER: "#999999",
    LOGITS_OWNER: "#CC6677",
    FORWARD_TEMPORARIES: "#EEDD88",
    BACKWARD_TEMPORARIES: "#BBCC33",
    STEP_TEMPORARIES: "#99DDFF",
    NO_STACK_OWNER: "#AAAA00",
    WORKSPACES_OWNER: "#AA4499",
    RESTS_OWNER: "#FFAABB",
}
# Points of a picture; a longer record is drawn at its highest moments.
MOST_POINTS = 1500
# Blocks that a page names; the smaller ones are only counted.
MOST_BLOCKS = 6000


class CourseBlock(NamedTuple):
    """A block that a page names."""

    born: int
    freed: int | None
    num_bytes: int
    owner: str
    label: str


@dataclass(frozen=True)
class MemoryCourse:
    """Bytes by owner over a record."""

    title: str
    unit: str  # what a moment counts: events or operations
    moments: Sequence[int]
    owners: Mapping[str, Sequence[int]]  # bytes at each moment, lowest layer first
    end: int  # of the record
    phases: Sequence[tuple[str, int, int]]  # name, first and last moment
    peak_place: int  # index of the peak among the moments
    peak_text: str
    reserved: Sequence[int] = ()
    limit: int = 0  # bytes of the budget
    blocks: Iterable[CourseBlock] = ()


def course_of_timeline(timeline: Timeline, lives: Iterable[Life] = ()) -> MemoryCourse:
    """Return the course of a measured step, with its storages if they are given."""
    # The last moment of each phase.
    ends = {point.phase: point.index for point in timeline.points}
    moments = [point.index for point in timeline.points]
    peak = timeline.peak
    named = (
        CourseBlock(life.born, life.died, life.nbytes, group, layer.replace("(rest)", ""))
        for life in lives
        for group, layer in [life.owner]
    )
    return MemoryCourse(
        title=f"{timeline.model} on {timeline.device}: one training step with {timeline.optimizer}",
        unit="operation",
        moments=moments,
        owners={group: sizes for group, sizes in timeline.owners.items() if any(sizes)},
        end=timeline.num_operations - 1,
        phases=list(zip(ends, [0, *ends.values()], ends.values(), strict=False)),
        peak_place=moments.index(peak.index),
        peak_text=f"peak {format_mebibytes(peak.bytes_alive)} MiB, {peak.phase}",
        blocks=named,
    )


def course_of_plan(plan: Plan, planned: Timeline) -> MemoryCourse:
    """Return the course of a planned step, on top of the context, below the line of the budget."""
    course = course_of_timeline(planned)
    owners = course.owners
    if plan.cuda is not None:
        context = [plan.cuda["context_bytes"]] * len(course.moments)
        owners = {CONTEXT_OWNER: context, **owners}
    title = f"{plan.workload} on {plan.settings['device']}, as planned"
    return replace(course, title=title, owners=owners, limit=plan.budget_bytes)


def course_of_blocks(owned: OwnedBlocks, *, title: str) -> MemoryCourse:
    """Return the course of a recorded snapshot."""
    history = owned.history
    moments = _choose_moments(history.allocated, history.peak_index)
    # Changes of each owner's bytes; the first are those at the start of the record, and the last
    # those after it, when blocks were released while the snapshot was taken.
    changes = {owner: numpy.zeros(len(history.events) + 2, numpy.int64) for owner in ALL_OWNERS}
    for life in history.lives:
        own = life.own_bytes
        for owner, size in ((life.owner, own), (RESTS_OWNER, life.num_bytes - own)):
            changes[owner][life.born + 1] += size
            if life.freed is not None:
                changes[owner][life.freed + 1] -= size
    places = numpy.array(moments) + 1
    figures = {owner: change.cumsum()[places].tolist() for owner, change in changes.items()}
    named = (
        CourseBlock(life.born, life.freed, life.num_bytes, life.owner, life.origin.line)
        for life in history.lives
    )
    return MemoryCourse(
        title=title,
        unit="event",
        moments=moments,
        owners={owner: column for owner, column in figures.items() if any(column)},
        end=max(len(history.events) - 1, 1),
        phases=list(owned.phase_spans()),
        peak_place=moments.index(history.peak_index),
        peak_text=f"peak {format_mebibytes(history.peak_allocated)} MiB, {owned.peak_phase}",
        reserved=[history.reserved[moment + 1] for moment in moments],
        blocks=named,
    )


def _choose_moments(allocated: Sequence[int], peak_index: int) -> list[int]:
    """Choose the highest and the last event of each of many equal ranges, and the peak."""
    chosen = {peak_index, -1}
    start = -1
    for part in numpy.array_split(allocated, min(len(allocated), MOST_POINTS // 2)):
        chosen |= {start + int(part.argmax()), start + len(part) - 1}
        start += len(part)
    return sorted(chosen)


# The page.


def write_page(course: MemoryCourse, path: str | Path) -> None:
    """Write one page with the course and its blocks; it loads nothing."""
    owners = [[name, OWNER_COLOURS[name], sizes] for name, sizes in course.owners.items()]
    blocks = heapq.nlargest(MOST_BLOCKS, course.blocks, key=lambda block: block.num_bytes)
    data = vars(course) | {"owners": owners, "blocks": blocks}
    text = render_template(Path(__file__).with_name("memory_page.html.jinja"), data=data)
    write_output(path, text)
