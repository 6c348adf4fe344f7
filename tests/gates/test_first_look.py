"""One look at a model finds what several gates would fail on; a cause is printed once.

python -m pytest tests/gates/test_first_look.py
"""

import json

import constructs
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from curry_train.cli.main import main
from curry_train.gates.first_look import FailureCause, explained, look
from curry_train.gates.recompute import compare_inactive
from curry_train.gates.verdict import Verdict
from curry_train.workloads.models import load_workload
from curry_train.workloads.workload import Case, Workload

WIDTH = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)
        )

    def forward(self, x):
        return x + self.inner(x)


class Body(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.body = nn.Sequential(*(block() for _ in range(3)))

    def forward(self, x):
        return self.body(x)


class LazyBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.LazyLinear(64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x):
        return x + self.inner(x)


class Frozen(Body):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.body.eval()(x))


class OtherBlock(Block):
    """The same as a block, and another kind of one."""


class PartlyUnused(Frozen):
    """Of its blocks one kind runs in eval mode, and the other never."""

    def __init__(self):
        super().__init__()
        self.unused = nn.ModuleList(OtherBlock() for _ in range(3))


class Quantized(nn.Module):
    """No gradient passes the rounding, so the encoder gets none."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*(Block() for _ in range(3)))
        self.decoder = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x):
        return self.decoder(self.encoder(x).detach().round())


class OpensInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(self.act(x))


class Openers(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(OpensInPlace() for _ in range(3)))

    def forward(self, x):
        return self.body(x)


def dense(size):
    return torch.randn(size, 6, WIDTH)


def ragged(size):
    return torch.nested.nested_tensor(
        [torch.randn(3 + row % 2, WIDTH) for row in range(size)], layout=torch.jagged
    )


def mean_square(model, batch):
    output = model(batch)
    return (output.values() if output.is_nested else output).square().mean() * len(batch)


def case_of(kind, batch=dense):
    return Case(Workload(kind.__name__, kind, batch=batch, loss=mean_square))


def lazy_body():
    return Body(LazyBlock)


FINDINGS = {
    Frozen: "body.0 to body.2 run in eval mode or without gradients",
    PartlyUnused: "unused.0 to unused.2 are never called, so nothing has an effect: name blocks "
    "that run (--blocks); body.0 to body.2 run in eval mode",
    Quantized: "encoder.0 to encoder.2: no gradient comes back, so backward never recomputes",
    Openers: "body.1 to body.3 write to their own input",
    lazy_body: "the model has lazy modules, which can't be built from shapes alone",
}


@pytest.mark.parametrize("kind", FINDINGS)
def test_each_cause_is_found_alone(kind):
    (finding,) = look(case_of(kind))
    assert finding.text.startswith(FINDINGS[kind])
    assert finding.gates


def test_nested_tensors_are_found():
    (finding,) = look(case_of(Body, ragged))
    assert finding.text.startswith("the batch has nested tensors")


def test_nothing_is_found_in_a_model_that_gates_can_judge():
    assert look(case_of(Body)) == ()


def test_lazy_modules_have_the_same_parameters_in_each_build():
    case = case_of(lazy_body)
    one, other = ([*case.build().parameters()] for _ in range(2))
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("make", [constructs.every_second, constructs.noisy_loss])
def test_recompute_off_judges_models_whose_calls_differ(make):
    assert compare_inactive(Case(make())).passed


@pytest.mark.parametrize(
    "name", ["keeps_last", "spectral", "compiled", "scripted", "checkpoints_all", "sparse"]
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_each_cause_of_a_construct_is_found_alone(name):
    assert len(look(Case(load_workload(f"constructs:{name}")))) == 1


def test_only_a_failure_is_explained():
    finding = FailureCause("the cause", ("sac/*",))
    failed = Verdict("sac/products", False, "1", "2", "mend it")
    assert explained(failed, [finding]).passed is None
    assert explained(failed, [finding]).hint == "the cause"
    held = Verdict("sac/products", True, "2", "2")
    assert explained(held, [finding]) is held
    other = Verdict("recompute/off", False, "1", "2", "mend it")
    assert explained(other, [finding]) is other


def test_a_failure_for_another_reason_is_not_explained_by_sparse_gradients():
    (finding,) = look(Case(constructs.sparse()))
    of_adamw = Verdict(
        "loss-spike/found", False, "raised RuntimeError: no Sparse gradients", "to run", "x"
    )
    assert explained(of_adamw, [finding]).passed is None
    lost = Verdict("checkpoint-policy/damage", False, "3 of 120 flips found", "120", "hash all")
    assert explained(lost, [finding]) is lost


def validate(spec, path, *gates, status):
    words = [word for gate in gates for word in ("--gate", gate)]
    ended = CliRunner().invoke(main, ["validate", "--model", spec, *words, "--json", str(path)])
    assert ended.exit_code == status, ended.output
    return " ".join(ended.output.split()), json.loads(path.read_text())


def test_validate_prints_a_cause_once_and_gates_that_hold_stay_held(tmp_path):
    gates = ("sac/parity-regions", "loss-spike/recovered", "recompute/off")
    output, data = validate("constructs:own_generator", tmp_path / "a.json", *gates, status=0)
    assert output.count("layers.0.generator to layers.2.generator: state stays") == 1
    assert "1 held, 0 failed, 2 not applicable" in output
    assert output.count("n/a: cause 1") == 2
    (found,) = data["findings"]["own_generator"]
    assert [row["hint"] for row in data["results"] if not row["passed"]] == [found["text"]] * 2


def test_a_run_in_which_nothing_could_be_judged_does_not_succeed(tmp_path):
    gates = ("recompute/memory", "sac/products")
    output, _ = validate("constructs:checkpoints_all", tmp_path / "b.json", *gates, status=2)
    assert "0 held, 0 failed, 2 not applicable" in output
    assert "nothing was checked" in output
