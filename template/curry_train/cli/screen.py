"""Help, text and tables for a terminal, and groups that import a command when it runs.

    @screen_command("memory", example="--model transformer")

Proof: `python -m pytest tests/cli/test_command_line.py`.
"""

import functools
import inspect
import io
import json
import os
import pkgutil
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NoReturn

import click
from click import echo

from ..core.wording import write_json
from .parameters import Together, output_option

SCREEN_WIDTH = 80

# The sections of a page of help; options that are in none of them are in OTHER_SECTION.
SECTIONS = {
    "Model": (
        "--model",
        "--trainer",
        "--script",
        "--model-config",
        "--factory",
        "--device",
        "--dtype",
        "--batch-size",
        "--seed",
        "--blocks",
    ),
    "Options": (),
    "Ranks": (
        "--parallel",
        "--ranks",
        "--mesh",
        "--rank",
        "--reshard-after-forward",
        "--gather-in",
        "--link",
    ),
    "Output": ("--explain", "--out", "--plot", "--html", "--json"),
}
OTHER_SECTION = "Options"
_HOME_PATTERN = re.compile(r"^((?:[\w.-]+=)?)~(?=/)")


PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
LIBRARY_FOLDERS = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
# For each command that may take longer than ten seconds: what it does, and how long that takes.
LONG_COMMANDS = {
    "validate": "runs the gates: seconds for a small model, a time follows for others",
    "plan": "tries options on shapes: seconds for a small model, a minute for one of 8B",
    "preflight": "runs a few steps of your training, in up to three times their own time",
    "savings": "runs steps with each strategy, in the time of a dozen steps for each",
    "bench": "runs rounds of steps, in the time of these steps; --steps sets how many",
    "record": "runs the first steps of your training, in up to twice their own time",
    "locate": "compares in seconds; --op and --tolerance run both trainings again",
    "resume-check": "runs your training eight times: whole, resumed, without each part",
    "spike-check": "trains three times: recovered, without the bad samples, through them",
    "replay": "runs the bad step again, in the time of your training's first step",
}


class UnusableInput(click.ClickException):
    """The user's input can't be used, or a result can't be written."""

    exit_code = 2


# The error of a group without arguments prints the help; click before 8.2 has none.
NO_ARGUMENTS_ERROR = getattr(click.exceptions, "NoArgsIsHelpError", ())
# The results for --json, and the exit status, or an error to raise once they are written.
Ended = tuple[Mapping[str, Any], bool | int | UnusableInput]


@contextmanager
def errors_that_fit(*, keeps_traceback: bool = False) -> Iterator[None]:
    """End a command in a few lines where its input, the environment or a file can't be used."""
    try:
        yield
        return
    except KeyboardInterrupt:
        echo("\ninterrupted", err=True)
        raise click.exceptions.Exit(128 + signal.SIGINT) from None
    except (click.exceptions.Exit, click.Abort, BrokenPipeError):
        raise
    except click.ClickException as raised:
        if isinstance(raised, NO_ARGUMENTS_ERROR):
            raise
        error = raised
    except Exception as raised:
        expected = isinstance(raised, (OSError, ValueError, OverflowError, RuntimeError))
        # The user's backward, hook or optimizer may raise anything. The traceback of a mistake of
        # ours is shown.
        is_mistake = not expected and _is_ours(_last_own_frame(raised))
        if keeps_traceback or is_mistake:
            raise
        error = UnusableInput(in_few_lines(raised))
    # click writes this word before it, and a long path would go to the next line.
    word = "Error: "
    message = fill_screen(word + error.format_message(), indent="")[len(word) :]
    if isinstance(error, click.UsageError):
        raise click.UsageError(message, error.ctx) from error
    raise type(error)(message) from error


def in_few_lines(error: Exception) -> str:
    """Return the message of an error, with its place where the package did not mean to raise it."""
    own = _last_own_frame(error)
    place = f"{Path(own.filename).name}:{own.lineno}"
    if isinstance(error, OSError):
        what = error.strerror or error
        return f"{error.filename}: {what}" if error.filename else f"{what} ({place})"
    # Imported here, because it imports torch.
    from ..runs.journal import printable

    text = str(error)
    *_, last = traceback.extract_tb(error.__traceback__)
    is_meant = _is_ours(last) and str(last.line).startswith("raise ")
    if not (is_meant or type(error).__module__.startswith(f"{__package__.split('.')[0]}.")):
        text = f"{type(error).__name__}: {error} ({place})"
    return "\n".join(printable(line, longest=1000) for line in text.split("\n"))


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(str(PACKAGE_FOLDER))


def _last_own_frame(error: Exception) -> traceback.FrameSummary:
    """Return the last frame of an error that is the package's or the user's, in no library."""
    *_, own = (
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if _is_ours(frame) or not frame.filename.startswith(LIBRARY_FOLDERS)
    )
    return own


