# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11,!=2.12.*,<2.14", "numpy>=1.26", "click>=8.1", "rich>=13"]
# ///
"""Write a pytest file that holds your model to every gate.

python scripts/gen_checkpoint_tests.py --model my_package.models:build --out tests/test_gates.py
"""

import environment

environment.require(__file__)

import importlib.machinery
import importlib.metadata
import os
import sys
from pathlib import Path, PurePath
from typing import Any

import click

from curry_train.cli.options import DTYPES, UnusableInput, model_option
from curry_train.cli.testgen import DEFAULT_PACKAGE_NAME, Recipe, differences, is_rendered, render

LONGEST_DIFF = 24


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@model_option("model", required=True)
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The file to write.",
)
@click.option(
    "--blocks",
    metavar="PATTERN",
    help="Only blocks of these names, a glob such as 'encoder.layers.*'.",
)
@click.option(
    "--gate",
    "gates",
    multiple=True,
    metavar="PATTERN",
    help="Only these gates: a technique or a glob.",
)
@click.option(
    "--device", default="auto", type=click.Choice(["auto", "cuda", "cpu"]), show_default=True
)
@click.option("--dtype", default="float32", type=click.Choice(list(DTYPES)), show_default=True)
@click.option("--batch-size", default=4, type=click.IntRange(1), show_default=True)
@click.option("--seed", default=0, type=click.IntRange(0), show_default=True)
@click.option(
    "--package",
    default=DEFAULT_PACKAGE_NAME,
    show_default=True,
    help="Where the gates are, such as mylib.training.",
)
@click.option(
    "--check", is_flag=True, help="Write nothing; say whether FILE is what would be written."
)
@click.option("--overwrite", is_flag=True, help="Replace FILE even if something else wrote it.")
def main(check: bool, overwrite: bool, **options: Any) -> None:
    """Exit status: 0 written, or the same; 1 with --check when FILE is another; 2 wrong usage."""
    recipe = Recipe(**options)
    out, shown = recipe.out, PurePath(os.path.relpath(recipe.out)).as_posix()
    try:
        found = out.read_text(encoding="utf-8") if out.exists() else None
        if check and found is None:
            raise UnusableInput(f"there is no {shown} to check: leave out --check to write it")
        if not (check or overwrite or found is None or is_rendered(found)):
            raise UnusableInput(
                f"{shown} was not written by this command: choose another --out, or add --overwrite"
            )
        text = render(recipe, script=PurePath(os.path.relpath(__file__)).as_posix())
        if not check:
            out.write_text(text, encoding="utf-8", newline="\n")
    except (ValueError, OSError) as error:
        raise UnusableInput(str(error)) from error
    if check:
        _tell_differences(shown, differences(found or "", text))
    else:
        click.echo(f"wrote {shown}; run it with\n  {_python_path(recipe)}python -m pytest {shown}")


def _tell_differences(shown: str, lines: list[str]) -> None:
    if not lines:
        click.echo(f"{shown} is what this command writes")
        return
    click.echo("\n".join(lines[:LONGEST_DIFF]))
    if len(lines) > LONGEST_DIFF:
        click.echo(f"... and {len(lines) - LONGEST_DIFF} lines more")
    click.echo(f"{shown} is not what this command writes: run it without --check to write it again")
    sys.exit(1)


def _python_path(recipe: Recipe) -> str:
    """What makes the package importable where it is neither installed nor the user's own."""
    if recipe.package != DEFAULT_PACKAGE_NAME or _is_installed():
        return ""
    template = str(environment.TEMPLATE)
    theirs = [path for path in sys.path if path != template] + os.environ.get(
        "PYTHONPATH", ""
    ).split(os.pathsep)
    if importlib.machinery.PathFinder.find_spec(DEFAULT_PACKAGE_NAME, theirs) is not None:
        return ""
    return f"PYTHONPATH={PurePath(os.path.relpath(template)).as_posix()} "


def _is_installed() -> bool:
    try:
        return bool(importlib.metadata.version("curry-train"))
    except importlib.metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    main(prog_name="gen_checkpoint_tests.py")
