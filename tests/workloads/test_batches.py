"""Batches and parameters of every common kind are taken as they are, or refused in one line.

python -m pytest tests/workloads/test_batches.py
"""

import types
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from curry_train.gates import discover
from curry_train.workloads import Case, WorkloadError, load_workload
from curry_train.workloads.workload import (
    IndivisibleBatch,
    batch_size,
    batches_like,
    default_workload,
    map_tensors,
    take,
)

from ..command_runs import ran
from ..plan_models import Runs, squares
from ..toy_steps import activated, all_equal, stacked

Pair = namedtuple("Pair", ["inputs", "targets"])


@dataclass(frozen=True)
class Frozen:
    inputs: torch.Tensor
    name: str = "words"


class Movable:
    """A container with `to` that hides its tensors, as an extension type does."""

    def __init__(self, inputs):
        self.get = lambda: inputs

    def to(self, device, dtype=None):
        return Movable(self.get().to(device, dtype))


class Slotted:
    """An object without a dictionary of attributes."""

    __slots__ = ("__weakref__", "inputs", "name")

    def __init__(self, inputs):
        self.inputs = inputs
        self.name = "words"


class Nested:
    """An object whose tensors stand in a container and in another object."""

    def __init__(self, inputs):
        self.parts = {"first": Slotted(inputs), "second": [inputs]}


INPUTS = torch.arange(12.0).reshape(4, 3)


