"""Run one rank of a distributed training in this process, on shapes, and follow its bytes.

    with one_rank({"dp": 64}, rank=0) as mesh, pretended(mode=RankKernels(kernels="cuda")):
        fully_shard(model, mesh=mesh)

The rank is that of the user's own program, under torch's fake process group, whose collectives move
no data. Corrections make the bytes equal to those of a rank among real processes. They are those of
torch 2.13, and the tests compare each with gloo.

Proof: `python -m pytest tests/plan/test_ranks.py tests/plan/test_routed_ranks.py`.
"""

import contextlib
import functools
import gc
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core.generators import seeded
from ..core.measure import REST_LAYER, Loss, as_trained, divide, operands
from ..workloads.models import describe_raised
from ..workloads.workload import WorkloadError
from .optimizers import patched_in_all
from .profiler import COLLECTIVES_GROUP, GRADIENTS_GROUP
from .rank_time import resolve_group
from .record import OptimizerState, RankStorages, StepLives
from .shapes import (
    NEEDS_VALUES_ERRORS,
    KernelsAsTheyRun,
    fake_mode,
    has_values,
    run_with_values,
    who_needs_values,
)
from .timeline import holding_output, run_recorded_step

# Record a step of the rank as plans record steps.

NOTHING_SHARED_WARNING = (
    "no rank communicates with another in a step: parallelize has shared nothing, and each rank "
    "trains a model of its own"
)
FROM_SHAPES_ALONE = "one rank of several is predicted from shapes alone: {}"
PARAMETERS_ON_HOST = (
    "FSDP2's CPUOffloadPolicy is not planned: plan without it, on more ranks, or with a smaller "
    "microbatch, and measure the training that has it"
)
UNSYNCED_WARNING = (
    "the last microbatch of a window does not sync its gradients, and the optimizer steps without "
    "them: call set_requires_gradient_sync(True) before it"
)


@dataclass(frozen=True)
class RankProgram:
    """The model of one rank with its batch and optimizer, ready to run."""

    # The model itself, and the module that the loss calls, which may be wrapped around it.
    module: nn.Module
    called: nn.Module

    batch: Any
    optimizer: torch.optim.Optimizer


def record_rank_step(
    make_program: Callable[["RankStorages"], RankProgram],
    loss: Loss,
    *,
    state: OptimizerState | None,
    blocks: Sequence[str],
    accumulated: bool,
    syncs_each: bool,
    keeps_output: bool,
) -> tuple[StepLives, StepLives | None]:
    """Record a step of the rank, and a microbatch that neither begins nor ends a window, if any.

    `record_step_storages` does this for a model alone. `make_program` enters the record that it
    gets when it begins to wrap the module, and fills `blocks`.
    """
    group = COLLECTIVES_GROUP
    before = RankStorages(owner=lambda: (group, REST_LAYER))
    records = [before]
    program = make_program(before)
    module, optimizer = program.module, program.optimizer
    groups = _parameter_groups(program.called)
    is_synced = all(one.reduce_grads for one in groups)
    if not is_synced:
        group = GRADIENTS_GROUP
        warnings.warn(UNSYNCED_WARNING, stacklevel=2)
    called_loss = functools.partial(_compute_loss, program, loss)
    with seeded(0), torch.enable_grad(), as_trained(module):
        with before:
            _warm_up(program, called_loss, state, is_synced=is_synced)
            if accumulated:
                gc.collect()
                group = GRADIENTS_GROUP
                _run_microbatch(program, called_loss, syncs=syncs_each)
        layers = divide(module, blocks=blocks or None)

        def begin_record() -> StepLives:
            gc.collect()
            lives = StepLives(module, torch.device("cpu"), layers, optimizer, state)
            lives.follow_all(program.batch, records)
            records.append(lives)
            return lives

        middle = None
        if accumulated:
            middle = begin_record()
            with middle.running, middle:
                _run_microbatch(program, called_loss, syncs=syncs_each)
        lives = begin_record()
        lives.dtypes = {one.mp_policy.param_dtype for one in groups}
        with holding_output(module, keeps_output), lives.running, lives:
            run_recorded_step(
                module,
                program.batch,
                called_loss,
                optimizer,
                lives,
                needs_gradients=is_synced,
            )
    if lives.course is not None and not lives.course.collectives:
        warnings.warn(NOTHING_SHARED_WARNING, stacklevel=2)
    return lives, middle


