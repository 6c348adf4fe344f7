"""Help, text and tables for a terminal, and groups that import a command when it runs.

    @click.command("memory", cls=ScreenCommand, example="--model transformer")

Proof: `python -m pytest tests/cli/test_command_line.py`.
"""

import errno
import importlib
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
import textwrap
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import click
from click.shell_completion import CompletionItem

from ..core.wording import did_you_mean

if TYPE_CHECKING:
    from rich.progress import Progress

SCREEN_WIDTH = 80

# The sections of a page of help; options that are in none of them are in OTHER_SECTION.
SECTIONS = {
    "Model": (
        *("--model", "--trainer", "--script", "--model-config", "--factory"),
        *("--device", "--dtype", "--batch-size", "--seed", "--blocks"),
    ),
    "Options": (),
    "Ranks": (
        *("--parallel", "--ranks", "--mesh", "--rank", "--reshard-after-forward", "--gather-in"),
        *("--link",),
    ),
    "Output": ("--explain", "--out", "--plot", "--html", "--json"),
}
OTHER_SECTION = "Options"
_HOME_PATTERN = re.compile(r"^((?:[\w.-]+=)?)~(?=/)")


PACKAGE_FOLDER = str(Path(__file__).resolve().parents[1])
LIBRARY_FOLDERS = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
# Code that writes to standard output, whose errors have no file name.
SITE_FOLDER = Path(str(click.__file__)).parents[1]
PRINTERS = (str(SITE_FOLDER / "click"), str(SITE_FOLDER / "rich"), f"{PACKAGE_FOLDER}/cli")

# Errors of a file system that leave nothing to write to, whatever the file.
FULL_OR_READ_ONLY = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO),
    errno.ENAMETOOLONG,
}


class UnusableInput(click.ClickException):
    """The user's input can't be used, or a result can't be written."""

    exit_code = 2


@contextmanager
def errors_that_fit(outputs: Iterable[Any] = ()) -> Iterator[None]:
    """End a command in a few lines, also where one of its outputs can't be written."""
    try:
        yield
    except click.ClickException as error:
        message = wrapped(error.format_message(), begun=len("Error: "))
        error.format_message = lambda: message  # type: ignore[method-assign]
        raise
    except OSError as error:
        is_output = error.filename is not None and str(error.filename) in map(str, outputs)
        if error.errno not in FULL_OR_READ_ONLY and not is_output:
            raise
        if error.filename is not None:
            raise UnusableInput(f"{error.filename}: {error.strerror}") from error
        if not traceback.extract_tb(error.__traceback__)[-1].filename.startswith(PRINTERS):
            raise UnusableInput(f"{error.strerror} ({place_of(error)})") from error
        # Buffered text is written at the end of the process, and would fail again.
        with suppress(OSError), Path(os.devnull).open("w") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        raise UnusableInput(f"standard output: {error.strerror}") from error


def place_of(error: BaseException) -> str:
    """Return the file and the line of an error: the last that is in no other library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if frame.filename.startswith(PACKAGE_FOLDER)
        or not frame.filename.startswith(LIBRARY_FOLDERS)
    ]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}"


def with_place(error: Exception) -> str:
    """Return the message of an error, with its place where the package did not mean to raise it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_meant = last.filename.startswith(PACKAGE_FOLDER) and str(last.line).startswith("raise ")
    if is_meant or type(error).__module__.startswith(f"{__package__.split('.')[0]}."):
        return str(error)
    return f"{type(error).__name__}: {error} ({place_of(error)})"


@contextmanager
def json_on_standard_output(ctx: click.Context) -> Iterator[None]:
    """Keep standard output for the JSON of `--json -`, and standard error for all else.

    What a factory or a script prints is among that. Ranks print for themselves.
    """
    if ctx.params.get("json_path") != "-" or "WORLD_SIZE" in os.environ:
        yield
        return
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as file:
        ctx.params["json_path"] = file.name
        try:
            with _children_to_standard_error(), redirect_stdout(sys.stderr):
                yield
        finally:
            sys.stdout.write(file.read())


@contextmanager
def _children_to_standard_error() -> Iterator[None]:
    """Send what other processes print to standard error."""
    try:
        number, other = sys.stdout.fileno(), sys.stderr.fileno()
    except (OSError, ValueError):
        # Standard output is captured in this process.
        yield
        return
    sys.stdout.flush()
    kept = os.dup(number)
    os.dup2(other, number)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)


