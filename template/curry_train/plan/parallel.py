"""Share a training among ranks: a mesh, and FSDP2, HSDP, DDP or tensor parallelism by name.

    sharding = Sharding("fsdp2+tp", mesh={"dp": 8, "tp": 8})
    with one_rank(sharding.mesh, rank=sharding.rank) as mesh:
        model = sharding.parallelize(model, mesh, blocks=blocks)

A way of the user's own is a function `parallelize(model, mesh)` that uses torch's calls, and wraps
the model in place or returns it wrapped.

Proof: `python -m pytest tests/plan/test_ranks.py`.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..core.blocks import find_modules
from ..core.wording import require_whole, some_of
from ..workloads.models import describe_raised, import_callable
from ..workloads.workload import WorkloadError

Parallelize = Callable[[nn.Module, Any], nn.Module | None]

TENSOR_PARALLEL_KIND = "fsdp2+tp"
SHARDING_KINDS = ("ddp", "fsdp2", "hsdp", TENSOR_PARALLEL_KIND)
# Dimensions of the built-in ways by their names; a way of the user's own has any.
MESH_EXAMPLES = {"hsdp": "replicate=2,shard=4", TENSOR_PARALLEL_KIND: "dp=4,tp=2"}
# Ranks along these dimensions have the same samples, and parts of the model or of the sequence.
MODEL_DIMENSIONS = ("tp", "cp", "ep")
PIPELINE_DIMENSION = "pp"
PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Sharding:
    """The way in which ranks share one training; one rank shares nothing.

    `kind` is a built-in way, `package.module:function`, or a function. With a mesh and no kind, the
    workload's own `parallelize` is the way.
    """

    kind: str | Parallelize | None = None
    ranks: int = 1

    # Sizes of the mesh by dimension; `{"dp": ranks}` where none are given.
    mesh: Mapping[str, int] = field(default_factory=dict)

    # The rank to predict. FSDP2 gives the first ranks the larger parts.
    rank: int = 0

    # As in `fully_shard`; None for torch's default.
    reshard_after_forward: bool | int | None = None

    # Dtype of gathered parameters, whose gradients are reduced in float32; None for that of the
    # parameters.
    precision: str | None = None

    # Whether every microbatch of a window syncs its gradients, and not the last one alone.
    sync_each_microbatch: bool = False

    def __post_init__(self) -> None:
        mesh = self.mesh
        require_whole("ranks", self.ranks, least=1)
        for name, size in mesh.items():
            require_whole(f"the size of {name} in the mesh", size, least=1)
        if PIPELINE_DIMENSION in mesh:
            raise ValueError(
                "stages of a pipeline are not planned: plan the modules of one stage as a model, "
                "with the mesh of the ranks that share it"
            )
        in_mesh = math.prod(mesh.values())
        if mesh and self.ranks not in (1, in_mesh):
            raise ValueError(f"the mesh has {in_mesh} ranks, and ranks is {self.ranks}")
        ranks = in_mesh if mesh else self.ranks
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "mesh", dict(mesh) or {"dp": ranks})
        if not 0 <= self.rank < ranks:
            raise ValueError(
                f"rank {self.rank} is none of {ranks} ranks: use 0 to {ranks - 1}, or more ranks"
            )
        if self.precision not in (None, *PRECISIONS):
            raise ValueError(
                f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}"
            )
        self._check_kind()

    def _check_kind(self) -> None:
        kind = self.kind
        if kind in SHARDING_KINDS:
            example = MESH_EXAMPLES.get(str(kind), "dp=8")
            if len(self.mesh) != example.count("="):
                raise ValueError(f"{kind} has a mesh such as {example}, got {self.mesh_text}")
        elif isinstance(kind, str) and ":" not in kind:
            raise ValueError(
                f"parallel must be one of {', '.join(SHARDING_KINDS)}, got {kind!r}, or a "
                "function as package.module:function"
            )
        uses_fsdp2 = kind in SHARDING_KINDS and kind != "ddp"
        options = (self.reshard_after_forward, self.precision)
        if not uses_fsdp2 and any(one is not None for one in options):
            raise ValueError(
                "reshard_after_forward and precision are options of fsdp2, hsdp and "
                f"{TENSOR_PARALLEL_KIND}, and parallel is {self.name}: leave them out"
            )

    @property
    def name(self) -> str | None:
        """The way as it is named in plans and messages."""
        name: str | None = name_of(self.kind)
        return name

    @property
    def mesh_text(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.mesh.items())

    @property
    def data_ranks(self) -> int:
        """The number of ranks with samples of their own."""
        return math.prod(size for name, size in self.mesh.items() if name not in MODEL_DIMENSIONS)

    @property
    def is_shared(self) -> bool:
        return self.ranks > 1

    def microbatches(
        self, global_batch: int, microbatch: int | None = None
    ) -> list[tuple[int, int]]:
        """List pairs of microbatch size and number of microbatches for a rank's samples.

        With `microbatch` only that size is listed.
        """
        ranks = self.data_ranks
        if global_batch % ranks:
            raise ValueError(
                f"a global batch of {global_batch} can't be shared by {ranks} ranks: "
                f"use a multiple of {ranks}"
            )
        own = global_batch // ranks
        sizes = [size for size in range(1, own + 1) if own % size == 0]
        if microbatch is None:
            return [(size, own // size) for size in sizes]
        if microbatch not in sizes:
            raise ValueError(
                f"microbatch {microbatch} does not divide the {own} samples of a rank: "
                f"use one of {some_of([*map(str, sizes)], 12)}"
            )
        return [(microbatch, own // microbatch)]

    def parallelize(
        self,
        module: nn.Module,
        mesh: Any,
        *,
        blocks: Iterable[nn.Module] = (),
        own: Parallelize | None = None,
    ) -> nn.Module:
        """Share a module among the ranks of a mesh, and return the module that training calls.

        `own` is the workload's way, for a sharding that names none.
        """
        if self.kind == "ddp":
            return nn.parallel.DistributedDataParallel(module)
        if self.kind in ("fsdp2", "hsdp"):
            return self._fully_sharded(module, blocks, mesh)
        if self.kind == TENSOR_PARALLEL_KIND:
            data, tensor = self.mesh
            tensor_parallel(module, mesh[tensor])
            return self._fully_sharded(module, blocks, mesh[data])
        way = self.kind or own
        if way is None:
            raise ValueError(
                f"{self.ranks} ranks need a way to share the training: set parallel to "
                f"{', '.join(SHARDING_KINDS)} or package.module:function, or Workload.parallelize"
            )
        function = import_callable(way)
        try:
            result = function(module, mesh)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # The user's code may raise anything, or end Python.
            raise WorkloadError(
                f"{self.name or 'parallelize'} raised {describe_raised(error)}; "
                "its arguments are the model and the mesh, whose dimensions are "
                f"{', '.join(mesh.mesh_dim_names)}"
            ) from error
        if result is None:
            return module
        if not isinstance(result, nn.Module):
            raise ValueError(
                f"parallelize returned {type(result).__name__}: return the module to train, or "
                "None where it was changed in place"
            )
        return result

    def _fully_sharded(
        self, module: nn.Module, blocks: Iterable[nn.Module], mesh: Any
    ) -> nn.Module:
        """Apply FSDP2 to each block and then to the whole module."""
        # Imported here because a plan of one rank needs no sharding.
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options: dict[str, Any] = {"mesh": mesh}
        if self.precision is not None:
            options["mp_policy"] = MixedPrecisionPolicy(PRECISIONS[self.precision], torch.float32)
        if self.reshard_after_forward is not None:
            options["reshard_after_forward"] = self.reshard_after_forward
        try:
            for one in (*blocks, module):
                fully_shard(one, **options)
        except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(
                f"{self.kind} refuses {type(module).__name__}: {lines[0]}; where blocks share a "
                "module, name blocks that share none"
            ) from error
        return module


def name_of(way: Any) -> Any:
    """Return a function as `package.module:function`, and anything else as it is."""
    if callable(way):
        return f"{way.__module__}:{getattr(way, '__qualname__', type(way).__name__)}"
    return way


def parse_mesh(text: str) -> dict[str, int]:
    """Read a mesh as it is written, `dp=8,tp=8`."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1 or name in sizes:
            raise ValueError(f"{text!r} is no mesh: write its dimensions as dp=8,tp=8")
        sizes[name] = int(size)
    return sizes


