"""Command `plan`: find the fastest way that fits a budget, print it and draw it.

The rows of the plan's table are marked. `--fits` prints the fewest GPUs instead.

Proof: `python -m pytest tests/cli/test_plan_memory.py`.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import click
from click import echo

from ..core.wording import format_bytes, parse_bytes, provenance, write_json
from ..gates.memory_plan import measure_real_peak
from ..plan.card import WORST_RESERVED_ERROR
from ..plan.device import PROFILES, find_profile, profile_of
from ..plan.fewest import fewest_gpus
from ..plan.optimizers import OPTIMIZERS
from ..plan.parallel import PRECISIONS, SHARDING_KINDS, Sharding, parse_mesh
from ..plan.planner import Infeasible, Planner
from ..plan.profiler import Timeline
from ..plan.rank_time import parse_links
from ..plan.saved import NONE_KIND, OPTION_KINDS, Candidate, Plan
from ..workloads.models import load_workload
from ..workloads.workload import Case
from .figures import plot_plan
from .memory_page import course_of_plan, write_page
from .options import (
    BLOCKS_OPTION,
    DTYPE_OPTION,
    SEED_OPTION,
    choose_device,
    echo_notes,
    own_workload,
    plot_option,
    refuse_typed,
    training_options,
)
from .parameters import number_option, option, output_option, together
from .screen import Ended, fill_screen, messages_on_screen, screen_command

# Command `plan`: find the fastest way to train within a memory budget.


FOR_THIS_DEVICE = {
    "cpu": "This plan is for this CPU; --target h100 plans for a GPU without having one.",
    "cuda": "This plan is for this GPU; --target names another device, such as h100.",
}


SAVING_KINDS = [kind for kind in OPTION_KINDS if kind != NONE_KIND]
# Values of --reshard-after-forward other than a number of ranks.
RESHARD_WORDS = {"yes": True, "no": False}


def _reshard(text: str) -> bool | int:
    if text in RESHARD_WORDS:
        return RESHARD_WORDS[text]
    if text.isdecimal() and int(text) > 1:
        return int(text)
    raise ValueError(f"{text!r} is neither yes, no, nor a number of ranks to reshard to")


@dataclass(frozen=True)
class PlannerOptions:
    """Options of the command that the planner takes unchanged."""

    dtype: Any = DTYPE_OPTION
    optimizer: str | None = option(
        f"{', '.join(OPTIMIZERS)}, bytes of state per parameter, or pkg.module:function.",
        "NAME",
    )
    context_bytes: int | None = option(
        "Memory of a GPU that a process takes besides its tensors.  "
        "[default: 512MiB, 816MiB with convolutions]",
        "SIZE",
        "--context",
        parse=parse_bytes,
    )
    margin: float = option(
        "Leave so much free on a GPU; the default is the worst recorded error.",
        "PERCENT",
        type=click.FloatRange(0, 100),
        default=round(100 * WORST_RESERVED_ERROR, 2),
        show_default=True,
        parse=lambda percent: percent / 100,
    )
    links: Any = option(
        "Bytes per second within a node of 8 GPUs and between nodes, such as 450GB,50GB.",
        "RATES",
        "--link",
        parse=parse_links,
    )
    blocks: str | None = BLOCKS_OPTION
    seed: int = SEED_OPTION


@screen_command("plan", example="--model transformer --budget 16MiB")
def plan_command(
    spec: str = training_options(),
    budget_bytes: int | None = option(
        "Memory per rank, such as 24GiB.  [default: the card of --target]",
        "SIZE",
        "--budget",
        parse=parse_bytes,
    ),
    fits: str | None = option(
        "In place of --budget: find the fewest GPUs of this kind, such as h100.", "GPU"
    ),
    global_batch: int | None = number_option(
        "Samples per optimizer step.  [default: the trainer's or factory's, or 1]", most=10**8
    ),
    microbatch: int | None = number_option(
        "Samples per microbatch.  [default: try every divisor of the global batch]"
    ),
    target: str | None = option(
        f"Device to plan for: {', '.join(PROFILES)}, or measured: this device, the default.",
        "NAME",
    ),
    parallel: str | None = option(
        "How ranks share the training: "
        f"{', '.join(SHARDING_KINDS)}, or package.module:parallelize.",
        "KIND",
    ),
    ranks: int = number_option("Number of ranks.", default=1),
    meshes: list[dict[str, int]] = option(
        "Sizes of the mesh of ranks, such as dp=8,tp=8; repeatable with --fits.",
        "SIZES",
        "--mesh",
        parse=lambda texts: [*map(parse_mesh, texts)],
        multiple=True,
    ),
    rank: int = number_option("The rank to plan for.", default=0, least=0),
    reshard_after_forward: bool | int | None = option(
        "Reshard parameters after forward: yes, no, or to how many ranks.  "
        "[default: as torch does]",
        "HOW",
        parse=_reshard,
    ),
    precision: str | None = option(
        "Dtype of gathered parameters.", flags="--gather-in", type=click.Choice([*PRECISIONS])
    ),
    settings: PlannerOptions = together(PlannerOptions),
    without: tuple[str, ...] = option(
        f"Do not use this way to save memory: {', '.join(SAVING_KINDS)}. Repeatable.",
        "KIND",
        type=click.Choice(SAVING_KINDS),
    ),
    chunked_loss: bool | None = option(
        "Compute the loss in chunks of tokens, or whole.  [default: try both]",
        flags="--chunked-loss/--whole-loss",
        default=None,
    ),
    explain: bool = option("Print every candidate."),
    verify: bool = option("Measure a planned step on this device."),
    out: str | None = output_option("Write the plan as JSON, which Plan.load reads."),
    plot_path: str | None = plot_option("Draw step time against memory as PNG; needs matplotlib."),
    page_path: str | None = output_option(
        "Write the planned step as a page for a browser.", "--html"
    ),
) -> Ended:
    """Find the fastest way to train within a memory budget.

    Exit status: 0 planned, 1 nothing fits, 2 wrong usage.
    """
    place = choose_device("auto")
    here = [] if target else [FOR_THIS_DEVICE[place.type]]
    try:
        # A trainer is read before the planner makes tensors without values.
        own = own_workload(spec)
        way = parallel or (fits and "fsdp2")
        shardings = [
            Sharding(way, ranks, mesh, rank, reshard_after_forward, precision)
            for mesh in meshes or [{}]
        ]
        if fits is not None:
            refuse_typed(OPTIONS_OF_BUDGET, "--fits tries settings by itself")
            with messages_on_screen() as show_message:
                fewest = fewest_gpus(
                    spec,
                    find_profile(fits),
                    global_batch=global_batch,
                    sharding=shardings,
                    tell=show_message,
                    **vars(settings),
                )
            echo(fewest.table())
            return provenance() | fewest.to_json(), fewest.best is None
        if len(meshes) > 1:
            raise ValueError("--fits alone takes several meshes: give --mesh once")
        (sharding,) = shardings
        if sharding.is_shared:
            if verify:
                raise ValueError(
                    "--verify runs one rank: leave --ranks out, or measure under torchrun"
                )
        else:
            if parallel is not None and not meshes:
                raise ValueError(
                    "--parallel shares a training among ranks: give --ranks or --mesh too"
                )
            refuse_typed(("links",), "one rank has no links to others")
        with (
            messages_on_screen() as show_message,
            Planner(
                spec,
                device=find_profile(target) if target else profile_of(place),
                chunked_loss=chunked_loss,
                without=without,
                sharding=sharding,
                tell=show_message,
                **vars(settings),
            ) as planner,
        ):
            plan, plain = _find_plan(
                planner,
                budget_bytes,
                global_batch,
                microbatch,
                plot_path=plot_path,
                page_path=page_path,
            )
    except Infeasible as error:
        echo("\n".join([*here, str(error)]))
        return {}, 1

    echo_notes(own)
    text = "\n".join([*here, _format_plan(plan, plain, explain=explain)])
    echo(text)
    measured = None
    if verify:
        workload = load_workload(spec)
        case = Case(workload, place, settings.dtype, plan.microbatch, settings.seed)
        measured = measure_real_peak(
            case, plan.apply, optimizer=settings.optimizer, accumulated=plan.steps > 1
        )
        predicted = plan.peak_bytes if plan.cuda is None else plan.cuda["allocated_bytes"]
        echo(
            f"\nmeasured on {place}: peak {format_bytes(measured)}, "
            f"predicted {format_bytes(predicted)} ({predicted / measured:.2%})"
        )
    if out:
        write_json(out, plan.to_json())
        echo(f"\nwrote {out}: Plan.load({out!r}).apply(model)")
    return provenance(place) | {
        "plain_peak": plain.peak.owners,
        "measured_bytes": measured,
        "text": text,
        "plan": plan.to_json(),
        **(plan.cuda or {}),
    }, 0


# Options of a plan for a budget, which `--fits` does not take.
OPTIONS_OF_BUDGET = (
    "budget_bytes",
    "microbatch",
    "target",
    "ranks",
    "without",
    "chunked_loss",
    "explain",
    "verify",
    "out",
    "plot_path",
    "page_path",
)


def _find_plan(
    planner: Planner,
    budget_bytes: int | None,
    global_batch: int | None,
    microbatch: int | None,
    *,
    plot_path: str | None,
    page_path: str | None,
) -> tuple[Plan, Timeline]:
    """Return the plan and the timeline of the plain step; write the pictures of the plan."""
    if planner.profile.usable_bytes is None:
        refuse_typed(("context_bytes", "margin"), "a plan for a CPU leaves nothing free")
    budget_bytes = budget_bytes or planner.profile.memory_bytes
    if budget_bytes is None:
        raise ValueError("a plan needs a --budget, such as 24GiB, or a --target")
    global_batch = global_batch or planner.sketch.own_global_batch
    plan = planner.plan(budget_bytes, global_batch=global_batch, microbatch=microbatch)
    planner.tell("what owns the peak")
    plain = planner.whole_steps.step(Candidate(plan.microbatch, plan.steps, False)).timeline
    if plot_path:
        planner.tell("drawing")
        plot_plan(planner, plan, plot_path)
    if page_path:
        best = next(one for one in plan.candidates if one.checked)
        write_page(course_of_plan(plan, planner.whole_steps.step(best).timeline), page_path)
    return plan, plain


def _format_plan(plan: Plan, plain: Timeline, *, explain: bool) -> str:
    """Return the current peak with its owners and the plan, at most 80 columns wide."""
    peak = plain.peak
    settings = plan.settings
    lines = [
        fill_screen(plan.assumptions(), indent=""),
        f"as it is, {plan.microbatch} sample{'s' * (plan.microbatch > 1)}: "
        f"{format_bytes(peak.bytes_alive)} of tensors in {peak.phase}",
    ]
    lines += [
        f"  {owner:<20} {format_bytes(held):>10} {held / peak.bytes_alive:>6.1%}"
        for owner, held in Counter(peak.owners).most_common()
        if held
    ]
    notes = [*settings["block_notes"], settings["host_note"]]
    lines += map(fill_screen, filter(None, notes))
    if settings["why_real"]:
        lines.append(
            fill_screen(f"measured for real, without offload: {settings['why_real']}", indent="")
        )
    return "\n".join([*lines, "", plan.explain(most=None if explain else 1, assumptions=False)])