class ScreenCommand(click.Command):
    """Show a line for each option, in sections, and one example.

    `example` is what follows the name of the command in a call that works. A ValueError or a
    RuntimeError ends it with its message and status 2, unless it `keeps_traceback`.
    """

    def __init__(
        self,
        *args: Any,
        example: str | None = None,
        keeps_traceback: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self.example = example
        self.keeps_traceback = keeps_traceback

    def main(self, *args: Any, standalone_mode: bool = True, **settings: Any) -> Any:
        """Run the command; Ctrl-C ends some at once."""
        run: Any = super().main
        if not standalone_mode:
            return run(*args, standalone_mode=False, **settings)
        if ENDED_BY_INTERRUPT.isdisjoint({self.name, *sys.argv[1:2]}):
            return run(*args, **settings)
        with ended_by_interrupt():
            return run(*args, **settings)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words; a shell leaves the ~ of `--json=~/a.json` and of `runs=~/a`."""
        if not isinstance(self, click.Group):
            home = str(Path.home())
            args = [_HOME_PATTERN.sub(lambda found: found[1] + home, word) for word in args]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in ("--script", "--trainer"):
                raise
            raise click.UsageError(
                f"{ctx.info_name} takes no {error.option_name}, give a factory as --model: "
                "`curry-train memory --script FILE --factory kept.py` writes one",
                ctx,
            ) from error

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        with errors_that_fit():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: click.Context) -> Any:
        with errors_that_fit(ctx.params.values()), json_on_standard_output(ctx):
            try:
                return super().invoke(ctx)
            except (click.exceptions.Exit, click.Abort):
                raise
            except (ValueError, OverflowError, RuntimeError) as error:
                if isinstance(self, click.Group) or self.keeps_traceback:
                    raise
                # The input is wrong, or the environment.
                raise UnusableInput(printable_lines(with_place(error))) from error

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
        if self.example is not None:
            runner = "python " if ctx.command_path.split()[0].endswith(".py") else ""
            formatter.write(f"\nExample: {runner}{ctx.command_path} {self.example}".rstrip() + "\n")


class LazyGroup(ScreenCommand, click.Group):
    """A group of commands in modules of this folder, so that `--help` does not import torch.

    `lazy` maps the name of a command to its place, as `module:attribute`, and its summary.
    """

    command_class = ScreenCommand

    def __init__(
        self, *args: Any, lazy: Mapping[str, tuple[str, str]] | None = None, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.lazy = lazy or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *self.lazy]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self.lazy[cmd_name][0].partition(":")
        loaded = importlib.import_module(f".{module}", __package__)
        return cast(click.Command, getattr(loaded, attribute))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        unknown = args[0] not in self.list_commands(ctx) and not args[0].startswith("-")
        if unknown and not ctx.resilient_parsing:
            advice = did_you_mean(args[0], self.list_commands(ctx))
            ctx.fail(f"no command is called {args[0]!r}: {advice}")
        return super().resolve_command(ctx, args)

    def summaries(self, ctx: click.Context) -> list[tuple[str, str]]:
        """Return name and summary of each command, without importing those that are lazy."""
        rows = []
        for name in self.list_commands(ctx):
            if name in self.lazy:
                rows.append((name, self.lazy[name][1]))
            else:
                rows.append((name, self.commands[name].get_short_help_str(SCREEN_WIDTH)))
        return rows

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a line for each command."""
        with formatter.section(f"Commands, with a page each by {ctx.command_path} COMMAND --help"):
            formatter.write_dl(self.summaries(ctx))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = [
            CompletionItem(name, help=summary)
            for name, summary in self.summaries(ctx)
            if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)


# Ctrl-C.

# Commands that hold nothing worth saving, and that run the user's code in hooks and in processes.
ENDED_BY_INTERRUPT = {"validate"}
INTERRUPTED_STATUS = 130
SHOW_CURSOR = "\x1b[?25h"  # which a progress display hides


def _children() -> set[int]:
    """Return the processes to end, also one that starts and that multiprocessing can't name yet."""
    children = {cast(int, child.pid) for child in multiprocessing.active_children()}
    for path in Path("/proc/self/task").glob("*/children"):
        children.update(map(int, path.read_text().split()))
    # It removes what the others leave, and then ends by itself.
    return children - {vars(resource_tracker._resource_tracker)["_pid"]}


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """End this process and its workers with status 130 on Ctrl-C, wherever they compute.

    A KeyboardInterrupt may be swallowed: in a hook of autograd, or by a model that catches all
    errors. So the signal is blocked, in the processes that are started here too, and a thread waits
    for it. SIGTERM, which a pool sends to its workers, has a handler here alone. Temporary files go
    into a folder of their own, which is removed.
    """
    if threading.current_thread() is not threading.main_thread() or os.name == "nt":
        yield
        return
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    folder = tempfile.mkdtemp(prefix="curry-train-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    is_over = threading.Event()
    # Held while a worker starts, and from the end on: a worker that started after the others were
    # ended would wait for ever. The handler of SIGTERM may run within a start.
    starting = threading.RLock()
    start = multiprocessing.util.spawnv_passfds

    def start_alone(*args: Any) -> int:
        with starting:
            return start(*args)

    def wait() -> None:
        signal.sigwait({signal.SIGINT})
        if not is_over.is_set():
            end("interrupted", INTERRUPTED_STATUS)

    def end(word: str, status: int) -> None:
        starting.acquire()
        os.write(2, f"{SHOW_CURSOR if os.isatty(2) else ''}\n{word}\n".encode())
        for child in _children():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(status)

    waiting = threading.Thread(target=wait, daemon=True)
    # It unblocks the signals when it starts, as with the first worker (python/cpython#127586). When
    # this process ends at once it removes what is left, which is nothing to warn of.
    quiet = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"]))
    with mock.patch.dict(os.environ, PYTHONWARNINGS=quiet):
        resource_tracker.ensure_running()
    started_alone = mock.patch.object(multiprocessing.util, "spawnv_passfds", start_alone)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    on_termination = signal.signal(
        signal.SIGTERM, lambda number, _: end("terminated", 128 + number)
    )
    waiting.start()
    try:
        with started_alone:
            yield
    finally:
        is_over.set()
        signal.pthread_kill(cast(int, waiting.ident), signal.SIGINT)
        waiting.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGTERM, on_termination)
        tempfile.tempdir = before[1]
        if before[0] is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = before[0]
        shutil.rmtree(folder, ignore_errors=True)


# Text that commands write and print: templates, paragraphs and tables.


def write_output(place: str | Path, content: bytes | str) -> None:
    """Write a file; an error names it, which that of a full disk does not."""
    try:
        Path(place).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        error.filename = error.filename or str(place)
        raise


def literal(text: str) -> str:
    """Return a string as an expression of Python, as formatters write it."""
    return json.dumps(text, ensure_ascii=False)


def render_template(place: Path, **values: Any) -> str:
    """Render a template; in one of HTML values are escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(place.parent),
        autoescape=".html" in place.name,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["literal"] = literal
    return environment.get_template(place.name).render(**values)


def printable_lines(text: str) -> str:
    """Escape what a terminal would act on, such as control characters of a file's name."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text
    )


