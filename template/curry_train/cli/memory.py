"""The memory command: bytes that each layer holds, owners of the peak, and the timeline.

With `--snapshot` it reads what a CUDA training recorded in place of running a model.

Proof: `python -m pytest tests/plan/test_timeline.py tests/cli/test_memory_snapshot.py`.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import click

from ..core.wording import format_bytes, provenance
from ..plan.available import missing_room
from ..plan.estimate import Sketch
from ..plan.optimizers import make_optimizer
from ..plan.owners import FREE_OWNER, OwnedBlocks, levers
from ..plan.profiler import BYTES_PER_MIB, MemoryProfiler
from ..plan.shapes import host_note
from ..plan.snapshot import read_snapshot
from ..plan.timeline import record_step_storages, timeline_of
from ..runs.journal import printable
from ..runs.values import Facts
from ..workloads.models import load_workload
from ..workloads.workload import Case
from .figures import plot_course
from .memory_page import MemoryCourse, course_of_blocks, course_of_timeline, write_page
from .options import (
    CaseOptions,
    blocks_text,
    echo_notes,
    facts_of,
    heading,
    own_workload,
    plot_option,
    refuse_typed,
    samples_of,
    settle_blocks,
    training_options,
)
from .parameters import INPUT_FILE, option, output_option, together
from .screen import Ended, fill_screen, messages_on_screen, screen_command, table

# Lines of code that a report lists, so that it has 30 lines in all; --json has more.
MOST_LINES = 4
NAME_WIDTH = 56


# The report of a snapshot.


def owners_of_device(owned: OwnedBlocks) -> Facts:
    """Return who owns the peak of one device of a snapshot, and what lowers it."""
    history = owned.history
    return {
        "device": history.device,
        "events": len(history.events),
        "peak_allocated_bytes": history.peak_allocated,
        "peak_reserved_bytes": history.peak_reserved,
        "reserved_at_peak_bytes": history.reserved_at_peak,
        "peak_event": history.peak_index,
        "peak_phase": owned.peak_phase,
        # They add up to the allocated peak, and with the free bytes to what is reserved then.
        "owners": list(owned.owners.items()),
        "reserved_free_bytes": history.reserved_at_peak - history.peak_allocated,
        "lines": [asdict(line) for line in owned.lines()[:100]],
        # The peak of a step includes the bytes that are there when it begins.
        "steps": [
            {
                "first_event": start,
                "last_event": end,
                "allocated": max(history.allocated[start : end + 2]),
                "reserved": max(history.reserved[start : end + 2]),
            }
            for start, end in owned.steps()
        ],
        "levers": [asdict(lever) for lever in levers(owned)],
        "out_of_memory": [
            {
                "event": index,
                "requested_bytes": event.num_bytes,
                "device_free_bytes": event.address,
                "reserved_free_bytes": history.reserved[index + 1] - history.allocated[index + 1],
            }
            for index, event in history.out_of_memory()
        ],
        "notes": list(_list_notes(owned)),
    }


def _list_notes(owned: OwnedBlocks) -> Iterator[str]:
    """Yield what the record lacks."""
    history = owned.history
    if not history.events:
        yield (
            "no events were recorded, so this is the moment of the snapshot and not the peak: "
            "call torch.cuda.memory._record_memory_history() first"
        )
    elif not owned.has_stacks:
        yield "the events have no stacks, so only sizes tell owners apart: record context='all'"
    if history.events and (missing := history.of_dropped_events):
        yield (
            f"the record holds the last {len(history.events):,} events only: older ones "
            f"were dropped, and {len(missing):,} blocks have no time. A larger max_entries of "
            "_record_memory_history keeps them"
        )
    if history.contradictions:
        yield f"{history.contradictions:,} blocks were allocated twice without a release"


def text_of_device(name: str, found: Facts) -> str:
    """Format the owners of a device in 80 columns."""
    whole, peak = found["peak_allocated_bytes"], found["peak_reserved_bytes"]
    lines = [
        f"{name}, device {found['device']}: {found['events']:,} events, "
        f"{len(found['steps'])} steps or parts of one",
        f"  allocated peak {format_bytes(whole)} in {found['peak_phase']}, "
        f"event {found['peak_event']:,}",
        f"  reserved {format_bytes(found['reserved_at_peak_bytes'])} at that moment, at most "
        f"{format_bytes(peak)}",
    ]
    for error in found["out_of_memory"]:
        asked, device, free = (format_bytes(size) for size in [*error.values()][1:])
        lines.append(
            f"  out of memory at event {error['event']:,}: {asked} asked for,\n"
            f"    {device} of the device free, {free} reserved but unallocated"
        )
    lines += map(fill_screen, found["notes"])

    rows = [["owner at the peak", "MiB", "share"]]
    for owner, size in found["owners"]:
        rows.append(_format_row(owner, size, whole))
        for line in found["lines"][:MOST_LINES]:
            if line["owner"] == owner:
                blocks = "" if line["blocks"] == 1 else f" ({line['blocks']} blocks)"
                code = printable(line["line"], longest=NAME_WIDTH - 2 - len(blocks))
                rows.append(_format_row(f"  {code}{blocks}", line["bytes"], whole))
    free = _format_mib(found["reserved_free_bytes"])
    rows.append([f"{FREE_OWNER} (reserved, not allocated)", free, ""])

    lowering = [["what lowers the peak, by replay", "allocated", "reserved MiB"]]
    for lever in found["levers"]:
        saved = (lever["allocated_saved_bytes"], lever["reserved_saved_bytes"])
        lowering.append([lever["change"], *map(_format_mib, saved)])
    if not found["levers"]:
        lowering.append(["nothing that is known here takes off 0.5%", "", ""])
    return "\n".join([*lines, f"\n{table(rows)}", f"\n{table(lowering)}"])


def _format_mib(num_bytes: int) -> str:
    return f"{num_bytes / BYTES_PER_MIB:,.3f}"


def _format_row(name: str, size: int, whole: int) -> list[str]:
    return [name, _format_mib(size), f"{size / max(whole, 1):.1%}"]


# The output of the command: its text, the results for `--json`, and the course to draw.
Report = tuple[str, Facts, MemoryCourse]


def report_snapshot(path: str) -> Report:
    """Find out who owns the peak of a snapshot; raises UnusableSnapshot."""
    with messages_on_screen(f"reading {format_bytes(Path(path).stat().st_size)}"):
        snapshot = read_snapshot(path)
    name = printable(Path(path).name)
    devices = [*map(OwnedBlocks, snapshot.devices)]
    devices.sort(key=lambda owned: -owned.history.peak_allocated)
    found = [owners_of_device(owned) for owned in devices]
    texts = [text_of_device(name, one) for one in found]
    texts += [f"note: {note}" for note in snapshot.notes]
    more = {"snapshot": path, "settings": list(snapshot.notes), "devices": found}
    title = f"{name}, device {found[0]['device']}"
    course = course_of_blocks(devices[0], title=title)
    return "\n\n".join(texts), provenance() | found[0] | more, course


# The command.


@screen_command("memory", example="--model transformer --plot memory.png")
def memory_command(
    spec: str | None = training_options(required=False),
    snapshot_path: str | None = option(
        "Read a CUDA memory snapshot in place of a model.",
        "FILE",
        "--snapshot",
        type=INPUT_FILE,
    ),
    on_shapes: bool = option("Run the model without values, in little memory."),
    asked: CaseOptions = together(CaseOptions),
    plot_path: str | None = plot_option("Draw the timeline as PNG; needs matplotlib."),
    html_path: str | None = output_option("Write the timeline as a page for a browser.", "--html"),
) -> Ended:
    """Show what holds the memory of a training step.

    Prints the bytes that each layer holds, and the owners of the peak.

    Exit status: 0 measured, 2 wrong usage, 3 device not available.
    """
    if (spec is None) == (snapshot_path is None):
        raise click.UsageError("give either --model or --snapshot")
    if spec is not None:
        text, results, course = measure_model(spec, asked, on_shapes=on_shapes)
    else:
        refuse_typed([*vars(asked), "on_shapes"], "--snapshot runs no model")
        text, results, course = report_snapshot(str(snapshot_path))
    click.echo(text)
    if plot_path:
        plot_course(course, plot_path)
    if html_path:
        write_page(course, html_path)
    return results, 0


@contextlib.contextmanager
def _choose_case(
    spec: str, asked: CaseOptions, *, on_shapes: bool
) -> Iterator[tuple[Case, str | None]]:
    """Provide the case, and why it has no values if it runs on shapes.

    With `on_shapes` a factory makes no real weights; a trainer or a script has made them already.
    """
    source = own_workload(spec) or spec
    why = "as asked" if on_shapes else missing_room(source, asked.case)
    if why is None:
        yield asked.case(load_workload(spec)), None
        return
    with Sketch(source, dtype=asked.dtype, seed=asked.seed, blocks=asked.blocks) as sketch:
        if sketch.why_real is not None:
            raise ValueError(f"{spec} does not run on shapes: {sketch.why_real}")
        size = samples_of(sketch.case.workload, asked.batch_size)
        yield replace(sketch.case, batch_size=size), why


def measure_model(spec: str, asked: CaseOptions, *, on_shapes: bool) -> Report:
    """Measure one training step of a model, to find out what holds its memory."""
    with _choose_case(spec, asked, on_shapes=on_shapes) as (case, why):
        workload = case.workload
        module = case.build()
        batch, loss = case.batch_and_loss
        case, choice = settle_blocks(case)
        optimizer = make_optimizer(workload.optimizer or "adamw", module)
        profile = MemoryProfiler(module).profile(batch, loss=loss, blocks=case.blocks)
        lives = record_step_storages(
            module,
            batch,
            loss,
            optimizer=optimizer,
            blocks=case.blocks,
            accumulated=workload.accumulation > 1,
        )
        timeline = timeline_of(lives)

    facts = facts_of([case])
    echo_notes(workload)
    shapes = [] if why is None else [fill_screen(f"run on shapes alone, {why}")]
    texts = [heading(facts), *shapes, blocks_text(choice)]
    texts += [profile.table(most=5), timeline.table(most=3)]
    workspace = max((one.nbytes for one in lives.convolutions), default=0)
    if workspace:
        texts.append(f"convolution workspace on a GPU, estimated: {format_bytes(workspace)}")
    if note := host_note(optimizer):
        texts.append(fill_screen(note))
    facts |= {
        "workload": workload.name,
        "blocks": choice.to_json(),
        "on_shapes": why,
        "convolution_workspace_bytes": workspace,
        "profile": asdict(profile),
        "timeline": asdict(timeline),
    }
    return "\n\n".join(texts), facts, course_of_timeline(timeline, lives.lives)
