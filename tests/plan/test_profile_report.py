"""Recommendations of a profile report, and its text.

python -m pytest tests/plan/test_profile_report.py
"""

import pytest

from curry_train.plan import LayerMemory, ProfileReport

from ..command_runs import require_narrow

MIB = 2**20


def report_of(*layers, rest=10):
    made = [LayerMemory(name, "Block", held * MIB, stays * MIB, 1) for name, held, stays in layers]
    made.append(LayerMemory("(rest)", "Model", rest * MIB, rest * MIB, 0))
    made.sort(key=lambda layer: -layer.bytes)
    return ProfileReport("Model", "cpu", tuple(made), sum(layer.bytes for layer in made), 0.0, 1)


@pytest.mark.parametrize(
    ("budget", "names"),
    [
        (100, []),  # 100 MiB are held
        (99, ["d"]),  # saves 1, which closes the gap
        (98.5, ["c"]),  # saves 10
        (80, ["b"]),  # 25 closes the gap of 20 with fewer bytes than 40 does
        (50, ["a", "c"]),  # 40 first, because none closes 50; then the smallest that closes 10
        (24, ["a", "b", "c", "d"]),
    ],
)
def test_recommended_layers_save_as_few_bytes_as_the_budget_needs(budget, names):
    report = report_of(("a", 45, 5), ("b", 30, 5), ("c", 11, 1), ("d", 2, 1), ("e", 2, 3))
    assert report.held_bytes == 100 * MIB
    assert report.recommend_layers(budget) == names


def test_a_budget_that_nothing_fits_is_an_error_with_the_figures():
    report = report_of(("a", 45, 5), ("b", 30, 5))
    with pytest.raises(
        ValueError, match=r"holds 85\.000 MiB.*20\.000 MiB with the 2 layers.*does not fit 19 MiB"
    ):
        report.recommend_layers(19)


@pytest.mark.parametrize("budget", [0, float("nan"), float("inf"), True, "512"])
def test_an_invalid_budget_is_refused(budget):
    with pytest.raises(ValueError, match="memory_budget_mb must be a number above 0, got"):
        report_of(("a", 45, 5)).recommend_layers(budget)


def test_the_table_fits_80_columns_with_any_names():
    layers = [
        (f"model.language_model.decoder.transformer.layers.{index}", 200000 - index, 1)
        for index in range(40)
    ]
    text = report_of(*layers).table()
    require_narrow(text)
    assert "transformer.layers.7 " in text
    assert "21 smaller layers" in text
    assert report_of(("holds nothing", 0, 0), rest=0).table()
    assert len(text.splitlines()) == 23