def _compute_loss(program: RankProgram, loss: Loss, module: nn.Module, batch: Any) -> Tensor:
    """Return the loss of the wrapped module; what a wrong wrapping raises is one line."""
    try:
        return loss(program.called, batch)
    except NEEDS_VALUES_ERRORS as error:
        raise ValueError(FROM_SHAPES_ALONE.format(who_needs_values(error))) from error
    except (AssertionError, AttributeError, LookupError, TypeError) as error:
        raise WorkloadError(
            f"a forward of {type(program.called).__name__} after parallelize raised "
            f"{describe_raised(error)}"
        ) from error


def _warm_up(
    program: RankProgram, loss: Loss, state: OptimizerState | None, *, is_synced: bool
) -> None:
    """Let a program be as after some steps.

    Optimizer state is enough, but for DDP, which divides its buckets anew after the first step, and
    where gradients are not synced, so that the optimizer makes no state.
    """
    optimizer = program.optimizer
    ddp = nn.parallel.DistributedDataParallel
    has_ddp = any(isinstance(one, ddp) for one in program.called.modules())
    if state is not None and is_synced and not has_ddp:
        state.give_state(optimizer)
        optimizer.zero_grad(set_to_none=True)
        return
    for _ in range(2):
        run_recorded_step(program.module, program.batch, loss, optimizer, needs_gradients=is_synced)
        optimizer.zero_grad(set_to_none=True)


def _parameter_groups(module: nn.Module) -> list[Any]:
    """Return the groups of parameters that units of FSDP2 gather together.

    Raises a ValueError where they are kept on the host.
    """
    # Imported here because a plan of one rank needs no sharding.
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

    groups: list[Any] = []
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            state: Any = unit._get_fsdp_state()
            # A unit of torch 2.11 has one.
            one = getattr(state, "_fsdp_param_group", None)
            groups += getattr(state, "_fsdp_param_groups", [] if one is None else [one])
    if any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups):
        raise ValueError(PARAMETERS_ON_HOST)
    return groups


def _run_microbatch(program: RankProgram, loss: Loss, *, syncs: bool) -> None:
    """Run forward and backward of a microbatch that is not the last of its window."""
    called = program.called
    # FSDP2 has a switch, and DDP a context.
    switch = getattr(called, "set_requires_gradient_sync", lambda _: None)
    no_sync = getattr(called, "no_sync", contextlib.nullcontext)
    switch(syncs)
    with contextlib.nullcontext() if syncs else no_sync():
        loss(called, program.batch).backward()
    switch(True)


# One rank of a world: torch's fake process group, and what differs under tensors without values.

MOST_RANKS = 1024
VIEW_WARNING = "FSDP2-wrapped module .* returned a view tensor"
FACTORY_OPERATIONS = (torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default)


class RankKernels(KernelsAsTheyRun):
    """Fake tensor mode whose waits return their tensor, as they do where tensors have values.

    DDP reads its own counts, which are of int32, so `has_counts` gives these values.
    """

    has_counts = False

    def __init__(self, *, kernels: str) -> None:
        # Imported here because a plan of one rank needs no collectives.
        from torch.distributed import _functional_collectives as functional

        super().__init__(kernels=kernels)
        operations = torch.ops._c10d_functional
        self._waits: dict[Any, Callable[[Tensor], Tensor]] = {
            operations.wait_tensor.default: lambda tensor: tensor,
            operations._wrap_tensor_autograd.default: functional.AsyncCollectiveTensor,
        }

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._waits:
            return self._waits[func](args[0])
        if self.has_counts and _is_count(func, args, kwargs or {}):
            return run_with_values(func, args, kwargs or {})
        return super().dispatch(func, types, args, kwargs)


