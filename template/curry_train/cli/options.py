"""Command-line options and exit statuses shared by all commands.

Proof: `python -m pytest tests/cli/test_cli.py`.
"""

import functools
import importlib.util
import shlex
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from click.core import ParameterSource

from ..core.blocks import NoBlocks
from ..core.timing import NoSuchDevice, find_device
from ..core.wording import error_in_a_line, provenance, write_output
from ..primitives.running_blocks import BlockChoice
from ..workloads.models import (
    BUILTIN_WORKLOADS,
    CONFIG_PREFIX,
    SCRIPT_PREFIX,
    TRAINER_PREFIX,
    is_taken,
    load_workload,
)
from ..workloads.workload import Case, Workload, WorkloadError
from .screen import UnusableInput, echo_lines, fill_screen

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEFAULT_BATCH_SIZE = 4

OptionDecorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class DeviceMissing(click.ClickException):
    """The requested device is not available."""

    exit_code = 3


def choose_device(name: str) -> torch.device:
    """Return the device of `--device`; a missing one ends the command with exit status 3."""
    try:
        return find_device(name)
    except NoSuchDevice as error:
        raise DeviceMissing(str(error)) from error


class OutputFile(click.Path):
    """A file to write; its folder has to exist before a long run rather than at its end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not Path(value).parent.is_dir():
            self.fail(f"the folder of {value!r} does not exist: create it first", param, ctx)
        return super().convert(value, param, ctx)


def parsed(parse: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return the callback of an option that parses its text; a ValueError is wrong usage."""

    def callback(context: click.Context, option: click.Parameter, value: Any) -> Any:
        if value is None:
            return None
        try:
            return parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return callback


def all_of(*options: OptionDecorator) -> OptionDecorator:
    """Join options, in the order of the page."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def with_values(change: Callable[..., dict[str, Any]]) -> OptionDecorator:
    """Change the values of a command's options before it runs."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(**values: Any) -> Any:
            return command(**change(**values))

        return run

    return decorate


def model_option(name: str, *, more: str = ".", **settings: Any) -> OptionDecorator:
    """Add `--model` with the same values in every command; `more` ends its help."""
    text = f"{', '.join(BUILTIN_WORKLOADS)}, pkg.module:factory or file.py:factory{more}"
    return click.option("--model", name, metavar="MODEL", help=text, **settings)


def training_options(
    name: str, *, more: str = "", multiple: bool = False, required: bool = True
) -> OptionDecorator:
    """Add `--model`, and options that read a workload off the user's own training in its place.

    The command gets the text for `load_workload` as `name`, or with `multiple` a tuple of texts.
    """

    def change(
        program: list[str], model_config: str | None, factory_path: str | None, **values: Any
    ) -> dict[str, Any]:
        kind, *words = program
        given = values[name] if multiple else [values[name]]
        specs = [one for one in given if one is not None]
        if model_config is not None:
            # The name is for people; the architecture is in the file.
            model = specs[-1] if specs else Path(model_config).stem
            specs = [*specs[:-1], f"{CONFIG_PREFIX}{model_config}:{model}"]
        if kind == "trainer":
            specs.append(TRAINER_PREFIX + words[0])
        if kind == "script":
            specs.append(SCRIPT_PREFIX + shlex.join(words))
        elif factory_path is not None:
            raise click.UsageError("--factory writes what --script has read: give it too")
        if not multiple and (len(specs) > 1 or (required and not specs)):
            raise click.UsageError("give either --model, --trainer or --script")
        return values | {name: tuple(specs) if multiple else next(iter(specs), None)}

    return all_of(
        model_option(name, more=f". {more}".rstrip(), multiple=multiple),
        program_option(otherwise=""),
        click.option(
            "--model-config",
            metavar="FILE",
            help="A config.json of Hugging Face; --model is a name for it then.",
        ),
        output_option(
            "Write the factory that stands for --script, to use it as --model.",
            "--factory",
            "factory_path",
            metavar="FILE",
        ),
        with_values(change),
    )


