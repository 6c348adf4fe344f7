"""The command `curry-train`: every command of the package with one line on what it does.

    curry-train --help

Proof: `python -m pytest tests/cli/test_command_line.py`.
"""

import click

from .. import __version__
from .screen import LazyGroup

# The summaries stand here too, so that `--help` imports no command and no torch; a test holds
# them equal to the first line of each command's own help.
COMMANDS = {
    "validate": ("validate:validate_command", "Measure every gate on a model."),
    "plan": ("plan:plan_command", "Find the fastest way to train within a memory budget."),
    "memory": ("memory:memory_command", "Show what holds the memory of a training step."),
    "preflight": ("preflight:preflight_command", "Check your own training loop, as it is."),
    "savings": ("savings:savings_command", "Measure what each strategy saves and costs."),
    "bench": ("bench:bench_command", "Time optimizer steps with each lever."),
    "grad-flow": ("grad_flow:grad_flow_command", "Train a few steps and report unhealthy layers."),
    "train": ("train:train_command", "Train a model by its configuration."),
    "runs": ("runs:runs_command", "Inspect, compare and check saved runs."),
    "new": ("scaffold:new_command", "Start a training project."),
    "add": ("scaffold:add_command", "Add one technique to a repository."),
    "update": ("scaffold:update_command", "Merge a newer release into copied files."),
    "diff": ("scaffold:diff_command", "Compare copied files with their origin."),
    "list": ("scaffold:list_command", "List the techniques and what adding each one copies."),
    "agents-md": ("agents_md:agents_md_command", "Write ten lines for agents into AGENTS.md."),
    "gen-tests": ("testgen:testgen_command", "Write a pytest file that runs every gate."),
}


@click.group(
    "curry-train",
    cls=LazyGroup,
    lazy=COMMANDS,
    example="validate --model mlp --gate grad-accum",
)
@click.version_option(__version__, prog_name="curry-train")
def main() -> None:
    """Train PyTorch models in less memory, check that the training is unchanged, resume runs.

    Exit status: 0 all held, 1 a gate failed or a plan does not fit, 2 wrong usage,
    3 the device asked for is not there.
    """
