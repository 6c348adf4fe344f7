"""Gates of selective activation checkpointing: policies, regions, and refused policies.

Each gate takes the technique as an argument, so that its tests can plant a wrong one.

Why so long: the gates of one technique share the count of its products and the planted blocks.

Proof: `python -m pytest tests/gates/test_sac.py`.
"""

import contextlib
import copy
import pickle
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from ..bench.steps import python_calls
from ..core.blocks import find_blocks
from ..core.measure import (
    REST_LAYER,
    FlopCount,
    RunningLayers,
    count_flops,
    measure_memory,
    recompute_flops,
)
from ..core.parity import StepRecord, compare, record_step
from ..core.rerun import seeded, untouched
from ..primitives import sac
from ..primitives.regions import apply_regions, report_regions
from ..primitives.sac import PolicyError, apply_sac
from ..primitives.strategies import STRATEGIES, Apply, Sample
from ..workloads.workload import Case
from .planted_policies import CHOICE_GATES
from .same_training import (
    PLANTED_BATCH_SIZE,
    PLANTED_DEPTH,
    PLANTED_MIB,
    PLANTED_WIDTH,
    OverwritingBlock,
    ReportedBlock,
    every_form,
    in_place,
    planted_blocks,
    same_in_every_form,
    same_training,
    sample_of,
    why_torch_reruns_nothing,
)
from .verdict import (
    Gate,
    Implementation,
    Judged,
    NotApplicable,
    Takes,
    Verdict,
    is_kind,
    not_applicable,
)

# Of the Python function calls that torch's own selective checkpointing adds to a step. A dispatch
# mode costs all of them. Regions without one cost 0.16 of them in a transformer, and up to 0.72 in
# blocks of few operations with many norms.
MOST_CALL_OVERHEAD = 0.9
# Calls of attention in a block, at most.
MOST_ATTENTIONS = 100
Policies = Callable[..., list[str]]  # takes a model, a policy, and the blocks to apply it to


def sac_parity(case: Case, *, strategy: str, apply: Apply | None = None) -> Verdict:
    """Compare loss, gradients, buffers and generators of one step with and without SAC."""
    gate = f"sac/parity-{strategy.removeprefix('sac_').replace('_', '-')}"
    ours = STRATEGIES[strategy].apply
    with _where_outputs_can_be_kept(case, lambda module: ours(module, sample_of(case))):
        # Regions run parts of a block again, which `sac/regions` judges.
        every_block = strategy != "regions"
        return same_training(
            gate,
            case,
            apply or ours,
            by_torch=why_torch_reruns_nothing,
            every_block=every_block,
        )


def sac_forms(case: Case, *, strategy: str, apply: Apply | None = None) -> Verdict:
    """Compare a training of blocks with every form of arguments, random numbers and state."""
    gate = f"sac/forms-{strategy}"
    apply = apply or STRATEGIES[strategy].apply
    return same_in_every_form(gate, case, apply, every_block=strategy != "regions")


def products(case: Case, *, apply: Policies = apply_sac) -> Verdict:
    """Compare the recomputed FLOPs with those that the policy leaves out.

    The policies save all matrix products, by a name, a list of operations and a function, or every
    second one.
    """
    gate = "sac/products"
    loss = case.workload.mean_loss
    batch = case.batch()
    plain = case.build()
    per_call, others = _flops_by_call(case)
    if not per_call:
        return not_applicable(
            gate, required="as predicted", why="the blocks have no matrix product"
        )

    before = count_flops(plain, batch, loss)
    every_second = others + sum(sum(flops[1::2]) for flops in per_call)
    policies: dict[str, tuple[Any, int]] = {
        "save_expensive": ("save_expensive", 0),
        "every_second_matmul": ("every_second_matmul", every_second),
        "a list": ([*sac.EXPENSIVE_OPERATIONS], 0),
        "a function": (_keep_expensive, 0),
    }
    if of_calls := getattr(sys.modules[apply.__module__], "Policy", None):
        attentions = {("attention", number) for number in range(MOST_ATTENTIONS)}
        policy = of_calls("the first product", calls=frozenset({("matmul", 0), *attentions}))
        policies["a call"] = policy, others + sum(sum(flops[1:]) for flops in per_call)
    found = {}
    for name, (policy, expected) in policies.items():
        module = case.build()
        apply(module, policy, blocks=case.blocks)
        ours = partial(apply_sac, policy=policy, blocks=case.blocks)
        keeping = _where_outputs_can_be_kept(case, ours)
        with seeded(case.seed), set_checkpoint_early_stop(False), keeping:
            found[name] = recompute_flops(before, count_flops(module, batch, loss)), expected
    held = all(recomputed == expected for recomputed, expected in found.values())
    measured = "; ".join(
        f"{name} {recomputed:,} of {expected:,}" for name, (recomputed, expected) in found.items()
    )
    hint = ""
    if not held:
        hint = "the policy names operations that never run, or counts the second run with the first"
    return Verdict(gate, held, measured, "recomputed FLOPs as the policy predicts", hint)