def _is_count(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Check whether an operation is on real tensors of int32 alone, or makes one."""
    found = operands(args, kwargs)
    if found:
        return all(type(leaf) is Tensor and leaf.dtype is torch.int32 for leaf in found)
    return func in FACTORY_OPERATIONS and kwargs.get("dtype") is torch.int32


# Experts: a routing that is the same on every rank, and known where tensors have no values.

# An all-to-all of functional collectives; that of torch.distributed is a function.
FUNCTIONAL_EXCHANGE = torch.ops._c10d_functional.all_to_all_single


class EvenRouting(TorchFunctionMode):
    """Let a router send the tokens to all experts evenly.

    The scores of the experts that are chosen stay those of the model. Within `pretended` the
    choices have values, so that the numbers of tokens that an expert gets are known.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        scores: Any = args[0] if args else None
        if func in (torch.topk, Tensor.topk) and _are_scores(scores, found[1]):
            indices = _even_indices(scores, found[1])
            return torch.return_types.topk((scores.gather(-1, indices), indices))
        if func in (torch.argmax, Tensor.argmax) and _are_scores(scores, found.unsqueeze(-1)):
            return _even_indices(scores, found.unsqueeze(-1)).squeeze(-1)
        if func is FUNCTIONAL_EXCHANGE:
            sent, _, sizes, group = args
            _exchange(found, sent, sizes, group)
        elif func is dist.all_to_all_single:
            given = inspect.signature(func).bind(*args, **(kwargs or {})).arguments
            sizes = given.get("input_split_sizes")
            _exchange(given["output"], given["input"], sizes, given.get("group"))
        return found


def _even_indices(scores: Tensor, found: Tensor) -> Tensor:
    """Return as many experts for each token as were chosen."""
    places = torch.arange(found.numel(), device=found.device) % scores.shape[-1]
    return places.view(found.shape)


def _are_scores(scores: Any, found: Any) -> bool:
    """Check for the scores of experts for tokens, of which some were chosen for each."""
    from ..primitives.routing import MOST_EXPERTS

    return (
        isinstance(scores, Tensor)
        and scores.is_floating_point()
        and scores.dim() > 1
        and 1 < scores.shape[-1] <= MOST_EXPERTS
        and found.shape[:-1] == scores.shape[:-1]
    )


def _exchange(received: Tensor, sent: Tensor, sizes: Sequence[int] | None, group: Any) -> None:
    """Write what an all-to-all receives from ranks that all send the numbers of this one.

    The all-to-all of the fake process group returns its input. Nothing is written to a tensor
    without values, nor among real processes.
    """
    if fake_mode() is None or not has_values(received):
        return
    if isinstance(group, str):
        group = resolve_group(group)
    size = dist.get_world_size(group)
    own = sent.split(sizes or len(sent) // size)[dist.get_rank(group)]
    run_with_values(torch.cat, ([own] * size,), {"out": received})


@contextlib.contextmanager
def one_rank(sizes: Mapping[str, int], *, rank: int = 0) -> Iterator[Any]:
    """Make this process one rank of a world, and yield the mesh of it.

    `sizes` are the dimensions of the mesh by name. Tensors without values are made inside of it.
    """
    world = math.prod(sizes.values())
    if world > MOST_RANKS:
        raise ValueError(f"{world} ranks are asked for, and {MOST_RANKS} is the most")
    if dist.is_initialized():
        raise RuntimeError(
            "this process is in a process group already: predict a rank outside of torchrun"
        )
    # Imported here because a plan of one rank needs no process group.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        few_chunks = mock.patch.object(_fsdp_param, "_chunk_with_empty", ShardChunks)
        # Torch takes tensors without values for a trace, in which it would wait for each functional
        # collective at once, and make copies.
        not_traced = patched_in_all("torch.distributed", "_are_we_tracing", lambda: False)
        with not_traced, _silence_ddp(), few_chunks, warnings.catch_warnings():
            # Torch warns about this when the program trains.
            warnings.filterwarnings("ignore", VIEW_WARNING, UserWarning)
            yield mesh
    finally:
        dist.destroy_process_group()
        # DTensor would use the groups of this rank for an equal mesh of another rank.
        _clear_sharding_prop_cache()


@dataclass
class ShardChunks:
    """The chunks of a parameter, of which only those that are read are made.

    FSDP2 reads the one of this rank; to make those of all ranks takes long.
    """

    tensor: Tensor
    num_chunks: int
    dim: int

    def __getitem__(self, index: int) -> Tensor:
        length = self.tensor.size(self.dim)
        size = math.ceil(length / self.num_chunks)
        start = index * size
        if start >= length > 0:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(size, length - start))


@contextlib.contextmanager
def _silence_ddp() -> Iterator[None]:
    """Let DDP skip the comparison of parameters, and average gradients in a hook.

    The work of the fake process group has no result that DDP could take.
    """
    from torch.nn.parallel import DistributedDataParallel

    make = DistributedDataParallel.__init__

    @functools.wraps(make)
    def wrap(self: Any, *args: Any, **options: Any) -> None:
        mode = fake_mode()
        if isinstance(mode, RankKernels):
            mode.has_counts = True
        make(self, *args, **options | {"init_sync": False})
        self.register_comm_hook(None, _average)

    with mock.patch.object(DistributedDataParallel, "__init__", wrap):
        yield


def _average(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Do what DDP does without a hook."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    buffer = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(buffer, async_op=True)
    future.set_result(buffer)
    return future
