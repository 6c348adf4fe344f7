# /// script
# requires-python = ">=3.11"
# dependencies = ["click>=8.1", "jinja2>=3.1", "pyyaml>=6"]
# ///
"""Starts a training project from this bundle, or adds one technique to a repository that exists.

    python scripts/scaffold.py list
    python scripts/scaffold.py new my-run
    python scripts/scaffold.py add grad-accum --into src/mylib/training
    python scripts/scaffold.py diff my-run --patch

What it copies is the user's afterwards. Proof: `python -m pytest tests/cli/test_scaffold_commands.py`.
"""

import environment

environment.require(__file__)

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from scaffolding.add import conflict_advice, import_line, plan_addition
from scaffolding.bundle import read_bundle
from scaffolding.compare import compare_project
from scaffolding.errors import ScaffoldError
from scaffolding.new import is_made, plan_project
from scaffolding.plan import refuse_conflicts
from scaffolding.report import comparison_lines, outcome_line, plan_lines, technique_lines
from scaffolding.target import find_target
from scaffolding.write import sweep, write_files, write_project

BUNDLE = Path(__file__).resolve().parents[1]


class Refusal(click.ClickException):
    """One line on what is wrong, and exit status 2."""

    exit_code = 2


class Scaffold(click.Group):
    """Turns what a user can get wrong, and what the file system refuses, into a `Refusal`."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ScaffoldError as error:
            raise Refusal(str(error)) from error
        except BrokenPipeError:
            raise  # the reader of our output went away, which click knows how to end
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            raise Refusal(f"{error.strerror or error}{where}") from error


@click.group(cls=Scaffold, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Start a training project, or add one technique to a repository."""


@main.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--name", metavar="N", help="Name of the project, a Python identifier.  [default: from DIR]"
)
@click.option(
    "--technique", "techniques", metavar="T", multiple=True, help="Only this one; repeat for more."
)
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
def new(directory: Path, name: str | None, techniques: tuple[str, ...], dry_run: bool) -> None:
    """Make a project in DIR that installs, trains and tests itself."""
    bundle = read_bundle(BUNDLE)
    plan = plan_project(
        bundle, directory, name=name, techniques=techniques, working_directory=Path.cwd()
    )
    if not dry_run:
        sweep(plan.root.parent)
    if is_made(plan):
        click.echo(f"Nothing to do: {plan.root} holds this project already, every file the same.")
        return
    if not dry_run:
        write_project(plan)
    _echo_lines(plan_lines(plan))
    click.echo(outcome_line(plan, what="a new project", dry_run=dry_run))
    if not dry_run:
        click.echo(f"Next:\n  cd {shlex.quote(str(directory))}\n  make test\n  make train")


@main.command()
@click.argument("technique", metavar="TECHNIQUE")
@click.option(
    "--into",
    "directory",
    metavar="PACKAGE_DIR",
    required=True,
    type=click.Path(path_type=Path),
    help="The package that gets it, such as src/mylib/training; made when missing.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace files that are in the way.")
def add(technique: str, directory: Path, dry_run: bool, overwrite: bool) -> None:
    """Add TECHNIQUE with its gate and its test to a repository."""
    bundle = read_bundle(BUNDLE)
    (chosen,) = bundle.choose([technique])
    target = find_target(directory, working_directory=Path.cwd())
    plan = plan_addition(bundle, chosen, target, overwrite=overwrite)
    _echo_lines(plan_lines(plan))
    refuse_conflicts(plan, advice=conflict_advice(plan, target))
    if not dry_run:
        write_files(plan)
    click.echo(outcome_line(plan, what=chosen.name, dry_run=dry_run))
    click.echo(f"Next:\n  {target.next_command([chosen.test], working_directory=Path.cwd())}")
    click.echo(f"Use it:\n  {import_line(bundle, chosen, target)}")


@main.command()
@click.argument("directory", metavar="[DIR]", default=".", type=click.Path(path_type=Path))
@click.option("--patch", is_flag=True, help="Print what would turn your files into the bundle's.")
def diff(directory: Path, patch: bool) -> None:
    """Compare the project in DIR with this bundle."""
    comparisons = compare_project(read_bundle(BUNDLE), directory)
    _echo_lines(comparison_lines(comparisons, with_patch=patch))


@main.command("list")
def list_techniques() -> None:
    """Show the techniques and what each decides."""
    _echo_lines(technique_lines(read_bundle(BUNDLE).techniques))


def _echo_lines(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)


if __name__ == "__main__":
    main()
