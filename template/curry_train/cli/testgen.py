"""Render a pytest file in which every gate is a test of the user's model.

    curry-train gen-tests --model my_model:build --out tests/test_gates.py

The text depends on the options alone: written again, it differs only by what is new.
Proof: `python -m pytest tests/cli/test_gen_checkpoint_tests.py`.
"""

import importlib
import importlib.metadata
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import click

from .. import __version__
from ..core.wording import provenance, write_output
from ..gates.verdict import TECHNIQUES
from ..workloads.models import BUILTIN_WORKLOADS, TRAINER_PREFIX, load_workload
from ..workloads.workload import Case, WorkloadError
from .options import (
    BATCH_SIZE_OPTION,
    BLOCKS_OPTION,
    DEFAULT_BATCH_SIZE,
    DTYPE_OPTION,
    SEED_OPTION,
    device_option,
    model_option,
    program_option,
    samples_of,
    settle_blocks,
)
from .parameters import option, output_option, together
from .screen import LIBRARY_FOLDERS, render_template, screen_command

DEFAULT_PACKAGE_NAME = "curry_train"
GENERATED_FILE_MARK = "Written by the command gen-tests of curry-train"


def values_of_gates(spec: str, out: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return what the template of the gates names; `recipe` are the options.

    The model and gates are loaded and run once first; a ValueError names what is wrong.
    """
    workload = load_workload(spec)
    size = samples_of(workload, recipe["batch_size"], default=DEFAULT_BATCH_SIZE)
    case = Case(workload, batch_size=size, seed=recipe["seed"], blocks=recipe["blocks"])
    source = spec.removeprefix(TRAINER_PREFIX)
    is_file = source.rpartition(":")[0].endswith(".py")
    patterns = _check_patterns(recipe["package"], recipe["gates"])
    modules = [] if is_file or spec in BUILTIN_WORKLOADS else [source.partition(":")[0]]
    if recipe["package"] != DEFAULT_PACKAGE_NAME:
        modules.append(recipe["package"])
    roots = {Path.cwd().resolve(), *_import_roots(modules)}
    return {
        "recipe": recipe | {"batch_size": size},
        "source": source,
        "spec": spec,
        "roots": [_make_relative(root, out) for root in sorted(roots)],
        "prefix": spec.removesuffix(source),
        "path": _make_relative(Path(source), out) if is_file else None,
        "patterns": patterns,
        # Blocks that the model's containers don't give are chosen again in each run of the tests.
        "chosen": settle_blocks(case)[0].blocks != case.blocks,
    }


def _import_roots(names: list[str]) -> Iterator[Path]:
    """Yield the folders that modules are imported from, except where the environment has them."""
    installed = {Path(folder).resolve() for folder in LIBRARY_FOLDERS}
    for name in names:
        top = sys.modules[name.partition(".")[0]]
        place = next(iter(getattr(top, "__path__", [])), top.__file__)
        root = Path(str(place)).resolve().parent
        if root not in installed:
            yield root


def _check_patterns(package: str, gates: tuple[str, ...]) -> list[str]:
    """Return globs over gate names; a technique becomes all of its gates.

    A pattern that matches no gate is an error.
    """
    try:
        discover = importlib.import_module(f"{package}.gates").discover
    except ModuleNotFoundError as error:
        raise WorkloadError(
            f"can't import {package}.gates ({error}): --package names a package with gates "
            "of its own, such as mylib.training; run from the folder that holds it"
        ) from None
    discover(gates)
    return [f"{one}/*" if one in TECHNIQUES else one for one in gates] or ["*"]


def _make_relative(path: Path, out: Path) -> str:
    """Return a path as seen from the folder of a file at `out`; both can move together."""
    return PurePath(os.path.relpath(path.expanduser().resolve(), out.resolve().parent)).as_posix()


# Command `gen-tests`.


@screen_command("gen-tests", example="--model mlp --out test_gates.py")
def gen_tests_command(
    model: str | None = model_option(),
    program: list[str] = program_option(otherwise=""),
    out: str = output_option("The file to write.", required=True),
    recipe: dict[str, Any] = together(
        dict,
        blocks=BLOCKS_OPTION,
        gates=option(
            "Only these gates: a technique or a glob. Repeatable.",
            "PATTERN",
            "--gate",
            multiple=True,
        ),
        device=device_option(),
        dtype=DTYPE_OPTION,
        batch_size=BATCH_SIZE_OPTION,
        seed=SEED_OPTION,
        package=option(
            "Where the gates are, such as mylib.training.",
            "NAME",
            default=DEFAULT_PACKAGE_NAME,
            show_default=True,
        ),
    ),
    overwrite: bool = option("Replace FILE even if something else wrote it."),
) -> None:
    """Write a pytest file that runs every gate.

    With a Trainer it checks the loop too, and with a script that alone. A file that this command
    wrote is replaced. Exit status: 0 written, 2 wrong usage.
    """
    kind, *words = program
    if (model is None) == (not kind):
        raise click.UsageError("give either --model, --trainer or --script")
    path = Path(out)
    shown = PurePath(os.path.relpath(out)).as_posix()
    # A device such as /dev/full may have no end.
    is_foreign = path.is_file() and GENERATED_FILE_MARK not in path.read_text(encoding="utf-8")
    if is_foreign and not overwrite:
        raise ValueError(
            f"{shown} was not written by this command: choose another --out, or add --overwrite"
        )
    if kind == "script":
        template = "test_loop.py.jinja"
        place = _make_relative(Path(words[0]), path)
        values = {"script": words[0], "path": place, "arguments": words[1:]}
    else:
        template = "test_gates.py.jinja"
        values = values_of_gates(model or TRAINER_PREFIX + words[0], path, recipe)
    text = render_template(
        Path(__file__).with_name(template),
        mark=GENERATED_FILE_MARK,
        version=__version__,
        # The command has a line for each option.
        command="    " + re.sub(r" (?=--)", r" \\\n        ", provenance()["command"]),
        **values,
    )
    write_output(path, text)
    python_path = "" if recipe["package"] != DEFAULT_PACKAGE_NAME else _write_python_path()
    click.echo(
        f"wrote {shown}; run it with pytest (pip install pytest)\n"
        f"  {python_path}python -m pytest {shlex.quote(shown)}"
    )


def _write_python_path() -> str:
    """Return the assignment that lets pytest import this package where it is not installed."""
    try:
        importlib.metadata.version("curry-train")
    except importlib.metadata.PackageNotFoundError:
        home = os.path.relpath(Path(__file__).resolve().parents[2])
        return f"PYTHONPATH={shlex.quote(PurePath(home).as_posix())} "
    return ""
