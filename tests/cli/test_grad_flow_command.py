"""The command `grad-flow`: its table, JSON, picture and exit status.

python -m pytest tests/cli/test_grad_flow_command.py
"""

import functools
from pathlib import Path

from matplotlib.colors import to_rgb
from matplotlib.image import imread

from curry_train.cli.figures import NONFINITE_COLOUR, ZERO_COLOUR

from ..command_runs import ran, read_json, require_narrow, results

OWN = """
import torch
from torch import nn

class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {"out": torch.sqrt(x - x)}  # whose derivative is infinite at 0

def build():
    root = Root()
    for parameter in root.layers[0].parameters():
        nn.init.zeros_(parameter)
    return root, torch.randn(4, 4)
"""


run = functools.partial(ran, "grad-flow --device cpu")


def test_the_table_is_at_most_80_columns_wide_and_opens_with_what_is_wrong():
    ended = run("--model transformer --steps 2 --learning-rate 0.05")
    lines = ended.output.splitlines()
    assert lines[1].startswith("update      ")
    assert "moves far" in lines[1]
    require_narrow(ended.output)
    assert sum(line.startswith("layers.") for line in lines) <= 24


def test_json_has_every_step_and_layer():
    data = results("grad-flow --device cpu --model mlp --steps 4 --layers *.0")
    assert {"command", "device", "workload"} <= data.keys()
    assert len(data["losses"]) == 4
    assert [step["step"] for step in data["steps"]] == [0, 1, 2, 3]
    assert list(data["steps"][0]["layers"]) == [f"{index}.0" for index in range(6)]


def test_a_non_finite_gradient_ends_with_status_1_and_names_the_layer():
    Path("own_model.py").write_text(OWN)
    ended = run("--model own_model:build --steps 2 --json own.json --plot own.png", status=1)
    pixels = imread("own.png")[..., :3]
    for colour in (NONFINITE_COLOUR, ZERO_COLOUR):
        assert (abs(pixels - list(to_rgb(colour))).max(-1) < 0.02).sum() > 5000
    assert ended.output.splitlines()[1].startswith("nonfinite   layers.1")
    assert read_json("own.json")["steps"][0]["gradient"]["norm"] == "nan"


def test_a_report_on_a_script_says_that_its_loop_was_not_run():
    Path("loop.py").write_text(SCRIPT)
    assert "curry-train preflight checks your loop" in run("--script loop.py --steps 2").output
    assert "preflight" not in run("--model mlp --steps 2").output


SCRIPT = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
