"""Missing matplotlib and a picture of another format are reported before the work begins.

python -m pytest tests/cli/test_missing_matplotlib.py
"""

import pytest

from curry_train.cli.main import COMMANDS, main
from curry_train.cli.runs_plot import runs_plot_command

from ..command_runs import flat, ran

FOUND = {name: main.load(name) for name in COMMANDS}
DRAWING = [
    name
    for name, command in FOUND.items()
    if any("--plot" in option.opts for option in command.params)
]


@pytest.fixture
def missing(monkeypatch):
    monkeypatch.setattr(
        "curry_train.cli.options.importlib.util.find_spec", lambda name, *rest: None
    )


def error_of(command, *words):
    """Call the command itself, because finding it calls `find_spec`."""
    return flat(ran(*words, command=command, status=2).stderr)


def test_commands_with_a_plot():
    assert {"memory", "plan", "bench", "grad-flow"} == set(DRAWING)


@pytest.mark.parametrize("command", DRAWING)
def test_what_can_not_be_drawn_is_refused_at_once(command, tmp_path, missing):
    assert "pip install 'matplotlib" in error_of(FOUND[command], "--plot", "x.png")
    message = "x.xyz: a picture is a PNG, name it x.png"
    assert message in error_of(FOUND[command], "--plot", "x.xyz")
    assert not list(tmp_path.iterdir())


def test_a_missing_run_is_reported_before_missing_matplotlib(missing):
    assert "there is no run absent" in error_of(runs_plot_command, "absent")
