"""Gates of policies and regions on planted blocks, whose operations and bytes are known.

The expected figures stand in tables, written by hand, so that no figure comes from the code that
is judged. The gates of `sac.py` measure the same on the user's model.

Proof: `python -m pytest tests/gates/test_sac.py`.
"""

import copy
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop

from ..core.blocks import find_blocks
from ..core.measure import measure_memory
from ..core.parity import compare, record_step
from ..core.rerun import seeded
from ..primitives.regions import apply_regions
from ..primitives.sac import apply_sac
from ..workloads.workload import Case
from .same_training import (
    PLANTED_BATCH_SIZE,
    PLANTED_DEPTH,
    PLANTED_WIDTH,
    OverwritingBlock,
    ReportedBlock,
    planted_blocks,
)
from .verdict import Gate, Takes, Verdict, not_applicable, unrefused

# Which operations run again under a policy.

# The operations that are counted, by a part of their name.
COUNTED_OPERATIONS = {
    "product": ("aten.mm.", "aten.addmm."),
    "attention": ("scaled_dot_product",),
    "sine": ("aten.sin.",),
    "tanh": ("aten.tanh.",),
    "noise": ("aten.rand_like.",),
    "added in place": ("aten.add_.",),
    "norm": ("aten.native_layer_norm.",),
}


class PolicyBlock(nn.Module):
    """Three products, and around them a sine, a tanh, noise, attention and a sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) / 3 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.weights
        drawn = torch.tanh(x.sin() @ first) * torch.rand_like(x)
        drawn.add_(1.0)
        heads = (drawn @ second).view(1, 2, 4, 8)
        return F.scaled_dot_product_attention(heads, heads, heads).view(8, 8) @ third


def _saves(texts: tuple[str, ...], context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
    return not context.is_recompute and str(operation).startswith(texts)


def _saving(*names: str) -> Callable[..., bool]:
    """Return a policy in torch's form that asks for the outputs of these operations to be kept."""
    return partial(_saves, tuple(f"aten.{name}." for name in names))


POLICY_BATCH = torch.ones(8, 8)
# How often an operation of a block runs again under each policy. Noise is always drawn again, and
# a sum in place is made again with what it is added to. A set holds the calls of a `Policy`.
ALL_CHEAP = {"sine": 1, "tanh": 1, "noise": 1, "added in place": 1}
CHOICES: dict[str, tuple[Any, Mapping[str, int]]] = {
    "save_expensive": ("save_expensive", {}),
    "save_matmuls": ("save_matmuls", {"attention": 1}),
    "save_attention": ("save_attention", {"product": 3}),
    "save_matmuls_and_attention": ("save_matmuls_and_attention", {}),
    "every_second_matmul": ("every_second_matmul", {"product": 1}),
    "a list": (["aten.mm"], {"attention": 1}),
    "a list with tanh": (["aten.mm.default", torch.ops.aten.tanh], {"attention": 1, "tanh": 0}),
    "a function": (_saving("tanh", "mm"), {"attention": 1, "tanh": 0}),
    "a function that names noise": (_saving("rand_like", "mm"), {"attention": 1}),
    "a function that keeps a quarter of what is cheap": (
        _saving("tanh"),
        {"product": 3, "attention": 1, "tanh": 0},
    ),
    "a function that keeps more, and products": (
        _saving("tanh", "sin", "mm"),
        {"attention": 1, "tanh": 0, "sine": 0},
    ),
    "the second product": (frozenset({("matmul", 1), ("attention", 0)}), {"product": 2}),
    "the last product": (frozenset({("matmul", 2)}), {"product": 2, "attention": 1}),
}
# Policies that are copied with their model too.
COPIED_POLICIES = ("save_expensive", "a list", "a function", "the second product")


def _policy_model() -> nn.Module:
    with seeded(0):
        return nn.Sequential(*[PolicyBlock() for _ in range(2)])


@cache
def _kind_of(operation: Any) -> str | None:
    for kind, texts in COUNTED_OPERATIONS.items():
        if any(text in str(operation) for text in texts):
            return kind
    return None