def echo_notes(workload: Workload | None) -> None:
    """Print what was read off the user's trainer or script, and what can't be taken over.

    The factory that stands for a script is printed, or written where `--factory` has a path.
    """
    if workload is None:
        return
    echo_lines(*workload.notes)
    path = click.get_current_context().params["factory_path"]
    if workload.factory and path is not None:
        write_output(path, workload.factory)
        click.echo(f"wrote {path}: use it as --model {shlex.quote(f'{path}:build')}")
    elif workload.factory:
        text = textwrap.indent(workload.factory, "  ")
        click.echo(f"the factory that was used, which --factory FILE writes:\n\n{text}")
    if workload.notes:
        click.echo()


def typed(names: Sequence[str]) -> list[str]:
    """Return the options of these names that were typed, as they are written."""
    context = click.get_current_context()
    return [
        option.opts[0]
        for option in context.command.params
        if option.name in names
        and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
    ]


def facts_of(cases: Sequence[Case]) -> dict[str, Any]:
    """Return what the figures of some cases depend on, for the results."""
    sizes = list(dict.fromkeys(case.batch_size for case in cases))
    dtypes = dict.fromkeys(str(case.dtype).removeprefix("torch.") for case in cases)
    return provenance(cases[0].device) | {
        "dtype": ", ".join(dtypes),
        "batch_size": sizes[0] if len(sizes) == 1 else sizes,
        "seed": cases[0].seed,
    }


def heading(facts: Mapping[str, Any]) -> str:
    """Return the facts of some cases in a line."""
    sizes = str(facts["batch_size"]).strip("[]")
    return (
        f"{facts['device']}, torch {facts['torch']}, {facts['dtype']}, batch size {sizes}, "
        f"seed {facts['seed']}"
    )


def output_option(text: str, *names: str, **settings: Any) -> OptionDecorator:
    """Add an option for an output file, which is checked before the work begins."""
    place = OutputFile(dir_okay=False, writable=True, allow_dash=True)
    return click.option(*names, type=place, help=text, **settings)


# `--json`, where a `ScreenCommand` writes the results that the command returns.
RESULTS_OPTION = output_option(
    "Write the results as JSON; - is standard output.", "--json", "json_path"
)


def plot_option(text: str) -> OptionDecorator:
    """Add `--plot`, the path of a PNG."""

    def check(path: str) -> str:
        if Path(path).suffix != ".png":
            name = Path(path).with_suffix(".png")
            raise ValueError(f"{path}: a picture is a PNG, name it {name}")
        require_matplotlib()
        return path

    return output_option(text, "--plot", "plot_path", callback=parsed(check))


# Words of a configuration.
WORDS_ARGUMENT = click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
DEVICE_OPTION = click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    help="auto is CUDA where available, else the CPU.",
)


DTYPE_OPTION = click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    callback=parsed(DTYPES.get),
    help="Type of weights and batch; by default the model's own.",
)


def number_option(
    text: str, *names: str, default: int | None = None, least: int = 1, **settings: Any
) -> OptionDecorator:
    """Add an option for a whole number, and show its default."""
    settings = {"show_default": True} | settings
    return click.option(*names, type=click.IntRange(least), default=default, help=text, **settings)


BATCH_SIZE_OPTION = number_option("Samples per step.", "--batch-size", show_default=False)
SEED_OPTION = number_option(
    "Seed of weights, batch and dropout.", "--seed", default=0, least=0, show_default=False
)
BLOCKS_OPTION = click.option(
    "--blocks", metavar="PATTERN", help="Blocks to work on, a glob over module names."
)


def samples_of(workload: Workload, asked: int | None, *, default: int | None = None) -> int:
    """Return the samples per step: `asked`, or the default.

    Without `default` it is the size of the factory's batch, if it returned one. A batch that can't
    be divided has to be used as it is.
    """
    own = workload.own_batch
    if workload.is_divisible:
        return asked or default or own or DEFAULT_BATCH_SIZE
    if asked not in (None, own):
        raise WorkloadError(
            f"{workload.name} has one batch of {own}, which can't be divided: leave --batch-size "
            "out, or return a Workload whose batch makes one of any size"
        )
    return own or 1


def named_once(workloads: Sequence[Workload]) -> list[Workload]:
    """Rename workloads that share a name to the spec that the user typed."""
    occurrences = Counter(workload.name for workload in workloads)
    return [
        replace(workload, name=workload.spec) if occurrences[workload.name] > 1 else workload
        for workload in workloads
    ]


