"""Render a pytest file in which every gate is a test of the user's model.

    curry-train gen-tests --model my_model:build --out tests/test_gates.py

The text depends on the options alone: written again, it differs only by what is new.
Proof: `python -m pytest tests/cli/test_gen_checkpoint_tests.py`.
"""

import fnmatch
import importlib
import importlib.machinery
import importlib.metadata
import os
import shlex
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path, PurePath
from typing import Any

import click

from .. import __version__
from ..core.blocks import find_blocks
from ..gates.verdict import no_such_gate
from ..workloads.models import BUILTIN_WORKLOADS, TRAINER_PREFIX, load_workload
from ..workloads.workload import Case, WorkloadError
from .options import (
    batch_size_option,
    blocks_option,
    device_option,
    dtype_option,
    model_option,
    output_option,
    seed_option,
    settle_blocks,
    trainer_option,
)
from .screen import ScreenCommand, UnusableInput, literal, render_template, write_output

DEFAULT_PACKAGE_NAME = "curry_train"
GENERATED_FILE_MARK = "Written by the command gen-tests of curry-train"
GENERATED_LINE_WIDTH = 88  # formatters leave lines up to this length unchanged by default
AUTO_DEVICE = '"cuda" if torch.cuda.is_available() else "cpu"'


def render_loop(script: str, arguments: Sequence[str], out: Path) -> str:
    """Return the text of a test that checks the loop of a script."""
    return render_template(
        Path(__file__).with_name("test_loop.py.jinja"),
        mark=GENERATED_FILE_MARK,
        version=__version__,
        command=shlex.join(["--script", script, "--out", os.path.relpath(out), "--", *arguments]),
        script=script,
        path=_path_expression(Path(script).resolve(), out),
        arguments=arguments,
    )


@dataclass(frozen=True)
class Recipe:
    """Model, gates and settings of a test file, as in the options of `validate`."""

    model: str
    out: Path
    package: str = DEFAULT_PACKAGE_NAME
    gates: tuple[str, ...] = ()
    blocks: str | None = None
    device: str = "auto"
    dtype: str = "float32"
    batch_size: int = 4
    seed: int = 0

    @property
    def option(self) -> str:
        return "--trainer" if self.model.startswith(TRAINER_PREFIX) else "--model"

    @property
    def source(self) -> str:
        """The model or the trainer, as on the command line."""
        return self.model.removeprefix(TRAINER_PREFIX)

    def words(self) -> list[str]:
        """Return the command-line options of this recipe, without those at their default."""
        out = PurePath(os.path.relpath(self.out)).as_posix()
        words = [self.option, self.source, "--out", out]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("model", "out") or value == field.default:
                continue
            option = "--gate" if field.name == "gates" else "--" + field.name.replace("_", "-")
            for word in value if isinstance(value, tuple) else [value]:
                words += [option, str(word)]
        return words


def render(recipe: Recipe, *, command: Sequence[str]) -> str:
    """Return the text of the test file; `command` are the words that `recipe.words` follow.

    The model and gates are loaded and run once first; a ValueError names what is wrong.
    """
    workload = load_workload(recipe.model)
    size = recipe.batch_size if workload.is_divisible else workload.own_batch or recipe.batch_size
    case = Case(workload, batch_size=size, seed=recipe.seed, blocks=recipe.blocks)
    if recipe.blocks is not None:
        find_blocks(case.build(), recipe.blocks)
    # Blocks that the model's containers don't give are chosen again in each run of the tests.
    chosen = settle_blocks(case)[0].blocks != recipe.blocks
    patterns = _checked_patterns(recipe)
    roots = {Path.cwd().resolve(), *filter(None, map(import_root, _imported(recipe)))}
    path = Path(recipe.source).expanduser().resolve() if _is_file(recipe.source) else None
    return render_template(
        Path(__file__).with_name("test_gates.py.jinja"),
        recipe=recipe,
        mark=GENERATED_FILE_MARK,
        version=__version__,
        command=_wrapped(shlex.join(command), recipe.words()),
        roots=[_path_expression(root, recipe.out) for root in sorted(roots)],
        prefix="" if recipe.source == recipe.model else f"{literal(TRAINER_PREFIX)} + ",
        path=path and _path_expression(path, recipe.out),
        patterns=patterns,
        is_trainer=recipe.option == "--trainer",
        device=AUTO_DEVICE if recipe.device == "auto" else literal(recipe.device),
        chosen=chosen,
    )


def is_rendered(text: str) -> bool:
    """Return whether a file was rendered by this module and may be overwritten."""
    return GENERATED_FILE_MARK in text


def import_root(name: str) -> Path | None:
    """Return the folder that a module is imported from; None if the environment installed it."""
    top = sys.modules[name.partition(".")[0]]
    locations = list(getattr(top, "__path__", [])) or [top.__file__]
    if locations[0] is None:
        return None
    root = Path(locations[0]).resolve().parent
    installed = {
        Path(sysconfig.get_path(kind)).resolve()
        for kind in ("purelib", "platlib", "stdlib", "platstdlib")
    }
    return None if root in installed else root


def _imported(recipe: Recipe) -> Iterator[str]:
    if recipe.model not in BUILTIN_WORKLOADS and not _is_file(recipe.source):
        yield recipe.source.partition(":")[0]
    # Our own package is installed or on PYTHONPATH wherever the file is used.
    if recipe.package != DEFAULT_PACKAGE_NAME:
        yield recipe.package