def fill_screen(text: str, *, indent: str = "  ") -> str:
    """Break a text into lines; all but the first are indented."""
    return textwrap.fill(text, SCREEN_WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def wrapped(text: str, *, begun: int = 0) -> str:
    """Break each line between words, and never at a hyphen of an option or inside of a path.

    In the first line so many columns are in use; no line is longer than the first may be.
    """
    return "\n".join(
        textwrap.fill(line, SCREEN_WIDTH - begun, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )


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
            justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold"
        )
    for row in rows:
        grid.add_row(*map(Text, row))
    console = Console(width=SCREEN_WIDTH, file=io.StringIO())
    with console.capture() as captured:
        console.print(grid)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


# Progress of long work.


def progress_on_screen(*, estimate: bool = True) -> "Progress":
    """Return a progress display on standard error, which stays quiet where that is no terminal.

    It shows an estimate of the time left, or else the elapsed time.
    """
    # Here, because the list of commands is shown without rich.
    from rich.console import Console
    from rich.progress import (
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn() if estimate else TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def messages_on_screen() -> Iterator[Callable[[str], None]]:
    """Show what a command does at the moment, with the elapsed time."""
    with progress_on_screen(estimate=False) as progress:
        task = progress.add_task("", total=None)
        yield lambda message: progress.update(task, description=message)