# Tensor parallelism with sequence parallel norms, for decoders whose Linears have known names.

COLUMN_NAMES = {"wq", "wk", "wv", "q_proj", "k_proj", "v_proj"}
COLUMN_NAMES |= {"gate", "up", "gate_proj", "up_proj", "w1", "w3", "fc1"}
ROW_NAMES = {"wo", "o_proj", "out_proj", "down", "down_proj", "w2", "fc2"}
HEAD_COUNTS = ("heads", "kv_heads", "n_heads", "n_kv_heads", "num_heads", "num_kv_heads")


def tensor_parallel(module: nn.Module, mesh: Any) -> None:
    """Divide a decoder over the ranks of a mesh, as its blocks' Linears are named.

    The tokens between blocks are divided too (sequence parallel). Each attention and feed-forward
    layer gathers its first argument.
    """
    # Imported here because a plan of one rank needs no tensor parallelism.
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    embedding, head = _ends(module)
    size = mesh.size()
    styles: dict[str, Any] = {
        embedding: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        head: ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for path, child in module.named_modules():
        parent, _, name = path.rpartition(".")
        if isinstance(child, nn.Linear) and name in COLUMN_NAMES and path != head:
            styles[path] = ColwiseParallel()
            if parent in styles:
                continue
            owner = module.get_submodule(parent)
            _divide_heads(owner, parent, size)
            layouts = _layouts(owner, Shard(1))
            wanted = _layouts(owner, Replicate())
            styles[parent] = PrepareModuleInput(input_layouts=layouts, desired_input_layouts=wanted)
        elif isinstance(child, nn.Linear) and name in ROW_NAMES:
            styles[path] = RowwiseParallel(output_layouts=Shard(1))
        elif type(child).__name__.endswith("Norm"):
            styles[path] = SequenceParallel()
    parallelize_module(module, mesh, styles)


def _layouts(module: nn.Module, first: Any) -> tuple[Any, ...]:
    """Return the layout of each argument of a forward, of which the first is divided."""
    arguments = inspect.signature(module.forward).parameters.values()
    required = [one for one in arguments if one.default is inspect.Parameter.empty]
    return (first, *[None] * (len(required) - 1))


def _divide_heads(module: nn.Module, path: str, size: int) -> None:
    """Let an attention layer count the heads of this rank."""
    for name in HEAD_COUNTS:
        count = vars(module).get(name)
        if not isinstance(count, int):
            continue
        if count % size:
            raise ValueError(f"{path} has {name}={count}, which {size} ranks can't share evenly")
        setattr(module, name, count // size)


def _ends(module: nn.Module) -> tuple[str, str]:
    """Return the names of the embedding and of the output layer."""
    embeddings = [*find_modules(module, nn.Embedding)]
    linears = [*find_modules(module, nn.Linear)]
    inside = {name.rpartition(".")[2] for name in linears}
    if len(embeddings) != 1 or not inside & ROW_NAMES:
        raise ValueError(
            f"{TENSOR_PARALLEL_KIND} knows no layers of {type(module).__name__}: it needs one "
            f"Embedding, and Linears named as {', '.join(sorted(ROW_NAMES))}; give a parallelize "
            "of your own as --parallel package.module:function"
        )
    embedding = embeddings[0]
    head = linears[-1]
    if module.get_submodule(embedding).weight is module.get_submodule(head).weight:
        raise ValueError(
            f"{embedding} and {head} are one parameter, which {TENSOR_PARALLEL_KIND} would make "
            "two: give a parallelize of your own"
        )
    return embedding, head