def regions(case: Case, *, apply: Callable[..., Any] = apply_regions) -> Verdict:
    """Check that regions hold fewer bytes, recompute no FLOPs, and cost less than torch's SAC."""
    gate = "sac/regions"
    loss = case.workload.mean_loss
    batch = case.batch()
    plain = case.build()
    module = case.build()
    before = measure_memory(plain, batch, loss)
    apply_regions(module, blocks=case.blocks)
    report = report_regions(module, batch, loss)
    if measure_memory(module, batch, loss).held_bytes >= before.held_bytes:
        why = (
            "no tensor in the blocks is cheap to compute from saved tensors, as with Linear and "
            "ReLU, or convolutions"
        )
        return not_applicable(gate, required="fewer bytes", why=why)

    module = case.build()
    apply(module, blocks=case.blocks)
    held = measure_memory(module, batch, loss).held_bytes / before.held_bytes
    again = recompute_flops(count_flops(plain, batch, loss), count_flops(module, batch, loss))
    with _where_outputs_can_be_kept(case):
        calls = python_calls(case, partial(_apply, apply))
    calls -= python_calls(case, lambda module, case: None)
    idle = _blocks_left_out(case, module)
    passed = held < 1 and again == 0 and calls > 0 and not idle
    missed = sum(row.nbytes for row in report.unreached)
    measured = f"holds {held:.0%}, {again:,} FLOPs again, {missed / 2**20:.1f} MiB not reached; "
    required = "under 100%, 0 FLOPs"
    if isinstance(of_sac := _cost_of_torch_sac(case), str):
        measured += of_sac
    else:
        share = calls / of_sac.num_calls
        passed = passed and share <= MOST_CALL_OVERHEAD
        held_by_sac = of_sac.held_bytes / before.held_bytes
        measured += f"{share:.2f} of the Python calls of torch's SAC, which holds {held_by_sac:.0%}"
        required += f", at most {MOST_CALL_OVERHEAD} of the calls"
    hint = ""
    if idle:
        hint = f"{', '.join(idle[:4])} save as much as in the plain model, unlike blocks like them"
    elif not passed:
        hint = (
            "a product runs again, nothing is freed, or a dispatch mode is on: see report_regions"
        )
    return Verdict(gate, passed, measured, required, hint)


def _blocks_left_out(case: Case, changed: nn.Module) -> list[str]:
    """Return the blocks that save as much as in the plain model, unlike blocks like them.

    Hooks around a block see the tensors that no hooks inside of it have taken.
    """
    module = case.build()
    plain = _saved_around_blocks(case, module)
    ours = _saved_around_blocks(case, changed)
    kinds: defaultdict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, saved in plain.items():
        kinds[type(module.get_submodule(name)), *saved].append(name)
    left_out = []
    for names in kinds.values():
        same = [name for name in names if ours[name] == plain[name]]
        left_out += same if len(same) < len(names) else []
    return left_out


