"""Compile functions under an activation memory budget, recomputing no random operation.

The budget is set while `Compiled` compiles a graph, which one thread does at a time, and applies to
that graph. Under a budget, torch 2.11 and 2.13 may recompute a random operation in backward without
the generator's state, and so with other random numbers; here its output is always saved. Importing
this module takes seconds. Private names of torch's compiler are used in this module only.

Proof: `python -m pytest tests/test_memory_budget.py`.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import TorchDynamoException
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from .compiled import BudgetUnsafe, CompileFailed, with_own_code
from .operations import EXPENSIVE, draws

BACKENDS = ("inductor", "aot_eager")

# At a budget of exactly 0.0, torch saves only the inputs, whichever nodes are marked to be saved.
SMALLEST = 1e-6

Parts = tuple[GraphModule, GraphModule]


class Compiled:
    """Compiled function whose graphs each save at most a share `budget` of their usual bytes.

    `name` is the function's name in messages. `num_graphs` counts the graphs compiled so far.
    """

    def __init__(
        self, function: Callable[..., Any], *, budget: float, backend: str, name: str
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(
                f"backend must be one of {', '.join(BACKENDS)}, which support budgets; got "
                f"{backend!r}"
            )
        self.function = function
        self.budget = budget
        self.backend = backend
        self.name = name
        self.num_graphs = 0
        self._run = torch.compile(with_own_code(function, name=name), backend=self._compile_graph)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # After a call under a dispatch mode, torch 2.11 and 2.13 would never run this code compiled
        # again.
        if torch._C._len_torch_dispatch_stack():
            return self.function(*args, **kwargs)
        try:
            return self._run(*args, **kwargs)
        except TorchDynamoException as failure:
            cause = getattr(failure, "inner_exception", failure)
            if isinstance(cause, BudgetUnsafe):
                raise cause from failure
            raise self._explained(cause) from failure

    def _compile_graph(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.num_graphs += 1
        with functorch_config.patch(activation_memory_budget=self.budget):
            if self.backend == "inductor":
                with inductor_config.patch(custom_partitioner_fn=DrawingOnce()):
                    return lookup_backend("inductor")(graph, inputs)
            options = {
                "fw_compiler": boxed_nop,
                "bw_compiler": boxed_nop,
                "keep_inference_input_mutations": True,
            }
            return aot_autograd(partition_fn=partition, **options)(graph, inputs)

    def _explained(self, cause: Exception) -> CompileFailed:
        first_line = (str(cause).strip().splitlines() or ["no message"])[0]
        return CompileFailed(
            f"{self.backend} can't compile {self.name}: {type(cause).__name__}: {first_line}; "
            "leave the block out with blocks=, or use recompute_blocks, which needs no compiler"
        )


class DrawingOnce(CustomPartitionerFn):
    """Adapter that passes `partition` to inductor."""

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **options: Any) -> Parts:
        return partition(gm, joint_inputs, **options)

    def uuid(self) -> str:
        """Return the part of the compiler's cache key that identifies this partitioner."""
        return _fingerprint()


@functools.cache
def _fingerprint() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def partition(joint: GraphModule, inputs: Sequence[object], **options: Any) -> Parts:
    """Split a joint graph into forward and backward under the budget that is set.

    Raise `BudgetUnsafe` if a random operation ends up in both.
    """
    budget = functorch_config.activation_memory_budget
    drawing = keep_what_draws(joint)
    if drawing and budget < 1:
        budget = 1.0 if _is_a_tuple_alone(joint, drawing) else max(budget, SMALLEST)
    with functorch_config.patch(activation_memory_budget=budget):
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)

    in_forward = {node.name for node in drawing_nodes(forward)}
    in_backward = {node.name for node in drawing_nodes(backward)}
    recomputed = (in_forward & in_backward) | _drawing_within(backward)
    if recomputed:
        raise BudgetUnsafe(
            f"at budget {budget:g} the compiler runs {', '.join(sorted(recomputed))} again in "
            "backward with other random numbers, and gradients would be wrong; move the random "
            "operations out of the blocks, or use recompute_blocks"
        )
    return forward, backward


def keep_what_draws(joint: GraphModule) -> list[Node]:
    """Mark every random operation to be saved, and return these nodes.

    Those in regions that the user recomputes are not marked: torch restores the generator's state
    for them.
    """
    drawing = [node for node in drawing_nodes(joint) if node.meta.get("recompute") is None]
    for node in drawing:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return drawing


def drawing_nodes(graph: GraphModule) -> list[Node]:
    """List the nodes that draw random numbers."""
    return [
        node
        for node in graph.graph.nodes
        if _is_call(node) and draws(node.target, node.args, node.kwargs)
    ]


def _drawing_within(backward: GraphModule) -> set[str]:
    """Return the random operations in nested compile regions, which torch partitions by itself."""
    regions = [
        submodule
        for name, submodule in backward.named_modules()
        if name and isinstance(submodule, GraphModule)
    ]
    return {node.name for region in regions for node in drawing_nodes(region)}


def _is_a_tuple_alone(joint: GraphModule, drawing: Sequence[Node]) -> bool:
    """Return whether a saved random operation has several outputs and no other choice exists.

    Torch 2.11 and 2.13 fail on such a graph. It has no expensive operation, so a budget would save
    nothing in it.
    """
    has_several_outputs = any(isinstance(node.meta.get("val"), tuple | list) for node in drawing)
    return has_several_outputs and not any(
        _is_call(node) and node.target in EXPENSIVE for node in joint.graph.nodes
    )


def _is_call(node: Node) -> bool:
    return bool(node.op == "call_function")
