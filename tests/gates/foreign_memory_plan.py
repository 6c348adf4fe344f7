"""A chunked loss and a plan on torch's own calls, and wrong twins of each."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 1024


class Deferred:
    """Logits that are not computed: the rows of the head's input, until a cross-entropy."""

    def __init__(self, rows, head, loss):
        self.rows, self.head, self.loss = rows, head, loss

    @property
    def shape(self):
        return (*self.rows.shape[:-1], self.head.out_features)

    def on(self, rows):
        return Deferred(rows, self.head, self.loss)

    def float(self):
        return self

    def flatten(self, start, end):
        return self.on(self.rows.flatten(start, end))

    def view(self, *sizes):
        return self.on(self.rows.reshape(*sizes[:-1], self.rows.shape[-1]))

    def __getitem__(self, where):
        return self.on(self.rows[where])

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not F.cross_entropy:
            return NotImplemented
        logits, targets = args
        given = {name: kwargs[name] for name in ("ignore_index", "reduction")}
        return logits.loss(logits.rows, logits.head, targets, **given)


def deferring(loss):
    """Make an `apply_chunked_loss` whose head leaves its product to this loss."""

    def apply_chunked_loss(model, *, head):
        linear = model.get_submodule(head)
        plain = linear.forward

        def forward(rows):
            trains = linear.training and torch.is_grad_enabled()
            return Deferred(rows, linear, loss) if trains else plain(rows)

        linear.forward = forward

    return apply_chunked_loss


def linear_loss(rows, head, targets, **given):
    return F.linear_cross_entropy(rows, head.weight, targets, linear_bias=head.bias, **given)


@deferring
def by_torch(rows, head, targets, **given):
    return linear_loss(rows, head, targets, options=nn.LinearCrossEntropyOptions(), **given)


@deferring
def by_torch_with_ignored_targets(rows, head, targets, **given):
    options = nn.LinearCrossEntropyOptions()
    return linear_loss(rows, head, targets.clamp(min=0), options=options, **given)


def losses_of_chunks(rows, head, targets, *, reduction="sum", ignore_index):
    def loss(rows, targets):
        logits = F.linear(rows, head.weight, head.bias).float()
        return F.cross_entropy(logits, targets, reduction=reduction, ignore_index=ignore_index)

    chunks = zip(rows.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True)
    return torch.stack([checkpoint(loss, *chunk, use_reentrant=False) for chunk in chunks])


@deferring
def by_checkpoint(rows, head, targets, *, reduction, ignore_index):
    losses = losses_of_chunks(rows, head, targets, ignore_index=ignore_index)
    return losses.sum() / ((targets != ignore_index).sum() if reduction == "mean" else 1)


@deferring
def by_mean_of_means(rows, head, targets, *, reduction, ignore_index):
    losses = losses_of_chunks(rows, head, targets, reduction="mean", ignore_index=ignore_index)
    return losses.nanmean() * ((targets != ignore_index).sum() if reduction == "sum" else 1)


class RecomputeBlocks:
    def __init__(self, most):
        self.most = most

    def apply(self, model):
        for block in model.layers[: self.most]:
            block.forward = self.recomputed(block.forward)

    def recomputed(self, forward):
        return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def plan_every_block(workload, budget_bytes, *, global_batch, microbatch):
    return RecomputeBlocks(None)


def plan_nothing(workload, budget_bytes, *, global_batch, microbatch):
    return RecomputeBlocks(0)
