"""Draw memory over time by owner: as a PNG, or as one page that needs no network.

    plot_course(course_of_timeline(timeline), "memory.png")
    write_page(course_of_blocks(owned, title="oom.pickle"), "memory.html")

The page shows the blocks that are alive at the moment under the pointer.

Proof: `python -m pytest tests/cli/test_memory_page.py`.
"""

import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.measure import Life
from ..core.wording import format_mebibytes
from ..plan.cuda_step import (
    BACKWARD_TEMPORARIES,
    FORWARD_TEMPORARIES,
    STEP_TEMPORARIES,
    WORKSPACES_OWNER,
)
from ..plan.owners import (
    ALL_OWNERS,
    EARLIER_OWNER,
    LOGITS_OWNER,
    NO_STACK_OWNER,
    RESTS_OWNER,
    OwnedBlocks,
)
from ..plan.profiler import STEP_PHASES, Timeline

# From Paul Tol's palettes for colour-blind readers. Bytes that live through the whole step are at
# the bottom, in grey or blue.
GROUP_COLOURS = {
    "parameters": "#BBBBBB",
    "buffers and batch": "#DDDDDD",
    "optimizer state": "#77AADD",
    "gradients": "#44BB99",
    "activations": "#EE8866",
    "temporaries": "#EEDD88",
    "gathered parameters": "#CCBB99",
    "collective buffers": "#88CCEE",
    "allocator": "#FFAABB",
}
OWNER_COLOURS = {
    **GROUP_COLOURS,
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


@dataclass(frozen=True)
class CourseBlock:
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
    moments: tuple[int, ...]
    owners: Mapping[str, tuple[int, ...]]  # bytes at each moment, lowest layer first
    end: int  # of the record
    phases: tuple[tuple[str, int, int], ...]  # name, first and last moment
    peak_place: int  # index of the peak among the moments
    peak_text: str
    reserved: tuple[int, ...] = ()
    blocks: tuple[CourseBlock, ...] = ()

    @property
    def totals(self) -> list[int]:
        return [sum(figures) for figures in zip(*self.owners.values(), strict=True)]


def course_of_timeline(timeline: Timeline, lives: Iterable[Life] = ()) -> MemoryCourse:
    """Return the course of a measured step, with its storages if they are given."""
    starts = [0]
    for phase in STEP_PHASES:
        starts.append(max(point.index for point in timeline.points if point.phase == phase))
    phases = [(phase, starts[index], starts[index + 1]) for index, phase in enumerate(STEP_PHASES)]
    moments = tuple(point.index for point in timeline.points)
    peak = timeline.peak
    named = (CourseBlock(life.born, life.died, life.nbytes, *_words(life.owner)) for life in lives)
    title = f"{timeline.model} on {timeline.device}: one training step with {timeline.optimizer}"
    return MemoryCourse(
        title=title,
        unit="operation",
        moments=moments,
        owners={group: timeline.owners[group] for group in _drawn(timeline.owners)},
        end=timeline.num_operations - 1,
        phases=tuple(phases),
        peak_place=moments.index(peak.index),
        peak_text=f"peak {format_mebibytes(peak.bytes_alive)} MiB, {peak.phase}",
        blocks=_largest(named),
    )


def _words(owner: tuple[str, str]) -> tuple[str, str]:
    group, layer = owner
    return group, "" if layer == "(rest)" else layer


def _drawn(owners: Mapping[str, Sequence[int]]) -> list[str]:
    return [group for group in GROUP_COLOURS if any(owners.get(group, ()))]


def _largest(blocks: Iterable[CourseBlock]) -> tuple[CourseBlock, ...]:
    found = heapq.nlargest(MOST_BLOCKS, blocks, key=lambda block: block.num_bytes)
    return tuple(sorted(found, key=lambda block: block.born))


def course_of_blocks(owned: OwnedBlocks, *, title: str) -> MemoryCourse:
    """Return the course of a recorded or predicted snapshot."""
    history = owned.history
    moments = _moments(history.allocated, history.peak_index)
    changes: dict[int, list[tuple[str, int]]] = {}
    for life in history.lives:
        own = owned.own_bytes(life)
        for owner, size in ((owned.owner(life), own), (RESTS_OWNER, life.num_bytes - own)):
            if size:
                changes.setdefault(life.born, []).append((owner, size))
                if life.freed is not None:
                    changes.setdefault(life.freed, []).append((owner, -size))
    figures: dict[str, list[int]] = {owner: [] for owner in ALL_OWNERS}
    alive = dict.fromkeys(ALL_OWNERS, 0)
    wanted = set(moments)
    for index in range(-1, len(history.record.events)):
        for owner, size in changes.get(index, ()):
            alive[owner] += size
        if index in wanted:
            for owner, size in alive.items():
                figures[owner].append(size)
    named = (
        CourseBlock(life.born, life.freed, life.num_bytes, owned.owner(life), owned.line(life))
        for life in history.lives
    )
    return MemoryCourse(
        title=title,
        unit="event",
        moments=moments,
        owners={owner: tuple(column) for owner, column in figures.items() if any(column)},
        end=max(len(history.record.events) - 1, 1),
        phases=tuple(owned.phase_spans()),
        peak_place=moments.index(history.peak_index),
        peak_text=f"peak {format_mebibytes(history.peak_allocated)} MiB, {owned.peak_phase}",
        reserved=tuple(history.reserved[moment + 1] for moment in moments),
        blocks=_largest(named),
    )


def _moments(allocated: Sequence[int], peak_index: int) -> tuple[int, ...]:
    """Choose the highest and the last event of each of many equal ranges, and the peak."""
    num_ranges = min(len(allocated), MOST_POINTS // 2)
    chosen = {peak_index, -1, len(allocated) - 2}
    for number in range(num_ranges):
        start = number * len(allocated) // num_ranges
        end = (number + 1) * len(allocated) // num_ranges
        chosen.add(max(range(start, end), key=allocated.__getitem__) - 1)
        chosen.add(end - 2)
    return tuple(sorted(chosen))


# The page.


def write_page(course: MemoryCourse, path: str | Path) -> None:
    """Write one page with the course and its blocks; it loads nothing."""
    labels = sorted({block.label for block in course.blocks})
    names = list(course.owners)
    shown = [block for block in course.blocks if block.owner in course.owners]
    number = {label: index for index, label in enumerate(labels)}
    blocks = [
        [block.born, block.freed, block.num_bytes, names.index(block.owner), number[block.label]]
        for block in shown
    ]
    data = {
        "title": course.title,
        "unit": course.unit,
        "end": course.end,
        "moments": course.moments,
        "owners": [[name, OWNER_COLOURS[name], course.owners[name]] for name in names],
        "reserved": course.reserved,
        "phases": course.phases,
        "peak": course.peak_place,
        "blocks": blocks,
        "labels": labels,
    }
    # A name from the record can't end the script element.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    try:
        Path(path).write_text(PAGE_TEMPLATE.replace("DATA_HERE", text), encoding="utf-8")
    except OSError as error:
        # The error of a full disk names no file.
        raise OSError(error.errno, error.strerror, str(path)) from error


PAGE_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>memory</title>
<style>
body { font: 14px/1.4 system-ui, sans-serif; margin: 1rem auto; max-width: 84rem; color: #222;
  background: #fff; padding: 0 1rem }
h1 { font-size: 1.1rem; font-weight: 600; margin: 0 0 .2rem; overflow-wrap: anywhere }
p { margin: .2rem 0 .6rem; color: #555 }
canvas { width: 100%; height: 24rem; display: block; cursor: crosshair; touch-action: pan-y }
canvas:focus-visible { outline: 2px solid #4477AA }
main { display: grid; grid-template-columns: minmax(16rem, 1fr) 2fr; gap: 1.5rem;
  align-items: start }
@media (max-width: 50rem) { main { grid-template-columns: 1fr } }
table { border-collapse: collapse; width: 100% }
th { text-align: left; font-weight: 600; border-bottom: 1px solid #999 }
td { padding: .1rem .6rem .1rem 0; vertical-align: top; overflow-wrap: anywhere }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
i { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
</style>
</head>
<body>
<h1 id="title"></h1>
<p id="moment" aria-live="polite"></p>
<canvas id="course" tabindex="0" aria-label="memory over time by owner"></canvas>
<p>Move the pointer, or use the arrow keys; click to hold a moment, Escape for the peak.</p>
<main>
<table><thead><tr><th>owner</th><th class="n">MiB</th><th class="n">share</th></tr></thead>
<tbody id="owners"></tbody></table>
<table><thead><tr><th>largest blocks alive</th><th>owner</th>
<th class="n">MiB</th><th class="n">alive</th></tr></thead><tbody id="blocks"></tbody></table>
</main>
<script type="application/json" id="data">DATA_HERE</script>
<script>
"use strict";
const MIB = 1048576, MARGIN = {left: 64, right: 12, top: 22, bottom: 30}, SHOWN = 24;
const find = (id) => document.getElementById(id);
const data = JSON.parse(find("data").textContent);
const canvas = find("course");
const totals = data.moments.map((_, at) => data.owners.reduce((sum, one) => sum + one[2][at], 0));
const highest = Math.max(1, ...totals, ...data.reserved);
const first = data.moments[0], span = Math.max(1, data.end - first);
const mib = (bytes) => (bytes / MIB).toLocaleString("en", {maximumFractionDigits: 2});
let place = data.peak, held = false;

function area() {
  return {
    width: canvas.clientWidth - MARGIN.left - MARGIN.right,
    height: canvas.clientHeight - MARGIN.top - MARGIN.bottom,
  };
}
const across = (moment) => MARGIN.left + (moment - first) / span * area().width;
const up = (bytes) => MARGIN.top + (1 - bytes / highest / 1.05) * area().height;

function steps(draw, values, from, to) {
  for (let at = from; at !== to; at += Math.sign(to - from)) {
    const next = at + 1 < data.moments.length ? data.moments[at + 1] : data.end;
    const ends = [across(data.moments[at]), across(next)];
    if (to < from) ends.reverse();
    draw.lineTo(ends[0], up(values[at]));
    draw.lineTo(ends[1], up(values[at]));
  }
}

function paint() {
  const ratio = window.devicePixelRatio || 1, size = area();
  canvas.width = canvas.clientWidth * ratio;
  canvas.height = canvas.clientHeight * ratio;
  const draw = canvas.getContext("2d");
  draw.scale(ratio, ratio);
  draw.font = "12px system-ui, sans-serif";
  const shades = ["#F4F4F4", "#FFFFFF"], base = MARGIN.top + size.height;
  data.phases.forEach(([name, start, end], number) => {
    draw.fillStyle = shades[number % 2];
    draw.fillRect(across(start), MARGIN.top, across(end) - across(start), size.height);
    if (draw.measureText(name).width > across(end) - across(start)) return;
    draw.fillStyle = "#333";
    draw.textAlign = "center";
    draw.fillText(name, (across(start) + across(end)) / 2, MARGIN.top - 8);
  });
  let below = totals.map(() => 0);
  for (const [, colour, figures] of data.owners) {
    const above = figures.map((bytes, at) => below[at] + bytes);
    draw.fillStyle = colour;
    draw.beginPath();
    draw.moveTo(across(first), base);
    steps(draw, above, 0, above.length);
    steps(draw, below, below.length - 1, -1);
    draw.fill();
    below = above;
  }
  draw.strokeStyle = "#000";
  draw.lineWidth = 1;
  if (data.reserved.length) {
    draw.beginPath();
    steps(draw, data.reserved, 0, data.reserved.length);
    draw.stroke();
  }
  draw.fillStyle = "#555";
  draw.textAlign = "right";
  for (let part = 0; part <= 4; part++) {
    draw.fillText(mib(highest * part / 4), MARGIN.left - 6, up(highest * part / 4) + 4);
  }
  draw.fillText("MiB", MARGIN.left - 6, MARGIN.top - 8);
  draw.fillText(data.unit, canvas.clientWidth - MARGIN.right, base + 20);
  draw.strokeStyle = held ? "#AA3377" : "#4477AA";
  draw.lineWidth = 2;
  draw.beginPath();
  draw.moveTo(across(data.moments[place]), MARGIN.top);
  draw.lineTo(across(data.moments[place]), base);
  draw.stroke();
}

function cell(row, text, isNumber, colour) {
  const made = row.appendChild(document.createElement("td"));
  if (isNumber) made.className = "n";
  if (colour) made.appendChild(document.createElement("i")).style.background = colour;
  made.appendChild(document.createTextNode(text));
}

function fill(id, rows) {
  const body = find(id);
  body.replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    cells.forEach((one) => cell(row, ...one));
    return row;
  }));
}

function life(born, freed) {
  return (born < 0 ? "start" : born) + " to " + (freed === null ? "end" : freed);
}

function show() {
  const moment = data.moments[place], total = totals[place];
  const phase = data.phases.find(([, start, end]) => start <= moment && moment <= end);
  const when = moment < 0 ? "before the first " + data.unit : data.unit + " " + moment;
  let text = when + (phase ? ", " + phase[0] : "") + ": " + mib(total) + " MiB allocated";
  if (data.reserved.length) text += ", " + mib(data.reserved[place]) + " MiB reserved";
  if (place === data.peak) text += " (the peak)";
  find("moment").textContent = text;
  const owners = data.owners.map(([name, colour, figures]) => [name, colour, figures[place]]);
  if (data.reserved.length) {
    owners.push(["free blocks", "", data.reserved[place] - total]);
  }
  fill("owners", owners.filter((one) => one[2]).sort((a, b) => b[2] - a[2]).map(
    ([name, colour, bytes]) => [
      [name, false, colour], [mib(bytes), true],
      [name === "free blocks" ? "" : (100 * bytes / total).toFixed(1) + "%", true],
    ]));
  const groups = new Map();
  for (const [born, freed, bytes, owner, label] of data.blocks) {
    if (born > moment || (freed !== null && freed <= moment)) continue;
    const key = owner + "," + label;
    if (!groups.has(key)) groups.set(key, {owner, label, bytes: 0, count: 0, born, freed});
    const group = groups.get(key);
    group.bytes += bytes;
    group.count += 1;
  }
  const largest = [...groups.values()].sort((a, b) => b.bytes - a.bytes).slice(0, SHOWN);
  const rows = largest.map(({owner, label, bytes, count, born, freed}) => [
    [data.labels[label] || "-", false, data.owners[owner][1]], [data.owners[owner][0], false],
    [mib(bytes), true],
    [count > 1 ? count + " blocks" : life(born, freed), true],
  ]);
  const rest = total - largest.reduce((sum, one) => sum + one.bytes, 0);
  if (rest > 0) rows.push([["smaller ones", false], ["", false], [mib(rest), true], ["", true]]);
  fill("blocks", rows);
  paint();
}

function select(at) {
  place = Math.max(0, Math.min(data.moments.length - 1, at));
  show();
}

function nearest(moment) {
  let low = 0, high = data.moments.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (data.moments[middle] <= moment) low = middle; else high = middle - 1;
  }
  return low;
}

function point(event) {
  const left = event.clientX - canvas.getBoundingClientRect().left - MARGIN.left;
  select(nearest(first + left / area().width * span));
}

canvas.addEventListener("pointermove", (event) => { if (!held) point(event); });
canvas.addEventListener("click", (event) => { held = !held; point(event); });
canvas.addEventListener("keydown", (event) => {
  const moves = {ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20};
  if (event.key === "Escape") { held = false; select(data.peak); }
  else if (event.key in moves) { held = true; select(place + moves[event.key]); }
  else return;
  event.preventDefault();
});
window.addEventListener("resize", paint);
find("title").textContent = data.title;
document.title = data.title;
const asked = /^#(-?\\d+)$/.exec(location.hash);
select(asked ? nearest(Number(asked[1])) : data.peak);
</script>
</body>
</html>
"""
