"""Declare the options of a command as the defaults of its function's parameters.

    @screen_command("bench", example="--model mlp")
    def bench_command(
        levers: tuple[str, ...] = option("Repeatable; + joins several.", "NAME", "--lever"),
        steps: int = number_option("Timed rounds.", default=20),
        asked: CaseOptions = together(CaseOptions),
    ) -> Ended:

An option has the name of its parameter unless it is given another one; a tuple makes it repeatable,
and a bool makes it a flag. A value that is made of several options is declared by the function or
the dataclass that makes it. A command that returns results has `--json`.

Proof: `python -m pytest tests/cli/test_command_line.py`.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_origin

import click


class Together:
    """A group of options from which a function makes one value: its parameters, or `members`."""

    def __init__(self, function: Callable[..., Any], members: Mapping[str, Any]) -> None:
        self.function = function
        # The declaration and the type of each parameter, by its name.
        self.declared = {name: (member, None) for name, member in members.items()} or {
            name: (one.default, one.annotation)
            for name, one in inspect.signature(function).parameters.items()
        }
        # In the order of the page.
        self.parameters: list[click.Parameter] = []
        for name, (one, kind) in self.declared.items():
            if isinstance(one, Together):
                self.parameters += one.parameters
            elif callable(one):
                self.parameters.append(one(name, kind))

    def value(self, **given: Any) -> Any:
        """Call the function with the values of its options."""
        for name, (one, _) in self.declared.items():
            if isinstance(one, Together):
                given[name] = one.value(**given)
        return self.function(**{name: given[name] for name in self.declared if name in given})


def together(function: Callable[..., Any], **members: Any) -> Any:
    """Declare the options of which a function makes the value of one parameter."""
    return Together(function, members)


def option(
    text: str,
    metavar: str | None = None,
    flags: str | None = None,
    *,
    parse: Callable[[Any], Any] | None = None,
    **settings: Any,
) -> Any:
    """Declare an option; a ValueError of `parse`, which reads its text, is wrong usage."""

    def read(context: click.Context, option: click.Parameter, value: Any) -> Any:
        # No range of click leaves out nan, and few leave out inf.
        if isinstance(value, float) and not math.isfinite(value):
            raise click.BadParameter(f"{value} is not a finite number")
        if parse is None or value is None:
            return value
        try:
            return parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    def declare(name: str, kind: Any) -> click.Option:
        return click.Option(
            [flags or f"--{name.replace('_', '-')}", name],
            metavar=metavar,
            help=text,
            callback=read,
            is_flag=kind in (bool, bool | None) or None,
            **{"multiple": get_origin(kind) is tuple} | settings,
        )

    return declare


def argument(metavar: str | None = None, **settings: Any) -> Any:
    """Declare an argument; a tuple takes any number of words."""

    def declare(name: str, kind: Any) -> click.Argument:
        nargs = -1 if get_origin(kind) is tuple else 1
        return click.Argument([name], metavar=metavar, nargs=nargs, **settings)

    return declare


def number_option(
    text: str,
    flags: str | None = None,
    *,
    default: int | None = None,
    least: int = 1,
    most: int | None = None,
) -> Any:
    """Declare an option for a whole number, and show its default."""
    kind = click.IntRange(least, most)
    return option(text, None, flags, type=kind, default=default, show_default=True)


def output_option(
    text: str,
    flags: str | None = None,
    *,
    parse: Callable[[str], str] = str,
    **settings: Any,
) -> Any:
    """Declare an option for a file to write.

    Its folder has to exist before a long run rather than at its end.
    """

    def check(path: str) -> str:
        if not Path(path).parent.is_dir():
            raise ValueError(f"the folder of {path!r} does not exist: create it first")
        return parse(path)

    place = click.Path(dir_okay=False, writable=True, allow_dash=True)
    return option(text, None, flags, type=place, parse=check, **settings)


INPUT_FILE = click.Path(exists=True, dir_okay=False)
# Words of a configuration.
WORDS_ARGUMENT = argument("[KEY=VALUE]...")
