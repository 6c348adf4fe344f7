"""Faults of selective recompute: policies, counts, and regions that are stale later.

Proof: `python -m pytest tests/gates/test_sac.py`.
"""

import copy
import functools

import torch
from saboteurs import planted
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from curry_train.core.blocks import find_blocks, restore
from curry_train.primitives import regions, sac
from curry_train.primitives.regions import RegionReport, apply_regions, report_regions
from curry_train.primitives.sac import POLICIES, Sac, apply_sac, remove_sac
from curry_train.workloads.workload import Workload

aten = torch.ops.aten


def torch_policy(policy):
    """Build a technique: torch's selective checkpointing with this policy or list, unchecked."""

    def apply(model, ignored=None, *, blocks=None):
        names = list(find_blocks(model, getattr(ignored, "blocks", blocks)))
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        for name in names:
            block = model.get_submodule(name)
            block.forward = functools.partial(
                checkpoint, block.forward, use_reentrant=False, context_fn=contexts
            )
        return names

    return apply


def any_policy(model, policy, *, blocks=None):
    """Build a technique: `apply_sac` without its checks."""
    return torch_policy(policy if callable(policy) else [aten.linear.default])(model, blocks=blocks)


def miscounting():
    """Build a policy that counts products over all blocks, and over both runs together."""
    seen = [0]

    def policy(context, operation, *args, **kwargs):
        if operation not in (aten.mm.default, aten.addmm.default):
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen[0] += 1
        return CheckpointPolicy.MUST_SAVE if seen[0] % 3 == 1 else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def miscounted(model, policy, *, blocks=None):
    return torch_policy(miscounting())(model, blocks=blocks)


def keeps_drawn(context, operation, *args, **kwargs):
    return operation in (aten.mm.default, aten.randn_like.default)


def no_op(model, ignored=None, *, blocks=None):
    return list(find_blocks(model, getattr(ignored, "blocks", blocks)))


def detached(model, *ignored, **also_ignored):
    names = apply_sac(model)
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args: (args[0].detach(), *args[1:])
        )
    return names


def reads_changed_boundary(model, *ignored, **also_ignored):
    """Apply regions, and overwrite the input, undetected, after the block has read it."""
    names = apply_regions(model)

    def write_over(module, args, output):
        args[0].data.mul_(1.5)  # .data does not raise the version counter

    for name in names:
        model.get_submodule(name).register_forward_hook(write_over)
    return names


def regions_of_everything(model, *, blocks=None):
    """Recompute all of a block, including its products."""
    return torch_policy([aten._softmax.default])(model, blocks=blocks)


