"""One look at a model finds what several gates would fail on; a cause is printed once.

python -m pytest tests/gates/test_first_look.py
"""

import json

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils.checkpoint import checkpoint

from curry_train.cli.main import main
from curry_train.gates.first_look import FailureCause, explained, look
from curry_train.gates.recompute import compare_inactive
from curry_train.gates.verdict import Verdict
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


class Keeping(Body):
    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        if self.last is not None:
            x = x + self.last
        y = self.body(x)
        self.last = 0.1 * y.detach().mean().item()
        return y


class HoldingItsOutput(Body):
    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        self.last = self.body(x)
        return self.last


class HoldingItInADict(Body):
    def __init__(self):
        super().__init__()
        self.memories = {"potential": 0.0}

    def forward(self, x):
        self.memories["potential"] = self.body(x)
        return self.memories["potential"]


class Described(Body):
    """Adds the arguments of its constructor to its state, as neuraloperator's models do."""

    def state_dict(self, *args, **kwargs):
        return super().state_dict(*args, **kwargs) | {"described": {"activation": len}}


class Noisy(Body):
    def forward(self, x):
        return self.body(x + 0.1 * torch.randn_like(x))


class Compiled(Body):
    def __init__(self):
        super().__init__()
        for block in self.body:
            block.compile(backend="eager")


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList(torch.jit.script(nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x):
        for layer in self.body:
            x = layer(x)
        return x


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


class SparseWords(Body):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, WIDTH, sparse=True)

    def forward(self, x):
        return self.body(self.words((x[..., 0].abs() * 10).long().clamp(max=49)))


class Checkpointing(Body):
    def forward(self, x):
        for block in self.body:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Forces(Body):
    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.body(x).tanh().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


class FunctionalForces(Body):
    def forward(self, x):
        return torch.func.grad(lambda y: self.body(y).tanh().sum())(x)


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
    Keeping: "state stays in the model between calls: the loss of one batch changes from",
    HoldingItsOutput: "last: a tensor of the last call stays in the module",
    HoldingItInADict: "memories['potential']: a tensor of the last call stays in the module",
    Described: "model.described['activation']: a builtin_function_or_method can't be saved",
    Noisy: "the model draws random numbers in eval mode",
    Compiled: "body.0 to body.2 are compiled, scripted or wrapped already",
    Scripted: "body.0 to body.2: scripted, so neither hooks nor techniques reach",
    Frozen: "body.0 to body.2 run in eval mode or without gradients",
    PartlyUnused: "unused.0 to unused.2 are never called, so nothing has an effect: name blocks "
    "that run (--blocks); body.0 to body.2 run in eval mode",
    Quantized: "encoder.0 to encoder.2: no gradient comes back, so backward never recomputes",
    SparseWords: "words.weight: the gradient is sparse",
    Checkpointing: "body.0 to body.2 save nothing in forward: the model checkpoints by itself",
    Forces: "forward or loss takes derivatives of the model",
    FunctionalForces: "forward or loss takes derivatives with torch.func",
    Openers: "body.1 to body.3 write to their own input",
    lazy_body: "the model has lazy modules, which can't be built from shapes alone",
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
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


@pytest.mark.parametrize("kind", [Keeping, Noisy])
def test_recompute_off_judges_models_whose_calls_differ(kind):
    assert compare_inactive(case_of(kind)).passed


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
    finding = next(iter(look(case_of(SparseWords))))
    of_adamw = Verdict(
        "loss-spike/found", False, "raised RuntimeError: no Sparse gradients", "to run", "x"
    )
    assert explained(of_adamw, [finding]).passed is None
    lost = Verdict("checkpoint-policy/damage", False, "3 of 120 flips found", "120", "hash all")
    assert explained(lost, [finding]) is lost


FACTORIES = """
import sys

sys.path.insert(0, {folder!r})
from test_first_look import Checkpointing, Keeping, Scripted, Workload, dense, mean_square


def keeping():
    return Workload("keeping", Keeping, batch=dense, loss=mean_square)


def scripted():
    return Workload("scripted", Scripted, batch=dense, loss=mean_square)


def checkpointing():
    return Workload("checkpointing", Checkpointing, batch=dense, loss=mean_square)
"""


@pytest.fixture(scope="module")
def factories(tmp_path_factory):
    path = tmp_path_factory.mktemp("look") / "factories_of_causes.py"
    path.write_text(FACTORIES.format(folder=__file__.rpartition("/")[0]))
    return path


def validate(spec, path, *gates, status):
    words = [word for gate in gates for word in ("--gate", gate)]
    ended = CliRunner().invoke(main, ["validate", "--model", spec, *words, "--json", str(path)])
    assert ended.exit_code == status, ended.output
    return " ".join(ended.output.split()), json.loads(path.read_text())


def test_validate_prints_a_cause_once_and_gates_that_hold_stay_held(factories, tmp_path):
    gates = ("grad-accum/equal", "grad-accum/uneven", "recompute/off")
    output, data = validate(f"{factories}:keeping", tmp_path / "a.json", *gates, status=0)
    assert output.count(FINDINGS[Keeping]) == 1
    assert "1 held, 0 failed, 2 not applicable" in output
    assert "n/a: cause 1" in output
    (found,) = data["findings"]["keeping"]
    assert [row["hint"] for row in data["results"][:2]] == [found["text"]] * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_gates_on_scripted_blocks_are_not_applicable(factories, tmp_path):
    gates = ("recompute/parity-full", "recompute/flops", "sac/parity-sac")
    output, _ = validate(f"{factories}:scripted", tmp_path / "c.json", *gates, status=2)
    assert "0 held, 0 failed, 3 not applicable" in output
    assert output.count("scripted, so neither hooks nor techniques reach") == 2


def test_a_run_in_which_nothing_could_be_judged_does_not_succeed(factories, tmp_path):
    gates = ("recompute/memory", "recompute/parity-full")
    spec = f"{factories}:checkpointing"
    output, _ = validate(spec, tmp_path / "b.json", *gates, status=2)
    assert "0 held, 0 failed, 2 not applicable" in output
    assert "nothing was checked" in output