def _saved_around_blocks(case: Case, module: nn.Module) -> dict[str, list[int]]:
    """Return the bytes of each tensor that a block saves, as hooks around the block see them."""
    blocks = find_blocks(module, case.blocks)
    saved: dict[str, list[int]] = {name: [] for name in blocks}
    hooks: list[saved_tensors_hooks] = []

    def enter(name: str) -> Callable[..., None]:
        def pack(tensor: Tensor) -> Tensor:
            saved[name].append(tensor.nbytes)
            return tensor

        def begin(*_: Any) -> None:
            hooks.append(saved_tensors_hooks(pack, lambda tensor: tensor))
            hooks[-1].__enter__()

        return begin

    def leave(*_: Any) -> None:
        hooks.pop().__exit__()

    handles = [block.register_forward_pre_hook(enter(name)) for name, block in blocks.items()]
    handles += [block.register_forward_hook(leave) for block in blocks.values()]
    try:
        with untouched(module), seeded(case.seed):
            case.workload.mean_loss(module, case.batch())
    finally:
        for handle in handles:
            handle.remove()
        while hooks:  # a block raised
            leave()
    return saved


@dataclass(frozen=True)
class _SacCost:
    """The bytes that torch's own selective checkpointing holds, and the Python calls it adds."""

    held_bytes: int
    num_calls: int


def _cost_of_torch_sac(case: Case) -> _SacCost | str:
    """Measure torch's own selective checkpointing, or return that it fails on this model."""
    module = case.build()
    torch_sac(module, case)
    try:
        held = measure_memory(module, case.batch(), case.workload.mean_loss).held_bytes
        calls = python_calls(case, torch_sac)
    except (AssertionError, RuntimeError, ValueError, TypeError, LookupError) as error:
        # The second forward of a block may find other inputs than the first.
        return f"torch's SAC raises {type(error).__name__} here, so calls are not compared"
    return _SacCost(held, calls - python_calls(case, lambda module, case: None))


# Policies that are no policy: of each a text that the error has to contain.
WRONG_POLICIES: dict[str, tuple[Any, str]] = {
    "matches nothing": (["aten.linear", "aten.scaled_dot_product_attention"], "aten.linear"),
    "keeps cheap operations alone": (lambda *call, **options: _keep_cheap(*call, **options), ""),
    "MUST_CPU_OFFLOAD": (
        lambda context, operation, *args, **kwargs: CheckpointPolicy.MUST_CPU_OFFLOAD,
        "MUST_CPU_OFFLOAD",
    ),
    "returns no answer": (lambda context, operation, *args, **kwargs: None, "None"),
    "returns a number": (lambda context, operation, *args, **kwargs: 1, "1"),
    "a name that is not there": ("save_expensiv", "save_expensive"),
    "the wrong way round": ("recompute_matmuls", "recompute_matmuls"),
    "an empty list": ([], "[]"),
    "a number": (3, "3"),
    "a list of numbers": ([3], "3"),
    "a name without a namespace": (["mm"], "mm"),
    "a name of too many words": (["aten.mm.default.out"], "aten.mm.default.out"),
    "an operation that is not there": (["aten.addmn"], "addmm"),
    "an overload that is not there": (["aten.mm.fast"], "fast"),
    "an operation that writes in place": (["aten.mm", torch.ops.aten.add_.Tensor], "aten.add_"),
}


def refusals(case: Case, *, apply: Policies = apply_sac) -> Verdict:
    """Check that useless policies are errors, and so is a saved output that is overwritten.

    A policy may save nothing, or only cheap operations, or be no policy at all. The error has to
    name what is wrong.
    """
    gate = "sac/refused"
    required = f"{len(WRONG_POLICIES) + 1} of {len(WRONG_POLICIES) + 1}"
    if not product_flops(case):
        return not_applicable(gate, required=required, why="the blocks have no matrix product")

    accepted = []
    for name, (policy, text) in WRONG_POLICIES.items():
        module = case.build()
        try:
            apply(module, policy, blocks=case.blocks)
            with untouched(module):
                case.workload.mean_loss(module, case.batch())
            accepted.append(name)
        except ValueError as error:
            if text not in str(error):
                accepted.append(f"{name} (the error does not name {text})")
    if not _raises_where_overwritten(apply, "save_expensive"):
        accepted.append("an output that is overwritten")
    hint = ""
    if accepted:
        hint = f"accepts these policies, and silently recomputes: {', '.join(accepted)}"
    num_refused = len(WRONG_POLICIES) + 1 - len(accepted)
    return Verdict(gate, not accepted, f"{num_refused} refused", required, hint)