class _Counted(TorchDispatchMode):
    """Count the calls of the operations of `COUNTED_OPERATIONS`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := _kind_of(func)) is not None:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _counts(model: nn.Module, batch: Tensor) -> Counter[str]:
    model.zero_grad()  # a gradient that is there is added to
    with seeded(1), set_checkpoint_early_stop(False), _Counted() as counted:
        _ = model(batch).sum().backward()
    return counted.counts


def _run_again(model: nn.Module, plain: Counter[str]) -> dict[str, int]:
    """Return how often the operations run more than in the plain model."""
    counts = _counts(model, POLICY_BATCH)
    return {
        name: counts[name] - plain[name]
        for name in COUNTED_OPERATIONS
        if counts[name] != plain[name]
    }


def _expected(choice: Mapping[str, int], num_blocks: int = 2) -> dict[str, int]:
    counts = ALL_CHEAP | dict(choice)
    return {name: num_blocks * number for name, number in counts.items() if number}


def choices(case: Case, *, apply: Callable[..., Any] = apply_sac) -> Verdict:
    """Compare the operations that run again on planted blocks with a table written by hand.

    For every policy, for copies of the model, and for one of the blocks. An output that is
    overwritten is an error, unless that is allowed.
    """
    gate = "sac/choices"
    find_blocks(case.build(), case.blocks)
    plain = _counts(_policy_model(), POLICY_BATCH)
    wrong = [*_wrong_choices(apply, plain), *_wrong_options(apply, plain)]
    hint = f"other operations run again than the policy says: {'; '.join(wrong)}" if wrong else ""
    num_ways = len(CHOICES) + 2 * len(COPIED_POLICIES) + 5
    return Verdict(gate, not wrong, f"{num_ways - len(wrong)} as by hand", f"{num_ways}", hint)


def _wrong_choices(apply: Callable[..., Any], plain: Counter[str]) -> Iterator[str]:
    """Yield the policies under which other operations run again than by hand."""
    beside = sys.modules[apply.__module__]
    for name, (policy, choice) in CHOICES.items():
        if isinstance(policy, frozenset):
            if not hasattr(beside, "Policy"):
                continue
            policy = beside.Policy("the calls", calls=policy)
        model = _policy_model()
        apply(model, policy)
        ways = {name: model}
        if name in COPIED_POLICIES:
            ways |= {f"{name}, {way}": change(model) for way, change in _copies()}
        for way, changed in ways.items():
            if (found := _run_again(changed, plain)) != _expected(choice):
                yield f"{way} {found}"


def _wrong_options(apply: Callable[..., Any], plain: Counter[str]) -> Iterator[str]:
    model = _policy_model()
    names = apply(model, "save_attention", blocks=["1"])
    if names != ["1"] or _run_again(model, plain) != _expected({"product": 3}, num_blocks=1):
        yield "the second block alone"
    if not _raises(apply):
        yield "an overwritten output"
    is_option = "allow_cache_entry_mutation" in signature(apply).parameters
    if is_option and _raises(apply, allow_cache_entry_mutation=True):
        yield "an overwritten output that is allowed"
    for name, text in (("add_", "add_"), ("sin", "wrong way round")):
        model = _policy_model()
        apply(model, _saving("tanh", name))
        if unrefused(ValueError, partial(_counts, model, POLICY_BATCH), text):
            yield f"a function that keeps the tanh and the output of {name}"


def _copies() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    yield "copied", copy.deepcopy
    yield "pickled", lambda model: pickle.loads(pickle.dumps(model))


def _raises(apply: Callable[..., Any], **options: Any) -> bool:
    model = planted_blocks(OverwritingBlock).build()
    apply(model, "save_expensive", **options)
    try:
        model(torch.randn(2, PLANTED_WIDTH)).sum().backward()
    except RuntimeError:
        return True
    return False


# Undo policies and regions.


def undone(
    case: Case,
    *,
    policies: Callable[..., Any] = apply_sac,
    regions: Callable[..., Any] = apply_regions,
) -> Verdict:
    """Apply and remove policies and regions, and look for anything that is left on the blocks.

    The functions that remove stand beside those that apply. A second policy over the first one is
    refused, and after the first was removed it is taken.
    """
    gate = "sac/undone"
    required = "as built: classes, attributes, operations"
    find_blocks(case.build(), case.blocks)
    ways: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "remove_sac": (policies, {"policy": "save_matmuls"}),
        "remove_regions": (regions, {"also": ["*.act"]}),
    }
    wrong = []
    for name, (apply, options) in ways.items():
        remove = getattr(sys.modules[apply.__module__], name, None)
        if remove is None:
            return not_applicable(gate, required=required, why=f"no {name} beside the other")
        model = planted_blocks(ReportedBlock).build()
        before = _traces(model)
        names = apply(model, **options)
        try:
            apply(model, **options)
            wrong.append(f"what {name} removes is applied twice")
        except ValueError:
            pass
        found = [remove(model), remove(model)]
        if found != [names, []]:
            wrong.append(f"{name} returns {found}")
        after = _traces(model)
        if differing := [trace for trace, value in after.items() if value != before[trace]]:
            wrong.append(f"{name} leaves other {', '.join(differing)}")
        elif apply(model, **options) != names:
            wrong.append(f"after {name} blocks are not found again")
    hint = "; ".join(wrong)
    return Verdict(gate, not wrong, f"{len(wrong)} differences", required, hint)


def _traces(model: nn.Module) -> dict[str, Any]:
    """Return what a changed block has otherwise than the plain one."""
    batch = torch.ones(PLANTED_BATCH_SIZE, PLANTED_WIDTH)
    modules = dict(model.named_modules())
    return {
        "classes": [(name, type(module)) for name, module in modules.items()],
        "attributes": [(name, sorted(vars(module))) for name, module in modules.items()],
        "names of weights": sorted(model.state_dict()),
        "operations": _counts(model, batch),
    }


def _sum(model: nn.Module, batch: Tensor) -> Tensor:
    total: Tensor = model(batch).float().sum()
    return total


def _sum_by_autocast(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return _sum(model, batch)


# What regions free, and how often they run a norm again.


class ProductChain(nn.Module):
    """A product, whose output is multiplied by some weights in a row."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.linear = nn.Linear(PLANTED_WIDTH, PLANTED_WIDTH)
        self.weights = nn.ParameterList(torch.ones(PLANTED_WIDTH) for _ in range(length))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for weight in self.weights:
            x = x * weight
        return x


