"""Compare the predicted peak of every rank with that of real processes, on gloo.

    python benchmarks/ranks.py --json evidence/ranks.json

A prediction runs one rank in this process, on shapes alone. The real ranks run the same program in
a plain loop, and each follows its own storages. The record is written after each number of ranks.

Proof: `python -m pytest tests/plan/test_ranks.py`.
"""

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from curry_train.core.blocks import find_blocks
from curry_train.gates.two_ranks import RankProcesses
from curry_train.plan.estimate import Sketch
from curry_train.plan.optimizers import make_optimizer
from curry_train.plan.parallel import Sharding, tensor_parallel
from curry_train.plan.record import RankStorages
from curry_train.primitives import apply_chunked_loss, apply_regions, apply_sac, recompute_blocks
from curry_train.workloads.models import import_callable, mlp, resnet, transformer
from curry_train.workloads.workload import Case, Workload
from finetune_models import OPTIMIZERS
from recording import Figures, record_parser, write_record

# Microbatches of a window that accumulates; the middle ones are alike.
WINDOW = 3
REPEATS = 5
WORLDS = (2, 4)


def small(**options) -> Workload:
    """Make a transformer of three blocks."""
    sizes = {"depth": 3, "dim": 64, "vocabulary": 256, "length": 16}
    return transformer(**sizes | options)


def tie_head(model) -> None:
    """Take the embedding of a transformer as its head."""
    model.head.weight = model.embedding.weight


def freeze_base(model) -> None:
    """Leave only the last block and the head of a transformer to be trained."""
    model.requires_grad_(False)
    model.layers[-1].requires_grad_(True)
    model.head.requires_grad_(True)


# Ways of a user's own, each with torch's calls.


def shard_all(model: nn.Module, mesh, **options) -> list[Any]:
    """Shard the blocks, which are returned, and what is left of the model as one more unit."""
    blocks = [*find_blocks(model).values()]
    for one in (*blocks, model):
        fully_shard(one, mesh=mesh, **options)
    return blocks


def root_alone(model: nn.Module, mesh) -> None:
    """Shard the whole model as one unit."""
    fully_shard(model, mesh=mesh)


def blocks_alone(model: nn.Module, mesh) -> None:
    """Shard the blocks, and leave embedding, norm and head whole on every rank."""
    for block in find_blocks(model).values():
        fully_shard(block, mesh=mesh)


def norms_left_out(model: nn.Module, mesh) -> None:
    """Shard all but the norms, whose parameters stay whole on every rank."""
    ignored = {
        parameter
        for module in model.modules()
        if isinstance(module, nn.RMSNorm)
        for parameter in module.parameters()
    }
    shard_all(model, mesh, ignored_params=ignored)


def prefetched(model: nn.Module, mesh) -> None:
    """Shard the blocks, and gather two blocks ahead."""
    blocks = shard_all(model, mesh)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - 2) : index][::-1])


def not_prefetched(model: nn.Module, mesh) -> None:
    """Shard the blocks, and gather each one only when it runs in backward."""
    for block in shard_all(model, mesh):
        block.set_modules_to_backward_prefetch([block])


def never_synced(model: nn.Module, mesh) -> None:
    """Shard the blocks, and sync the gradients of no microbatch, not of the last one either."""
    shard_all(model, mesh)
    model.set_requires_gradient_sync(False)
    model.set_requires_gradient_sync = keep


def keep(*arguments: object) -> None:
    """Change nothing."""


def bucket_views(model: nn.Module, mesh) -> nn.Module:
    """Let gradients be views of the buckets of DDP."""
    return nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, bucket_cap_mb=0.05
    )


@dataclass(frozen=True)
class Configuration:
    """One program on several ranks."""

    kind: Any = "fsdp2"
    workload: Callable[[], Workload] = small
    change: Callable[[nn.Module], object] = keep
    dtype: torch.dtype = torch.float32
    optimizer: Any = "adamw"
    batch_size: int = 4
    window: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    # The dimensions of the mesh, of which all but the first have two ranks.
    dimensions: tuple[str, ...] = ("dp",)

    def sharding(self, world: int, rank: int) -> Sharding:
        mesh = dict.fromkeys(self.dimensions, 2)
        mesh[self.dimensions[0]] = 2 * world // 2 ** len(mesh)
        return Sharding(self.kind, mesh=mesh, rank=rank, **self.options)


