"""Gates of accumulation hold for every right loop and model, and fail on planted faults.

python -m pytest tests/gates/test_grad_accum.py
"""

from dataclasses import replace

import odd_models
import pytest
import torch
from saboteurs import case_of, faults
from torch import nn

from curry_train.gates import grad_accum
from curry_train.gates.implementation import load_implementation
from curry_train.gates.two_ranks import verdict_of_ranks
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case, Workload

GATES = {gate.name.partition("/")[2]: gate for gate in grad_accum.GATES}
IN_PROCESS = [name for name in GATES if name != "two-ranks"]


@pytest.mark.parametrize("name", IN_PROCESS)
@pytest.mark.parametrize("model", BUILTIN_WORKLOADS)
def test_gates_hold_on_built_in_workloads(model, name):
    verdict = GATES[name].run(Case(load_workload(model)))
    assert verdict.passed, verdict


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gates_hold_with_dropout_and_on_the_device(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    case = Case(transformer(dropout=0.1), device=torch.device(device))
    for name in IN_PROCESS:
        verdict = GATES[name].run(case)
        assert verdict.passed, verdict


# Implementations that are not ours, with the gates that don't apply to them.


@pytest.mark.filterwarnings("ignore::UserWarning:accelerate")
@pytest.mark.parametrize(
    ("function", "left_out"),
    [
        ("by_hand", ["once", "scaled"]),
        ("with_clipping", []),
        ("by_accelerate", ["scaled"]),
    ],
)
def test_a_users_loop_passes_every_gate_that_applies(function, left_out):
    given = load_implementation(f"train_window=foreign_grad_accum:{function}")
    case = Case(load_workload("transformer"))
    verdicts = {
        name: gate.run(case, [given])
        for name, gate in GATES.items()
        if "train_window" in gate.takes
    }
    assert len(verdicts) == 7
    for name, verdict in verdicts.items():
        assert verdict.passed is (None if name in left_out else True), verdict
        assert ("implementation" in verdict.ran) == (name not in left_out)


@pytest.mark.parametrize("saboteur", faults("faulty_accumulation"), ids=str)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_gate_catches(saboteur):
    saboteur.check()


# Models of unusual form.


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("model", ["counting", "counting_in_python", "parallel", "derived"])
def test_gates_hold_on_models_of_unusual_form(model, name):
    verdict = GATES[name].run(odd_models.case_of(model))
    assert verdict.passed, verdict


@pytest.mark.parametrize("model", ["counted", "counted_in_python", "random_in_eval"])
def test_a_model_that_gives_another_loss_each_time_is_named(model):
    for name in ("equal", "once", "scaled", "own-loop"):
        verdict = GATES[name].run(odd_models.case_of(model))
        assert verdict.passed is None
        assert "for the same batch in eval mode" in verdict.hint
        assert ("such as 0.calls" in verdict.hint) == (model == "counted")


class Steep(nn.Module):
    """A product of layers, whose gradients are thousands of times as large as its weights."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return 100 * self.layer(x) ** 3


def test_a_model_with_large_gradients_trains_through_several_windows():
    workload = Workload("steep", Steep, odd_models.make_batch, odd_models.squared_sum)
    for name in ("short-window", "once"):
        verdict = GATES[name].run(Case(workload))
        assert verdict.passed, verdict


def test_the_dtype_that_is_asked_for_changes_the_figures():
    for name in ("equal", "scaled", "random"):
        exact = GATES[name].run(case_of("small"))
        rounded = GATES[name].run(replace(case_of("small"), dtype=torch.bfloat16))
        assert exact.passed, exact
        assert rounded.passed, rounded
        assert exact.required != rounded.required


def test_a_wrapper_that_rank_1_alone_refuses_is_not_compared():
    def figure(found):
        return True, f"error {max(one['error'] for one in found)}"

    held, refused = {"error": 0.5}, {"refused": "no DDP here"}
    results = [{"DDP": held, "FSDP2": held}, {"DDP": refused, "FSDP2": held}]
    options = {"required": "1", "figure": figure, "hint": ""}
    verdict = verdict_of_ranks("a/two-ranks", results, **options)
    assert verdict.passed
    assert verdict.measured == "DDP not compared: no DDP here; FSDP2 error 0.5"
    results = [{"DDP": held, "FSDP2": refused}, {"DDP": refused, "FSDP2": held}]
    assert verdict_of_ranks("a/two-ranks", results, **options).passed is None
