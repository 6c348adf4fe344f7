"""Losses of models that compute none: every output counts, and no gradient vanishes.

python -m pytest tests/workloads/test_default_loss.py
"""

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

from curry_train.gates.grad_accum import compare_windows
from curry_train.primitives import train_window
from curry_train.workloads import Case
from curry_train.workloads.workload import LabelCount, default_workload, take

from ..plan_models import Runs
from ..toy_steps import drawn

X = drawn(8, 6, seed=0)
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    left: torch.Tensor
    right: torch.Tensor
    note: str = "a text"


def towers(contain):
    """Return two towers, whose outputs are returned in one container."""

    def run(inner, x):
        left, right = inner
        return contain(left(x), right(x))

    return Runs(run, nn.Linear(6, 4), nn.Linear(6, 3))


CONTAINERS = {
    "nested": lambda left, right: {"first": [left, None], "second": ({"third": right}, 3)},
    "dataclass": Output,
    "object": lambda left, right: SimpleNamespace(left=left, right=right, note="a text"),
    "distribution": lambda left, right: [
        torch.distributions.Normal(left, 1.0),
        torch.distributions.Categorical(logits=right),
    ],
}


def gradients(module, batch=X):
    default_workload("theirs", lambda: module, (module, batch)).loss(module, batch).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_output_has_a_gradient_in_any_container(name):
    found = gradients(towers(CONTAINERS[name]))
    assert len(found) == 4
    for gradient in found.values():
        assert gradient.norm() > 0.01


def ended(end):
    """Return a layer with what ends the model."""
    return Runs(lambda inner, x: end(inner[0](x)), nn.Linear(6, 8))


def learned(build, batch):
    """Make a workload as a factory's, which runs one forward when it is loaded."""
    workload = default_workload("theirs", build, (build(), batch))
    workload.loss.learn(build(), workload.batch)
    return workload


ENDS = {
    "layer norm": nn.LayerNorm(8, elementwise_affine=False),
    "unit length": F.normalize,
    "softmax": nn.Softmax(dim=1),
    "norm over channels": lambda y: F.layer_norm(y.view(-1, 2, 4).mT, (2,)).mT,
    "spectrum": lambda y: torch.fft.rfft(F.normalize(y)),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_gradient_does_not_vanish_where_outputs_are_normalised(name):
    torch.manual_seed(0)
    found = gradients(ended(ENDS[name]))
    assert found["inner.0.weight"].norm() > 0.01, name
    assert found["inner.0.bias"].norm() > 0.01, name


def test_an_output_of_zeros_has_a_gradient():
    """As of diffusion models and adapters, whose last layer is zero at first."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    for parameter in model[1].parameters():
        nn.init.zeros_(parameter)
    assert gradients(model)["1.weight"].norm() > 0.01


def recurrent():
    """A model whose outputs have the samples in the first and in the second dimension."""
    return nn.LSTM(6, 5, num_layers=2, batch_first=True), drawn(8, 3, 6)


def jagged(inner, x):
    """Return outputs of different lengths, with the samples in one nested tensor."""
    lengths = [1 + int(row.abs().sum() * 10) % 3 for row in x.detach()]
    rows = [inner[0](row).expand(length, -1) for row, length in zip(x, lengths, strict=True)]
    return {"nested": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}


def slope(inner, x):
    """Return a gradient, which a forward can't compute without gradients."""
    y = inner[0](x)
    return torch.autograd.grad(y.cos().sum(), y, create_graph=True)


def packed():
    rows = [drawn(length, 6, seed=place) for place, length in enumerate((5, 3, 3, 1, 2, 2, 4, 1))]
    return nn.LSTM(6, 5, num_layers=2), pack_sequence(rows, enforce_sorted=False)


@pytest.mark.parametrize(
    "make",
    [
        recurrent,
        packed,
        lambda: (Runs(jagged, nn.Linear(6, 5)), X),
        lambda: (towers(CONTAINERS["nested"]), X),
        lambda: (towers(lambda left, right: (left, right, (left * 0).sum() + 2)), X),
        lambda: (Runs(slope, nn.LazyLinear(5)), X),
    ],
    ids=["recurrent", "packed", "jagged", "nested", "constant", "slope"],
)
def test_the_loss_of_a_batch_is_the_sum_over_its_samples(make):
    module, batch = make()
    module.double()
    batch = batch.to(torch.float64)
    workload = learned(lambda: module, batch)
    whole = workload.loss(module, batch)
    for sizes in ([1] * 8, [2] * 4, [3, 2, 1, 2]):
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        parts = [
            workload.loss(module, take(batch, slice(end - size, end)))
            for size, end in zip(sizes, ends, strict=True)
        ]
        assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-12)


@pytest.mark.parametrize(
    "contain",
    [
        lambda left, right: {"loss": left.square().mean(), "logits": right},
        lambda left, right: SimpleNamespace(loss=left.square().mean(1), logits=right),
        lambda left, right: (left.square().mean(), right),
        lambda left, right: {"first": left.square().mean() / 4, "second": left.square().mean(0)[0]},
    ],
    ids=["mapping", "loss of each sample", "tuple", "several losses"],
)
def test_a_loss_of_the_module_is_taken_and_other_outputs_are_not(contain):
    module = towers(contain)
    found = gradients(module)
    assert found["inner.0.weight"].norm() > 0.01
    assert found["inner.1.weight"] is None
    loss = default_workload("theirs", lambda: module, (module, X)).loss(module, X).item()
    if isinstance(output := module(X), SimpleNamespace):
        assert loss == pytest.approx(output.loss.sum().item())
    elif isinstance(output, tuple):
        assert loss == pytest.approx(8 * output[0].item())


def last_alone(model, window, loss, optimizer, **options):
    def only_last(model, batch):
        value = loss(model, batch)
        return len(window) * value if batch is window.microbatches[-1] else value * 0

    return train_window(model, window, only_last, optimizer, **options)


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_microbatches_differ_though_the_factory_has_few_samples(rows):
    case = Case(learned(lambda: towers(Pair), X[:rows]))
    *_, hint = compare_windows(case, hint="differs")
    assert not hint
    *_, hint = compare_windows(case, train_window=last_alone, hint="differs")
    assert hint


def test_uneven_rows_count_by_label_where_a_prompt_is_in_front_of_them():
    """Prompt tuning puts virtual tokens in front, so that a row's first label is a target too."""

    def run(inner, tokens, labels):
        logits = F.pad(inner[0](tokens), (0, 0, 3, 0))[:, :-1].flatten(0, 1)
        return {"loss": F.cross_entropy(logits, F.pad(labels, (2, 0), value=-100).flatten())}

    module = type("PromptForCausalLM", (Runs,), {})(run, nn.Embedding(7, 7))
    tokens = torch.randint(7, (4, 6))
    batch = {"tokens": tokens, "labels": tokens}
    workload = default_workload("prompt", lambda: module, (module, batch))
    uneven = workload.mask(workload.batch(4))
    parts = [take(uneven, [row]) for row in range(4)]
    whole = workload.loss(module, uneven)
    assert sum(workload.loss(module, part) for part in parts).item() == pytest.approx(whole.item())


def test_only_labels_of_tokens_are_masked():
    labels = torch.ones(3, 4)
    for one in (labels[0].long(), labels[None].long(), labels):
        assert LabelCount().mask({"labels": one})["labels"] is one
    masked = LabelCount().mask({"labels": labels.long()})["labels"]
    assert (masked != -100).sum(1).tolist() == [2, 3, 4]
