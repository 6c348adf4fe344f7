"""The command `bench`: its table, picture and JSON, and its messages for wrong input.

python -m pytest tests/cli/test_bench_command.py
"""

import importlib.util
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from tree import ROOT

from curry_train.bench.report import measure_levers
from curry_train.bench.steps import find_lever
from curry_train.cli.bench import bench_command, bench_table
from curry_train.cli.figures import plot_bench
from curry_train.workloads.models import transformer
from curry_train.workloads.workload import Case

QUICK = ["--steps", "2", "--warmup", "0", "--batch-size", "2"]
SMALL = transformer(depth=2, dim=32, length=16)
TOY = """
import torch
from torch import nn

def small():
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*blocks), torch.randn(4, 8)

def large():
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(9)]
    return nn.Sequential(*blocks), torch.randn(4, 8)

def other():
    return nn.Embedding(8, 8), torch.randint(8, (4, 3))
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return lambda *arguments: CliRunner().invoke(bench_command, arguments)


@pytest.fixture
def toys(tmp_path):
    (tmp_path / "bench_toys.py").write_text(TOY)
    yield
    sys.modules.pop("bench_toys", None)


def planted(*levers, seconds=(1.0, 1.01, 1.3), rounds=6, **options):
    """Make a benchmark whose clock gives these seconds, in the order of the first round."""
    times = itertools.chain.from_iterable((0.0, taken) for taken in itertools.cycle(seconds))
    found = [find_lever(name) for name in levers]
    case = Case(SMALL, batch_size=4)
    return measure_levers(
        case, found, rounds=rounds, warmup=0, clock=lambda: next(times), **options
    )


def test_the_table_of_a_planted_clock_fits_80_columns():
    shown = bench_table(planted("full", "accumulate=2", "timesteps", seconds=(1.0,), peak=1e9))
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80, shown
    assert "one optimizer step is 64 tokens and" in shown
    head = next(line for line in lines if "10-90%" in line)
    assert head.split() == ["step", "10-90%", "ratio", "95%", "tokens/s", "MiB", "MFU", "HFU"]
    full = next(line for line in lines if line.startswith("full"))
    assert full.split()[1:6] == ["1.00", "s", "1.00-1.00", "1.00x", "1.00-1.00"]
    text = " ".join(shown.split())
    assert "no difference seen to plain: full, accumulate=2 (1 is within the interval)" in text
    assert "timesteps: refused: Transformer has no method unroll" in text
    assert "peak: 0.001 TFLOP/s, as given" in text


def test_the_table_explains_missing_utilisation_and_too_few_rounds():
    shown = bench_table(planted("full", rounds=2))
    assert "MFU and HFU are unknown: no peak of this processor is known" in " ".join(shown.split())
    assert "no intervals: 2 rounds are too few, use --steps 6 or more" in shown
    assert [line.split()[-2:] for line in shown.splitlines() if line.startswith("full")] == [
        ["-", "-"]
    ]


def test_the_table_gives_a_long_name_a_line_of_its_own():
    shown = bench_table(planted("chunked_loss+full+accumulate=2"))
    assert max(map(len, shown.splitlines())) <= 80
    assert "\nchunked_loss+full+accumulate=2\n" in shown


def test_figures_of_every_size_keep_to_80_columns():
    found = planted("full", seconds=(0.0123, 0.0144))
    for row in found.rows:
        row.peak_bytes, row.terms_per_second, row.mfu, row.hfu = (
            70 * 2**30,
            1_234_567.0,
            0.0512,
            1.0,
        )
        row.step = type(row.step)(123.0, 100.0, 1234.0)
    assert max(map(len, bench_table(found).splitlines())) <= 80


needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="no matplotlib"
)


@needs_matplotlib
def test_the_plot_shows_the_measurements_also_with_a_stalled_step(tmp_path):
    found = planted("full", "timesteps", "accumulate=2", seconds=(1.0, 1.3, 1.1, 1.0, 1.3, 60.0))
    assert plot_bench(found, tmp_path / "bench.png") == ["plain", "full", "accumulate=2"]
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    alone = planted(rounds=1)
    assert plot_bench(alone, tmp_path / "alone.png") == ["plain"]


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(run, monkeypatch):
    monkeypatch.setattr("curry_train.cli.options.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("curry_train.cli.bench.measure_levers", None)
    ended = run("--model", "mlp", *QUICK, "--plot", "bench.png")
    assert ended.exit_code == 2
    assert "pip install 'matplotlib" in ended.output


@needs_matplotlib
def test_the_command_writes_table_picture_and_json(run, tmp_path):
    levers = [
        "--lever",
        "full",
        "--lever",
        "timesteps",
        "--plot",
        "bench.png",
        "--json",
        "bench.json",
    ]
    ended = run("--model", "mlp", *QUICK, *levers)
    assert ended.exit_code == 0, ended.output
    found = json.loads((tmp_path / "bench.json").read_text())
    assert {"command", "date", "device", "torch", "python", "threads", "seed"} <= set(found)
    assert found["device"].startswith(("cpu (", "NVIDIA"))
    assert [row["outcome"] for row in found["rows"]] == ["measured", "measured", "refused"]
    assert len(found["rows"][1]["seconds"]) == 2
    assert found["rows"][1]["ratio"]["verdict"] == "too few rounds to tell"
    assert found["unit"] == "samples"
    assert (tmp_path / "bench.png").is_file()


def test_json_on_standard_output_is_json_alone(run):
    ended = run("--model", "mlp", *QUICK, "--json", "-")
    assert json.loads(ended.stdout)["rows"][0]["name"] == "plain"
    assert "10-90%" in ended.stderr


def test_two_models_of_the_user_are_compared(run, toys):
    ended = run("--model", "bench_toys:small", "--against", "bench_toys:large", *QUICK)
    assert ended.exit_code == 0, ended.output
    assert "\nbench_toys:large" in ended.output


def test_a_hugging_face_model_is_benchmarked(run, tmp_path):
    pytest.importorskip("transformers")
    size = "vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2"
    source = (
        "from transformers import LlamaConfig, LlamaForCausalLM as L\n"
        f"def build(): return L(LlamaConfig({size}, num_attention_heads=4))\n"
    )
    (tmp_path / "bench_llama.py").write_text(source)
    ended = run(
        "--model", "bench_llama:build", "--lever", "full", "--lever", "accumulate=2", *QUICK
    )
    assert ended.exit_code == 0, ended.output
    assert "tokens/s" in ended.output
    assert "changes the training result" not in ended.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "bert"], "no workload is called 'bert'"),
        (["--model", "mlp", "--lever", "ful"], "no lever is called 'ful'; did you mean 'full'?"),
        (["--model", "mlp", "--against", "absent:build"], "can't import absent"),
        (["--model", "mlp", "--optimizer", "adamx"], "no optimizer is called 'adamx'"),
        (["--model", "mlp", "--blocks", "layers.*"], "the pattern 'layers.*' matches no module"),
        (["--model", "mlp", "--steps", "0"], "0 is not in the range x>=1"),
        (
            ["--model", "mlp", "--peak", "fast"],
            "'fast' is not a peak: give TFLOP/s, such as 989, or 'measured'",
        ),
        (["--model", "mlp", "--peak", "-3"], "'-3' is not a peak"),
        (["--model", "mlp", "--plot", "absent/bench.png"], "create it first"),
        (
            ["--model", "bench_toys:small", "--against", "bench_toys:other"],
            "can't take the batch of bench_toys:small",
        ),
        ([], "give either --model, --trainer or --script"),
    ],
)
def test_wrong_usage_ends_with_2_and_one_message(run, toys, arguments, message):
    ended = run(*arguments, "--batch-size", "2")
    assert ended.exit_code == 2, ended.output
    assert message in " ".join(ended.output.split())
    assert "Traceback" not in ended.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_ends_with_status_3(run):
    assert run("--model", "mlp", "--device", "cuda").exit_code == 3


def test_bench_is_a_command_of_curry_train():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "template"), "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "curry_train", "bench", "--help"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "--lever" in done.stdout
