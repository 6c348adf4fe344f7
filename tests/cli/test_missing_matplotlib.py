"""Missing matplotlib is reported before the work begins, and after wrong options.

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
TRAINING = ["data.source=workload", "batch_size=8", "microbatch=8", "device=cpu"]
# Each with correct words, where the work begins, and a wrong option that is reported first.
COMMANDS = {
    "memory": ([*MODEL], "cli.memory.MemoryProfiler", {"--blocks nothing*": "matches no module"}),
    "plan": (
        [*MODEL, "--budget", "1GiB", "--global-batch", "4", "--target", "cpu"],
        "cli.plan.Planner.plan",
        {
            "--microbatch 3": "microbatch 3 does not divide",
            "--optimizer adam": "no optimizer is called",
            "--blocks nothing*": "matches no module",
            "--target h10": "there is no profile",
        },
    ),
    "bench": (
        [*MODEL],
        "cli.bench.measure_levers",
        {
            "--lever ful": "ful",
            "--optimizer adam": "no optimizer is called",
            "--blocks nothing*": "matches no module",
        },
    ),
    "grad-flow": ([*MODEL], "cli.grad_flow._train", {"--layers nothing*": "nothing*"}),
    "runs spike-check": (
        [*MODEL, "--steps", "60", *TRAINING],
        "cli.spike_check.spike_check",
        {
            "--windows 99": "not all among the 60 steps",
            "spike.window=2": "spike.window must be",
            "modle=mlp": "no key",
        },
    ),
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
        "runs ": (runs_command, [*runs_command.commands, *IN_MODULES]),
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
    words, work, _ = COMMANDS[command]
    room, module, attribute = work.split(".", 2)
    place = importlib.import_module(f"curry_train.{room}.{module}")
    for name in attribute.split(".")[:-1]:
        place = getattr(place, name)

    def works(*args, **options):
        raise AssertionError("the work began")

    monkeypatch.setattr(place, attribute.split(".")[-1], works)
    assert "pip install 'matplotlib" in call(command, *words)


@pytest.mark.parametrize(
    ("command", "wrong", "message"),
    [
        *(
            (name, wrong, message)
            for name, (_, _, wrongs) in COMMANDS.items()
            for wrong, message in wrongs.items()
        ),
        *((name, "--model absent_module:build", "can't import absent_module") for name in COMMANDS),
    ],
)
def test_wrong_options_are_reported_before_missing_matplotlib(missing, command, wrong, message):
    output = call(command, *COMMANDS[command][0], *wrong.split(" "))
    assert message in output
    assert "matplotlib" not in output


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
