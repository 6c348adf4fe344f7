"""Command-line options and exit statuses shared by all commands.

Proof: `python -m pytest tests/cli/test_cli.py`.
"""

import importlib.util
import shlex
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from click import echo
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
from .parameters import argument, number_option, option, output_option, together
from .screen import UnusableInput, echo_lines, fill_screen

DEFAULT_BATCH_SIZE = 4


class DeviceMissing(click.ClickException):
    """The requested device is not available."""

    exit_code = 3


def choose_device(name: str) -> torch.device:
    """Return the device of `--device`; a missing one ends the command with exit status 3."""
    try:
        return find_device(name)
    except NoSuchDevice as error:
        raise DeviceMissing(str(error)) from error


def model_option(*, more: str = "", **settings: Any) -> Any:
    """Declare `--model` with the same values in every command; `more` ends its help."""
    text = f"{', '.join(BUILTIN_WORKLOADS)}, pkg.module:factory or file.py:factory. {more}".rstrip()
    return option(text, "MODEL", "--model", **settings)


def training_options(*, more: str = "", multiple: bool = False, required: bool = True) -> Any:
    """Declare `--model`, and options that read a workload off the user's training in its place.

    The command gets the text for `load_workload`, or with `multiple` a tuple of texts.
    """

    def read(
        model: Any = model_option(more=more, multiple=multiple),
        program: list[str] = program_option(otherwise=""),
        model_config: str | None = option(
            "A config.json of Hugging Face; --model is a name for it then.", "FILE"
        ),
        factory_path: str | None = output_option(
            "Write the factory that stands for --script, to use it as --model.", "--factory"
        ),
    ) -> Any:
        kind, *words = program
        specs = [one for one in (model if multiple else [model]) if one is not None]
        if model_config is not None:
            # The name is for people; the architecture is in the file.
            name = specs[-1] if specs else Path(model_config).stem
            specs = [*specs[:-1], f"{CONFIG_PREFIX}{model_config}:{name}"]
        if kind == "trainer":
            specs.append(TRAINER_PREFIX + words[0])
        if kind == "script":
            specs.append(SCRIPT_PREFIX + shlex.join(words))
        elif factory_path is not None:
            raise click.UsageError("--factory writes what --script has read: give it too")
        if not multiple and (len(specs) > 1 or (required and not specs)):
            raise click.UsageError("give either --model, --trainer or --script")
        return tuple(specs) if multiple else next(iter(specs), None)

    return together(read)


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
        echo(f"wrote {path}: use it as --model {shlex.quote(f'{path}:build')}")
    elif workload.factory:
        text = textwrap.indent(workload.factory, "  ")
        echo(f"the factory that was used, which --factory FILE writes:\n\n{text}")
    if workload.notes:
        echo()


def refuse_typed(names: Sequence[str], why: str) -> None:
    """Raise an error where options of these names were typed, which `why` leaves no use for."""
    context = click.get_current_context()
    if others := [
        one.opts[0]
        for one in context.command.params
        if one.name in names
        and context.get_parameter_source(one.name) is ParameterSource.COMMANDLINE
    ]:
        raise ValueError(f"{why}: leave out {', '.join(others)}")


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


def plot_option(text: str, flags: str = "--plot", **settings: Any) -> Any:
    """Declare an option for the path of a PNG."""

    def check(path: str) -> str:
        if Path(path).suffix != ".png":
            name = Path(path).with_suffix(".png")
            raise ValueError(f"{path}: a picture is a PNG, name it {name}")
        require_matplotlib()
        return path

    return output_option(text, flags, parse=check, **settings)


DEVICES = click.Choice(["auto", "cuda", "cpu"])
DTYPE_NAMES = click.Choice(["float32", "bfloat16"])


def device_option(**settings: Any) -> Any:
    """Declare `--device`, which is read as its name."""
    text = "auto is CUDA where available, else the CPU."
    return option(text, type=DEVICES, default="auto", **settings)


DTYPE_OPTION = option(
    "Type of weights and batch; by default the model's own.",
    type=DTYPE_NAMES,
    parse=lambda name: getattr(torch, name),
)
BATCH_SIZE_OPTION = number_option("Samples per step.")
SEED_OPTION = option(
    "Seed of weights, batch and dropout.", type=click.IntRange(0, 2**63 - 1), default=0
)
BLOCKS_OPTION = option("Blocks to work on, a glob over module names.", "PATTERN")
RANKS_OPTION = number_option("Start so many processes, as torchrun does.", "--ranks", default=1)


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

    batch_size: int | None = BATCH_SIZE_OPTION
    device: torch.device = device_option(parse=choose_device)
    blocks: str | None = BLOCKS_OPTION
    # None leaves that of the user's model.
    dtype: Any = DTYPE_OPTION
    seed: int = SEED_OPTION

    def case(self, workload: Workload, *, default: int | None = None) -> Case:
        """Return a workload as it was asked for, on its device."""
        size = samples_of(workload, self.batch_size, default=default)
        return Case(workload, self.device, self.dtype, size, self.seed, self.blocks)


def settle_blocks(
    case: Case, *, reported: type[Exception] = RuntimeError
) -> tuple[Case, BlockChoice]:
    """Choose the blocks of a case by one forward; the choice has no names if there are none.

    The command's own measurement reports an error of the forward that is `reported`.
    """
    try:
        return case.with_running_blocks()
    except NoBlocks as error:
        why = error.in_short
    except reported as error:
        why = f"no forward could be recorded: {error_in_a_line(error)}"
    return case, BlockChoice((), None, None, (why,))


def blocks_text(choice: BlockChoice) -> str:
    """Return the lines on the blocks, at most 80 columns wide."""
    return fill_screen("\n".join(choice.lines()))


def steps_option(default: int, least: int = 1) -> Any:
    """Declare `--steps`, the steps that a program of the user's makes."""
    text = "Steps of an optimizer, after which the loop ends."
    return number_option(text, "--steps", default=default, least=least)


def program_option(otherwise: str | None = None) -> Any:
    """Declare the options of a user's program, which the command gets as its kind and words.

    Without a script or a trainer, the kind is `otherwise`: "" has no words, None is refused.
    """

    def read(
        trainer: str | None = option(
            "pkg.module:function that returns a Trainer of Hugging Face, Lightning's with its "
            "module, or, where its loop does not run, an Accelerator with its training.",
            "FACTORY",
        ),
        script: str | None = option("Run this script, with the ARGUMENTS after --.", "FILE"),
        arguments: tuple[str, ...] = argument("[-- ARGUMENTS]"),
    ) -> list[str | None]:
        if (script and trainer) or (not (script or trainer) and otherwise is None):
            raise click.UsageError("give either --script or --trainer")
        if arguments and (trainer or not (script or otherwise)):
            raise click.UsageError(f"{arguments[0]!r} is for no script: give --script FILE")
        if script and not Path(script).is_file():
            raise UnusableInput(f"there is no file {script}")
        kind = "script" if script else "trainer" if trainer else otherwise
        return [kind, *filter(None, [script or trainer]), *arguments]

    return together(read)


def require_matplotlib() -> None:
    """Raise an error with the install command if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnusableInput(
            "a plot needs matplotlib, which is not installed:\n  pip install 'matplotlib>=3.8'"
        )