@pytest.mark.parametrize(
    "batch",
    [
        Pair(INPUTS, INPUTS + 1),
        Frozen(INPUTS),
        OrderedDict(inputs=INPUTS, name="words"),
        Slotted(INPUTS),
        Nested(INPUTS),
        [INPUTS, (INPUTS, {"more": INPUTS})],
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_container_keeps_its_type_and_is_cut_by_samples(batch):
    assert type(map_tensors(batch, lambda tensor: tensor * 2)) is type(batch)
    assert batch_size(batch) == 4
    half = take(batch, slice(1, 3))
    assert type(half) is type(batch)
    found = []
    map_tensors(half, found.append)
    assert all(torch.equal(tensor - tensor[0, 0], INPUTS[1:3] - INPUTS[1, 0]) for tensor in found)


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_a_packed_sequence_is_cut_into_its_sequences(enforce_sorted):
    sequences = [torch.full((length, 2), float(length)) for length in (4, 2, 1)]
    if not enforce_sorted:
        sequences = sequences[::-1]
    packed = pack_sequence(sequences, enforce_sorted=enforce_sorted)
    assert batch_size((packed, torch.zeros(3))) == 3
    cut, targets = take((packed, torch.arange(3)), [2, 0])
    assert targets.tolist() == [2, 0]
    assert all_equal(unpack_sequence(cut), [sequences[2], sequences[0]])


class Graphs:
    """Graphs as one object, in the manner of a library: it makes batches and takes them apart."""

    def __init__(self, graphs):
        self.graphs = graphs

    def to(self, device):
        return Graphs([graph.to(device) for graph in self.graphs])

    def to_data_list(self):
        return self.graphs

    @classmethod
    def from_data_list(cls, graphs):
        return cls(graphs)


def test_a_batch_of_graphs_is_cut_into_its_graphs():
    batch = Graphs([torch.ones(nodes, 2) for nodes in (3, 1, 2)])
    assert batch_size(batch) == 3
    assert [len(graph) for graph in take(batch, slice(1, 3)).graphs] == [1, 2]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_nested_tensor_is_a_batch_that_can_not_be_divided(layout):
    nested = torch.nested.nested_tensor([torch.ones(3, 2), torch.zeros(1, 2)], layout=layout)
    assert batch_size(nested) == 2
    batch, is_divisible = batches_like(nested)
    assert not is_divisible
    assert batch(2) is nested
    with pytest.raises(IndivisibleBatch, match=r"^a nested tensor can.t be divided"):
        batch(1)


def reading():
    """Return a model that takes its inputs out of an object."""
    return Runs(lambda inner, batch: inner[0](batch.get()), stacked(lambda: activated(3), 3))


def reads():
    return reading(), Movable(torch.randn(8, 3))


class Applied(Movable):
    """A container that applies a function to its tensors, as PyG's data objects do."""

    def apply(self, function):
        inputs = function(self.get())
        self.get = lambda: inputs
        return self


def test_the_dtype_reaches_tensors_inside_of_objects_or_is_refused():
    case = Case(squares(reading), dtype=torch.bfloat16)
    sequence = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    assert case.place(sequence).data.dtype is torch.bfloat16
    before = Applied(INPUTS)
    assert case.place({"x": [before]})["x"][0].get().dtype is torch.bfloat16
    assert before.get().dtype is torch.float32
    assert case.place(pack_sequence([torch.ones(3, dtype=torch.int64)])).data.dtype is torch.int64
    with pytest.raises(WorkloadError, match=r"tensors in a Movable can't be made torch.bfloat16"):
        case.place(Movable(INPUTS))


def empty():
    return reading(), Frozen(torch.randn(0, 3))


def test_an_object_that_can_not_be_cut_is_taken_whole():
    workload = load_workload(f"{__file__}:reads")
    assert workload.own_batch == 1
    case = Case(workload, batch_size=1)
    case.workload.mean_loss(case.build(), case.batch()).backward()
    with pytest.raises(IndivisibleBatch, match="return a Workload whose batch makes one of any"):
        case.batch(2)
    (gate,) = [one for one in discover(["grad-accum"]) if one.name == "grad-accum/equal"]
    verdict = gate.run(case)
    assert verdict.passed is None
    assert "type Movable can't be divided into samples" in verdict.hint


def test_an_object_that_can_not_be_cut_sets_the_batch_size_of_commands():
    line = f"validate --model {__file__}:reads --gate recompute/parity-full"
    ran(line)
    refused = ran(line, "--batch-size 3", status=2)
    assert "reads has one batch of 1, which can't be divided" in refused.output


GRAPH = """
import torch
from torch import nn

class Neighbours(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, nodes, edges):
        for layer in self.layers:
            nodes = nodes + torch.tanh(layer(nodes)).index_select(0, edges[0])
        return nodes

def build():
    return Neighbours(), (torch.randn(6, 4), torch.stack([torch.arange(6).flip(0)] * 2))
"""


def test_rows_that_belong_together_are_one_batch(tmp_path):
    path = tmp_path / "graph.py"
    path.write_text(GRAPH)
    workload = load_workload(f"{path}:build")
    assert not workload.is_divisible
    assert workload.own_batch == 6
    nodes, edges = workload.batch(6)
    assert (nodes.shape, edges.shape) == ((6, 4), (2, 6))
    with pytest.raises(IndivisibleBatch, match="its own batch of 6 alone, and one of 2 is"):
        workload.batch(2)
    case = Case(workload, batch_size=6)
    with pytest.raises(IndivisibleBatch, match="runs on its own batch"):
        case.split(case.batch(), [3, 3])


def test_a_model_that_fails_on_its_whole_batch_too_is_reported_as_before(tmp_path):
    path = tmp_path / "wrong_graph.py"
    path.write_text(GRAPH.replace("torch.arange(6)", "torch.arange(7)"))
    with pytest.raises(WorkloadError, match="a forward on the batch raised"):
        load_workload(f"{path}:build")


def test_an_empty_batch_is_refused():
    with pytest.raises(WorkloadError, match="the batch is empty"):
        load_workload(f"{__file__}:empty")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_complex_parameters_stay_complex(dtype):
    """Fourier and state-space layers have complex weights."""
    parameters = [torch.randn(3, dtype=torch.complex64), torch.randn(3)]
    module = Case(squares(lambda: nn.ParameterList(parameters)), dtype=dtype).build()
    assert [one.dtype for one in module] == [torch.complex64, dtype]


def test_positions_that_all_samples_share_stay_whole_in_batches_of_their_length():
    def build():
        return Runs(lambda inner, x, positions: inner[0](x) + positions.sin(), nn.Linear(4, 4))

    batch = {"x": torch.randn(2, 8, 4), "positions": torch.zeros(8, 1)}
    case = Case(default_workload("adds", build, (build(), batch)), batch_size=8)
    parts = case.split(case.batch(), [2, 6])
    assert [(len(part["x"]), len(part["positions"])) for part in parts] == [(2, 8), (6, 8)]
    last = case.take(case.batch(), [7, 0])
    assert (len(last["x"]), len(last["positions"])) == (2, 8)
    # Tensors in an object are none of those that are counted.
    inside = types.SimpleNamespace(x=torch.ones(8), to=lambda device: inside)
    part = take((inside, torch.ones(8), torch.ones(8)), [0], shared=(False, True))
    assert [len(one) for one in (part[0].x, *part[1:])] == [1, 1, 8]
    # Of another length than the batch.
    assert len(take({"x": torch.ones(6), "positions": torch.ones(8)}, [0])["positions"]) == 8
    with pytest.raises(IndivisibleBatch, match="a batch of 3 samples has 8 by the leading dim"):
        case.split(case.batch(), [1, 2])