def own_workload(spec: str) -> Workload | None:
    """Return the workload of the user's trainer or script, which have made their model already."""
    return load_workload(spec) if is_taken(spec) else None


@dataclass(frozen=True)
class CaseOptions:
    """The options that mean the same in every command that runs a model."""

    device: torch.device
    # None leaves that of the user's model.
    dtype: Any
    batch_size: int | None
    seed: int
    blocks: str | None

    def case(self, workload: Workload, *, default: int | None = None) -> Case:
        """Return a workload as it was asked for, on its device."""
        size = samples_of(workload, self.batch_size, default=default)
        return Case(workload, self.device, self.dtype, size, self.seed, self.blocks)


def settle_blocks(case: Case) -> tuple[Case, BlockChoice]:
    """Choose the blocks of a case by one forward; the choice has no names if there are none."""
    try:
        return case.with_running_blocks()
    except NoBlocks as error:
        why = error.in_short
    except RuntimeError as error:
        # The command's own measurement reports it.
        why = f"no forward could be recorded: {error_in_a_line(error)}"
    return case, BlockChoice((), None, None, (why,))


def blocks_text(choice: BlockChoice) -> str:
    """Return the lines on the blocks, at most 80 columns wide."""
    return fill_screen("\n".join(choice.lines()))


def _as_asked(
    device: str,
    dtype: torch.dtype | None,
    seed: int,
    blocks: str | None,
    batch_size: int | None = None,
    **values: Any,
) -> dict[str, Any]:
    asked = CaseOptions(choose_device(device), dtype, batch_size, seed, blocks)
    return values | {"asked": asked}


# `--json`, and the options that a command gets as `asked`, which are `CaseOptions`.
case_options = all_of(
    DEVICE_OPTION,
    BLOCKS_OPTION,
    DTYPE_OPTION,
    SEED_OPTION,
    RESULTS_OPTION,
    with_values(_as_asked),
)
run_options = all_of(BATCH_SIZE_OPTION, case_options)


def program_options(default_steps: int, *, least_steps: int = 1) -> OptionDecorator:
    """Add the options by which a user's program runs some steps in processes of its own."""
    text = "Start so many processes, as torchrun does."
    ranks = number_option(text, "--ranks", "num_ranks", default=1)
    return all_of(program_option(), steps_option(default_steps, least_steps), ranks)


def steps_option(default: int, least: int) -> OptionDecorator:
    """Add `--steps`, the steps that a program of the user's makes."""
    text = "Steps of an optimizer, after which the loop ends."
    return number_option(text, "--steps", "num_steps", default=default, least=least)


def program_option(otherwise: str | None = None) -> OptionDecorator:
    """Add the options of a user's program, which the command gets as `program`: kind and words.

    Without a script or a trainer, the kind is `otherwise`: "" has no words, None is refused.
    """

    def change(
        script: str | None, trainer: str | None, arguments: tuple[str, ...], **values: Any
    ) -> dict[str, Any]:
        if (script and trainer) or (not (script or trainer) and otherwise is None):
            raise click.UsageError("give either --script or --trainer")
        if arguments and (trainer or not (script or otherwise)):
            raise click.UsageError(f"{arguments[0]!r} is for no script: give --script FILE")
        if script and not Path(script).is_file():
            raise UnusableInput(f"there is no file {script}")
        kind = "script" if script else "trainer" if trainer else otherwise
        return values | {"program": [kind, *filter(None, [script or trainer]), *arguments]}

    return all_of(
        click.option(
            "--trainer",
            metavar="FACTORY",
            help="pkg.module:function that returns a Trainer of Hugging Face, Lightning's "
            "with its module, or an Accelerator with its training.",
        ),
        click.option(
            "--script", metavar="FILE", help="Run this script, with the ARGUMENTS after --."
        ),
        click.argument("arguments", nargs=-1, metavar="[-- ARGUMENTS]"),
        with_values(change),
    )


def require_matplotlib() -> None:
    """Raise an error with the install command if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnusableInput(
            "a plot needs matplotlib, which is not installed:\n  pip install 'matplotlib>=3.8'"
        )