class ReadThrice(nn.Module):
    """A norm that three products read, two of which are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(PLANTED_WIDTH)
        self.layers = nn.ModuleList(
            nn.Linear(PLANTED_WIDTH, PLANTED_WIDTH, bias=False) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        first, second, third = (layer(normed) for layer in self.layers)
        return x + F.silu(first) * second + third


# The tensors that three blocks with regions keep, in units of a float32 tensor, with or without
# autocast in bfloat16, under which casts of weights and of norms are made again. A chain keeps its
# product and every fifth factor, and a block the input that the one before it computed. Under
# autocast the first block keeps its cast batch too, which nothing makes again.
FREED_BLOCKS: tuple[tuple[str, Callable[[], nn.Module], bool, float], ...] = (
    ("a chain of 5", partial(ProductChain, 5), True, 1.5 + 1 + 0.5),
    ("a chain of 6", partial(ProductChain, 6), False, 3 + 3),
    ("a norm of three products", ReadThrice, False, 2 + 6),
    ("a norm of three products", ReadThrice, True, 2 + 3),
)


def freed(case: Case, *, apply: Callable[..., Any] = apply_regions) -> Verdict:
    """Compare what regions hold of planted blocks with a count by hand, and the norms that run.

    A norm runs once more in backward, however many products read it. Modules that `also` names may
    return their input, a view, several values, or what needs no gradient.
    """
    gate = "sac/freed"
    find_blocks(case.build(), case.blocks)
    wrong = []
    batch = torch.ones(PLANTED_BATCH_SIZE, PLANTED_WIDTH)
    for name, block, by_autocast, units in FREED_BLOCKS:
        model = planted_blocks(block).build()
        apply(model)
        loss = _sum_by_autocast if by_autocast else _sum
        held = measure_memory(model, batch, loss).held_bytes / batch.nbytes
        if round(held, 1) != units:
            wrong.append(f"{name} holds {held:.1f} tensors and not {units}")
    model = planted_blocks(ReadThrice).build()
    apply(model)
    if (found := _counts(model, batch)["norm"]) != 2 * PLANTED_DEPTH:
        wrong.append(f"{found} norms run and not {2 * PLANTED_DEPTH}")
    wrong += [f"a module that returns {name} trains otherwise" for name in _other_outputs(apply)]
    num_ways = len(FREED_BLOCKS) + 1 + len(MODULE_OUTPUTS)
    hint = "; ".join(wrong)
    return Verdict(gate, not wrong, f"{num_ways - len(wrong)} as by hand", f"{num_ways}", hint)


# What a module inside of a block may return.
MODULE_OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "its input": lambda x: x,
    "a view": lambda x: torch.sigmoid(x).view(-1, 2, PLANTED_WIDTH // 2).flatten(1),
    "a pair": lambda x: (torch.sigmoid(x), None),
    "no gradient": lambda x: torch.sigmoid(x.detach()),
}


class Returning(nn.Module):
    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output(x)


class ReturningBlock(nn.Module):
    """A module between two products that returns its values in another form."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(PLANTED_WIDTH, PLANTED_WIDTH)
        self.act = Returning(output)
        self.last = nn.Linear(PLANTED_WIDTH, PLANTED_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        output = self.act(x)
        return x + self.last(output[0] if isinstance(output, tuple) else output)


def _other_outputs(apply: Callable[..., Any]) -> Iterator[str]:
    """Yield the outputs with which a model with regions trains otherwise, or not at all."""
    batch = torch.ones(PLANTED_BATCH_SIZE, PLANTED_WIDTH)
    for name, output in MODULE_OUTPUTS.items():
        with seeded(0):
            model = planted_blocks(partial(ReturningBlock, output)).build()
        expected = record_step(model, batch, _sum)
        model.zero_grad()
        try:
            apply(model, also=["*.act"])
            is_same = compare(expected, record_step(model, batch, _sum)).bit_equal
        except (RuntimeError, AttributeError, TypeError):
            is_same = False
        if not is_same:
            yield name


CHOICE_GATES = (
    Gate("sac/choices", choices, {"apply_sac": Takes("apply")}),
    Gate(
        "sac/undone",
        undone,
        {"apply_sac": Takes("policies"), "apply_regions": Takes("regions")},
    ),
    Gate("sac/freed", freed, {"apply_regions": Takes("apply")}),
)