SYNCED = {"sync_each_microbatch": True}
TENSOR = {"kind": "fsdp2+tp", "dimensions": ("dp", "tp")}
HYBRID = {"kind": "hsdp", "dimensions": ("replicate", "shard")}
CONFIGURATIONS = {
    "fsdp2": Configuration(),
    "fsdp2, parameters stay gathered": Configuration(options={"reshard_after_forward": False}),
    "fsdp2, root resharded too": Configuration(options={"reshard_after_forward": True}),
    "fsdp2, gathered in bfloat16": Configuration(options={"precision": "bfloat16"}),
    "fsdp2, all in bfloat16": Configuration(dtype=torch.bfloat16),
    "fsdp2, window": Configuration(window=WINDOW),
    "fsdp2, window, synced each time": Configuration(window=WINDOW, options=SYNCED),
    "fsdp2, full recompute": Configuration(change=recompute_blocks),
    "fsdp2, sac": Configuration(change=apply_sac),
    "fsdp2, regions": Configuration(change=apply_regions),
    "fsdp2, chunked loss": Configuration(
        workload=lambda: small(vocabulary=2048),
        change=lambda module: apply_chunked_loss(module, chunk_tokens=16),
    ),
    "fsdp2, tied head": Configuration(change=tie_head),
    "fsdp2, frozen base": Configuration(change=freeze_base),
    "fsdp2, uneven shards": Configuration(
        workload=lambda: small(dim=36, vocabulary=97, hidden=51, heads=2, kv_heads=1)
    ),
    "fsdp2, momentum": Configuration(optimizer="sgd-momentum"),
    # As torch steps by default on CUDA.
    "fsdp2, foreach": Configuration(optimizer=OPTIMIZERS["AdamW, foreach"]),
    "fsdp2, window, recompute, bfloat16": Configuration(
        window=WINDOW, change=recompute_blocks, options={"precision": "bfloat16"}
    ),
    "fsdp2, mlp": Configuration(workload=mlp),
    "fsdp2, one unit": Configuration(root_alone),
    "fsdp2, root not sharded": Configuration(blocks_alone),
    "fsdp2, norms left out": Configuration(norms_left_out),
    "fsdp2, two blocks ahead": Configuration(prefetched),
    "fsdp2, nothing ahead in backward": Configuration(not_prefetched),
    "fsdp2, window, never synced": Configuration(never_synced, window=WINDOW),
    "ddp": Configuration("ddp"),
    "ddp, window": Configuration("ddp", window=WINDOW),
    "ddp, full recompute": Configuration("ddp", change=recompute_blocks),
    "ddp, all in bfloat16": Configuration("ddp", dtype=torch.bfloat16),
    "ddp, bucket views": Configuration(bucket_views),
    "ddp, resnet": Configuration("ddp", workload=resnet),
    "hsdp": Configuration(**HYBRID),
    "hsdp, window": Configuration(**HYBRID, window=WINDOW),
    "tp": Configuration(tensor_parallel, workload=lambda: small(kv_heads=4), dimensions=("tp",)),
    "fsdp2+tp": Configuration(**TENSOR),
    "fsdp2+tp, window": Configuration(**TENSOR, window=WINDOW),
    "fsdp2+tp, full recompute": Configuration(**TENSOR, change=recompute_blocks),
    "fsdp2+tp, bfloat16": Configuration(**TENSOR, options={"precision": "bfloat16"}),
}


def predict(name: str, world: int, rank: int) -> int:
    """Return the peak of a rank, from shapes."""
    one = CONFIGURATIONS[name]
    given = {"dtype": one.dtype, "optimizer": one.optimizer, "sharding": one.sharding(world, rank)}
    with Sketch(one.workload(), **given) as sketch:
        step = sketch.step(one.batch_size, accumulated=one.window > 1, change=one.change)
    return step.peak_bytes


