"""The command `curry-train`: a group that imports each command when it is used.

Proof: `python -m pytest tests/cli/test_cli.py`.
"""

import importlib
from collections.abc import Mapping
from typing import Any, cast

import click

from .. import __version__


class LazyGroup(click.Group):
    """A group of commands in modules beside this one, so that `--help` does not import torch.

    `lazy` maps the name of a command to its module and attribute, as `module:attribute`.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, str], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self.lazy])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self.lazy[cmd_name].partition(":")
        loaded = importlib.import_module(f".{module}", __package__)
        return cast(click.Command, getattr(loaded, attribute))


COMMANDS = {
    "bench": "bench:bench_command",
    "grad-flow": "grad_flow:grad_flow_command",
    "memory": "memory:memory_command",
    "plan": "plan:plan_command",
    "runs": "runs:runs_command",
    "train": "train:train_command",
    "validate": "validate:validate_command",
}


@click.group(cls=LazyGroup, lazy=COMMANDS)
@click.version_option(__version__, prog_name="curry-train")
def main() -> None:
    """Train PyTorch models in less memory, keep it the same training, and make runs survive."""
