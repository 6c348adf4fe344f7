"""Faults of selective recompute: policies, counts, and regions that are stale later.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import torch
from torch import nn
from torch.nn import functional as F

from curry_train.core.blocks import find_blocks
from curry_train.primitives import apply_regions, apply_sac

from ..gates.foreign_recompute import nothing
from ..gates.foreign_sac import (
    PRODUCTS,
    checkpointed,
    draws_again,
    names_what_never_runs,
    saving,
    trains_in_eval_mode,
)
from ..plan_models import Runs, squares
from ..toy_steps import stacked
from .saboteurs import planted

aten = torch.ops.aten


def noisy(inner, x):
    """Draw before and after a product: saving the first draw shifts the second."""
    drawn = torch.sin(inner[0](x + 0.5 * torch.randn_like(x)))
    return x + F.dropout(drawn, 0.5) * drawn


def noisy_block():
    return Runs(noisy, nn.Linear(16, 16, bias=False))


NOISY = squares(lambda: stacked(noisy_block, 3), 16, name="noisy")


def keeps_what_is_drawn(model, *, blocks):
    checkpointed(model, blocks, saving([*PRODUCTS, aten.randn_like.default]))


def first_block_alone(model, *, blocks):
    apply_sac(model, blocks=blocks[:1])


def changes_nothing(model, sample):
    return list(find_blocks(model, sample.blocks))


def written_over(apply, first_call):
    """Return a strategy whose second run finds another input, from some call of a block on."""

    def change(model, sample):
        names = apply(model, blocks=sample.blocks)
        calls = dict.fromkeys(names, 0)

        def hook(name):
            def write_over(module, args, output):
                calls[name] += 1
                if calls[name] >= first_call:
                    args[0].data.mul_(1.5)  # .data does not raise the version counter

            return write_over

        for name in names:
            model.get_submodule(name).register_forward_hook(hook(name))
        return names

    return change


def regions_of_everything(model, *, blocks):
    """Recompute all of a block, including its products."""
    checkpointed(model, find_blocks(model, blocks), saving([aten._softmax.default]))


FAULTS = [
    planted(
        "sac.policy-parity",
        "keeps-what-is-drawn",
        apply_sac=keeps_what_is_drawn,
        model=NOISY,
        hint="computes another value",
    ),
    planted(
        "sac.policy-parity",
        "first-block-alone",
        apply_sac=first_block_alone,
        hint="did not run again",
    ),
    planted("sac.policy-parity", "does-nothing", apply_sac=nothing, hint="nothing ran twice"),
    planted(
        "sac.policy-parity",
        "draws-again",
        apply_sac=draws_again,
        model="dropout",
        hint="preserve_rng_state=True",
    ),
    planted("sac.count-parity", "changes-nothing", apply=changes_nothing, hint="nothing ran twice"),
    planted(
        "sac.count-parity",
        "changed-boundary",
        apply=written_over(apply_sac, 1),
        hint="computes another value",
    ),
    planted(
        "sac.regions-parity", "changes-nothing", apply=changes_nothing, hint="nothing ran twice"
    ),
    planted(
        "sac.regions-parity",
        "stale-from-the-third-call",
        apply=written_over(apply_regions, 3),
        hint="step 2 of 3|step 3 of 3",
    ),
    planted(
        "sac.products",
        "names-what-never-runs",
        apply_sac=names_what_never_runs,
        hint="such as aten.linear",
    ),
    planted("sac.products", "does-nothing", apply_sac=nothing, hint="is not applied"),
    planted("sac.regions", "does-nothing", apply=nothing, hint="nothing is freed"),
    planted("sac.regions", "everything", apply=regions_of_everything, hint="a product runs again"),
    planted(
        "sac.off",
        "a-policy-in-eval",
        apply_sac=trains_in_eval_mode,
        model="dropout",
        hint="a policy: ",
    ),
    planted(
        "sac.off", "regions-in-eval", apply=trains_in_eval_mode, model="dropout", hint="regions: "
    ),
]
