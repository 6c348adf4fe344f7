"""Set the compiler's activation memory budget safely.

The budget is set while `Compiled` compiles a graph, which one thread does at a time, and applies to
that graph. Under a budget, torch 2.11 and 2.13 may recompute a random operation in backward without
the generator's state, and so with other random numbers; here its output is always saved. Importing
this module takes seconds. Private names of torch's compiler are used in this module only.

Proof: `python -m pytest tests/primitives/test_memory_budget.py`.
"""

import contextlib
import functools
import hashlib
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import TorchDynamoException
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ..core.blocks import DerivedForward, Globs, become, find_blocks, find_modules, restore
from ..core.generators import seeded
from ..core.measure import Loss, untouched
from ..core.measure_compiled import (
    BudgetUnsafe,
    CompileFailed,
    warnings_of_the_compiler_ignored,
    with_own_code,
)
from ..core.wording import error_in_a_line
from .sac import EXPENSIVE_OPERATIONS, draws

# Compile functions under an activation memory budget, recomputing no random operation.

BUDGET_BACKENDS = ("inductor", "aot_eager")

# At a budget of exactly 0.0, torch saves only the inputs, whichever nodes are marked to be saved.
SMALLEST_BUDGET = 1e-6

GraphPair = tuple[GraphModule, GraphModule]


@dataclass(frozen=True)
class Budget:
    """The way a block is compiled; stored on the block, and copied with it."""

    # Each graph saves at most this share of its usual bytes.
    share: float
    backend: str
    # Blocks of the same kind share their compiled code; messages name it.
    kind: str


@dataclass(eq=False)
class Compiled:
    """A function that is compiled with a budget."""

    function: Callable[..., Any]
    budget: Budget
    # Graphs compiled so far.
    num_graphs: int = 0

    def __post_init__(self) -> None:
        function = with_own_code(self.function, name=self.budget.kind)
        self._run = torch.compile(function, backend=self._compile_graph)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # After a call under a dispatch mode, torch 2.11 and 2.13 would never run this code compiled
        # again.
        if torch._C._len_torch_dispatch_stack():
            return self.function(*args, **kwargs)
        try:
            return self._run(*args, **kwargs)
        except (TorchDynamoException, AssertionError) as failure:
            cause = getattr(failure, "inner_exception", failure)
            if isinstance(cause, BudgetUnsafe):
                raise cause from failure
            raise CompileFailed(
                f"{self.budget.backend} can't compile {self.budget.kind}: "
                f"{error_in_a_line(cause)}; leave the block out with blocks=, or use "
                "recompute_blocks, which needs no compiler"
            ) from failure

    def _compile_graph(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.num_graphs += 1
        with functorch_config.patch(activation_memory_budget=self.budget.share):
            if self.budget.backend == "inductor":
                with inductor_config.patch(custom_partitioner_fn=DrawingOnce()):
                    return lookup_backend("inductor")(graph, inputs)
            compile_eagerly = aot_autograd(
                partition_fn=partition,
                fw_compiler=boxed_nop,
                bw_compiler=boxed_nop,
                keep_inference_input_mutations=True,
            )
            return compile_eagerly(graph, inputs)


class DrawingOnce(CustomPartitionerFn):
    """Adapter that passes `partition` to inductor."""

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> GraphPair:
        return partition(gm, joint_inputs, **options)

    def uuid(self) -> bytes:
        """Return the part of the compiler's cache key that identifies this partitioner."""
        return get_hash_for_files((__file__,))


def partition(joint: GraphModule, inputs: Sequence[object], **options: Any) -> GraphPair:
    """Split a joint graph into forward and backward under the budget that is set.

    Every random operation is saved. Raise `BudgetUnsafe` if a random operation ends up in both.
    """
    # Per thread, in torch 2.11 per process.
    budget = float(functorch_config.activation_memory_budget)
    # Torch restores the generator's state in regions that the user recomputes.
    drawing = [node for node in drawing_nodes(joint) if node.meta.get("recompute") is None]
    for node in drawing:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    kept = _keep_updated(joint)
    if (drawing or kept) and budget < 1:
        budget = 1.0 if _is_a_tuple_alone(joint, drawing) else max(budget, SMALLEST_BUDGET)
    with functorch_config.patch(activation_memory_budget=budget):
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)

    in_forward = {node.name for node in drawing_nodes(forward)}
    recomputed = {
        node.name
        for name, region in find_modules(backward, GraphModule).items()
        for node in drawing_nodes(region)
        # A nested region is partitioned by torch itself.
        if name or node.name in in_forward
    }
    if recomputed:
        raise BudgetUnsafe(
            f"at budget {budget:g} the compiler runs {', '.join(sorted(recomputed))} again in "
            "backward with other random numbers, and gradients would be wrong; move the random "
            "operations out of the blocks, or use recompute_blocks"
        )
    return forward, backward


