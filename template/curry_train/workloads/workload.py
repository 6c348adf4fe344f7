"""The user's model as the tools use it: module, batch and loss, adapted from what was given.

A `Case` is one workload on a device, with the seed that makes it repeatable. `load_workload` finds
the built-in workloads, and makes one from a user's own model.

Proof: `python -m pytest tests/workloads/test_workload.py`.
"""

import contextlib
import copy
import copyreg
import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from ..core.blocks import Globs
from ..core.generators import seeded
from ..core.measure import Loss
from ..primitives.cross_entropy import IGNORED_TARGET
from ..primitives.running_blocks import BlockChoice, choose_blocks

# Nested batches of tensors and of other containers of samples, cut into samples.


class IndivisibleBatch(ValueError):
    """Raised where a batch of another size is needed than an object in the batch allows."""


def map_tensors(
    batch: Any,
    function: Callable[[Tensor], Any],
    *,
    move: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Apply `function` to every tensor of a nested batch; containers keep their types.

    `move` is applied to other objects with a method `to`, such as packed sequences and graphs. An
    object with tensors as attributes is copied. Everything else is returned unchanged.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        mapped = {key: map_tensors(value, function, move=move) for key, value in batch.items()}
        return type(batch)(mapped) if isinstance(batch, dict) else mapped
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        return move(batch)
    if isinstance(batch, tuple | list):
        values = [map_tensors(value, function, move=move) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return _map_attributes(batch, function, move) if has_tensors(batch) else batch


def _map_attributes(
    batch: Any, function: Callable[[Tensor], Any], move: Callable[[Any], Any]
) -> Any:
    mapped = copy.copy(batch)
    for name, value in _read_attributes(batch).items():
        object.__setattr__(mapped, name, map_tensors(value, function, move=move))
    return mapped


def _read_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of a user's class, in its dictionary and its slots."""
    if isinstance(value, type | nn.Module):
        return {}
    # As `copy` finds them, without `__dict__` and by their real names; the stubs leave it out.
    slots = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    own = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return own | getattr(value, "__dict__", {})


# Containers and objects are looked into so far.
MOST_LEVELS = 6


def tensors_at(
    value: Any, place: str = "", levels: int = MOST_LEVELS
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nested value with their places in it, such as `[0].logits`."""
    if isinstance(value, Tensor):
        yield place, value
    elif levels:
        for key, one in _list_entries(value).items():
            yield from tensors_at(one, place + key, levels - 1)


def has_tensors(value: Any) -> bool:
    return any(True for _ in tensors_at(value))


def _list_entries(value: Any) -> dict[str, Any]:
    """Return the entries of a container, or the attributes of another object, by their places."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        return {f"[{key!r}]": one for key, one in value.items()}
    return {f".{name}": one for name, one in _read_attributes(value).items()}


# Samples of two batches that are compared to find tensors that all samples share.
SIZES_TO_COMPARE = (2, 4)


def batch_size(batch: Any) -> int:
    """Return the number of samples: the leading dimension of the first tensor that has one.

    A packed sequence and a batch of graphs count their samples; another object without tensors is
    one sample.
    """
    sizes: list[int] = []
    others: list[Any] = []

    def count(value: Any) -> None:
        if isinstance(value, Tensor):
            if value.dim():
                sizes.append(value.size(0))
        elif (samples := _list_samples(value)) is not None:
            sizes.append(len(samples))
        elif has_tensors(value):
            _map_attributes(value, count, count)
        else:
            others.append(value)

    map_tensors(batch, count, move=count)
    if not sizes and not others:
        raise ValueError(
            f"an object of type {type(batch).__name__} has no tensor with a batch dimension: "
            "return tensors in containers, a dataclass or attributes, or a Workload with count= "
            "for the terms of a batch and a method to(device) on its class"
        )
    return sizes[0] if sizes else 1


def take(batch: Any, rows: slice | list[int], *, shared: Sequence[bool] = ()) -> Any:
    """Select samples from a batch; tensors with another leading dimension are shared.

    `shared` says for each tensor in containers whether it is shared in a batch of any size: its
    leading dimension may be the number of samples by chance.
    """
    size = batch_size(batch)
    chosen = list(range(size))[rows] if isinstance(rows, slice) else rows
    known = iter(shared)

    def select_unless_shared(tensor: Tensor) -> Tensor:
        return tensor if next(known, False) else select(tensor)

    def select(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.size(0) != size:
            return tensor
        if tensor.is_nested:
            raise IndivisibleBatch("a nested tensor can't be divided into samples: pad it")
        return tensor[rows]

    def divide(value: Any) -> Any:
        samples = _list_samples(value)
        if samples is None and has_tensors(value):
            return _map_attributes(value, select, divide)
        if samples is None or len(samples) != size:
            raise IndivisibleBatch(
                f"an object of type {type(value).__name__} can't be divided into samples: return a "
                "Workload whose batch makes one of any size"
            )
        selected = [samples[row] for row in chosen]
        if isinstance(value, PackedSequence):
            return pack_sequence(selected, enforce_sorted=False)
        return type(value).from_data_list(selected)

    return map_tensors(batch, select_unless_shared, move=divide)


def _list_samples(value: Any) -> list[Any] | None:
    """Return the samples of a packed sequence or a batch of graphs, or None for other objects."""
    if isinstance(value, PackedSequence):
        return unpack_sequence(value)
    makes_batches = hasattr(type(value), "from_data_list") and hasattr(value, "to_data_list")
    return list(value.to_data_list()) if makes_batches else None


# Workloads to train: a module, a batch of any size, and a loss that is a sum of terms.

Batch = Any


class WorkloadError(ValueError):
    """A workload that can't be trained as the user asked."""


@dataclass(frozen=True)
class Workload:
    """A model with its batches and its loss.

    The loss is a sum over terms, so that the mean is divided only once, by the number of terms of a
    whole window. `build` and `batch` draw from torch's global generator.
    """

    name: str
    build: Callable[[], nn.Module]

    # Makes a batch of a given size.
    batch: Callable[[int], Batch]

    # The sum of the loss over the terms of a batch.
    loss: Loss

    # The number of terms in a batch.
    count: Callable[[Batch], int] = batch_size

    # Drops an uneven part of the terms, for models whose loss can be masked.
    mask: Callable[[Batch], Batch] | None = None

    # Makes the user's optimizer from the module; None where the tools choose one.
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None

    # Shares the module among the ranks of a device mesh with torch's calls, in place, or returns it
    # wrapped; None where only one rank trains or the tools' built-in ways are used.
    parallelize: Callable[[nn.Module, Any], nn.Module | None] | None = None

    # The text from which the workload was loaded.
    spec: str = ""

    # The number of samples in the batch that a user's factory returned.
    own_batch: int | None = None

    # Whether batches of other sizes than `own_batch` can be made.
    is_divisible: bool = True

    # The dtype in which the user's own weights and batch are left; None where the tools choose one.
    dtype: torch.dtype | None = None

    # Microbatches that the user's own optimizer step accumulates.
    accumulation: int = 1

    # What was read off the user's trainer or script, a sentence each.
    notes: tuple[str, ...] = ()

    # The source of the factory that stands for the user's script.
    factory: str = ""

    # How long the caller holds what the module returned: to the end of "loss" or "step" where these
    # are functions that return without it, or to the "next step" where a variable outlives it.
    output_until: str = "next step"

    def __post_init__(self) -> None:
        if self.output_until not in ("loss", "step", "next step"):
            raise ValueError(f"output_until is loss, step or next step, got {self.output_until!r}")

    def mean_loss(self, module: nn.Module, batch: Batch) -> Tensor:
        return self.loss(module, batch) / self.count(batch)


# Stands for the dtype of a case's workload, or float32, until the case is made.
OWN_DTYPE: Any = None


@dataclass(frozen=True)
class Case:
    """One workload on one device, on which a gate is measured."""

    workload: Workload
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = OWN_DTYPE
    batch_size: int = 4
    seed: int = 0

    # The names of the blocks to work on, or a glob over them.
    blocks: Globs | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise WorkloadError(f"batch size must be at least 1, got {self.batch_size}")
        if isinstance(self.blocks, list):
            object.__setattr__(self, "blocks", tuple(self.blocks))
        dtype = self.dtype or self.workload.dtype or torch.float32
        object.__setattr__(self, "dtype", dtype)

    def build(self) -> nn.Module:
        """Build a module, with the same weights each time.

        Lazy modules get their parameters in one forward, as they would in training.
        """
        with seeded(self.seed):
            module = with_values(self.workload.build())
            if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
                with torch.no_grad():
                    self.workload.loss(module, self.workload.batch(self.batch_size))
        return self.place_module(module).train()

    def place_module(self, module: nn.Module) -> nn.Module:
        """Move a module to the device, its floating tensors to the dtype, and leave caches off."""
        # `Module.to(dtype)` would drop the imaginary parts of complex tensors.
        return without_cache(module)._apply(self._place_tensor)

    def batch(self, size: int | None = None) -> Batch:
        """Make the same batch each time, on the device and in the case's dtype."""
        with seeded(self.seed + 1):
            return self.place(self.workload.batch(self.batch_size if size is None else size))

    @property
    def batch_and_loss(self) -> tuple[Batch, Loss]:
        """The batch and the mean loss, which measurements take after the module."""
        return self.batch(), self.workload.mean_loss

    def mean_loss(self, module: nn.Module, batch: Batch = None) -> Tensor:
        """Return the mean loss of a batch, or of the case's own, with the same random numbers."""
        with seeded(self.seed):
            return self.workload.mean_loss(module, self.batch() if batch is None else batch)

    def place(self, batch: Batch) -> Batch:
        """Move a batch to the device, and its floating tensors to the case's dtype."""
        return map_tensors(batch, self._place_tensor, move=self._place_object)

    def _place_tensor(self, tensor: Tensor) -> Tensor:
        is_changed = tensor.is_floating_point() and self.dtype is not self.workload.dtype
        return tensor.to(self.device, self.dtype if is_changed else None)

    def _place_object(self, value: Any) -> Any:
        """Move an object that holds tensors; its dtype is changed by its method `apply`."""
        if isinstance(value, PackedSequence):
            packed: Any = value
            return packed.to(self.device, self._place_tensor(value.data).dtype)
        # Graphs change themselves, and the factory's batch has to stay as it is.
        value = copy.copy(value)
        if callable(getattr(value, "apply", None)):
            return value.apply(self._place_tensor)
        if self.dtype not in (torch.float32, self.workload.dtype):
            raise WorkloadError(
                f"the tensors in a {type(value).__name__} can't be made {self.dtype}: leave "
                "--dtype out, or return a Workload whose batch makes tensors of that type"
            )
        return value.to(self.device)

    def with_running_blocks(self) -> "tuple[Case, BlockChoice]":
        """Return the case on blocks that one forward runs, and their choice.

        Blocks that are given stay. Raises `NoBlocks` if there are none.
        """
        choice = choose_blocks(self.build(), *self.batch_and_loss, blocks=self.blocks)
        return replace(self, blocks=choice.blocks), choice

    def split(self, batch: Batch, sizes: Sequence[int]) -> list[Batch]:
        """Split a batch into microbatches of these sizes, which must add up to the batch."""
        if not self.workload.is_divisible and len(sizes) > 1:
            # Raises what is the matter with it.
            self.workload.batch(sizes[0])
        if sum(sizes) != batch_size(batch):
            raise IndivisibleBatch(
                f"a batch of {sum(sizes)} samples has {batch_size(batch)} by the leading dimension "
                "of its first tensor, so it can't be divided: make tensors that begin with the "
                "dimension of samples"
            )
        return [
            self.take(batch, slice(end - size, end))
            for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)
        ]

    def take(self, batch: Batch, rows: slice | list[int]) -> Batch:
        """Select samples from a batch of this workload."""
        return take(batch, rows, shared=shared_tensors(self.workload.batch))


def with_values(module: nn.Module) -> nn.Module:
    """Return a module; raise WorkloadError if a parameter or buffer has a shape alone."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type == "meta":
            raise WorkloadError(
                f"{name} is on the device meta, without values: build the model on the CPU; "
                "plan works on shapes alone by itself"
            )
    return module


@functools.lru_cache(maxsize=64)
def shared_tensors(make: Callable[[int], Batch]) -> tuple[bool, ...]:
    """Return for each tensor of a batch whether it is as long in a batch of another size.

    Positions of tokens are, which all samples share. Empty where batches have one size.
    """
    try:
        with seeded(0):
            lengths = [_list_lengths(make(size)) for size in SIZES_TO_COMPARE]
            shared = tuple(first == second for first, second in zip(*lengths, strict=True))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return ()
    return () if all(shared) else shared


def _list_lengths(batch: Batch) -> list[int]:
    """Return the leading dimension of each tensor, 0 for a scalar."""
    found: list[int] = []
    map_tensors(batch, lambda tensor: found.append(len(tensor) if tensor.dim() else 0))
    return found


@contextlib.contextmanager
def made_by(base: Any, make: Callable[..., Any]) -> Iterator[None]:
    """Call `make(kind, ...)` where an object of a class, or of one derived from it, is made."""
    # Deleted, it would leave an `object.__new__` that takes no arguments.
    usual = staticmethod(lambda kind, *_, **__: object.__new__(kind))
    before = vars(base).get("__new__", usual)
    base.__new__ = staticmethod(make)
    try:
        yield
    finally:
        base.__new__ = before


# Batches and losses for modules, `(module, batch)` pairs and Hugging Face models.

SEQUENCE_LENGTH = 64
IMAGE_SIZE = 32


def default_workload(name: str, build: Callable[[], nn.Module], made: Any) -> Workload:
    """Make a workload from what a factory returned: a module, or a module and a batch."""
    match made:
        case nn.Module() as module:
            example = _make_example_batch(module)
        case tuple((nn.Module() as module, example)):
            pass
        case _:
            raise ValueError(
                f"the factory returned {type(made).__name__}: return an nn.Module, a (module, "
                "batch) pair or a Workload"
            )

    size = batch_size(example)
    if not size:
        raise ValueError("the batch is empty: return one with at least one sample")
    has_labels = isinstance(example, Mapping) and isinstance(example.get("labels"), Tensor)
    is_causal = has_labels and type(module).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    # Set where the user gives a model of Hugging Face another loss.
    is_causal &= not hasattr(module, "_loss_function")
    if is_causal:
        # The first token of a row follows on no other. Prompt tuning puts virtual ones in front of
        # it, from which the model would predict it, and a count of labels would have to know.
        labels = example["labels"].clone()
        labels[:, 0] = IGNORED_TARGET
        example = {**example, "labels": labels}
    batch, is_divisible = batches_like(example)
    count = LabelCount() if is_causal else batch_size

    return Workload(
        name,
        build,
        batch,
        loss=OutputLoss(count),
        count=count,
        mask=getattr(count, "mask", None),
        own_batch=size if isinstance(made, tuple) else None,
        is_divisible=is_divisible,
        dtype=dtype_of(module),
    )


def batches_like(example: Any) -> tuple[Callable[[int], Any], bool]:
    """Return a function that makes batches of any size from one, and whether it can be divided."""
    size = batch_size(example)
    is_divisible = True
    try:
        take(example, [0])
    except IndivisibleBatch:
        is_divisible = False

    def batch(wanted: int) -> Any:
        if not is_divisible and wanted == size:
            return example
        # Repeated in order, the microbatches of a window would be equal, and hide what is left out.
        more = random.Random(0).choices(range(size), k=wanted)
        return take(example, [*range(size), *more][:wanted])

    return batch, is_divisible


def undivided(workload: Workload) -> Workload:
    """Return a workload that makes its own batch alone, whose rows belong together."""
    own = workload.own_batch

    def batch(wanted: int) -> Any:
        if wanted != own:
            raise IndivisibleBatch(
                f"the model runs on its own batch of {own} alone, and one of {wanted} is needed: "
                "return a Workload whose batch makes one of any size"
            )
        return workload.batch(wanted)

    return replace(workload, batch=batch, is_divisible=False)


def call(module: nn.Module, batch: Any) -> Any:
    """Call a module on a batch."""
    if isinstance(batch, Mapping):
        return module(**batch)
    # A packed sequence is a tuple by its class alone.
    if isinstance(batch, tuple | list) and not isinstance(batch, PackedSequence):
        return module(*batch)
    return module(batch)


def own_loss(output: Any) -> Any:
    """Return the loss that a model returns with its output, or None."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def without_cache(module: nn.Module) -> nn.Module:
    """Switch the key-value cache of Hugging Face's modules off, and return the module."""
    for submodule in module.modules():
        config: Any = getattr(submodule, "config", None)
        is_hugging_face = any(
            base.__module__.startswith("transformers.") for base in type(config).__mro__
        )
        if is_hugging_face and getattr(config, "use_cache", None) is True:
            config.use_cache = False
    return module


class OutputLoss:
    """The sum over terms of a module's own mean loss, or of distances of all its outputs.

    Without a loss of its own, a module's loss is the mean squared distance of each output from
    fixed targets. They differ between the elements of a sample and are the same for all samples.
    So the loss is a sum over samples, and its gradient does not vanish on normalised outputs.
    """

    def __init__(self, count: Callable[[Any], int] = batch_size) -> None:
        # The number of terms that the module's own loss is a mean of.
        self.count = count
        # The dimension that counts samples, by the place of an output; None if there is none.
        self.sample_dims: dict[str, int | None] = {}

    def __call__(self, module: nn.Module, batch: Any) -> Tensor:
        return self._compute_loss(call(module, batch), batch)

    def learn(self, module: nn.Module, make_batch: Callable[[int], Any]) -> Tensor:
        """Find the dimension of samples in each output, and return the loss of a small batch.

        It is the one that is longer in a larger batch.
        """
        small, large = map(make_batch, SIZES_TO_COMPARE)
        output = call(module, small)
        if not isinstance(own_loss(output), Tensor):
            # Gradients are on here, because a forward may take some.
            larger = {
                place: one.shape for place, one in _find_floating_tensors(call(module, large))
            }
            for place, value in _find_floating_tensors(output):
                lengths = zip(value.shape, larger.get(place, value.shape), strict=False)
                longer = (dim for dim, (first, second) in enumerate(lengths) if first != second)
                self.sample_dims[place] = next(longer, None)
        return self._compute_loss(output, small)

    def _compute_loss(self, output: Any, batch: Any) -> Tensor:
        own = own_loss(output)
        if isinstance(own, Tensor):
            return (own.mean() if own.dim() else own) * self.count(batch)

        size = batch_size(batch)
        outputs = [
            (place, value) for place, value in _find_floating_tensors(output) if value.numel()
        ]
        if not outputs:
            raise TypeError(
                f"the module returned {type(output).__name__}, from which no loss can be computed; "
                "return a Workload"
            )
        if torch.is_grad_enabled():
            # The others are masks and constants, which may be infinite.
            trained = [(place, value) for place, value in outputs if value.requires_grad]
            outputs = trained or outputs
        if outputs[0][1].dim() == 0:
            losses = [value for _, value in outputs if value.dim() == 0]
            return torch.stack(losses).sum() * size
        return torch.stack([self._measure_distance(*one, size) for one in outputs]).sum()

    def _measure_distance(self, place: str, value: Tensor, size: int) -> Tensor:
        """Sum the squared distance of an output from fixed targets, in the mean of a sample.

        Samples of different lengths are one dimension of an output: each of its rows counts.
        """
        dim = self.sample_dims.get(place)
        shape = [1 if index == dim else length for index, length in enumerate(value.shape)]
        number = math.prod(shape)
        positions = torch.arange(1, number + 1, dtype=value.dtype, device=value.device)
        target = positions.sin_().view(shape).expand_as(value)
        distance = F.mse_loss(value, target, reduction="sum") / number
        return distance * size if dim is None else distance


def _find_floating_tensors(output: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors of a nested output in at least float32, with their places."""
    for place, value in tensors_at(output):
        if value.is_nested:
            value = value.values()
        if value.is_complex():
            value = torch.view_as_real(value)
        if value.is_floating_point():
            yield place, value if value.dtype is torch.float64 else value.float()


@dataclass(frozen=True)
class LabelCount:
    """Count the targets of a batch, which `shifts` if each token is to predict the next one."""

    shifts: bool = False

    # The entry of the batch that holds the targets.
    key: str = "labels"

    def __call__(self, batch: Any) -> int:
        labels = batch[self.key]
        if "shift_labels" in batch:
            labels = batch["shift_labels"]
        elif self.shifts:
            labels = labels[..., 1:]
        return int((labels != IGNORED_TARGET).sum())

    def mask(self, batch: Any) -> Any:
        """Ignore the ends of rows, so that rows differ in valid targets and have at least two.

        Only tokens are ignored by -100: no class of a sample, no pixel, and no number.
        """
        targets = batch[self.key]
        if targets.dim() != 2 or targets.is_floating_point():
            return batch
        rows, length = targets.shape
        valid = torch.linspace(2, length, rows, device=targets.device).round()
        positions = torch.arange(length, device=targets.device)
        ignored = positions >= valid[:, None]
        return {**batch, self.key: targets.masked_fill(ignored, IGNORED_TARGET)}


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the floating dtype in which most of a module's parameters are."""
    sizes = Counter[torch.dtype]()
    for parameter in module.parameters():
        if parameter.is_floating_point() and not is_lazy(parameter):
            sizes[parameter.dtype] += parameter.numel()
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


def _make_example_batch(module: nn.Module) -> Any:
    """Make token ids for a Hugging Face model, else an input for the module's first layer."""
    dtype = dtype_of(module)
    config: Any = getattr(module, "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    name = type(module).__name__
    if vocabulary:
        tokens = torch.randint(vocabulary, (8, SEQUENCE_LENGTH))
        is_class = name.endswith("ForSequenceClassification")
        labels = torch.randint(config.num_labels, (8,)) if is_class else tokens
        return {"input_ids": tokens, "labels": labels}
    if name.endswith("ForImageClassification"):
        size = getattr(config, "image_size", None) or IMAGE_SIZE
        shape = (size, size) if isinstance(size, int) else tuple(size)
        pixels = torch.randn(8, getattr(config, "num_channels", 3), *shape, dtype=dtype)
        return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (8,))}

    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            return torch.randn(8, layer.in_features, dtype=dtype)
        if isinstance(layer, nn.Embedding):
            return torch.randint(layer.num_embeddings, (8, SEQUENCE_LENGTH))
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return torch.randn(8, layer.in_channels, *[32] * len(layer.kernel_size), dtype=dtype)
    raise ValueError(f"the input of {name} can't be inferred; return (module, batch)")
