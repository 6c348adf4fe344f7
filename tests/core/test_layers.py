"""Tensors are found in the inputs and outputs of modules.

python -m pytest tests/core/test_layers.py
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from curry_train.core.measure import tensors_in


@dataclass
class Node:
    tensor: Any
    others: list[Any] = field(default_factory=list)


def test_tensors_in_containers_and_dataclasses_are_found_in_order():
    a, b, c, d = (torch.tensor(float(number)) for number in range(4))
    found = list(tensors_in((a, {"inner": Node(b, [Node(c)])}, [d], "text", None, Node)))
    assert [float(tensor) for tensor in found] == [0.0, 1.0, 2.0, 3.0]


def test_dataclasses_that_refer_to_each_other_are_visited_once():
    first, second = Node(torch.ones(1)), Node(torch.zeros(1))
    first.others, second.others = [second], [first, second]
    assert len(list(tensors_in(first))) == 2
