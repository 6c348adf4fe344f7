"""Compiled code with a bound on what it keeps for backward, and with random numbers that are drawn once.

The bound holds while `Compiled` compiles a graph, which one thread does at a time, and for that graph. With a bound,
torch 2.11 and 2.13 may compute what draws again in backward, without the generator's state and so with other numbers;
here it is kept. Importing this takes seconds. Private names of torch's compiler stay in this module. Proof:
`python -m pytest tests/test_memory_budget.py`.
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
SMALLEST = 1e-6  # at 0.0 itself torch keeps the inputs alone, whatever is marked as kept
Parts = tuple[GraphModule, GraphModule]


class Compiled:
    """A function that runs compiled; each graph of it may keep `budget` of the bytes that it would keep without.

    `name` goes into messages. `num_graphs` counts what was compiled so far.
    """

    def __init__(
        self, function: Callable[..., Any], *, budget: float, backend: str, name: str
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(
                f"backend must be one of {', '.join(BACKENDS)}, which know budgets; got {backend!r}"
            )
        self.function, self.budget, self.backend, self.name = function, budget, backend, name
        self.num_graphs = 0
        self._run = torch.compile(with_own_code(function, name=name), backend=self._compile_graph)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            torch._C._len_torch_dispatch_stack()
        ):  # 2.11 and 2.13 would never run this code compiled again
            return self.function(*args, **kwargs)
        try:
            return self._run(*args, **kwargs)
        except TorchDynamoException as failure:
            cause = getattr(failure, "inner_exception", failure)
            raise cause if isinstance(cause, BudgetUnsafe) else self._explained(cause) from failure

    def _compile_graph(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.num_graphs += 1
        with functorch_config.patch(activation_memory_budget=self.budget):
            if self.backend == "inductor":
                with inductor_config.patch(custom_partitioner_fn=DrawingOnce()):
                    return lookup_backend("inductor")(graph, inputs)
            as_it_is = {
                "fw_compiler": boxed_nop,
                "bw_compiler": boxed_nop,
                "keep_inference_input_mutations": True,
            }
            return aot_autograd(partition_fn=partition, **as_it_is)(graph, inputs)

    def _explained(self, cause: Exception) -> CompileFailed:
        first = (str(cause).strip().splitlines() or ["no message"])[0]
        return CompileFailed(
            f"{self.backend} can't compile {self.name}: {type(cause).__name__}: {first}; leave the block out with "
            "blocks=, or take recompute_blocks, which needs no compiler"
        )


class DrawingOnce(CustomPartitionerFn):
    """`partition`, as inductor takes it."""

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **options: Any) -> Parts:
        return partition(gm, joint_inputs, **options)

    def uuid(self) -> str:
        """What compiled code is cached under, beside the budget."""
        return _fingerprint()


@functools.cache
def _fingerprint() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def partition(joint: GraphModule, inputs: Sequence[object], **options: Any) -> Parts:
    """Forward and backward within the budget that is set; an operation that draws is in one of them alone."""
    budget, drawing = functorch_config.activation_memory_budget, keep_what_draws(joint)
    if drawing and budget < 1:
        budget = 1.0 if _is_a_tuple_alone(joint, drawing) else max(budget, SMALLEST)
    with functorch_config.patch(activation_memory_budget=budget):
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
    twice = {node.name for node in drawing_nodes(forward)} & {
        node.name for node in drawing_nodes(backward)
    }
    if twice := twice | _drawing_within(backward):
        raise BudgetUnsafe(
            f"at budget {budget:g} the compiler runs {', '.join(sorted(twice))} again in backward with other random "
            "numbers, and gradients would be wrong; take what draws out of the blocks, or use recompute_blocks"
        )
    return forward, backward


def keep_what_draws(joint: GraphModule) -> list[Node]:
    """Mark every operation that draws as one to keep. Those in regions that the user recomputes are left alone: torch
    hands the generator's state on for them."""
    drawing = [node for node in drawing_nodes(joint) if node.meta.get("recompute") is None]
    for node in drawing:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return drawing


def drawing_nodes(graph: GraphModule) -> list[Node]:
    return [
        node
        for node in graph.graph.nodes
        if _is_call(node) and draws(node.target, node.args, node.kwargs)
    ]


def _drawing_within(backward: GraphModule) -> set[str]:
    """What draws in regions that are compiled as one (`nested_compile_region`), which torch divides by itself."""
    regions = [
        part for name, part in backward.named_modules() if name and isinstance(part, GraphModule)
    ]
    return {node.name for region in regions for node in drawing_nodes(region)}


def _is_a_tuple_alone(joint: GraphModule, drawing: Sequence[Node]) -> bool:
    """Torch 2.11 and 2.13 fail on a kept operation of several outputs where they have nothing else to choose from.
    There is no costly operation then, so nothing that a budget is for."""
    several = any(isinstance(node.meta.get("val"), tuple | list) for node in drawing)
    return several and not any(
        _is_call(node) and node.target in EXPENSIVE for node in joint.graph.nodes
    )


def _is_call(node: Node) -> bool:
    return bool(node.op == "call_function")
