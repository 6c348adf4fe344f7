"""The picture of runs. `python -m pytest tests/cli/test_runs_plot.py`."""

import json
import math
from dataclasses import replace

import pytest

from curry_train.cli.figures import FAINT_OPACITY, LONGEST_RUN_NAME, MOST_NAMED, plot_runs
from curry_train.runs import read_history

from ..command_runs import ran, require_picture
from ..journals import plant, plant_eventful


@pytest.fixture
def figure(monkeypatch):
    """Draw, and return the saved figure."""
    import matplotlib.figure

    drawn, save = [], matplotlib.figure.Figure.savefig

    def keep(self, *arguments, **options):
        drawn.append(self)
        save(self, *arguments, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)

    def draw(folders):
        plot_runs(
            [replace(read_history(folder), name=folder.name) for folder in folders],
            "out.png",
        )
        require_picture("out.png")
        return drawn[-1]

    return draw


def panel(figure, label):
    return next(axes for axes in figure.axes if axes.get_ylabel().startswith(label))


def test_rolled_back_steps_are_faint_and_the_others_solid(figure):
    loss = panel(figure([plant_eventful("run")]), "loss")
    curves = [
        line for line in loss.lines if len(line.get_xdata()) > 1 and line.get_marker() == "None"
    ]
    spans = {(line.get_xdata()[0], line.get_xdata()[-1]): line.get_alpha() for line in curves}
    assert spans == {(11, 20): FAINT_OPACITY, (21, 30): FAINT_OPACITY, (1, 40): None}


def test_saves_spikes_rollbacks_and_resumes_are_marked_at_their_steps(figure):
    drawn = figure([plant_eventful("run")])
    places = {line.get_marker(): list(line.get_xdata()) for line in panel(drawn, "events").lines}
    assert places["|"] == [10, 20, 20, 30, 30, 40]
    assert (places["v"], places["<"], places[">"], places["s"]) == ([20], [10], [20], [40])
    labels = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert labels == [
        "save",
        "resume",
        "rollback",
        "spike",
        "skip",
        "stop",
        "rolled back or resumed over",
    ]


def test_there_is_a_panel_for_each_figure_in_the_journals(figure):
    assert [axes.get_ylabel() for axes in figure([plant_eventful("run")]).axes] == [
        "loss", "dev loss", "learning rate", "peak, GiB", "events",
    ]  # fmt: skip
    assert "dev loss" not in [axes.get_ylabel() for axes in figure([plant("other")]).axes]


def test_losses_that_are_not_finite_are_marked_at_the_edge(figure):
    folder = plant("run", loss=lambda step: math.nan if step > 15 else 2.0**-step)
    loss = panel(figure([folder]), "loss")
    (lost,) = [line for line in loss.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert list(lost.get_xdata()) == [16, 17, 18, 19, 20]
    assert loss.get_yscale() == "log"
    assert figure([plant("lost", loss=lambda step: math.nan)]).axes


def test_of_many_runs_the_lowest_have_names_and_all_names_fit(figure):
    folders = []
    for number in range(20):
        name = f"sweep-{number:03d}-{'a-long-list-of-options-' * 4}seed={number}"
        folders.append(
            # The run whose loss is not finite is not among the lowest.
            plant(name, last=3, loss=lambda step, number=number: (number * 7) % 20 or math.nan)
        )
    drawn = figure(folders)
    names = next(legend for legend in drawn.legends if "sweep" in legend.get_texts()[0].get_text())
    texts = [text.get_text() for text in names.get_texts()]
    assert all(len(text) <= LONGEST_RUN_NAME for text in texts)
    for legend in drawn.legends:
        box = legend.get_window_extent()
        assert drawn.bbox.contains(*box.min)
        assert drawn.bbox.contains(*box.max)
    assert sorted(text[:9] for text in texts) == [
        f"sweep-{number:03d}" for number in range(20) if 0 < (number * 7) % 20 <= MOST_NAMED
    ]


def test_the_command_draws_and_prints_figures():
    plant_eventful("runs/one")
    plant("runs/two")
    ended = ran("runs plot one two one --out both.png --json -")
    assert ended.stderr == "wrote both.png\n"
    require_picture("both.png")
    one, two = json.loads(ended.stdout)["runs"]
    assert (one["run"], one["attempts"], one["steps"]) == ("one", 3, "1 to 40")
    assert (one["events"]["save"], two["run"]) == (6, "two")
