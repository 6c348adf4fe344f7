"""Layers that grad-flow probes, the parameters of each, and layers without a figure.

python -m pytest tests/primitives/test_grad_flow_layers.py
"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from curry_train.plan.rank_step import one_rank
from curry_train.primitives import GradFlow, grad_flow_probe
from curry_train.primitives.grad_flow_probe import group_of_batch


def probe(model, x, *, loss=lambda out: out.sum(), **options):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with GradFlow(model, optimizer, every=1, **options) as flow:
        loss(model(x)).backward()
        optimizer.step()
    return flow.records[0]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def test_tied_weights_are_counted_once():
    model = Tied()
    record = probe(model, torch.arange(8), loss=lambda out: out.square().sum())
    norm = model.embedding.weight.grad.double().norm().item()
    assert record.gradient.norm == pytest.approx(norm)
    assert record.layers["embedding"].gradient.norm == pytest.approx(norm)
    assert record.layers["head"].gradient is None
    assert record.layers["head"].tied == ("embedding.weight",)
    assert record.layers["head"].calls == 1


def test_frozen_and_unreached_parameters_are_named_instead_of_counted_as_0():
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("frozen", "used", "unused")})
    model["frozen"].requires_grad_(False)
    model.forward = lambda x: model["used"](model["frozen"](x))
    record = probe(model, torch.randn(2, 4))
    assert record.layers["frozen"].gradient is None
    assert record.layers["frozen"].frozen == ("frozen.weight", "frozen.bias")
    unused = record.layers["unused"]
    assert unused.activation is None
    assert unused.calls == 0
    assert unused.gradient is None
    assert unused.without_gradient == ("unused.weight", "unused.bias")
    assert record.gradient.elements == 20


@pytest.mark.parametrize(
    ("pattern", "names"), [("first", ["first"]), (["f*", "used"], ["first", "frozen", "used"])]
)
def test_layers_are_chosen_by_patterns_and_ordered_as_their_forwards_end(pattern, names):
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("first", "frozen", "used", "unused")})
    model.forward = lambda x: model["used"](model["first"](model["frozen"](x)))
    record = probe(model, torch.randn(2, 4), layers=pattern)
    assert list(record.layers) == names
    assert record.order == tuple(name for name in ("frozen", "first", "used") if name in names)


@dataclass
class Out:
    first: torch.Tensor
    count: int


class Several(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner, self.kind = nn.Linear(4, 4), kind

    def forward(self, x):
        y = self.inner(x)
        outputs = {
            "tuple": lambda: (y, torch.arange(3), None),
            "dict": lambda: {"hidden": y, "again": y},
            "dataclass": lambda: Out(y, 3),
        }
        return outputs[self.kind]()


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass"])
def test_outputs_of_every_structure_are_counted_once(kind):
    model = nn.ModuleDict({"block": Several(kind)})
    model.forward = lambda x: model["block"](x)
    first = {
        "tuple": lambda out: out[0],
        "dict": lambda out: out["hidden"],
    }
    loss = first.get(kind, lambda out: out.first)
    record = probe(model, torch.randn(2, 4), loss=lambda out: loss(out).sum(), layers="*")
    assert record.layers["block"].activation.elements == 8
    assert record.layers["block"].activation == record.layers["block.inner"].activation


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GradFlow(nn.Linear(2, 2)), "has no module with parameters to probe"),
        (
            lambda: GradFlow(nn.Sequential(nn.Linear(2, 2)), layers="layers.*"),
            "layers 'layers.*' matches no module",
        ),
        (
            lambda: GradFlow(nn.Sequential(nn.LazyLinear(2))),
            "run one batch through the model first",
        ),
        (
            lambda: GradFlow(nn.DataParallel(nn.Sequential(nn.Linear(2, 2)))),
            "use DistributedDataParallel",
        ),
        (
            lambda: GradFlow(nn.Sequential(nn.Linear(2, 2)), "adam"),
            "an optimizer is needed, got str",
        ),
        (
            lambda: GradFlow(
                nn.Sequential(nn.Linear(2, 2)), torch.optim.SGD(nn.Linear(2, 2).parameters())
            ),
            "SGD holds no parameter of this model",
        ),
        (
            lambda: GradFlow(nn.Sequential(nn.Linear(2, 2)), scaler=1024.0),
            "scaler must be a GradScaler, got float",
        ),
    ],
)
def test_wrong_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message.replace("*", "[*]")):
        make()


def test_the_ranks_that_share_a_batch_are_those_of_the_wrapper():
    def linear():
        return nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def sharded(mesh):
        return fully_shard(linear(), mesh=mesh)

    assert group_of_batch(linear()) is None  # no process group
    with one_rank({"dp": 4}) as mesh:
        group = mesh.get_group()
        assert group_of_batch(linear()) is None
        assert group_of_batch(sharded(mesh)) is group
        replicated = nn.parallel.DistributedDataParallel(linear(), process_group=group)
        assert group_of_batch(replicated) is group
    with one_rank({"replicate": 2, "shard": 2}) as mesh:
        assert group_of_batch(sharded(mesh)) is None  # two groups share a batch


def test_a_forward_inside_a_transform_is_not_counted():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(weights, sample):
        return torch.func.functional_call(model, weights, (sample[None],)).sum()

    with GradFlow(model, optimizer, every=1) as flow:
        model(x).sum().backward()
        weights = dict(model.named_parameters())
        torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
        optimizer.step()
    (record,) = flow.records
    assert [layer.calls for layer in record.layers.values()] == [1, 1]
    assert all(layer.activation.elements == 12 for layer in record.layers.values())


@pytest.mark.parametrize("most", [7, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_counted_in_pieces_of_a_strided_tensor(monkeypatch, most, dtype):
    tensor = torch.randn(9, 30).to(dtype).relu().T  # strided, with zeros
    tensor[3, 5], tensor[4, 5], tensor[20, 1] = float("inf"), float("nan"), -float("inf")
    monkeypatch.setattr(grad_flow_probe, "CPU_PIECE_ELEMENTS", most)
    for part in (tensor, tensor[5:20], tensor[:0]):
        elements, zeros, bad, squares = grad_flow_probe.sums_of(part).tolist()
        assert (elements, zeros) == (part.numel(), (part == 0).sum())
        assert bad == (~part.isfinite()).sum()
        expected = part.double().square().sum().item()
        assert squares == pytest.approx(expected, nan_ok=True)
