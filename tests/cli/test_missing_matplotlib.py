"""Missing matplotlib and a picture of another format are reported before the work begins.

python -m pytest tests/cli/test_missing_matplotlib.py
"""

import importlib

import click
import pytest
from click.testing import CliRunner

from curry_train.cli.main import COMMANDS as LAZY_COMMANDS
from curry_train.cli.main import main
from curry_train.cli.runs import IN_MODULES, runs_command

MODEL = ["--model", "mlp"]
# Each with correct words, and where the work begins.
COMMANDS = {
    "memory": ([*MODEL], "cli.memory.MemoryProfiler"),
    "plan": ([*MODEL, "--budget", "1GiB", "--target", "cpu"], "cli.plan.Planner.plan"),
    "bench": ([*MODEL], "cli.bench.measure_levers"),
    "grad-flow": ([*MODEL], "cli.grad_flow._train"),
}


@pytest.fixture
def missing(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "curry_train.cli.options.importlib.util.find_spec", lambda name, *rest: None
    )


def call(command, *words):
    """Call the command itself, because finding it calls `find_spec`."""
    ended = CliRunner().invoke(
        FOUND[command], [*words, *(() if command == "runs plot" else ("--plot", "x.png"))]
    )
    assert ended.exit_code == 2, ended.output
    assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exc_info
    return " ".join(ended.output.split())


def _find():
    groups = {
        "": (main, LAZY_COMMANDS),
        "runs ": (runs_command, IN_MODULES),
    }
    context = click.Context(main)
    return {
        f"{at}{name}": group.get_command(context, name)
        for at, (group, names) in groups.items()
        for name in names
    }


FOUND = _find()


def test_no_command_with_a_plot_is_left_out():
    drawing = {
        name
        for name, command in FOUND.items()
        if any("--plot" in option.opts for option in command.params)
    }
    assert drawing == COMMANDS.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_matplotlib_is_reported_before_the_work(missing, monkeypatch, command):
    words, work = COMMANDS[command]
    room, module, attribute = work.split(".", 2)
    place = importlib.import_module(f"curry_train.{room}.{module}")
    for name in attribute.split(".")[:-1]:
        place = getattr(place, name)

    def works(*args, **options):
        raise AssertionError("the work began")

    monkeypatch.setattr(place, attribute.split(".")[-1], works)
    assert "pip install 'matplotlib" in call(command, *words)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_picture_of_another_format_is_refused_before_the_work(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*COMMANDS[command][0], "--plot", "x.xyz"]
    ended = CliRunner().invoke(FOUND[command], words)
    assert ended.exit_code == 2
    assert "x.xyz: a picture is a PNG, name it x.png" in " ".join(ended.output.split())
    assert not list(tmp_path.iterdir())


def test_a_missing_run_is_reported_before_missing_matplotlib(missing):
    assert "there is no run absent" in call("runs plot", "absent")
