"""Fixtures of gates: a simulated machine, planted hosts, blocks, losses and records.

The machine slows down over time, is slow before it is warm, stalls now and then, and returns from a
launch before the work is done. Its time depends only on the work given to it, so the right result
of a measurement is known, whatever else runs on the real machine.

Why so long: the tables of what is planted, each for one gate.

Proof: `python -m pytest tests/gates/test_bench.py`.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.rerun import seeded
from ..primitives.cross_entropy import IGNORED_TARGET


class PlantedMachine:
    """Simulated machine: `launch` queues work, `wait` finishes it, `clock` reads the time.

    `steps` is the amount of work to come in all and `cold_steps` the amount that is slow at first,
    both in units of `unit`.
    """

    def __init__(
        self,
        *,
        unit: float,
        steps: float,
        cold_steps: float,
        drift: float = 1 / 3,
        cold: float = 10.0,
        stall_every: int = 11,
        stall_steps: float = 50.0,
    ) -> None:
        self.drift = drift
        self._unit = unit
        self._steps = steps
        self._cold_steps = cold_steps
        self._cold = cold
        self._stall_every = stall_every
        self._stall = stall_steps * unit
        self._launch = 0.001 * unit
        self._queued = 0.0
        self._done = 0.0
        self._time = 0.0
        self._num_waits = 0

    def launch(self, amount: float) -> None:
        """Queue work; the call itself takes almost no time."""
        self._queued += amount
        self._time += self._launch

    def wait(self) -> None:
        if not self._queued:
            return
        self._num_waits += 1
        slowness = 1 + self.drift * self._done / (self._steps * self._unit)
        if self._done < self._cold_steps * self._unit:
            slowness *= self._cold
        if self._num_waits % self._stall_every == 0:
            self._time += self._stall
        self._time += self._queued * slowness
        self._done += self._queued
        self._queued = 0.0

    def clock(self) -> float:
        return self._time

    def drift_of(self, steps: float) -> float:
        """Return how much slower the machine gets over so many steps, as a share."""
        return self.drift * steps / self._steps


# Blocks whose saved tensors are known: what moves to the host, and what stays.

TENSOR_SIDE = 64  # of the square tensors that planted blocks save
SAVED_BYTES = 4 * TENSOR_SIDE * TENSOR_SIDE


def square_tensor(start: float) -> Tensor:
    """Return a tensor of `SAVED_BYTES`, with numbers from `start` to 1."""
    return torch.linspace(start, 1, TENSOR_SIDE**2).reshape(TENSOR_SIDE, TENSOR_SIDE)


class SavingBlock(nn.Module):
    """A block whose `act` makes autograd save tensors of `SAVED_BYTES`."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        self.weight = nn.Parameter(square_tensor(-1))
        self.register_buffer("factors", square_tensor(0))
        self.data = torch.ones(8 * TENSOR_SIDE, TENSOR_SIDE)

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        return self.act(self, x, *given)


def _views(block: Any, x: Tensor) -> Tensor:
    y = x.exp()
    if hasattr(block, "saved"):
        block.saved.append(ref(y))
    return y.view(-1).sin().view(TENSOR_SIDE, TENSOR_SIDE) + y[:, :1].cos() + y.t().cos()


def _detached(block: Any, x: Tensor) -> Tensor:
    y = x.exp()
    return y + y.detach().requires_grad_().sin()