def _raises_where_overwritten(apply: Callable[..., Any], *policy: str) -> bool:
    module = planted_blocks(OverwritingBlock).build()
    apply(module, *policy, blocks=None)
    x = torch.randn(2, PLANTED_WIDTH)
    try:
        module(x).sum().backward()
    except RuntimeError:
        return True
    return False


# Forms in which one policy is given: the same operations by name, as text, as objects, or chosen by
# a function.


class _ChoosesExpensive:
    """A policy without a name of its own, that answers True or False."""

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
        return operation in sac.EXPENSIVE_OPERATIONS


def _prefers_expensive(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keeps = operation in sac.EXPENSIVE_OPERATIONS
    return CheckpointPolicy.PREFER_SAVE if keeps else CheckpointPolicy.MUST_RECOMPUTE


def _forms() -> dict[str, dict[str, Any]]:
    """Return the forms of two policies, by the name of the policy."""
    products = sorted(map(str, sac.MATMULS))
    packets = sorted({name.rpartition(".")[0] for name in products})
    return {
        "save_expensive": {
            "a list": [*sac.EXPENSIVE_OPERATIONS],
            "a function": _prefers_expensive,
            "an object": _ChoosesExpensive(),
        },
        "save_matmuls": {
            "names of overloads": [f"torch.ops.{name}" for name in products],
            "names of operations": packets,
            "operations": [getattr(torch.ops.aten, name.split(".")[1]) for name in packets],
        },
    }


def policy_forms(case: Case, *, apply: Policies = apply_sac) -> Verdict:
    """Compare the operations of a step under a policy in each form, and in copies of the model.

    A copy is one by `deepcopy`, and one that was pickled. Without a policy `save_expensive` holds.
    """
    gate = "sac/policies"
    required = "the operations of the policy by its name"
    if not product_flops(case):
        return not_applicable(gate, required=required, why="the blocks have no matrix product")

    def executed(policy: Any, change: Callable[[Any], Any] = lambda module: module) -> Any:
        module = case.build()
        options = {} if policy is None else {"policy": policy}
        apply(module, **options, blocks=case.blocks)
        module = change(module)
        with seeded(case.seed), set_checkpoint_early_stop(False), _Executed() as operations:
            _ = case.workload.mean_loss(module, case.batch()).backward()
        return operations.counts

    found: dict[str, bool] = {}
    for name, forms in _forms().items():
        with _where_outputs_can_be_kept(case, partial(apply_sac, policy=name, blocks=case.blocks)):
            expected = executed(name)
        found |= {form: executed(policy) == expected for form, policy in forms.items()}
        if name == "save_expensive":
            found["the default"] = executed(None) == expected
            for way, change in _copies(case).items():
                found[way] = executed(name, change) == expected
    differing = [form for form, is_alike in found.items() if not is_alike]
    num_alike = len(found) - len(differing)
    hint = ""
    if differing:
        hint = f"recomputes other operations than the policy by its name: {', '.join(differing)}"
    return Verdict(gate, not hint, f"{num_alike} of {len(found)} forms alike", required, hint)


class _Executed(TorchDispatchMode):
    """Count the calls of each operation, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def _copies(case: Case) -> dict[str, Callable[[Any], Any]]:
    """Return the ways to copy a model that the plain one allows."""
    ways: dict[str, Callable[[Any], Any]] = {
        "a copy": copy.deepcopy,
        "a pickled copy": lambda module: pickle.loads(pickle.dumps(module)),
    }
    possible = {}
    for way, change in ways.items():
        with contextlib.suppress(Exception):  # a model may hold what cannot be copied
            change(case.build())
            possible[way] = change
    return possible


# Regions and policies are off where nothing is trained.


def inactive(
    case: Case, *, policies: Policies = apply_sac, regions: Callable[..., Any] = apply_regions
) -> Verdict:
    """Compare eval mode, and a forward without gradients, with the plain model.

    Compared are loss, gradients, buffers, generators and what autograd saves, on the model and on
    blocks with arguments of every form.
    """
    gate = "sac/off"
    required = "as the plain model, to the bit"
    find_blocks(case.build(), case.blocks)
    changes = {"a policy": policies, "regions": regions}
    differing = []
    num_compared = 0
    for one in (case, replace(case, workload=every_form(), blocks=None)):
        try:
            plain, again = (_idle(one, one.build()) for _ in range(2))
        except (RuntimeError, TypeError):  # the plain model does not run in eval mode
            continue
        if _difference(plain, again):
            continue
        for name, change in changes.items():
            module = one.build()
            change(module, blocks=one.blocks)
            num_compared += 1
            if what := _difference(plain, _idle(one, module)):
                differing.append(f"{name} on {one.workload.name}: {what}")
    hint = ""
    if differing:
        hint = "be active only while module.training and torch.is_grad_enabled()"
    measured = f"{len(differing)} of {num_compared} differ {'; '.join(differing)}".rstrip()
    return Verdict(gate, not hint, measured, required, hint)


@dataclass(frozen=True)
class _Idle:
    """A step in eval mode, the sizes of what it saves, and the loss of a model in training.

    That loss is one without gradients.
    """

    step: StepRecord
    saved: list[int]
    loss: Tensor


def _idle(case: Case, module: nn.Module) -> _Idle:
    batch = case.batch()
    loss = case.workload.mean_loss
    saved = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.nbytes)
        return tensor

    with seeded(case.seed), saved_tensors_hooks(pack, lambda tensor: tensor):
        step = record_step(module.eval(), batch, loss)
    with seeded(case.seed), torch.no_grad():
        return _Idle(step, saved, loss(module.train(), batch))


def _difference(plain: _Idle, other: _Idle) -> str:
    found = compare(plain.step, other.step)
    if not found.bit_equal:
        return f"in eval mode {found.describe(most=1)}"
    if plain.saved != other.saved:
        return "saves other tensors in eval mode"
    return "" if torch.equal(plain.loss, other.loss) else "another loss without gradients"


# The report of regions, on planted blocks whose tensors are counted by hand.

# Of a block: its tensors that stay saved.
NUM_REPORTED_HELD = 6
# Of a block: where a tensor is saved, the node that made it, and what the edit names.
REPORTED_ROWS = (
    (".act", "SigmoidBackward0", 'also=["*.act"]'),
    ("", "TanhBackward0", "move the expression"),
    (".layers", "SinBackward0", "compute the input of 3"),
)


def reported(
    case: Case, *, apply: Callable[..., Any] = apply_regions, report: Any | None = None
) -> Verdict:
    """Compare the report of regions on planted blocks with a count by hand, and follow an edit.

    `also` has to free what the report names, to train as before, and to refuse a module that draws
    random numbers or is not there.
    """
    gate = "sac/report"
    required = f"{NUM_REPORTED_HELD} tensors of a block held, 3 reported, 1 freed by an edit"
    find_blocks(case.build(), case.blocks)
    ours = report or getattr(sys.modules[apply.__module__], "report_regions", None)
    if ours is None:
        why = "no report_regions stands beside the implementation"
        return not_applicable(gate, required=required, why=why)

    workload = planted_blocks(ReportedBlock)
    with seeded(case.seed):
        batch = workload.batch(PLANTED_BATCH_SIZE)
        models = {name: workload.build() for name in ("plain", "regions", "also")}
    for model in models.values():
        model.load_state_dict(models["plain"].state_dict())
    apply(models["regions"])
    apply(models["also"], also=["*.act"])
    found = ours(models["regions"], batch, workload.loss)
    before, after = (
        measure_memory(models[name], batch, workload.loss).held_bytes
        for name in ("regions", "also")
    )
    steps = [record_step(model, batch, workload.loss) for model in models.values()]

    num_held = found.kept_bytes / 2**20 / PLANTED_MIB / PLANTED_DEPTH
    freed = (before - after) / 2**20 / PLANTED_MIB / PLANTED_DEPTH
    wrong = _wrong_rows(found)
    hint = ""
    if num_held != NUM_REPORTED_HELD or wrong:
        hint = f"the report differs from a count by hand: {wrong or 'the bytes that are held'}"
    elif freed != 1 or not all(compare(steps[0], step).bit_equal for step in steps):
        hint = "run the modules that `also` names again in backward, and nothing else"
    elif not (_refuses(apply, "*.act", noise=0.1) and _refuses(apply, "*.gelu", noise=0.0)):
        hint = "refuse an `also` that matches nothing, and a module that draws random numbers"
    elif not _raises_where_overwritten(apply):
        hint = "compare the versions of tensors that are needed again in backward"
    measured = f"{num_held:g} tensors of a block held, {len(found.unreached) / PLANTED_DEPTH:g} "
    measured += f"reported; {freed:g} freed by an edit"
    return Verdict(gate, not hint, measured, required, hint)


def _wrong_rows(report: Any) -> str:
    """Name what the rows and the table do not have as counted by hand; empty if all is right."""
    rows = [(row.module, row.made_by, row.nbytes / 2**20) for row in report.unreached]
    table = report.table()
    total = PLANTED_DEPTH * PLANTED_MIB
    lines = [f"{NUM_REPORTED_HELD * total:,.2f} MiB, of which {3 * total:,.2f} not reached"]
    for place, made_by, edit in REPORTED_ROWS:
        lines += [f"{total:,.2f} MiB in *{place}, computed by {made_by}", edit]
        for number in range(PLANTED_DEPTH):
            if (f"{number}{place}", made_by, PLANTED_MIB) not in rows:
                return f"{number}{place} of {made_by}"
    if missing := next((line for line in lines if line not in table), ""):
        return missing
    row = report.unreached[0]
    both = replace(report, unreached=(row, replace(row, module="large", nbytes=2 * row.nbytes)))
    is_sorted = both.table().index("large") < both.table().index(row.edit)
    return "" if is_sorted else "the largest bytes first"


def _refuses(apply: Callable[..., Any], also: str, *, noise: float) -> bool:
    model = planted_blocks(partial(ReportedBlock, noise)).build()
    try:
        apply(model, also=[also])
        model(torch.randn(2, PLANTED_WIDTH))
    except ValueError as error:
        return also.rpartition(".")[2] in str(error)
    return False


def _freeing_regions(given: Implementation, present: Any) -> Apply:
    """Make a strategy of regions, which finds nothing to do where they free nothing.

    What they free is judged by `regions`.
    """
    apply_all = in_place()(given, None)

    def apply(model: nn.Module, sample: Sample) -> list[str]:
        before = measure_memory(model, sample.batch, sample.loss)
        names = apply_all(model, sample)
        after = measure_memory(model, sample.batch, sample.loss)
        return names if after.held_bytes < before.held_bytes else []

    return apply


JUDGED_CALLABLES = (
    Judged("apply_sac", lambda model, policy, *, blocks: None),
    Judged("apply_regions", lambda model, *, blocks: None),
)
POLICY_TAKES = {"apply_sac": Takes("apply")}

GATES = (
    Gate(
        "sac/parity-sac",
        partial(sac_parity, strategy="sac"),
        {"apply_sac": Takes("apply", in_place("save_expensive"))},
    ),
    Gate(
        "sac/parity-every-second",
        partial(sac_parity, strategy="sac_every_second"),
        {"apply_sac": Takes("apply", in_place("every_second_matmul"))},
    ),
    Gate(
        "sac/parity-regions",
        partial(sac_parity, strategy="regions"),
        {"apply_regions": Takes("apply", _freeing_regions)},
    ),
    Gate(
        "sac/forms-sac",
        partial(sac_forms, strategy="sac"),
        {"apply_sac": Takes("apply", in_place("save_expensive"))},
    ),
    Gate(
        "sac/forms-regions",
        partial(sac_forms, strategy="regions"),
        {"apply_regions": Takes("apply", _freeing_regions)},
    ),
    Gate("sac/products", products, POLICY_TAKES),
    Gate("sac/regions", regions, {"apply_regions": Takes("apply")}),
    Gate("sac/report", reported, {"apply_regions": Takes("apply")}),
    Gate("sac/policies", policy_forms, POLICY_TAKES),
    Gate(
        "sac/off",
        inactive,
        {"apply_sac": Takes("policies"), "apply_regions": Takes("regions")},
    ),
    Gate("sac/refused", refusals, POLICY_TAKES),
    *CHOICE_GATES,
)


def _keep_expensive(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keeps = operation in sac.EXPENSIVE_OPERATIONS
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_cheap(context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
    keepable = not sac.writes_in_place(operation)
    return keepable and sac.is_cheap(operation) and operation not in sac.EXPENSIVE_OPERATIONS


@contextlib.contextmanager
def _where_outputs_can_be_kept(
    case: Case, ours: Callable[[nn.Module], Any] | None = None
) -> Iterator[None]:
    """Turn errors of blocks without outputs that a policy could save into `NotApplicable`.

    `ours` applies our own implementation. Where that runs, an error of another one stays an error.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        is_refused = is_kind(error, PolicyError)
        is_overwritten = isinstance(error, RuntimeError) and "has been mutated" in str(error)
        if not (is_refused or is_overwritten) or (ours is not None and _runs(case, ours)):
            raise
        why = (
            "a block overwrites in place an output that would be saved: recompute it whole, or "
            "write to another tensor"
        )
        if is_refused:
            why = getattr(error, "in_short", str(error))
        raise NotApplicable(why, required="an operation to keep") from error


def _runs(case: Case, change: Callable[[nn.Module], Any]) -> bool:
    """Return whether a step of the changed model runs."""
    module = case.build()
    try:
        change(module)
        with seeded(case.seed), untouched(module):
            _ = case.workload.mean_loss(module, case.batch()).backward()
    except (PolicyError, RuntimeError):
        return False
    return True


def _apply(apply: Callable[..., Any], module: nn.Module, case: Case) -> None:
    apply(module, blocks=case.blocks)


class _Products(TorchDispatchMode):
    """Count the FLOPs of each matrix product, in the order of execution, per call of a block."""

    def __init__(self, running: RunningLayers) -> None:
        super().__init__()
        self.running = running
        self.flops: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        # FLOPs of operations that are neither products nor attention, such as convolutions.
        self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with FlopCount() as counted:
            out = func(*args, **(kwargs or {}))
        block = self.running.called
        if func in sac.MATMULS and block != REST_LAYER:
            self.flops[block, self.running.calls[block]].append(counted.flops)
        elif func not in sac.ATTENTION_OPERATIONS and block != REST_LAYER:
            self.others += counted.flops
        return out


def product_flops(case: Case) -> list[list[int]]:
    """Count the FLOPs of the matrix products in each call of a block in one plain forward."""
    return _flops_by_call(case)[0]


def _flops_by_call(case: Case) -> tuple[list[list[int]], int]:
    """Count the FLOPs of the products per block call, and of operations other than attention."""
    module = case.build()
    blocks = find_blocks(module, case.blocks)
    with (
        untouched(module),
        seeded(0),
        RunningLayers(module, blocks) as running,
        _Products(running) as counted,
    ):
        case.workload.mean_loss(module, case.batch())
    return list(counted.flops.values()), counted.others


def torch_sac(module: nn.Module, case: Case) -> None:
    """Apply torch's own selective checkpointing of the same operations, as a reference."""

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_saved = operation in sac.MATMULS or operation in sac.ATTENTION_OPERATIONS
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    for block in find_blocks(module, case.blocks).values():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
