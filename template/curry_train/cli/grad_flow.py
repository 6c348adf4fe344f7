"""The grad-flow command: its table and heat map.

The panels show activations, gradients and updates.

Proof: `python -m pytest tests/cli/test_grad_flow_command.py`.
"""

from dataclasses import replace

import click

from ..core.generators import seeded
from ..plan.optimizers import make_optimizer
from ..primitives.grad_flow import GradFlow
from ..primitives.grad_flow_report import flow_json, flow_table
from ..workloads.models import is_taken, load_workload
from .figures import plot_flow
from .options import (
    CaseOptions,
    echo_notes,
    facts_of,
    plot_option,
    settle_blocks,
    training_options,
)
from .parameters import number_option, option, together
from .screen import Ended, messages_on_screen, screen_command

# Command `grad-flow`: train briefly and report how gradients and activations flow.


LOOP_NOT_RUN = "\nthe loss was read off your script; curry-train preflight checks your loop"


@screen_command("grad-flow", example="--model mlp --steps 5 --plot flow.png")
def grad_flow_command(
    spec: str = training_options(),
    asked: CaseOptions = together(CaseOptions),
    steps: int = number_option("Optimizer steps to train.", default=20),
    learning_rate: float | None = option(
        "Constant rate of AdamW; default: the trainer's optimizer, or 1e-3.",
        "RATE",
        type=click.FloatRange(0, min_open=True),
    ),
    layers: tuple[str, ...] = option(
        "Layers to probe, a glob over module names. Repeatable.", "PATTERN"
    ),
    plot_path: str | None = plot_option("Draw layers by steps as PNG; needs matplotlib."),
) -> Ended:
    """Train a few steps and report unhealthy layers.

    Exit status: 0 all values finite, 1 some were not (the first layer is named), 2 wrong usage,
    3 device not available. A dead layer is reported but is no failure.
    """
    workload = load_workload(spec)
    case, _ = settle_blocks(asked.case(workload))
    module = case.build()
    own = workload.optimizer if learning_rate is None else None
    optimizer = make_optimizer(own or "adamw", module)
    if learning_rate is not None:
        optimizer.param_groups[0]["lr"] = learning_rate
    flow = GradFlow(module, optimizer, every=1, layers=list(layers) or None, blocks=case.blocks)
    losses = []
    with messages_on_screen() as show_message, seeded(case.seed), flow:
        for step in range(steps):
            show_message(f"step {step + 1} of {steps}")
            optimizer.zero_grad()
            # A new batch for each step.
            loss = workload.mean_loss(module, replace(case, seed=case.seed + step).batch())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    echo_notes(workload)
    click.echo(flow_table(flow.records) + LOOP_NOT_RUN * is_taken(spec))
    facts = facts_of([case])
    if plot_path:
        title = f"{workload.name}, {facts['dtype']}, {facts['device']}, torch {facts['torch']}"
        plot_flow(flow.records, plot_path, title=title)
    facts |= {
        "workload": workload.name,
        "learning_rate": optimizer.param_groups[0]["lr"],
        "losses": losses,
    }
    is_bad = any(record.nonfinite for record in flow.records)
    return facts | flow_json(flow), is_bad
