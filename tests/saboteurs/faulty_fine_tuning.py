"""Faults of adapters, frozen bases, small optimizers, routers and steps in backward.

Proof: `python -m pytest tests/gates/test_adapters.py`.
"""

from dataclasses import replace

import torch
from faulty_recompute import no_generator_kept, patched, rerun
from saboteurs import planted
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from curry_train.core.blocks import find_blocks
from curry_train.gates.memory_plan import predicted_peaks
from curry_train.primitives.grad_accum import StepInBackward
from curry_train.primitives.recompute import recompute_blocks
from curry_train.primitives.routing import CHOOSING_FUNCTIONS, keep_routing
from curry_train.workloads.models import mlp
from curry_train.workloads.workload import Workload, default_workload, token_loss

WIDTH = 16
EXPERTS = 4
VOCABULARY = 64


class AdaptedRouter(nn.Module):
    """A frozen layer with an adapter of low rank, and a router that draws noise for its choice."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.score = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden = torch.tanh(self.base(x) + self.up(self.down(x)))
        scores = self.score(x).sigmoid()
        noise = torch.rand_like(scores) if self.training else 0.0
        chosen = torch.topk(scores.detach() + noise, 4, dim=-1).indices
        return x + hidden * torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))


def adapted():
    return nn.Sequential(*(AdaptedRouter() for _ in range(3))), torch.randn(8, WIDTH)


ADAPTED = default_workload("adapters", lambda: adapted()[0], adapted())


class Router(nn.Module):
    """Choose one expert by score and another by score and bias, and count the load."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS))

    def forward(self, x):
        scores = torch.softmax(self.score(x), -1)
        balanced = torch.topk(scores.detach() + self.bias, 1, dim=-1).indices
        weights, chosen = torch.topk(scores, 1, dim=-1)
        self.load += torch.bincount(balanced.flatten(), minlength=EXPERTS)
        weights = torch.cat([weights, scores.gather(-1, balanced)], -1)
        share = F.one_hot(chosen, EXPERTS).float().mean(0)
        return weights, torch.cat([chosen, balanced], -1), (share * scores.mean(0)).sum()


class Experts(nn.Module):
    """A block that returns the loss of its router beside its output."""

    def __init__(self):
        super().__init__()
        self.router = Router()
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x):
        weights, chosen, balance = self.router(x)
        out = torch.einsum("tkwv,tw->tkv", self.experts[chosen], x).tanh()
        return x + (weights[..., None] * out).sum(1), balance