def measure_all(names: list[str], repeats: int = REPEATS) -> dict[str, int]:
    """Return the peaks of this process, which is one of the ranks, in plain loops."""
    found = {}
    for name in names:
        one = CONFIGURATIONS[name]
        sharding = one.sharding(dist.get_world_size(), dist.get_rank())
        mesh = mesh_of(tuple(sharding.mesh.items()))
        make = functools.partial(make_program, one, sharding, mesh)
        found[name] = peak_of_running_rank(make, repeats=repeats)
    return found


def peak_of_running_rank(make: Callable[[], Callable[[], object]], *, repeats: int) -> int:
    """Measure the peak of a step of this process, which is a rank among others.

    `make` builds the program and returns its step; all that it makes counts. Two steps come first.
    Gloo may hold the buffers of a collective a little longer on a busy machine, so the least of
    `repeats` steps is taken.
    """
    with RankStorages() as storages:
        step = make()
        for _ in range(2):
            step()
        peaks = []
        for _ in range(repeats):
            gc.collect()
            storages.settle()
            storages.bytes_peak = storages.bytes_alive
            step()
            storages.settle()
            peaks.append(storages.bytes_peak)
        return min(peaks)


@functools.cache
def mesh_of(sizes: tuple[tuple[str, int], ...]):
    """Make each mesh once, because DTensor caches the process groups of equal meshes."""
    names, numbers = zip(*sizes, strict=True)
    return init_device_mesh("cpu", numbers, mesh_dim_names=names)


def make_program(one: Configuration, sharding: Sharding, mesh) -> Callable[[], None]:
    """Build the program of a rank, and return its step."""
    case = Case(one.workload(), dtype=one.dtype)
    model = case.build()
    blocks = find_blocks(model)
    one.change(model)
    inside = [model.get_submodule(name) for name in blocks]
    called = sharding.parallelize(model, mesh, blocks=inside)
    optimizer = make_optimizer(one.optimizer, model)
    batch = case.batch(one.batch_size)
    switch = getattr(called, "set_requires_gradient_sync", keep)
    no_sync = getattr(called, "no_sync", contextlib.nullcontext)

    def step() -> None:
        for index in range(one.window):
            syncs = index == one.window - 1 or sharding.sync_each_microbatch
            switch(syncs)
            with contextlib.nullcontext() if syncs else no_sync():
                # Without a name, which would hold it through the next microbatch.
                case.workload.mean_loss(called, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(names: list[str], world: int) -> list[Figures]:
    """Return both peaks of the first and of the last rank of each configuration."""
    # By the name of this file, because the ranks have another main module.
    job = functools.partial(import_callable(f"{Path(__file__).resolve()}:measure_all"), names)
    with contextlib.closing(RankProcesses(world)) as processes:
        ranks = processes.call(job, timeout=7200.0)
    return [
        {
            "configuration": name,
            "ranks": world,
            "rank": rank,
            "predicted": predict(name, world, rank),
            "measured": ranks[rank][name],
        }
        for name in names
        for rank in (0, world - 1)
    ]


def time_llama() -> Figures:
    """Time the prediction of one rank of 64 that trains Llama 3 with FSDP2 and full recompute."""
    started = time.process_time()
    sizes = {"depth": 80, "dim": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672}
    workload = transformer(vocabulary=128_256, length=8192, **sizes)
    sharding = Sharding("fsdp2", mesh={"dp": 64})
    with Sketch(workload, dtype=torch.bfloat16, kernels="cuda", sharding=sharding) as sketch:
        sketch.step(1, change=recompute_blocks)
    return {"processor_seconds": round(time.process_time() - started, 1)}


def main() -> None:
    """Compare predicted and measured peaks of ranks."""
    options = record_parser(__doc__).parse_args()
    llama = {"70B": time_llama()}
    rows = []
    for world in WORLDS:
        # Each dimension of a mesh has two ranks or more.
        names = [name for name, one in CONFIGURATIONS.items() if world >= 2 ** len(one.dimensions)]
        rows += compare(names, world)
        summary = {
            "num_rows": len(rows),
            "equal": sum(row["predicted"] == row["measured"] for row in rows),
            "configurations": len({row["configuration"] for row in rows}),
        }
        print(world, "ranks:", summary)
        write_record(options.json, summary | {"llama": llama, "rows": rows})


if __name__ == "__main__":
    main()
