"""The command `bench`: its table, picture and JSON, and its messages for wrong input.

python -m pytest tests/cli/test_bench_command.py
"""

import functools
from pathlib import Path

from curry_train.cli.bench import bench_table
from curry_train.cli.figures import plot_bench
from curry_train.workloads import Case

from ..bench.test_bench_steps import SMALL, figures, ticking
from ..command_runs import flat, ran, read_json, require_narrow, require_picture

run = functools.partial(ran, "bench")


def planted(*levers, seconds=(1.0, 1.01, 1.3), rounds=6, **options):
    """Make a benchmark whose clock gives these seconds, in the order of the first round."""
    case = Case(SMALL, batch_size=4)
    return figures(case, *levers, rounds=rounds, clock=ticking(*seconds), **options)


def test_the_table_of_a_planted_clock_fits_80_columns():
    shown = bench_table(planted("full", "accumulate=2", "timesteps", seconds=(1.0,), peak=1e9))
    lines = shown.splitlines()
    require_narrow(shown)
    assert "one optimizer step is 64 tokens and" in shown
    head = next(line for line in lines if "10-90%" in line)
    assert head.split() == ["step", "10-90%", "ratio", "95%", "tokens/s", "MiB", "MFU", "HFU"]
    full = next(line for line in lines if line.startswith("full"))
    assert full.split()[1:6] == ["1.00", "s", "1.00-1.00", "1.00x", "1.00-1.00"]
    text = flat(shown)
    assert "no difference seen to plain: full, accumulate=2 (1 is within the interval)" in text
    assert "timesteps: refused: Transformer has no method unroll" in text
    assert "peak: 0.001 TFLOP/s, as given" in text


def test_the_table_explains_missing_utilisation_and_too_few_rounds():
    shown = bench_table(planted("full", rounds=2))
    assert "MFU and HFU are unknown: no peak of this processor is known" in flat(shown)
    assert "no intervals: 2 rounds are too few, use --steps 6 or more" in shown
    assert [line.split()[-2:] for line in shown.splitlines() if line.startswith("full")] == [
        ["-", "-"]
    ]


def test_the_plot_shows_the_measurements_also_with_a_stalled_step(monkeypatch):
    titles = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.suptitle", lambda _, text, **__: titles.append(text)
    )
    found = planted("full", "timesteps", "accumulate=2", seconds=(1.0, 1.3, 1.1, 1.0, 1.3, 60.0))
    plot_bench(found, "bench.png")
    require_picture("bench.png")
    plot_bench(planted(rounds=1), "alone.png")
    assert titles[1].endswith(", on cpu: one optimizer step")
    assert Path("alone.png").is_file()


def test_the_command_writes_table_picture_and_json():
    run(
        "--model mlp --steps 2 --warmup 0 --batch-size 2 --lever full --lever timesteps",
        "--plot bench.png --json bench.json",
    )
    found = read_json("bench.json")
    assert {"command", "threads", "seed"} <= set(found)
    assert found["device"].startswith(("cpu (", "NVIDIA"))
    assert [row["outcome"] for row in found["rows"]] == ["measured", "measured", "refused"]
    assert len(found["rows"][1]["seconds"]) == 2
    assert found["rows"][1]["ratio"]["verdict"] == "too few rounds to tell"
    assert found["unit"] == "samples"
    assert Path("bench.png").is_file()