def _in_bfloat16(block: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear((x * 1).bfloat16(), block.weight).float()


def _sparse(block: Any, x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(TENSOR_SIDE).to_sparse(), x)


def six_in_a_row(block: Any, x: Tensor) -> Tensor:
    for _ in range(6):
        x = (0.1 * x).exp()
        if hasattr(block, "note"):
            x.register_hook(block.note)
    return x


PARAMETER_REASON = "parameter or buffer"
# Of each: what a block does, how many storages move, and the tensors that stay, by the reason.
SAVED_STORAGES: dict[str, tuple[Callable[..., Tensor], int, dict[str, tuple[int, int]]]] = {
    "one tensor": (lambda block, x: x.exp(), 1, {}),
    "views": (_views, 1, {"duplicate": (3, 2 * SAVED_BYTES + 4 * TENSOR_SIDE)}),
    "a detached tensor": (_detached, 1, {"alias of what moved": (1, SAVED_BYTES)}),
    "a weight": (lambda block, x: x @ block.weight, 1, {PARAMETER_REASON: (1, SAVED_BYTES)}),
    "a buffer": (lambda block, x: x * block.factors, 0, {PARAMETER_REASON: (1, SAVED_BYTES)}),
    "few numbers": (
        lambda block, x: x.exp() + x[:2].t().exp().sum(),
        1,
        {"too small": (1, 4 * 2 * TENSOR_SIDE)},
    ),
    "a slice of data": (
        lambda block, x, given: x * given,
        0,
        {"slice of data": (1, SAVED_BYTES)},
    ),
    "a copy of a weight": (_in_bfloat16, 1, {"cast of a parameter": (1, SAVED_BYTES // 2)}),
    "a sparse tensor": (_sparse, 0, {"no plain tensor of the device": (1, 0)}),
    "few numbers and a weight": (
        lambda block, x: x[:2].exp().sum() + x @ block.weight,
        1,
        {"too small": (1, 4 * 2 * TENSOR_SIDE), PARAMETER_REASON: (1, SAVED_BYTES)},
    ),
    "six in a row": (six_in_a_row, 6, {}),
}


# Planted hosts: files below a folder, and the bytes that a process may still allocate.

MEMINFO_TEXT = "MemTotal: 900 kB\nMemFree: 10 kB\nMemAvailable: 800 kB\n"


def _group(folder: str, limit: object, used: int, stat: str | None = None) -> dict[str, str]:
    """Return the files of a control group of the second version."""
    files = {f"{folder}/memory.max": f"{limit}\n", f"{folder}/memory.current": f"{used}\n"}
    return files if stat is None else files | {f"{folder}/memory.stat": stat}


SECOND_ROOT = "sys/fs/cgroup"
FIRST_ROOT = "sys/fs/cgroup/memory"
FIRST_GROUP = {
    f"{FIRST_ROOT}/memory.limit_in_bytes": "7000\n",
    f"{FIRST_ROOT}/memory.usage_in_bytes": "3000\n",
    f"{FIRST_ROOT}/memory.stat": "inactive_file 9\ntotal_inactive_file 500\n",
}
JOB_FILES = {"proc/self/cgroup": "0::/user/job\n", "proc/meminfo": MEMINFO_TEXT}
PLANTED_HOSTS: dict[str, tuple[dict[str, str], int | None]] = {
    "no files": ({}, None),
    "a kernel": ({"proc/meminfo": MEMINFO_TEXT}, 800 * 1024),
    "a kernel that does not report it": ({"proc/meminfo": "MemFree: 10 kB\n"}, None),
    "a group without files": (JOB_FILES, 800 * 1024),
    "a group": (JOB_FILES | _group(f"{SECOND_ROOT}/user/job", 9000, 4000), 5000),
    "a group above": (
        JOB_FILES
        | _group(f"{SECOND_ROOT}/user/job", "max", 4000)
        | _group(f"{SECOND_ROOT}/user", 6000, 5000, "anon 3\ninactive_file 700\n"),
        1700,
    ),
    "the root group of a container": (
        JOB_FILES | _group(SECOND_ROOT, 5000, 4000, "anon 3\n"),
        1000,
    ),
    "a group with a wide limit": (JOB_FILES | _group(f"{SECOND_ROOT}/user", 2**40, 0), 800 * 1024),
    "a limit without its use": (JOB_FILES | {f"{SECOND_ROOT}/user/memory.max": "5"}, 800 * 1024),
    "the first version": ({"proc/self/cgroup": "4:hugetlb,memory:/a/b\n"} | FIRST_GROUP, 4500),
    "both versions": (
        {"proc/self/cgroup": "3:cpu:/a\n4:memory:/a:b\n0::/c\n"}
        | FIRST_GROUP
        | _group(f"{SECOND_ROOT}/c", 4000, 1000),
        3000,
    ),
}


# Losses over logits, as people write them, and the definition of their options.

HALF_PRECISION_DTYPES = (torch.bfloat16, torch.float16)
# The next higher precision. Tokens that the model predicts with a probability near 1 have gradients
# that are small differences of it and 1, so float32 may round them by more than its bound.
HIGHER_PRECISION = {
    torch.float32: torch.float64,
    **dict.fromkeys(HALF_PRECISION_DTYPES, torch.float32),
}


def loss_by_definition(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    reduction: str = "mean",
    softcap: float | None = None,
    z_loss: float = 0.0,
    class_weights: Tensor | None = None,
    token_weights: Tensor | str | None = None,
    ignore_index: int = IGNORED_TARGET,
    backend: object = None,
    **smoothing: float,
) -> Tensor:
    """Compute the loss from whole logits, in the next higher precision, whatever the backend."""
    dtype = HIGHER_PRECISION.get(hidden.dtype, hidden.dtype)
    logits = F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    shares = None if class_weights is None else class_weights.to(dtype)
    options: dict[str, Any] = {"weight": shares, "ignore_index": ignore_index, **smoothing}
    is_used = targets != ignore_index
    rows = logits.flatten(0, -2)
    losses = F.cross_entropy(rows, targets.flatten(), reduction="none", **options)
    losses = losses.reshape(targets.shape)
    losses = losses + is_used * z_loss * logits.logsumexp(-1).square()
    if token_weights is not None:
        factors = token_weights
        if isinstance(factors, str):
            chosen = targets.where(is_used, 0)[..., None]
            factors = logits.softmax(-1).gather(-1, chosen)[..., 0].detach()
        losses = losses * factors
    if reduction == "none":
        return losses
    terms = is_used if shares is None else is_used * shares[targets.where(is_used, 0)]
    return losses.sum() / (terms.sum() if reduction == "mean" else 1)


def own_backend(reference: Any, sources: Any, targets: Tensor, used: Any) -> Tensor:
    """Compute a loss by its definition, from the options that a backend gets."""
    hidden, weight, bias = sources
    sizes = ("chunk_tokens", "chunk_bytes", "weighted_by_probability")
    options = {name: value for name, value in used.items() if name not in sizes}
    if used.get("weighted_by_probability"):
        options["token_weights"] = "probability"
    return loss_by_definition(hidden, weight, targets, bias=bias, **options)


def options_of_losses(hidden: Tensor, classes: int) -> dict[str, dict[str, Any]]:
    """Draw each option of the chunked cross-entropy, for tokens and classes of these numbers."""
    weights = torch.rand(classes).to(hidden.device) + 0.5
    token_weights = torch.rand(hidden.shape[:-1]).to(hidden.device)
    bias = torch.randn(classes).to(hidden)
    each: dict[str, dict[str, Any]] = {
        "sum": {"reduction": "sum"},
        "a bias": {"bias": bias},
        "class weights": {"class_weights": weights},
        "label smoothing": {"label_smoothing": 0.1},
        "z-loss": {"z_loss": 1e-2},
        "softcap": {"softcap": 2.0},
        "token weights": {"token_weights": token_weights, "reduction": "sum"},
        "probability": {"token_weights": "probability"},
        "another ignored target": {"ignore_index": 0},
        "the leanest backend": {"backend": "auto"},
        "a backend of one's own": {"backend": own_backend, "bias": bias, "reduction": "sum"},
    }
    each["all, by token"] = {key: value for one in each.values() for key, value in one.items()}
    each["all, by token"] |= {"reduction": "none", "ignore_index": IGNORED_TARGET}
    return each


# Expressions that users write between the head and the loss, over logits and targets of two
# sequences.
FORMS_IN_CHUNKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a shift": lambda logits, targets: _by_row(logits[:, :-1], targets[:, 1:]),
    "a shift by ...": lambda logits, targets: _by_row(
        logits[..., :-1, :].contiguous(), targets[..., 1:]
    ),
    "one position": lambda logits, targets: F.cross_entropy(logits[:, -2], targets[:, -2]),
    "flatten": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
    "a mask": lambda logits, targets: F.cross_entropy(
        logits[targets != IGNORED_TARGET], targets[targets != IGNORED_TARGET]
    ),
    "indices": lambda logits, targets: F.cross_entropy(
        torch.reshape(logits, (-1, logits.shape[-1]))[_every_second(targets)],
        targets.flatten()[_every_second(targets)],
    ),
    "transpose": lambda logits, targets: F.cross_entropy(logits.transpose(1, 2), targets),
    "permute": lambda logits, targets: F.cross_entropy(logits.permute(0, -1, 1), targets),
    "transpose twice": lambda logits, targets: _by_row(
        logits.transpose(-1, -2).transpose(2, 1), targets
    ),
    "float": lambda logits, targets: _by_row(logits.float().to(logits.device), targets),
    "two losses": lambda logits, targets: (
        _by_row(logits[:1], targets[:1]) + 2 * _by_row(logits[1:], targets[1:])
    ),
}
# A factor changes the rows of the head's input, which leaves out a bias.
FORMS_WITHOUT_BIAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a temperature": lambda logits, targets: _by_row(logits / 0.7, targets),
    "a factor": lambda logits, targets: _by_row(torch.mul(2 * logits, 0.25), targets),
    "a softcap": lambda logits, targets: _by_row(3.0 * torch.tanh(logits / 2.0), targets),
}
# These need all of the logits, which are computed then.
WHOLE_FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "log_softmax": lambda logits, targets: F.nll_loss(logits[0].log_softmax(-1), targets[0]),
    "a term beside the loss": lambda logits, targets: (
        _by_row(logits, targets) + 0.1 * logits.logsumexp(-1).square().mean()
    ),
    "a factor below 0": lambda logits, targets: _by_row(logits * -1, targets),
    "classes left out": lambda logits, targets: F.cross_entropy(
        logits[..., :-1].flatten(0, 1), targets.flatten().clamp(max=logits.shape[-1] - 2)
    ),
    "probabilities": lambda logits, targets: F.cross_entropy(logits[0], logits[1].softmax(-1)),
}


def _by_row(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))