def _checked_patterns(recipe: Recipe) -> tuple[str, ...]:
    """Return globs over gate names; a technique becomes all of its gates.

    A pattern that matches no gate is an error.
    """
    try:
        discover = importlib.import_module(f"{recipe.package}.gates").discover
    except ModuleNotFoundError as error:
        raise WorkloadError(
            f"can't import {recipe.package}.gates ({error}): --package names a package with gates "
            "of its own, such as mylib.training; run from the folder that holds it"
        ) from None
    names = [gate.name for gate in discover()]

    def is_technique(gate: str) -> bool:
        return any(name.startswith(f"{gate}/") for name in names)

    patterns = [f"{gate}/*" if is_technique(gate) else gate for gate in recipe.gates]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise WorkloadError(no_such_gate(pattern, names))
    return tuple(patterns) or ("*",)


def _is_file(model: str) -> bool:
    """Return whether a model is named by a file, as in `models/net.py:build`."""
    return model.rpartition(":")[0].endswith(".py")


def _path_expression(path: Path, out: Path) -> str:
    """Return the expression of a path in a file at `out`; both can move together."""
    names = PurePath(os.path.relpath(path, out.resolve().parent)).parts
    expression = f"Path(__file__).resolve().parents[{names.count('..')}]"
    below = PurePath(*[name for name in names if name != ".."]).as_posix()
    return expression if below == "." else f"{expression} / {literal(below)}"


def _wrapped(first: str, words: Sequence[str]) -> str:
    """Wrap a shell command; how it is started has the first line, so that only this line varies."""
    lines = [first]
    for word, following in zip(words[::2], words[1::2], strict=True):
        pair = shlex.join([word, following])
        if len(lines) > 1 and len(lines[-1]) + len(pair) + 11 <= GENERATED_LINE_WIDTH:
            lines[-1] += f" {pair}"
        else:
            lines.append(pair)
    return textwrap.indent(" \\\n    ".join(lines), "    ")


# Command `gen-tests`.


@click.command("gen-tests", cls=ScreenCommand, example="--model mlp --out test_gates.py")
@model_option("model")
@trainer_option()
@click.option("--script", metavar="FILE", help="Check the loop of this script in a test.")
@output_option("The file to write.", "--out", required=True, metavar="FILE")
@blocks_option()
@click.option(
    "--gate",
    "gates",
    multiple=True,
    metavar="PATTERN",
    help="Only these gates: a technique or a glob. Repeatable.",
)
@device_option()
@dtype_option()
@batch_size_option(default=4)
@seed_option()
@click.option(
    "--package",
    default=DEFAULT_PACKAGE_NAME,
    show_default=True,
    metavar="NAME",
    help="Where the gates are, such as mylib.training.",
)
@click.option("--overwrite", is_flag=True, help="Replace FILE even if something else wrote it.")
@click.argument("arguments", nargs=-1, metavar="[-- ARGUMENTS]")
@click.pass_context
def testgen_command(
    context: click.Context,
    /,
    model: str | None,
    trainer: str | None,
    script: str | None,
    out: str,
    overwrite: bool,
    arguments: tuple[str, ...],
    **options: Any,
) -> None:
    """Write a pytest file that runs every gate, and the check of the loop of a Trainer or script.

    Of a script it has the loop alone. A file that this command wrote is replaced. Exit status: 0
    written, 2 wrong usage.
    """
    if sum(one is not None for one in (model, trainer, script)) != 1:
        raise click.UsageError("give either --model, --trainer or --script")
    if script is not None and not Path(script).is_file():
        raise UnusableInput(f"there is no file {script}")
    if arguments and script is None:
        raise click.UsageError(f"{arguments[0]!r} is for no script: give --script FILE")
    recipe = Recipe(model or f"{TRAINER_PREFIX}{trainer}", out=Path(out), **options)
    shown = PurePath(os.path.relpath(out)).as_posix()
    # A device such as /dev/full may have no end.
    found = recipe.out.read_text(encoding="utf-8") if recipe.out.is_file() else None
    if not (overwrite or found is None or is_rendered(found)):
        raise UnusableInput(
            f"{shown} was not written by this command: choose another --out, or add --overwrite"
        )
    if script is not None:
        text = render_loop(script, arguments, recipe.out)
    else:
        text = render(recipe, command=_command_words(context))
    write_output(recipe.out, text)
    command = f"{_python_path(recipe)}python -m pytest {shlex.quote(shown)}"
    click.echo(f"wrote {shown}; run it with\n  {command}")


def _command_words(context: click.Context) -> list[str]:
    """Return how this command was started, with the path of a script relative to this folder."""
    if ".py" not in context.command_path:
        return context.command_path.split()
    script = PurePath(os.path.relpath(sys.argv[0])).as_posix()
    command = [context.info_name or "gen-tests"] if context.parent else []
    return ["python", script, *command]


def _python_path(recipe: Recipe) -> str:
    """Return the assignment that makes this package importable for pytest, where it is needed."""
    if recipe.package != DEFAULT_PACKAGE_NAME or _is_installed():
        return ""
    home = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in sys.path if path != home] + inherited
    if importlib.machinery.PathFinder.find_spec(DEFAULT_PACKAGE_NAME, others) is not None:
        return ""
    return f"PYTHONPATH={shlex.quote(PurePath(os.path.relpath(home)).as_posix())} "


def _is_installed() -> bool:
    try:
        return bool(importlib.metadata.version("curry-train"))
    except importlib.metadata.PackageNotFoundError:
        return False
