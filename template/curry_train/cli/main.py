"""The command `curry-train`: every command of the package with one line on what it does.

    curry-train --help

Proof: `python -m pytest tests/cli/test_command_line.py`.
"""

import click

from .. import __version__
from .screen import LazyGroup

# The summaries of the commands in each module. They stand here too, so that `--help` imports no
# command and no torch; a test holds them equal to the first line of each command's own help.
COMMANDS = {
    "validate": {"validate": "Measure every gate on a model."},
    "plan": {"plan": "Find the fastest way to train within a memory budget."},
    "memory": {"memory": "Show what holds the memory of a training step."},
    "preflight": {"preflight": "Check your own training loop, as it is."},
    "savings": {"savings": "Measure what each strategy saves and costs."},
    "bench": {"bench": "Time optimizer steps with each lever."},
    "grad_flow": {"grad-flow": "Train a few steps and report unhealthy layers."},
    "train": {"train": "Train a model by its configuration."},
    "runs": {"runs": "Inspect, compare and check saved runs."},
    "scaffold": {
        "new": "Start a training project.",
        "add": "Add one technique to a repository.",
        "update": "Merge a newer release into copied files.",
        "diff": "Compare copied files with their origin.",
        "list": "List the techniques and what adding each one copies.",
    },
    "agents_md": {"agents-md": "Write ten lines for agents into AGENTS.md."},
    "testgen": {"gen-tests": "Write a pytest file that runs every gate."},
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
