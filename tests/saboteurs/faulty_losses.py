"""Faults of the chunked loss: dropped options, wrong gradients, wrong logits or reports.

Proof: `python -m pytest tests/gates/test_memory_plan.py`.
"""

import functools

import torch
from saboteurs import planted

from curry_train.primitives import chunked_loss, cross_entropy, loss_backends
from curry_train.primitives.chunked_loss import apply_chunked_loss
from curry_train.primitives.cross_entropy import chunked_cross_entropy


def without(name):
    """Drop an option."""

    def dropped(*given, **options):
        options.pop(name, None)
        return chunked_cross_entropy(*given, **options)

    return dropped


def half_of_a_backend(*given, backend=None, **options):
    return chunked_cross_entropy(*given, backend=backend, **options) * (
        1 if backend is None else 0.5
    )


def mean_over_all_tokens(hidden, weight, targets, *, reduction="mean", **options):
    if reduction != "mean":
        return chunked_cross_entropy(hidden, weight, targets, reduction=reduction, **options)
    total = chunked_cross_entropy(hidden, weight, targets, reduction="sum", **options)
    return total / len(targets)


def weights_that_do_not_divide(hidden, weight, targets, *, class_weights=None, **options):
    weigh = functools.partial(chunked_cross_entropy, hidden, weight, targets)
    if class_weights is None or options.get("reduction", "mean") != "mean":
        return weigh(class_weights=class_weights, **options)
    total = weigh(class_weights=class_weights, reduction="sum", **options)
    return total / (targets != -100).sum()


def probability_with_a_gradient(hidden, weight, targets, *, token_weights=None, **options):
    if not isinstance(token_weights, str) or options.get("reduction", "mean") != "mean":
        return chunked_cross_entropy(
            hidden, weight, targets, token_weights=token_weights, **options
        )
    losses = chunked_cross_entropy(hidden, weight, targets, reduction="none", **options)
    return (losses * torch.exp(-losses)).sum() / (targets != -100).sum()


def with_logits(changed):
    """Change what a head in chunks derives from its logits."""

    def apply(model, **options):
        names = apply_chunked_loss(model, **options)
        for name in names:
            model.get_submodule(name).register_forward_hook(lambda head, given, out: changed(out))
        return names

    return apply


def report_of_no_use(model, **options):
    names = apply_chunked_loss(model, **options)
    for name in names:
        model.get_submodule(name).register_forward_hook(note_whole_logits)
    return names


def note_whole_logits(head, given, out):
    if head.training:
        out.logits.product.use.whole.append("nothing")


def any_input(model, *, chunk_tokens=None, chunk_bytes=None, **options):
    if chunk_tokens is not None:
        return apply_chunked_loss(model, chunk_tokens=max(1, int(chunk_tokens)), **options)
    return apply_chunked_loss(model, chunk_bytes=chunk_bytes or 1024, **options)


def in_eval_mode_too(model, *, head="0", **options):
    names = apply_chunked_loss(model, head=head, **options)
    linear = model.get_submodule(names[0])
    linear.register_forward_hook(lambda head, given, out: out if head.training else 2 * out)
    return names


def counts_logits_alone(given, options):
    """Return the tokens whose logits fit into a chunk, with nothing else."""
    return max(1, (options.chunk_bytes or 2**20) // (4 * given.weight.shape[0]))


def first_of_the_widest(linears):
    return dict([max(linears.items(), key=lambda item: item[1].out_features)])


FAULTS = [
    planted("memory-plan.loss-calls", "half", loss=half_of_a_backend, hint="of one's own"),
    planted(
        "memory-plan.loss-calls",
        "no-ignored",
        loss=without("ignore_index"),
        hint="another ignored|raised",
    ),
    planted(
        "memory-plan.loss-calls",
        "logits-alone",
        patches=[(cross_entropy, "_fitting_rows", counts_logits_alone)],
        hint="chunks with",
    ),
    planted(
        "memory-plan.loss-backends",
        "not-compared",
        patches=[(loss_backends, "_agree", lambda *_, most: True)],
        hint="ran, not",
    ),
    planted(
        "memory-plan.loss-heads",
        "watched",
        patches=[(chunked_loss, "_counts_arrivals", lambda function, args: False)],
        hint="watches logits",
    ),
    planted(
        "memory-plan.loss-heads",
        "first-of-two",
        patches=[(chunked_loss, "_widest", first_of_the_widest)],
        hint="as wide",
    ),
    planted(
        "memory-plan.loss-heads",
        "named-otherwise",
        patches=[(chunked_loss, "_name", lambda function: "an operation")],
        hint="is reported as",
    ),
    *(
        planted("memory-plan.loss-forms", name, apply=apply, hint=hint, model="transformer")
        for name, apply, hint in (
            ("logits-too-large", with_logits(lambda logits: 1.5 * logits), "a shift: "),
            ("logits-made-whole", with_logits(lambda logits: logits + 0), "reported as all"),
            ("another-report", report_of_no_use, "all logits made for nothing"),
            ("wrong-sizes-taken", any_input, "no tokens is taken"),
            ("other-logits-in-eval", in_eval_mode_too, "other logits in eval mode"),
        )
    ),
    *(
        planted("memory-plan.loss-options", name, loss=loss, hint=hint, model="transformer")
        for name, loss, hint in (
            ("no-softcap", without("softcap"), "softcap"),
            ("no-z-loss", without("z_loss"), "z-loss"),
            ("no-smoothing", without("label_smoothing"), "label smoothing"),
            ("no-bias", without("bias"), "raised|a bias"),
            ("half-of-a-backend", half_of_a_backend, "leanest backend|own"),
            ("mean-over-all", mean_over_all_tokens, "off by"),
            ("weights-do-not-divide", weights_that_do_not_divide, "class weights"),
            ("probability-with-a-gradient", probability_with_a_gradient, "probability"),
        )
    ),
]