class Routed(nn.Module):
    """Logits of tokens, and the sum of the routers' losses."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens.flatten())
        balance = 0.0
        for block in self.blocks:
            x, one = block(x)
            balance = balance + one
        return self.head(x), balance


def routed_loss(module, tokens):
    logits, balance = module(tokens)
    return token_loss(logits, tokens.flatten()) + 0.1 * tokens.numel() * balance


ROUTED = Workload("routed", Routed, lambda size: torch.randint(VOCABULARY, (size, 8)), routed_loss)


class CodedMomentum(torch.optim.Optimizer):
    """Momentum with a code for each element, of one byte unless another dtype is given."""

    def __init__(self, parameters, dtype=torch.int8):
        super().__init__(parameters, {})
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["codes"] = torch.zeros_like(parameter, dtype=self.dtype)
            moment = torch.lerp(parameter.grad, state["codes"].float(), 0.9)
            state["codes"].copy_(moment)
            parameter.sub_(moment, alpha=1e-3)


def coded(module):
    return CodedMomentum(list(module.parameters()))


def counted_as_32_bits(case):
    """Predict for the same optimizer with codes of four bytes."""

    def wide(module):
        return CodedMomentum(list(module.parameters()), torch.float32)

    return predicted_peaks(replace(case, workload=replace(case.workload, optimizer=wide)))


CODED = replace(mlp(depth=2, width=64), optimizer=coded)


def detached_input(run, x):
    """The adapter trains on its input alone, as reentrant recompute of a frozen start does."""
    return rerun(run, x.detach())


def base_trained(model, *, blocks):
    """Give the frozen base gradients too."""
    for name in recompute_blocks(model, blocks=blocks):
        model.get_submodule(name).base.requires_grad_(True)


def auxiliary_loss_cut_off(model, *, blocks):
    for name in recompute_blocks(model, blocks=blocks):
        model.get_submodule(name).register_forward_hook(
            lambda _, args, output: (output[0], output[1].detach())
        )


def choices_not_kept(module):
    return list(find_blocks(module))


def first_block_kept(module):
    return keep_routing(module, blocks="blocks.0")


class KeepsIndicesAlone(TorchFunctionMode):
    """Repeat the indices of a choice, with the scores of the second run."""

    def __init__(self):
        super().__init__()
        self.kept = []
        self.repeats = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func not in CHOOSING_FUNCTIONS:
            return found
        if self.repeats:
            found[1].data.copy_(self.kept.pop(0))
        else:
            self.kept.append(found[1].clone())
        return found


def indices_kept_alone(module):
    for block in module.blocks:
        recomputed = block.router.forward
        mode = KeepsIndicesAlone()

        def forward(x, run=recomputed, mode=mode):
            mode.repeats = bool(mode.kept)
            with mode:
                return run(x)

        block.router.forward = forward


def load_counted_again(module):
    names = keep_routing(module)
    for block in module.blocks:
        runs = []

        def count(*_, load=block.router.load, runs=runs):
            runs.append(None)
            if len(runs) == 2:
                load.data.add_(1.0)

        block.router.score.register_forward_hook(count)
    return names


def steps_after_backward(parameters, make):
    return make([one for one in parameters if one.requires_grad])


class StepsInEachBackward(StepInBackward):
    """Step at every microbatch of a window."""

    def _step_in_backward(self, parameter):
        self._step_one(parameter)


class NeverFrees(StepInBackward):
    """Gradients stay until the end of the window."""

    def _step_one(self, parameter):
        self.parts[parameter].step()

    def step(self, closure=None):
        pass


FAULTS = [
    planted(
        "recompute.same-steps",
        "adapter-on-detached-input",
        recompute_blocks=patched(detached_input),
        model=ADAPTED,
        hint="gets no gradient|another value",
    ),
    planted(
        "recompute.same-steps",
        "base-saved-as-gradient",
        recompute_blocks=base_trained,
        model=ADAPTED,
        hint="gradient",
    ),
    planted(
        "recompute.same-steps",
        "router-drawn-twice",
        recompute_blocks=no_generator_kept,
        model=ADAPTED,
        hint="another value|preserve_rng_state",
    ),
    planted(
        "recompute.same-steps",
        "auxiliary-loss-dropped",
        recompute_blocks=auxiliary_loss_cut_off,
        model=ROUTED,
        hint="gradient|another value",
    ),
    planted(
        "memory-plan.estimate",
        "8-bit-state-counted-as-32",
        predict_peaks=counted_as_32_bits,
        model=CODED,
        hint="an owner is missing",
    ),
    planted(
        "recompute.routing", "no-op", keep=choices_not_kept, model=ROUTED, hint="chooses others"
    ),
    planted(
        "recompute.routing",
        "first-block-alone",
        keep=first_block_kept,
        model=ROUTED,
        hint="chooses others",
    ),
    planted(
        "recompute.routing",
        "indices-alone",
        keep=indices_kept_alone,
        model=ROUTED,
        hint="chooses others",
    ),
    planted(
        "recompute.load-once",
        "counted-again",
        keep=load_counted_again,
        model=ROUTED,
        hint="a counter of the load",
    ),
    planted(
        "grad-accum.in-backward", "no-op", optimizer=steps_after_backward, hint="free each gradient"
    ),
    planted(
        "grad-accum.in-backward", "never-frees", optimizer=NeverFrees, hint="free each gradient"
    ),
    planted(
        "grad-accum.in-backward",
        "every-microbatch",
        optimizer=StepsInEachBackward,
        hint="of the whole window",
    ),
]