def _keep_updated(joint: GraphModule) -> list[Node]:
    """Let recomputed operations read copies of the buffers that the forward updates.

    A block that runs twice has updated them again when backward begins, and torch then refuses what
    it has saved.
    """
    kept = []
    for update in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        buffer: Any = update.args[0]
        readers = [user for user in buffer.users if user is not update]
        with joint.graph.inserting_after(buffer):
            copied = joint.graph.call_function(torch.ops.aten.clone.default, (buffer,))
        copied.meta = {**buffer.meta, "recompute": CheckpointPolicy.MUST_SAVE}
        for reader in readers:
            reader.replace_input_with(buffer, copied)
        kept.append(copied)
    return kept


def drawing_nodes(graph: GraphModule) -> list[Node]:
    """List the nodes that draw random numbers."""
    return [node for node in graph.graph.nodes if draws(node.target, node.args, node.kwargs)]


def _is_a_tuple_alone(joint: GraphModule, drawing: Sequence[Node]) -> bool:
    """Return whether a saved random operation has several outputs and no other choice exists.

    Torch 2.11 and 2.13 fail on such a graph. It has no expensive operation, so a budget would save
    nothing in it.
    """
    has_several_outputs = any(isinstance(node.meta.get("val"), tuple | list) for node in drawing)
    return has_several_outputs and not any(
        node.target in EXPENSIVE_OPERATIONS for node in joint.graph.nodes
    )


# Compile blocks with a memory budget: the compiler chooses which activations to recompute.


class Budgeted(DerivedForward):
    """A block that runs compiled with its budget in training, also inside a compiled model."""

    runs_compiled_code = True
    forward = torch.compiler.disable(
        DerivedForward.forward, reason="the block is compiled by itself, with its memory budget"
    )

    def _run_changed(self, run: Any, inputs: Any) -> Any:
        args, kwargs = inputs
        return _compiled(run.__func__, self._technique)(self, *args, **kwargs)


_compiled = functools.cache(Compiled)


def memory_budget(
    model: nn.Module,
    budget: float,
    *,
    blocks: Globs | None = None,
    backend: str = "inductor",
    batch: Any = None,
    loss: Loss | None = None,
) -> list[str]:
    """Compile the blocks of a model with a memory budget, in place, and return their names.

    `budget` is a share of the bytes that a compiled block saves by default, between 0.0 (only the
    block's inputs) and 1.0; the saved bytes fall with it in steps. Random numbers are drawn once at
    every budget. `blocks` is a glob over module names, or several; without it these are the blocks
    that the model repeats. Call this before DDP and `fully_shard`.

    With `batch` and `loss` one step compiles the blocks now and drops its gradients.
    """
    if not 0 <= budget <= 1:
        raise ValueError(
            f"the budget is a share of the saved bytes between 0 and 1, got {budget!r}"
        )
    if backend not in BUDGET_BACKENDS:
        raise ValueError(
            f"backend must be one of {', '.join(BUDGET_BACKENDS)}, which support budgets; "
            f"got {backend!r}"
        )
    if (batch is None) != (loss is None):
        raise ValueError("give batch and loss both, to compile now, or neither")

    found: dict[str, Any] = find_blocks(model, blocks)
    with contextlib.ExitStack() as undo:
        for name, block in found.items():
            # A scripted module's class has no forward.
            if not isinstance(getattr(type(block), "forward", None), types.FunctionType):
                raise ValueError(
                    f"{name} is a {type(block).__name__}, which torch.compile can't trace: "
                    "leave it out"
                )
            tensors = [*block.named_parameters(), *block.named_buffers()]
            shapes = [(path, tuple(tensor.shape), str(tensor.dtype)) for path, tensor in tensors]
            digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
            # Class, tensor shapes and dtypes decide the compiled code.
            kind = f"{type(block).__name__}_{digest}"
            become(Budgeted, block, Budget(float(budget), backend, kind))
            undo.callback(remove_memory_budget, block)
        if loss is not None:
            with untouched(model), seeded(0), warnings_of_the_compiler_ignored():
                loss(model, batch).backward()
            for block in found.values():
                code = _compiled(type(block)._bases[1].forward, block._technique)
                if not code.num_graphs:
                    raise CompileFailed(
                        f"{code.budget.kind} produced no compiled graph: check that the forward "
                        "runs it in training mode"
                    )
        undo.pop_all()
    return list(found)


def remove_memory_budget(model: nn.Module) -> list[str]:
    """Undo `memory_budget` and return the names of the blocks that were compiled."""
    return restore(model, Budgeted)
