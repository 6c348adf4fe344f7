"""A step that does not fit the machine is not run: on shapes, or refused with a line.

python -m pytest tests/plan/test_available.py
"""

import sys

import pytest
import torch

from curry_train.plan import available
from curry_train.plan.available import missing_room
from curry_train.workloads import Case
from curry_train.workloads.models import transformer

from ..command_runs import flat, ran, results
from ..plan_models import ROUTED, estimated, net


@pytest.fixture
def no_room(monkeypatch):
    monkeypatch.setattr(available, "available_host_bytes", lambda: 2**20)


@pytest.mark.parametrize("workload", [transformer(depth=2, dim=64), net(64, 64)])
def test_a_step_is_refused_above_half_of_its_peak_and_not_above_the_peak(monkeypatch, workload):
    peak = estimated(workload, 8).peak_bytes

    def makes_missing(num_bytes):
        monkeypatch.setattr(available, "available_host_bytes", lambda: num_bytes)
        return missing_room(workload, lambda found: Case(found, batch_size=8)) is not None

    assert makes_missing(peak // 2)
    assert not makes_missing(peak)
    # No mode is left behind.
    assert torch.ones(1).item() == 1


def test_a_model_whose_shapes_need_values_is_let_through(no_room):
    assert missing_room(ROUTED, Case) is None


def test_tensors_of_the_users_file_keep_their_values(tmp_path):
    text = "import torch\nMASK = torch.eye(3)\ndef build(): return torch.nn.Linear(3, 3), MASK\n"
    (tmp_path / "masked.py").write_text(text)
    missing_room(f"{tmp_path}/masked.py:build", Case)
    assert type(sys.modules["masked"].MASK) is torch.Tensor


def test_a_model_that_does_not_fit_is_refused_and_not_made_with_values(
    no_room, monkeypatch, tmp_path
):
    """Its weights alone would fill the machine, and so would the forward that checks its batch."""
    (tmp_path / "large.py").write_text(
        "import torch\n"
        "from torch._subclasses.fake_tensor import FakeTensor\n"
        "def build():\n"
        "    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))\n"
        "    assert isinstance(model[0].weight, FakeTensor), 'made for real'\n"
        "    return model, torch.ones(2, 1024)\n"
    )
    monkeypatch.chdir(tmp_path)
    shown = ran("memory --model large.py:build")
    assert "run on shapes alone, a step of build with a batch of 2 takes at least" in shown.output
    for command in (
        "bench --model large.py:build",
        "validate --model large.py:build --gate sac/off",
        "savings --model large.py:build --out nowhere",
    ):
        words = flat(ran(command, status=2).output)
        assert "takes at least" in words
        assert "and 1.00 MiB is available: curry-train plan runs it on shapes alone" in words


def test_memory_runs_on_shapes_where_the_real_step_does_not_fit(no_room, monkeypatch):
    command = "memory --model mlp"
    monkeypatch.setattr(Case, "build", lambda case: pytest.fail("the model was built for real"))
    on_shapes = results(command)
    assert "takes at least" in on_shapes["on_shapes"]
    assert "on shapes alone" in flat(ran(command, "--on-shapes").output)
    monkeypatch.undo()
    real = results(command)
    assert real["on_shapes"] is None
    assert real["timeline"]["peak"] == on_shapes["timeline"]["peak"]
