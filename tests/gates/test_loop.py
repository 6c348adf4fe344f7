"""The checks of a user's loop find planted faults at their line, and pass healthy loops.

Run: `python -m pytest tests/gates/test_loop.py`.
"""

import gc
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from curry_train.gates import loop_trace
from curry_train.gates.loop import CHECKS, preflight

from . import faulty_loops, healthy_loops, known_bugs, loops

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of some of these faults itself


def failed(train):
    torch.manual_seed(0)
    return {
        verdict.gate.removeprefix("loop/"): verdict
        for verdict in preflight(train)
        if verdict.passed is False
    }


@pytest.mark.parametrize("train", [*loops.HEALTHY, *healthy_loops.HEALTHY])
def test_a_healthy_loop_passes(train):
    assert failed(train) == {}


@pytest.mark.parametrize(
    ("check", "train"),
    [
        (check, one)
        for module in (loops, faulty_loops, known_bugs)
        for check, faulty in module.FAULTY.items()
        for one in faulty
    ],
)
def test_a_fault_is_found_at_its_line(check, train):
    found = failed(train)
    assert check in found, found
    assert found[check].measured.startswith(f"{loops.wrong_line(train)}: ")
    assert found[check].hint


def test_a_parameter_without_elements_passes():
    model = loops.classifier()
    model.empty = nn.Parameter(torch.ones(0))
    assert not failed(
        lambda: loops.fit(model, loss=lambda *one: F.cross_entropy(*one) + model.empty.sum())
    )


def test_another_file_with_a_variable_of_that_name_hides_no_growth(tmp_path, monkeypatch):
    other = tmp_path / "other.py"
    other.write_text("outputs = [1]\noutputs.pop()\n")
    monkeypatch.setitem(sys.modules, "other", SimpleNamespace(__file__=str(other)))
    assert "growth" in failed(faulty_loops.cache_of_outputs)


class ByKeywords(nn.Linear):
    def forward(self, given, *, module, call):
        return F.dropout(input=super().forward(given), p=0.1)


def called_by_keywords():
    torch.manual_seed(seed=0)
    model, sparse = ByKeywords(8, 5), nn.Linear(8, 5)
    sparse.register_forward_hook(lambda *called: called[-1].to_sparse())
    optimizer = loops.adamw(model)
    for inputs, labels in loops.loader():
        logits = model(inputs.requires_grad_(), module=1, call=2)
        torch.max(input=logits, dim=1)
        torch.normal(mean=logits, std=1.0)
        F.soft_margin_loss(input=logits[:0], target=logits[:0].detach())
        sparse(torch.ones(2, 8))
        (slope,) = torch.autograd.grad(logits.sum(), inputs, None, True, True)
        loops.step(optimizer, F.cross_entropy(logits, labels) + slope.square().mean())


def test_arguments_reach_torch_however_they_are_passed():
    assert failed(called_by_keywords) == {}


def test_a_second_epoch_is_seen_however_long_the_imports_take(monkeypatch):
    moments = [0.0]

    def late():
        moments[0] = 60.0
        model, optimizer = loops.started()
        data = loops.loader(96)
        for _ in range(4):
            torch.manual_seed(0)
            loops.fit(model, optimizer, data)

    monkeypatch.setattr(loop_trace, "time", SimpleNamespace(monotonic=lambda: moments[0]))
    assert "data" in failed(late)


def test_a_heap_that_is_frozen_stays_so():
    num_others = len(gc.get_objects())
    failed(loops.plain)
    # A few of them have gone by themselves.
    assert len(gc.get_objects()) < 10 * num_others


def test_each_check_finds_a_fault():
    assert {*loops.FAULTY, *faulty_loops.FAULTY} == {*CHECKS}