class Noisy(nn.Module):
    """A block that draws before and after a product: saving the first draw shifts the second."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        noisy = torch.sin(self.linear(x + 0.5 * torch.randn_like(x)))
        return x + F.dropout(noisy, 0.5) * noisy


NOISY = Workload(
    "noisy",
    lambda: nn.Sequential(*[Noisy() for _ in range(3)]),
    lambda size: torch.randn(size, 16),
    lambda module, batch: module(batch).square().sum(),
)


class ThreeProducts(nn.Module):
    """A block with products of one shape, so that a saved output fits in place of another.

    The last product is never recomputed.
    """

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x):
        for linear in self.linears[:2]:
            x = x + torch.sin(linear(x))
        return self.linears[2](x)


SQUARE = Workload(
    "square",
    lambda: nn.Sequential(*[ThreeProducts() for _ in range(3)]),
    lambda size: torch.randn(size, 16),
    lambda module, batch: module(batch).square().sum(),
)


def stale_from_the_third_call(model, sample):
    """Apply regions whose replay finds another input from the third call of a block on."""
    names = apply_regions(model, blocks=sample.blocks)
    calls = dict.fromkeys(names, 0)

    def hook(name):
        def write_over(module, args, output):
            calls[name] += 1
            if calls[name] >= 3:
                args[0].data.mul_(1.5)  # .data does not raise the version counter

        return write_over

    for name in names:
        model.get_submodule(name).register_forward_hook(hook(name))
    return names


def without_lists(model, policy, *, blocks=None):
    """Recompute all where the policy is a list."""
    return apply_sac(
        model, policy if isinstance(policy, str) or callable(policy) else never, blocks=blocks
    )


def without_functions(model, policy, *, blocks=None):
    """Recompute all where the policy is a function."""
    return apply_sac(model, never if callable(policy) else policy, blocks=blocks)


def never(context, operation, *args, **kwargs):
    """Save the output of a view alone, which is less than any policy saves."""
    return operation is aten.t.default


def activation_written_over(model, sample):
    """Apply regions, of which an activation finds another input in the second step."""
    names = apply_regions(model, blocks=sample.blocks)
    calls = []

    def write_over(module, args, output):
        calls.append(module)
        if len(calls) > len(names):
            args[0].data.mul_(1.5)  # .data does not raise the version counter

    for name in names:
        model.get_submodule(name).activation.register_forward_hook(write_over)
    return names


def last_block_left_out(model, *, blocks=None):
    names = list(find_blocks(model, blocks))
    apply_regions(model, blocks=names[:-1])
    return names


def first_block_alone(model, *, blocks=None):
    names = list(find_blocks(model, blocks))
    apply_regions(model, blocks=names[:1])
    return names


def policy_of_the_first_block(model, sample):
    names = list(find_blocks(model, sample.blocks))
    apply_sac(model, blocks=names[:1])
    return names


def every_call_kept(model, sample):
    """Keep the output of each block of each call, as a cache by identity would."""
    kept = []
    names = apply_sac(model, blocks=sample.blocks)
    for name in names:
        model.get_submodule(name).register_forward_hook(lambda *call: kept.append(call[-1]))
    return names


def lost_in_copies(model, policy="save_expensive", *, blocks=None):
    names = apply_sac(model, policy, blocks=blocks)

    def without(memo):
        del model.__deepcopy__
        other = copy.deepcopy(model)
        remove_sac(other)
        return other

    model.__deepcopy__ = without
    return names


def another_default(model, policy="every_second_matmul", *, blocks=None):
    return apply_sac(model, policy, blocks=blocks)


def default_for_a_misspelled_name(model, policy, *, blocks=None):
    is_known = not isinstance(policy, str) or policy in POLICIES
    return apply_sac(model, policy if is_known else "save_expensive", blocks=blocks)


def overwritten_unseen(model, policy, *, blocks=None):
    return apply_sac(model, policy, blocks=blocks, allow_cache_entry_mutation=True)


def by_position_alone(model, *ignored, blocks=None):
    """Drop the arguments by name where nothing is trained."""
    names = list(find_blocks(model, blocks))
    for name in names:
        block = model.get_submodule(name)

        def forward(*args, own=block.forward, block=block, **kwargs):
            return own(*args, **kwargs) if block.training else own(*args)

        block.forward = forward
    return names


def also_ignored(model, *, blocks=None, also=()):
    return apply_regions(model, blocks=blocks)


def also_unchecked(model, *, blocks=None, also=()):
    """Take a pattern that matches nothing."""
    try:
        return apply_regions(model, blocks=blocks, also=also)
    except ValueError:
        return apply_regions(model, blocks=blocks)


def first_row_alone(model, batch, loss):
    whole = report_regions(model, batch, loss)
    return RegionReport(whole.kept_bytes, whole.unreached[:1])


def half_of_the_bytes(model, batch, loss):
    whole = report_regions(model, batch, loss)
    return RegionReport(whole.kept_bytes // 2, whole.unreached)


def in_every_block(model, policy="save_expensive", *, blocks=None, **options):
    return apply_sac(model, policy, **options)


def one_policy_for_all(model, policy="save_expensive", **options):
    return apply_sac(model, "save_matmuls_and_attention", **options)


def overwritten_unchecked(model, policy="save_expensive", **options):
    return apply_sac(model, policy, **options | {"allow_cache_entry_mutation": True})


def norms_left(model):
    """Leave the modules inside of blocks as they are."""
    names = [name for name, module in model.named_modules() if isinstance(module, regions.Regions)]
    for name in names:
        restore(model.get_submodule(name), regions.KEEPER_ATTRIBUTE)
    return names


def policies_left(model):
    names = [name for name, module in model.named_modules() if isinstance(module, Sac)]
    return names if len(names) < 3 else remove_sac(model[:2]) + names[2:]


def taken_once(self):
    """Make the output again for each of its readers."""
    self.output = None
    self._again()
    output, self.output = self.output, None
    return output


def first_of_gradients_alone(self):
    output = first_of_replay(self)
    for leaf in tree_leaves(output):
        if leaf is not None:
            _ = leaf.grad_fn.metadata
    return output


def first_of_tensors_alone(self):
    output = first_of_replay(self)
    output.size()
    return output


first_of_replay = regions.Replay.first

FAULTS = [
    planted("sac.choices", "in-every-block", apply=in_every_block, hint="second block alone"),
    planted("sac.choices", "one-for-all", apply=one_policy_for_all, hint="save_matmuls"),
    planted("sac.choices", "unchecked", apply=overwritten_unchecked, hint="overwritten"),
    planted(
        "sac.undone", "norms-left", patches=[(regions, "remove_regions", norms_left)], hint="leaves"
    ),
    planted(
        "sac.undone", "policies-left", patches=[(sac, "remove_sac", policies_left)], hint="leaves"
    ),
    planted("sac.freed", "no-recipes", patches=[(regions, "NODE_RECIPES", {})], hint="a chain"),
    planted(
        "sac.freed",
        "no-casts",
        patches=[(regions, "_source_of_cast", lambda node: None)],
        hint="three products",
    ),
    planted(
        "sac.freed",
        "for-each-reader",
        patches=[(regions.Replay, "_take", taken_once)],
        hint="norms run",
    ),
    planted(
        "sac.other-outputs",
        "gradients-alone",
        patches=[(regions.Replay, "first", first_of_gradients_alone)],
        hint="no gradient",
    ),
    planted(
        "sac.other-outputs",
        "tensors-alone",
        patches=[(regions.Replay, "first", first_of_tensors_alone)],
        hint="a pair",
    ),
    planted("sac.policy-parity", "no-op", apply=no_op, hint="nothing ran twice or was freed"),
    planted("sac.policy-parity", "detached", apply=detached, hint="gets no gradient"),
    planted(
        "sac.policy-parity",
        "keeps-what-is-drawn",
        apply=torch_policy(keeps_drawn),
        model=NOISY,
        hint="computes another value",
    ),
    planted(
        "sac.policy-parity",
        "changed-boundary",
        apply=reads_changed_boundary,
        hint="computes another value",
    ),
    planted(
        "sac.policy-parity",
        "first-block-alone",
        apply=policy_of_the_first_block,
        hint="did not run again",
    ),
    planted("sac.policy-parity", "outputs-kept", apply=every_call_kept, hint="stay alive"),
    planted("sac.count-parity", "no-op", apply=no_op, hint="nothing ran twice or was freed"),
    planted(
        "sac.count-parity",
        "changed-boundary",
        apply=reads_changed_boundary,
        hint="computes another value",
    ),
    planted(
        "sac.regions-parity",
        "stale-from-the-third-call",
        apply=stale_from_the_third_call,
        hint="step 2 of 3|step 3 of 3",
    ),
    planted(
        "sac.regions-parity",
        "changed-boundary",
        apply=reads_changed_boundary,
        hint="computes another value",
    ),
    planted(
        "sac.forms-sac",
        "torchs-own",
        apply=torch_policy([aten.mm.default, aten.addmm.default]),
        hint="layers|raised",
    ),
    planted("sac.forms-sac", "no-op", apply=no_op, hint="nothing ran twice or was freed"),
    planted("sac.forms-regions", "no-op", apply=no_op, hint="nothing ran twice or was freed"),
    planted(
        "sac.forms-regions",
        "activation-written-over",
        apply=activation_written_over,
        hint="layers|step",
    ),
    planted("sac.products", "no-op", apply=no_op, hint="names operations that never run"),
    planted("sac.products", "any-policy", apply=any_policy, hint="names operations that never run"),
    planted("sac.products", "no-lists", apply=without_lists, hint="names operations that never"),
    planted(
        "sac.products", "no-functions", apply=without_functions, hint="names operations|raised"
    ),
    planted("sac.products", "miscounted", apply=miscounted, model=SQUARE, hint="counts the second"),
    planted("sac.regions", "no-op", apply=no_op, hint="nothing is freed"),
    planted("sac.regions", "everything", apply=regions_of_everything, hint="a product runs again"),
    planted(
        "sac.regions",
        "a-dispatch-mode",
        apply=torch_policy([aten.mm.default, aten.bmm.default]),
        hint="a dispatch mode is on",
    ),
    planted(
        "sac.every-region", "last-block-left-out", apply=last_block_left_out, hint="save as much as"
    ),
    planted(
        "sac.every-region", "first-block-alone", apply=first_block_alone, hint="save as much as"
    ),
    planted(
        "sac.refused",
        "any-policy",
        apply=any_policy,
        hint="matches nothing, keeps cheap operations alone, MUST_CPU_OFFLOAD",
    ),
    planted("sac.refused", "no-op", apply=no_op, hint="matches nothing"),
    planted("sac.wrong-policy", "any-policy", apply=any_policy, hint="an empty list"),
    planted(
        "sac.wrong-policy",
        "default-for-a-misspelled-name",
        apply=default_for_a_misspelled_name,
        hint="a name that is not there",
    ),
    planted("sac.overwritten", "unseen", apply=overwritten_unseen, hint="is overwritten"),
    planted("sac.policy-forms", "no-lists", apply=without_lists, hint="a list|raised"),
    planted("sac.policy-forms", "no-functions", apply=without_functions, hint="a function|raised"),
    planted("sac.policy-forms", "another-default", apply=another_default, hint="the default"),
    planted("sac.policy-copies", "lost-in-copies", apply=lost_in_copies, hint="a copy|raised"),
    planted(
        "sac.off",
        "a-policy-in-eval",
        policies=torch_policy([aten.mm.default, aten.addmm.default]),
        hint="a policy on|raised",
    ),
    planted("sac.off", "regions-in-eval", regions=regions_of_everything, hint="regions on|raised"),
    planted("sac.off", "by-position-alone", regions=by_position_alone, hint="raised"),
    planted("sac.report", "first-row-alone", report=first_row_alone, hint="differs from a count"),
    planted(
        "sac.report", "half-of-the-bytes", report=half_of_the_bytes, hint="3 tensors of a block"
    ),
    planted("sac.also", "ignored", apply=also_ignored, report=report_regions, hint="run the mod"),
    planted("sac.also", "unchecked", apply=also_unchecked, report=report_regions, hint="refuse"),
    planted(
        "sac.regions-overwritten",
        "versions-not-compared",
        patches=[(regions, "check_unchanged", lambda tensor, version: None)],
        hint="compare the versions",
    ),
]