def _every_second(targets: Tensor) -> Tensor:
    return torch.arange(0, targets.numel(), 2, device=targets.device)


# Planted losses: small tensors, in which each chunk, dtype and gradient can be counted.

LOSS_WIDTH = 5
LOSS_CLASSES = 7
LOSS_SHAPE = (2, 6)


def planted_loss(dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    """Return the tensors of a loss, of which two targets are left out."""
    with seeded(0):
        given = {
            "hidden": torch.randn(*LOSS_SHAPE, LOSS_WIDTH).to(dtype),
            "weight": torch.randn(LOSS_CLASSES, LOSS_WIDTH).to(dtype),
            "targets": torch.randint(LOSS_CLASSES, LOSS_SHAPE),
        }
    given["targets"][:, 2] = IGNORED_TARGET
    return given | changes


# Wrong calls of the chunked cross-entropy, and what the error has to name.
WRONG_LOSSES: dict[str, tuple[dict[str, Any], str]] = {
    "another width": ({"hidden": torch.ones(*LOSS_SHAPE, 4)}, "do not fit"),
    "a number as input": ({"hidden": torch.ones(())}, "do not fit"),
    "a weight without classes": ({"weight": torch.ones(LOSS_WIDTH)}, "do not fit"),
    "probabilities": ({"targets": torch.ones(LOSS_SHAPE)}, "class indices"),
    "fewer targets": ({"targets": torch.ones(2, 5).long()}, "targets of (2, 6)"),
    "another bias": ({"bias": torch.ones(LOSS_WIDTH)}, "bias must be (7,)"),
    "another dtype": ({"weight": torch.ones(LOSS_CLASSES, LOSS_WIDTH).half()}, "same floating"),
    "a bias of another dtype": ({"bias": torch.ones(LOSS_CLASSES).half()}, "torch.float16"),
    "whole numbers": (
        {
            "hidden": torch.ones(*LOSS_SHAPE, LOSS_WIDTH).long(),
            "weight": torch.ones(LOSS_CLASSES, LOSS_WIDTH).long(),
        },
        "floating-point dtype",
    ),
    "another reduction": ({"reduction": "average"}, "reduction must be"),
    "smoothing below 0": ({"label_smoothing": -0.1}, "label_smoothing"),
    "smoothing above 1": ({"label_smoothing": 1.1}, "label_smoothing"),
    "a z-loss below 0": ({"z_loss": -1e-3}, "z_loss"),
    "an infinite z-loss": ({"z_loss": float("inf")}, "z_loss"),
    "a softcap of 0": ({"softcap": 0.0}, "softcap"),
    "an infinite softcap": ({"softcap": float("inf")}, "softcap"),
    "a word for weights": ({"token_weights": "own"}, "'own'"),
    "weights of other tokens": ({"token_weights": torch.ones(6)}, "token_weights"),
    "weights of other classes": ({"class_weights": torch.ones(6)}, "of shape (7,)"),
    "whole class weights": ({"class_weights": torch.ones(7).long()}, "class_weights"),
    "weights with a gradient": (
        {"class_weights": torch.ones(7, requires_grad=True)},
        "class_weights get no gradient",
    ),
    "no tokens": ({"chunk_tokens": 0}, "chunk_tokens"),
    "True tokens": ({"chunk_tokens": True}, "chunk_tokens"),
    "half a byte": ({"chunk_bytes": 0.5}, "chunk_bytes"),
    "two sizes": ({"chunk_tokens": 2, "chunk_bytes": 100}, "chunk_tokens=2 and chunk_bytes=100"),
    "an unknown backend": ({"backend": "none"}, "got 'none'"),
}
# Options of a loss of ten counted tokens, and the tokens of its chunks. A token has the bytes of
# its logits, of their copies and of its input.
CHUNK_SIZES: tuple[tuple[torch.dtype, dict[str, Any], list[int]], ...] = (
    (torch.float32, {"chunk_tokens": 4}, [4, 4, 2]),
    (torch.float32, {"chunk_bytes": 7 * 4 + 5 * 4 + 47}, [1] * 10),
    (torch.float32, {"chunk_bytes": 2 * (7 * 4 + 5 * 4)}, [2] * 5),
    (torch.float32, {"chunk_bytes": 2 * (7 * 8 + 5 * 4), "softcap": 3.0}, [2] * 5),
    (torch.float64, {"chunk_bytes": 5 * (7 * 8 + 5 * 8)}, [5, 5]),
    (torch.bfloat16, {"chunk_bytes": 3 * (7 * 6 + 5 * 2)}, [3, 3, 3, 1]),
    (torch.float32, {"chunk_bytes": 1}, [1] * 10),
    (torch.float32, {}, [10]),
    # Half of the gradients' bytes, of 480 tokens and of the weight.
    (torch.float32, {"repeated": 40}, [101, 101, 101, 97]),
    (torch.float32, {"repeated": 40, "needs": (False, True)}, [16] * 25),
)


class ProductRows(TorchDispatchMode):
    """Note the rows of each product whose columns are classes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "mm" in func.__name__ and out.shape[-1] == LOSS_CLASSES:
            self.rows.append(out.shape[0])
        return out


WRONG_CHUNKS: dict[str, dict[str, Any]] = {
    "no tokens": {"chunk_tokens": 0},
    "no bytes": {"chunk_bytes": 0},
    "half a token": {"chunk_tokens": 1.5},
    "tokens and bytes": {"chunk_tokens": 4, "chunk_bytes": 2**20},
    "a head that is not there": {"head": "no_such_head"},
    "a head that is no Linear": {"head": "1"},
    "an unknown backend": {"backend": "no_such_backend"},
}


def rows_of_chunks(
    loss: Callable[..., Tensor],
    dtype: torch.dtype,
    *,
    repeated: int = 1,
    needs: tuple[bool, bool] = (True, True),
    **options: Any,
) -> list[int]:
    """Return the tokens of each chunk of a planted loss."""
    given = planted_loss(dtype)
    for name, count in (("hidden", repeated), ("targets", repeated)):
        given[name] = torch.cat([given[name]] * count)
    for name, need in zip(("hidden", "weight"), needs, strict=True):
        given[name].requires_grad_(need)
    with ProductRows() as found:
        loss(**given, **options)
    return found.rows


class LossesPerToken(TorchFunctionMode):
    """Count the tokens that `F.cross_entropy` gets with `reduction="none"`."""

    num_tokens = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy and kwargs.get("reduction") == "none":
            self.num_tokens += (args[1] if len(args) > 1 else kwargs["target"]).numel()
        return func(*args, **kwargs)


# Planted heads: a model, the head that is named, and the heads found, or what the error names.


def _with_head(model: Any, head: nn.Module | None) -> nn.Module:
    model.get_output_embeddings = lambda: head
    return model


def _two_heads() -> nn.Module:
    heads = nn.ModuleDict({"a": nn.Linear(4, 9), "b": nn.Linear(4, 8)})
    return nn.ModuleDict({"body": nn.Linear(4, 4), "heads": heads})


class OwnLinear(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


PLANTED_HEADS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[str] | str]] = {
    "the widest": (_two_heads, {}, ["heads.a"]),
    "by name": (_two_heads, {"head": "heads.b"}, ["heads.b"]),
    "by a pattern": (_two_heads, {"head": "heads.*"}, ["heads.a", "heads.b"]),
    "two that are as wide": (
        lambda: nn.Sequential(nn.Linear(4, 9), nn.Linear(4, 9)),
        {},
        "Sequential has no output layer",
    ),
    "narrower than its input": (lambda: nn.Sequential(nn.Linear(9, 4)), {}, "head="),
    "no Linear": (lambda: nn.Sequential(nn.Tanh()), {}, "has no output layer"),
    "embeddings": (
        lambda: _with_head(model := nn.Sequential(nn.Linear(9, 4), nn.Linear(4, 9)), model[0]),
        {},
        ["0"],
    ),
    "no embeddings": (lambda: _with_head(nn.Sequential(nn.Linear(4, 9)), None), {}, ["0"]),
    "embeddings of another kind": (
        lambda: _with_head(model := nn.Sequential(nn.Bilinear(4, 4, 9)), model[0]),
        {},
        "0 is a Bilinear, not a plain nn.Linear",
    ),
    "an own forward": (lambda: nn.Sequential(OwnLinear(4, 9)), {}, "0 is a OwnLinear"),
    "the model itself": (lambda: OwnLinear(4, 9), {}, "the model is a OwnLinear"),
    "another name": (_two_heads, {"head": "other"}, "head 'other' matches no module"),
}
# Operations that read all logits, and the name under which the report has them.
READS: dict[str, Callable[[Tensor], Any]] = {
    "exp": torch.exp,
    "argmax": lambda logits: logits.argmax(-1),
    "T": lambda logits: logits[0].T,
    "__rsub__": lambda logits: 1 - logits,
    "mul": lambda logits: logits.mul(True),
    "view": lambda logits: logits.view(torch.int32),
    "__getitem__": lambda logits: logits[..., 0],
    "to": lambda logits: logits.to(torch.float64),
    "cross_entropy with reduction='average'": lambda logits: F.cross_entropy(
        logits.flatten(0, 1), torch.zeros(4).long(), reduction="average"
    ),
    "cross_entropy with classes that are not in dimension 1": lambda logits: F.cross_entropy(
        logits, torch.zeros(2, 9).long()
    ),
}


class PastFunctions(torch.autograd.Function):
    """An exponential that takes its tensor past `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        output = logits.exp()
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        return gradient * output


def read_by_operations(apply: Callable[..., Any], needs: Sequence[bool]) -> list[Tensor]:
    """Read shifted logits past functions, and in a loss under autocast; return all gradients."""
    with seeded(0):
        model: Any = nn.Sequential(nn.Linear(4, 9))
    apply(model)
    leaves = [torch.linspace(-1, 1, 24).reshape(2, 3, 4), model[0].weight, model[0].bias]
    for leaf, need in zip(leaves, needs, strict=True):
        leaf.requires_grad_(need)
    value = PastFunctions.apply(model(leaves[0])[:, :-1]).sum()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(leaves[0])
    value = value + F.cross_entropy(logits.float().flatten(0, 1), torch.arange(6))
    wanted = list(itertools.compress(leaves, needs))
    gradients = torch.autograd.grad(value, wanted) if wanted else ()
    return [value.detach(), *gradients]


def planted_backends(calls: list[str]) -> dict[str, Any]:
    """Return backends of which one is lean, and the others waste memory, err or do not run here."""
    from ..primitives import loss_backends

    def made(name: str, waste: int, factor: float) -> Any:
        def loss(hidden: Any, weight: Any, bias: Any, targets: Any, **options: Any) -> Tensor:
            calls.append(name)
            if not factor:
                raise RuntimeError("this kernel does not run here")
            wasted = torch.ones(waste)
            return factor * wasted[0] * F.cross_entropy(F.linear(hidden, weight, bias), targets)

        return loss_backends.BackendEntry(
            loss, "json", ("cpu",), frozenset({"ignore_index", "reduction"})
        )

    rows = {"wasteful": (2**16, 1.0), "lean": (2**10, 1.0), "wrong": (1, 1.001), "broken": (1, 0.0)}
    planted = {name: made(name, *row) for name, row in rows.items()}
    planted["elsewhere"] = replace(planted["lean"], device_types=("cuda", "xpu"))
    planted["absent"] = replace(planted["lean"], package="no_such_package")
    planted["limited"] = replace(planted["lean"], options=frozenset({"reduction"}))
    return planted


def wrong_backends() -> list[str]:
    """Return what is wrong with the choice of a backend by name, and by measured bytes."""
    from ..primitives import cross_entropy, loss_backends

    wrong = []
    calls: list[str] = []
    planted = planted_backends(calls)
    options = {"ignore_index": IGNORED_TARGET, "reduction": "mean"}
    measured = ["wasteful", "wasteful", "lean", "wrong", "broken", "lean"]
    with (
        mock.patch.dict(loss_backends.BACKENDS, planted, clear=True),
        mock.patch.dict(loss_backends.MEASURED_BACKENDS, clear=True),
    ):
        # Of a size that is measured already one backend runs once.
        for targets, expected in (
            (torch.arange(4), measured),
            (torch.arange(5), ["lean"]),
            (torch.arange(9) % 7, measured),
        ):
            sources = [torch.ones(len(targets), 5, requires_grad=True), torch.ones(7, 5), None]
            calls.clear()
            leanest = loss_backends.loss_backend("auto")
            leanest(planted["wasteful"].loss, sources, targets, options)
            if calls != expected:
                wrong.append(f"of {len(targets)} tokens {calls} ran, not {expected}")
        for name, text in (
            ("elsewhere", "runs on cuda, xpu, not on cpu"),
            ("absent", "no_such_package is not installed"),
            ("limited", "does not take ignore_index"),
            ("other", "must be one of auto, wasteful, lean, wrong"),
        ):
            try:
                loss_backends.loss_backend(name)(planted["lean"].loss, sources, targets, options)
                wrong.append(f"the backend {name} computes")
            except ValueError as error:
                if text not in str(error):
                    wrong.append(f"the backend {name}: {error}")
        calls.clear()
        hidden, weight = torch.ones(4, 5), torch.ones(7, 5)
        cross_entropy.chunked_cross_entropy(hidden, weight, torch.arange(4), backend="lean")
        if calls != ["lean"]:
            wrong.append(f"a loss with the backend lean runs {calls}")
    return wrong


# Planted records of a probe, and how a report describes them.

Changes = Mapping[int, Mapping[str, Any]]
PLANTED_LAYERS = tuple(f"layers.{index}" for index in range(4))
# The number of values, of zeros and of those that are not finite, and the sum of squares; the norm
# of the weights and that of the update.
SOUND_LAYER: dict[str, Any] = {
    "activation": (100, 10, 0, 100.0),
    "gradient": (50, 0, 0, 1e-2),
    "update": (1.0, 1e-3),
}
LITTLE_UPDATE = {"update": (1.0, 1e-6)}
LARGE_UPDATE = {"update": (1.0, 0.02)}
DEAD_OUTPUTS = {"activation": (100, 95, 0, 1.0)}
BAD_OUTPUTS = {"activation": (100, 10, 7, math.nan)}
BAD_GRADIENTS = {"gradient": (50, 0, 1, math.nan)}


def _flow(step: int, changes: Changes | None = None, **options: Any) -> Any:
    """Return a record of four sound layers, of which some are changed, by their number."""
    # Imported here, because gates of other techniques load this module too.
    from ..primitives.grad_flow import AFTER_BACKWARD, LayerFlow, StepFlow, Update, ValueSpread

    kinds: dict[str, Any] = {"activation": ValueSpread, "gradient": ValueSpread, "update": Update}

    def made(values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: kinds[name](*value) if name in kinds and value else value
            for name, value in values.items()
        }

    sound = LayerFlow(**made(SOUND_LAYER), calls=1, is_block=True)
    layers = {
        name: replace(sound, **made((changes or {}).get(number, {})))
        for number, name in enumerate(PLANTED_LAYERS)
    }
    others: dict[str, Any] = {"stepped": True, "forwards": 1, "gradient": SOUND_LAYER["gradient"]}
    others |= {"gradients_read": AFTER_BACKWARD, "scaled": None}
    return StepFlow(step=step, layers=layers, order=PLANTED_LAYERS, **made(others | options))


def _of_all_forms() -> Any:
    return _flow(
        10,
        {
            0: {"activation": None, "gradient": None, "update": None, "frozen": ("weight",)},
            1: {"gradient": None, "tied": ("weight",), "update": (0.0, 1.0)},
            2: {"gradient": None, "update": None},
            3: {
                "activation": (10_000, 9996, 1, 4e4),
                "gradient": (1000, 125, 600, 9.0),
                "update": (1.0, 3e-4),
            },
        },
        ranks=2,
        scaled=0.05,
        notes=("a note",),
    )


ROWS_OF_ALL_FORMS = """\
layers.0                                 not called             frozen        -
layers.1                         1.0e+00 10.0%    0               tied      new
layers.2                         1.0e+00 10.0%    0                  -        -
layers.3                         2.0e+00  100%   1%  3.0e+00 12.5% 60%  3.0e-04"""
# The records of a run, and the report above its rows.
PLANTED_REPORTS: tuple[tuple[Callable[[], list[Any]], str], ...] = (
    (
        lambda: [_flow(0), _flow(10)],
        """\
2 steps probed, the last is 10: 1 forwards, gradient norm 0.1 after backward
nothing is wrong: all finite, no layer dead, updates 1e-4 to 1e-2 of the weights""",
    ),
    (
        lambda: [_of_all_forms()],
        """\
1 steps probed, the last is 10: 1 forwards, 2 ranks, gradient norm 0.1 after
backward, then multiplied by 0.05
a note
nonfinite   layers.3: under 0.1% of its activations are inf or nan, the first
            layer in forward order (step 10)""",
    ),
    (
        lambda: [
            _flow(0),
            _flow(10, {1: BAD_OUTPUTS | {"update": (math.nan, 1.0)}, 2: BAD_OUTPUTS}),
        ],
        """\
2 steps probed, the last is 10: 1 forwards, gradient norm 0.1 after backward
nonfinite   layers.1: 7.0% of its activations are inf or nan, the first layer in
            forward order; weights are too, starting with layers.1: an earlier
            step broke them, so probe with every=1 (step 10)""",
    ),
    (
        lambda: [_flow(0, {1: BAD_GRADIENTS, 2: BAD_GRADIENTS})],
        """\
1 steps probed, the last is 0: 1 forwards, gradient norm 0.1 after backward
nonfinite   layers.2: 2.0% of its gradients are inf or nan, the first layer in
            backward order; all activations were finite (step 0)""",
    ),
    (
        lambda: [_flow(3, gradient=(10, 0, 1, math.nan))],
        """\
1 steps probed, the last is 3: 1 forwards, gradient norm nan after backward
nonfinite   a gradient outside of the probed layers is inf or nan (step 3)""",
    ),
    (
        lambda: [_flow(0, {0: LITTLE_UPDATE, 1: DEAD_OUTPUTS, 2: DEAD_OUTPUTS, 3: LARGE_UPDATE})],
        """\
1 steps probed, the last is 0: 1 forwards, gradient norm 0.1 after backward
dead        layers.1: 95.0% of its activations are exactly 0; the same in 1 more
            layer (step 0)
update      layers.3: moves far: 2.0e-02 of its weights' norm per step, expected
            1e-4 to 1e-2 (step 0)
update      layers.0: hardly moves: 1.0e-06 of its weights' norm per step,
            expected 1e-4 to 1e-2 (step 0)""",
    ),
    (
        lambda: [_flow(0, {1: {"activation": (100, 90, 0, 1.0)}}, gradient=None)],
        """\
1 steps probed, the last is 0: 1 forwards, gradient norm none after backward
nothing is wrong: all finite, no layer dead, updates 1e-4 to 1e-2 of the weights""",
    ),
    (
        lambda: [_flow(0, stepped=False), _flow(1, stepped=False), _flow(2)],
        """\
3 steps probed, the last is 2: 1 forwards, gradient norm 0.1 after backward
skipped     2 of 3 probed steps were skipped: the optimizer did not use their
            gradients (step 0)""",
    ),
)


def wrong_report(table: Callable[..., str]) -> str:
    """Return what a table says otherwise than it should of planted records, or nothing."""
    for records, text in PLANTED_REPORTS:
        found = table(records()).partition("\n\n")[0]
        if found != text:
            return f"planted records are reported as: {found}"
    rows = table([_of_all_forms()])
    if not rows.endswith(ROWS_OF_ALL_FORMS):
        return f"layers of all forms have the rows: {rows}"
    return ""