@contextmanager
def standard_output_kept() -> Iterator[None]:
    """Send to standard error what is printed, by a factory, a script or other processes too."""
    sys.stdout.flush()
    with ExitStack() as stack:
        # Standard output that is captured in this process has no number.
        with suppress(OSError, ValueError):
            number, other = sys.stdout.fileno(), sys.stderr.fileno()
            kept = os.dup(number)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, number)
            os.dup2(other, number)
        stack.enter_context(redirect_stdout(sys.stderr))
        yield


class ScreenCommand(click.Command):
    """Show a line for each option, in sections, and one example.

    `example` is what follows the name of the command in a call that works. It returns `Ended`: the
    results, which are written where `--json` has a path, and how it ends, by `leave`.
    An error of the input or the environment ends it with its message and status 2, unless it
    `keeps_traceback`.
    """

    def __init__(
        self,
        *,
        callback: Callable[..., Any],
        params: list[click.Parameter],
        example: str = "",
        keeps_traceback: bool = False,
        leave: Callable[[int], NoReturn] = sys.exit,
        **settings: Any,
    ) -> None:
        declared = Together(callback, {})
        params += declared.parameters
        if inspect.signature(callback).return_annotation is not None:
            results = output_option("Write the results as JSON; - is standard output.", "--json")
            params.append(results("json_path", None))
        super().__init__(callback=declared.value, params=params, **settings)
        self.example = example
        self.keeps_traceback = keeps_traceback
        self.leave = leave

    def main(self, args: Sequence[str] | None = None, *rest: Any, **settings: Any) -> Any:
        """Run the command, after a line on what it does if that is long; a signal ends some."""
        if args is None:
            words = [self.name, *sys.argv[1 : 3 if sys.argv[1:2] == ["runs"] else 2]]
            found = [f"{word} {LONG_COMMANDS[word]}" for word in words if word in LONG_COMMANDS]
            asks_only = {"-h", "--help", "--list"} & {*sys.argv}
            if found and not asks_only and SUPERVISED_VARIABLE not in os.environ:
                # Now, because the import of the command takes seconds itself.
                echo(found[-1], err=True)
            if SUPERVISED_COMMAND in words:
                supervise()
        return super().main(args, *rest, **settings)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words; a shell leaves the ~ of `--json=~/a.json` and of `runs=~/a`."""
        home = str(Path.home())
        words = [_HOME_PATTERN.sub(lambda found: found[1] + home, word) for word in args]
        return super().parse_args(ctx, words)

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        with errors_that_fit():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: click.Context) -> None:
        path = ctx.params.pop("json_path", None)
        kept = standard_output_kept() if path == "-" else nullcontext()
        with errors_that_fit(keeps_traceback=self.keeps_traceback), kept:
            ended: Ended | None = super().invoke(ctx)
        if ended is None:
            if path:
                raise click.UsageError("there are no results to write: leave --json out")
            return
        results, status = ended
        with errors_that_fit():
            if path and results:
                # Imported here, because it imports torch.
                from ..runs.journal import finite

                write_json(path, finite(results))
            if isinstance(status, UnusableInput):
                raise status
        self.leave(int(status))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of each section; a group has its commands first."""
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in SECTIONS}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record is None or isinstance(option, click.Argument):
                continue
            titles = (title for title, names in SECTIONS.items() if option.opts[0] in names)
            rows[next(titles, OTHER_SECTION)].append(record)
        for title, section in rows.items():
            if section:
                with formatter.section(title):
                    formatter.write_dl(section)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        runner = "python " if ctx.command_path.split()[0].endswith(".py") else ""
        formatter.write(f"\nExample: {runner}{ctx.command_path} {self.example}".rstrip() + "\n")


# The decorator of a command, with its name and the settings of `ScreenCommand`.
screen_command = functools.partial(click.command, cls=ScreenCommand)


class ListedCommand(click.Command):
    """The name and summary of a command, which are all that a page of help and a shell need."""

    def __init__(self, module: str, name: str, summary: str) -> None:
        super().__init__(name, short_help=summary)
        self.place = f"{__package__}.{module}:{name.replace('-', '_')}_command"

    def load(self) -> click.Command:
        """Import the command."""
        loaded: click.Command = pkgutil.resolve_name(self.place)
        return loaded

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        return self.load().make_context(*args, **settings)


class LazyGroup(ScreenCommand, click.Group):
    """A group of commands in modules of this folder, so that `--help` does not import torch.

    `lazy` has for each module the names of its commands, each with its summary. The command
    `grad-flow` is `grad_flow_command` there.
    """

    def __init__(self, *, lazy: Mapping[str, Mapping[str, str]], **settings: Any) -> None:
        listed = {
            name: ListedCommand(module, name, summary)
            for module, summaries in lazy.items()
            for name, summary in summaries.items()
        }
        settings["context_settings"] = {"help_option_names": ["-h", "--help"]}
        super().__init__(commands=listed, keeps_traceback=True, **settings)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands]


# Signals.

# It holds nothing worth saving, and runs the user's code in hooks and in processes.
SUPERVISED_COMMAND = "validate"
# In the environment of the process that is supervised: the end of a pipe from the other one.
SUPERVISED_VARIABLE = "CURRY_TRAIN_SUPERVISED"
SHOW_CURSOR = "\x1b[?25h"  # which a progress display hides
SECONDS_TO_END = 2.0


def supervise() -> None:
    """Run this command again in a process group of its own, and end with its status.

    A KeyboardInterrupt may be swallowed, in a hook of autograd or by a model that catches all
    errors. So Ctrl-C and SIGTERM reach this process alone, which ends the whole group. Temporary
    files go into a folder of their own, which is removed.
    """
    pipe = os.environ.pop(SUPERVISED_VARIABLE, None)
    if pipe is not None:
        threading.Thread(target=_end_with_parent, args=[int(pipe)], daemon=True).start()
    if pipe is not None or os.name == "nt":
        return

    def end(number: int, _: Any) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)
        # First the process that would report the end of its workers.
        process.kill()
        _end_group(process)
        word = "interrupted" if number == signal.SIGINT else "terminated"
        os.write(2, f"{SHOW_CURSOR if os.isatty(2) else ''}\n{word}\n".encode())
        sys.exit(128 + number)

    with tempfile.TemporaryDirectory(prefix="curry-train-", ignore_cleanup_errors=True) as folder:
        read_end, _ = os.pipe()
        variables = {
            "TMPDIR": folder,
            SUPERVISED_VARIABLE: str(read_end),
            # The tracker warns of what it removes when the others have been ended.
            "PYTHONWARNINGS": f"{os.environ.get('PYTHONWARNINGS', '')},ignore:resource_tracker",
        }
        command = [sys.executable, *sys.orig_argv[1:]]
        process = subprocess.Popen(
            command, env=os.environ | variables, start_new_session=True, pass_fds=[read_end]
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        status = process.wait()
        sys.exit(status if status >= 0 else 128 - status)


def _end_with_parent(pipe: int) -> None:
    """End this group when the process is killed that supervises it, and holds the other end."""
    os.read(pipe, 1)
    os.killpg(0, signal.SIGKILL)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End all processes of a group; multiprocessing's tracker ignores SIGTERM, and cleans up."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + SECONDS_TO_END
        with suppress(ProcessLookupError):
            while time.monotonic() < until:
                os.killpg(process.pid, number)
                process.poll()
                time.sleep(0.02)


# Text that commands write and print: templates, paragraphs and tables.


def render_template(place: Path, **values: Any) -> str:
    """Render a template; in one of HTML values are escaped."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=".html" in place.name,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    # A string as an expression of Python, as formatters write it.
    environment.filters["literal"] = functools.partial(json.dumps, ensure_ascii=False)
    return environment.from_string(place.read_text(encoding="utf-8")).render(**values)


def fill_screen(text: str, *, indent: str = "  ") -> str:
    """Break each line of a text between words; what follows of a line is indented."""
    return "\n".join(
        textwrap.fill(
            line,
            SCREEN_WIDTH,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.splitlines()
    )


def echo_lines(*lines: str, indent: str = "  ") -> None:
    """Print lines, each broken where it is too long; what follows of it is indented."""
    for line in lines:
        echo(fill_screen(line, indent=indent))


def table(rows: Sequence[Sequence[str]], *, texts: Collection[str] = ()) -> str:
    """Return rows as a table on a screen: names at the left, figures at the right.

    The first row has the heads. `texts` are those of more columns at the left, which are broken
    into lines where they are too long.
    """
    # Here, because the list of commands is shown without rich.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    gap = 2 if sum(widths) + 2 * len(widths) <= SCREEN_WIDTH else 1
    grid = Table.grid(padding=(0, gap, 0, 0))
    for number, head in enumerate(rows[0]):
        is_text = number == 0 or head in texts
        grid.add_column(
            justify="left" if is_text else "right",
            no_wrap=not is_text,
            overflow="fold",
            # A name is broken only where it takes more than half of the screen.
            min_width=min(widths[0], SCREEN_WIDTH // 2) if number == 0 else None,
        )
    for row in rows:
        grid.add_row(*map(Text, row))
    printed = io.StringIO()
    Console(width=SCREEN_WIDTH, file=printed).print(grid)
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


@contextmanager
def messages_on_screen(first: str = "") -> Iterator[Callable[[str], None]]:
    """Show what a command does at the moment, on standard error if that is a terminal.

    It begins with a first message. The command itself prints nothing meanwhile.
    """
    # Here, because the list of commands is shown without rich.
    from rich.console import Console

    with Console(stderr=True).status(first) as status:
        yield status.update
