"""Read off a loss, and off its graph, what it is made of.

    for term in terms_of(loss)[0]:
        print(term.name, term.reduction, term.num_terms, term.factor)

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core.digest import is_plain

# Functions of `torch.nn.functional` whose input, target and reduction are looked at: on classes and
# probabilities, some of which take logarithms, and on values.
OF_LOGARITHMS = ("nll_loss", "kl_div", "ctc_loss")
ON_CLASSES = ("cross_entropy", "binary_cross_entropy_with_logits", *OF_LOGARITHMS)
ON_VALUES = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "soft_margin_loss",
    "binary_cross_entropy",
    "multi_margin_loss",
    "multilabel_margin_loss",
)
# Sums of probabilities and weights of terms may differ by rounding, in half precision at worst.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Term:
    """A mean or sum that a loss has as a part."""

    # The operation, without its suffix; the name of the function where its call was seen.
    name: str
    # `mean`, `sum`, or nothing where it can't be read.
    reduction: str
    num_terms: float
    # The product of all factors of the part, and the divisors among them. A factor that is a whole
    # number counts as a divisor below 1.
    factor: float
    divisors: tuple[float, ...]
    # Positions that are in a mean, and count as 0 there.
    num_masked: int = 0
    # Values of a position, where a sum over them is known; or 1.
    width: int = 1
    # The mean of the weights that the classes of its terms were given.
    class_weight: float = 1.0
    # Values that were added up for each of those that the loss function is given, as over time.
    num_added: int = 1

    @property
    def strength(self) -> float:
        """The weight of the part; 1 where it is a mean over its own terms."""
        return abs(self.factor) * (1.0 if self.reduction == "mean" else self.num_terms)

    @property
    def weight(self) -> float:
        """The weight of one term in the loss."""
        return self.factor / self.num_terms if self.reduction == "mean" else self.factor


# Name of a mean of log-probabilities of the targets.
LOG_PROBABILITY = "log_probability"

# Likely mistakes in a call of a loss function: the measured figure, and what to do.
Doubts = Iterable[tuple[str, str]]


def values_of(one: Tensor) -> Tensor:
    """Return a dense tensor of this rank's values."""
    local: Tensor = getattr(one, "_local_tensor", one)
    return local.to_dense() if local.is_sparse else local


def digest(one: Tensor) -> float:
    """Return a number that other values, or another order of them, hardly have."""
    if not is_plain(one) and not hasattr(one, "_local_tensor"):
        return 0.0
    flat = values_of(one.detach()).flatten()
    if not flat.numel() or flat.is_complex() or flat.device.type == "meta":
        return float(flat.numel())
    weights = torch.arange(1, len(flat) + 1, device=flat.device, dtype=torch.float64)
    return float((flat.double() * weights.sqrt()).sum())


def term_of_call(name: str, options: Mapping[str, Any]) -> tuple[Term, dict[str, Doubts]]:
    """Return the whole loss of a call, as a part of itself, and doubts about it by the check."""
    given, target = options["input"], options["target"]
    num_terms = (target if name in ON_CLASSES else given).numel()
    class_weight = 1.0
    reduction = options["reduction"]
    if not target.is_floating_point():
        counted = target[target != options.get("ignore_index", -100)]
        num_terms = counted.numel()
        if options.get("weight") is not None:
            class_weight = float(options["weight"][counted].mean())
    elif name == "cross_entropy":
        num_terms = target.numel() // target.shape[1] if target.dim() > 1 else 1
    wrong_targets = [*_doubt_targets(name, given, target)]
    if name in ("cross_entropy", "nll_loss"):
        smoothing = float(options.get("label_smoothing", 0))
        # A sum may be that of a part of the positions, such as those of a prompt.
        is_ignored = not num_terms and reduction != "sum"
        wrong_targets += _doubt_classes(target.detach(), is_ignored, smoothing)
        wrong_targets += _doubt_own_pairs(given.detach(), target)
    elif name == "ctc_loss":
        wrong_targets += _doubt_labels(**options)
    width = given.shape[-1] if name in ON_VALUES and given.dim() > 1 else 1
    node = _skip_shape_nodes(given.grad_fn)
    added = node._saved_self_sym_sizes if operation(node) == "Sum" else ()
    num_added = math.prod(added) // max(1, given.numel())
    term = Term(name, reduction, num_terms, 1.0, (), 0, width, class_weight, num_added)
    return term, {"logits": _doubt_inputs(name, given, target), "targets": wrong_targets}


def _doubt_inputs(name: str, given: Tensor, target: Tensor) -> Doubts:
    """Find inputs that are no logits or log-probabilities, or of another shape than targets."""
    made = made_by(given, "LogSoftmax" if name == "nll_loss" else "")
    values = given.detach()
    sums = values.exp() if name in OF_LOGARITHMS else values
    # Over the classes, by how much sums of probabilities differ from 1.
    dims = range(sums.dim()) if name == "kl_div" else (min(1, sums.dim() - 1),)
    errors = [float((sums.float().sum(dim) - 1).abs().max()) for dim in dims if sums.numel()]
    error = min(errors, default=0.0)
    if name in OF_LOGARITHMS and error >= TOLERANCE:
        hint = "give it F.log_softmax(logits, dim=1), or use cross_entropy"
        yield f"{name} gets no log-probabilities", hint
    elif name in ("cross_entropy", "binary_cross_entropy_with_logits", "nll_loss"):
        has_classes = given.dim() > 1 and given.shape[1] > 1
        is_distribution = error < 1e-3 and has_classes and (values >= 0).all()
        if is_distribution or made in ("Softmax", "Sigmoid", "LogSigmoid"):
            yield f"{name} gets probabilities", "give it the values before softmax or sigmoid"
        if made == "Relu":
            hint = "remove the activation behind the last layer"
            yield f"the logits of {name} are never negative, as a ReLU is last", hint
    # Targets that are classes, or numbers of labels, have another shape.
    if not name.startswith(("cross", "nll", "ctc", "multi")):
        sizes = given.numel(), target.numel()
        together = torch.broadcast_shapes(given.shape, target.shape).numel()
        # Targets for a column may be the result of such a comparison already.
        is_crossed = together > max(sizes)
        is_crossed |= given.dim() == 2 and together == given.numel() ** 2 > 1
        if 1 not in sizes and is_crossed:
            yield (
                f"values of shape {list(given.shape)} are compared with targets of "
                f"{list(target.shape)}, each with each",
                "give both the same shape, as by squeeze(1) or unsqueeze(1)",
            )


# The least and the greatest value that an operation gives. Others may give any value.
RANGES = {
    "Tanh": (-1.0, 1.0),
    "Sigmoid": (0.0, 1.0),
    **dict.fromkeys(("Relu", "Softplus", "Exp"), (0.0, math.inf)),
}


def _doubt_targets(name: str, given: Tensor, target: Tensor) -> Doubts:
    """Find targets that the values before a loss can't have, and that have a gradient."""
    is_binary = name.startswith("binary")
    if target.is_floating_point() and (is_binary or name in ON_VALUES):
        made = "Sigmoid" if is_binary else made_by(given)
        low, high = RANGES.get(made, (-math.inf, math.inf))
        node = _skip_shape_nodes(given.grad_fn)
        # Limits that are numbers: tensors may be those of a step, as around an earlier value.
        if made == "Clamp" and node.name() == "ClampBackward1":
            low, high = node._saved_min, node._saved_max
        if is_binary:
            # Labels of a discriminator may be noisy.
            high *= 1.3
        share = float((target != target.clamp(low, high)).float().mean())
        if share > (0 if is_binary else 0.25):
            hint = "scale the targets, as from 0 to 1, or leave out the last layer's activation"
            yield f"{share:.0%} of the targets are values that the model can't give", hint
    if is_binary and target.requires_grad and not given.requires_grad:
        yield f"{name} gets targets as its input", "swap its arguments: the model's output first"
    # A number and a share of what the model gave, on either side of the loss. Without a factor it
    # may be the output of a residual network.
    is_sum = name in ON_VALUES and any(
        operation(node) == "Add" and {"", "Mul"} == {*map(operation, _input_nodes(node))}
        for node in (_skip_shape_nodes(one.grad_fn) for one in (given, target))
    )
    # The targets come from another model, as a teacher that is trained by mistake. Where they come
    # from the trained model on purpose, the input has no gradient.
    is_others = name == "kl_div" and given.requires_grad
    is_others &= {*leaves(given)}.isdisjoint(leaves(target))
    # Two outputs of one model are computed from a result that both have.
    if target.requires_grad and (
        is_others
        or (
            is_sum
            and all(hasattr(one, "variable") for one in nodes_behind(given) & nodes_behind(target))
        )
    ):
        yield "the targets have a gradient", "compute them under torch.no_grad(), or detach them"


def _doubt_classes(target: Tensor, is_ignored: bool, smoothing: float) -> Doubts:
    """Find targets that are several classes, smoothed away, or ignored."""
    if target.is_floating_point() and target.dim() > 1:
        is_whole = ((target == 0) | (target == 1)).all()
        if is_whole and (target.sum(1) > 1).any():
            hint = "use binary_cross_entropy_with_logits, or targets that sum to 1"
            yield "targets of cross_entropy are several classes at once", hint
    if smoothing > 0.9:
        yield f"a label smoothing of {smoothing:g} leaves nothing of the labels", "use 0.1"
    if is_ignored:
        yield "no target counts: all have the ignored index", "look at how labels are made"


def _doubt_labels(
    *, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int, **options: Any
) -> Doubts:
    """Find labels of ctc_loss that it can't give."""
    lengths = torch.as_tensor(target_lengths, device=targets.device)
    if targets.dim() == 2:
        targets = targets[torch.arange(targets.shape[1], device=targets.device) < lengths[:, None]]
    if (targets == blank).any():
        yield f"labels are {blank}, which is the blank of ctc_loss", "count labels from 1"
    is_short = torch.as_tensor(input_lengths, device=lengths.device) < lengths
    if is_short.float().mean() > 0.5 and options["zero_infinity"]:
        hint = "give it more frames than labels; zero_infinity=True hides these losses"
        yield "most samples have fewer frames than labels", hint


def _doubt_own_pairs(given: Tensor, target: Tensor) -> Doubts:
    """Find similarities of samples among which is that of each sample with itself."""
    if target.dim() != 1 or given.shape != 2 * target.shape or len(target) < 3:
        return
    is_symmetric = torch.allclose(given, given.T, rtol=1e-3)
    is_largest = (given.diagonal() >= given.amax(1)).all()
    own = torch.arange(len(target), device=target.device)
    if is_symmetric and is_largest and not (target == own).any():
        hint = "set the diagonal of the similarities to -inf before the loss"
        yield "each sample is compared with itself, too", hint


# Operations that change the shape or type of values alone.
SHAPE_ONLY = (
    "View",
    "Reshape",
    "Transpose",
    "Permute",
    "Squeeze",
    "Unsqueeze",
    "ToCopy",
    "Alias",
    "Slice",
    "Select",
    "Clone",
    "T",
    "UnsafeView",
)


def operation(node: Any) -> str:
    """Return the name of a node of the graph, without its suffix; nothing for no node."""
    return re.sub(r"Backward\d*$", "", node.name()) if node else ""


def _input_nodes(node: Any) -> list[Any]:
    """Return the nodes that made the inputs of a node, and None for those without a gradient."""
    return [one for one, _ in node.next_functions]


def nodes_behind(*tensors: Tensor) -> set[Any]:
    """Return the nodes of the graphs of tensors."""
    left, seen = [one.grad_fn for one in tensors], set[Any]()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += _input_nodes(node)
    return seen


def leaves(tensor: Tensor) -> list[Tensor]:
    """Return the parameters, and other leaves, that a tensor is computed from."""
    found = [one.variable for one in nodes_behind(tensor) if hasattr(one, "variable")]
    return found or [tensor]


def made_by(tensor: Tensor, *others: str) -> str:
    """Return the operation that computed the values of a tensor, before these others."""
    return operation(_skip_shape_nodes(tensor.grad_fn, *others))


def _skip_shape_nodes(node: Any, *others: str) -> Any:
    """Return the node before those of shapes, and of these other operations."""
    while operation(node) in (*SHAPE_ONLY, *others) and node:
        node = _input_nodes(node)[0]
    return node


Added = tuple[str, float]

# Names of notes on nodes: the term of the loss function that made one, the number that it adds, the
# scale of a gradient scaler, where noise is multiplied by its exponential, and whether it gave the
# probability of a sample, was read as a part of a loss, or made what a model returned for each
# token.
TERM = "preflight term"
ADDED = "preflight number"
SCALE = "preflight scale"
DRAWN = "preflight noise"
CHANCE = "preflight chance"
READ = "preflight read"
OF_TOKENS = "preflight tokens"


def notes_on(tensor: Tensor) -> dict[str, Any]:
    """Return the notes on the node that made a tensor; they last as long as its graph."""
    node: Any = tensor.grad_fn  # torch annotates its property `metadata` as a method
    return {} if node is None else node.metadata


def num_left_out(logits: Tensor, dim: int) -> int:
    """Return how many first tokens of a model's output were cut off; 0 if that is not known."""
    node: Any = logits.grad_fn
    number = 0
    while node is not None:
        if OF_TOKENS in node.metadata:
            return number
        name = operation(node)
        if name == "Slice" and node._saved_dim == dim:
            size = node._saved_self_sym_sizes[dim]
            # Negative numbers are shown without their sign.
            number += (node._saved_start + size) % 2**64 % size
        node = _input_nodes(node)[0] if name in (*SHAPE_ONLY, "LogSoftmax") else None
    return 0


def terms_of(loss: Tensor) -> tuple[list[Term], list[Added], float, bool]:
    """Return the parts of a loss, the numbers in it, its scale, and whether a part was read before.

    Factors are those without a gradient scaler's scale. It reads what torch's nodes saved, so it
    must be called before the backward pass.
    """
    found = list[Term]()
    added = list[Added]()
    scale = 1.0
    is_second = False
    left = list[tuple[Any, float, tuple[float, ...]]]()
    # A loss may be a parameter.
    if loss.grad_fn is not None:
        left.append((loss.grad_fn, 1.0, ()))
    while left:
        node, factor, divisors = left.pop()
        notes = node.metadata
        if ADDED in notes:
            added.append(notes[ADDED])
        if SCALE in notes:
            scale = notes[SCALE]
            factor /= scale
        inner = None if TERM in notes else _expand_sum(node)
        if inner is None:
            found.append(_read_term(node, factor, divisors))
            # A parameter's own node stays from step to step.
            if not operation(node).endswith("AccumulateGrad"):
                is_second |= READ in notes
                notes[READ] = True
            continue
        for one, times in inner:
            # A factor of the user's, such as 0.1, is no division by microbatches. A whole number
            # may be that of the samples, as a divisor below 1.
            is_whole = times > 1 and times == round(times)
            is_divisor = is_whole if operation(node) == "Mul" else 0 < abs(times) < 1
            by = (1 / times,) if is_divisor else ()
            left.append((one, factor * times, (*divisors, *by)))
    return found, added, scale, is_second


def _expand_sum(node: Any) -> list[tuple[Any, float]] | None:
    """Return the nodes whose weighted sum a node is, if it is one."""
    name, inputs = operation(node), _input_nodes(node)
    own = [*filter(None, inputs)]
    alpha = float(getattr(node, "_saved_alpha", 1.0))
    by: float | None = None
    if name in ("Add", "Sub"):
        weights = (1.0, alpha if name == "Add" else -alpha)
        return [(one, by) for one, by in zip(inputs, weights, strict=True) if one]
    if name in ("Mean", "Sum") and operation(own[0]) == "Stack":
        inputs = _input_nodes(own[0])
        own = [*filter(None, inputs)]
        # Scalars alone: of others each would be a sum itself.
        if math.prod(node._saved_self_sym_sizes) == len(inputs):
            by = 1 / len(own) if name == "Mean" else 1.0
    elif len(own) == 1:
        if name in ("Neg", "Rsub"):
            by = -alpha
        elif name in SHAPE_ONLY:
            by = 1.0
        elif name in ("Mul", "Div") and (number := _read_constant(node)):
            by = 1 / number if name == "Div" else number
    return None if by is None else [(one, by) for one in own]


def wrong_divergences(loss: Tensor) -> Iterator[tuple[str, str, str, str]]:
    """Find x - exp(x) or log(x) - x in a loss, which falls without end, or noise times exp(x).

    Yield the check, the doubt, and the place, if that is known.
    """
    weights = defaultdict[Any, float](float)
    left: list[tuple[Any, float]] = [(loss.grad_fn, 1.0)] if loss.grad_fn is not None else []
    while left:
        node, factor = left.pop()
        inner = _expand_sum(node)
        if operation(node) in ("Sum", "Mean", "Clamp"):
            inner = inner or [(_input_nodes(node)[0], 1.0)]
        weights[node] += factor
        left += [(one, factor * times) for one, times in inner or ()]
    for node, factor in [*weights.items()]:
        sign = {"Exp": 1, "Log": -1}.get(operation(node), 0)
        below = _input_nodes(node)[0] if sign else node
        if factor * weights[below] >= 0 or _compares_two_spreads(node):
            continue
        if factor * sign < 0:
            hint = "add -0.5 * (1 + logvar - mean**2 - logvar.exp()).sum() to the loss"
            yield "sign", "the divergence to a normal distribution is made larger", hint, ""
        elif DRAWN in below.metadata:
            hint = "multiply it by the root: (0.5 * logvar).exp()"
            yield "logits", "noise is multiplied by a variance", hint, below.metadata[DRAWN]


def _compares_two_spreads(node: Any) -> bool:
    """Return whether a node is of a ratio of spreads of which none is 1, as of no prior."""
    ratio = _input_nodes(node)[0] if operation(node) == "Log" else node
    if operation(ratio) == "Pow":
        (ratio,) = _input_nodes(ratio)
    known = [_read_saved(ratio, name) for name in ("self", "other")]
    is_one = any(isinstance(one, Tensor) and (one == 1).all() for one in known)
    return operation(ratio) == "Div" and not is_one


def _read_saved(node: Any, name: str) -> Any:
    """Return what a node saved; None where it is gone, or was changed in place."""
    try:
        return getattr(node, f"_saved_{name}", None)
    except RuntimeError:
        return None


def _read_constant(node: Any) -> float | None:
    """Return the number that a product or quotient has besides the loss."""
    for name in ("other", "self"):
        value = _read_saved(node, name)
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            return float(value)
    return None


def _read_term(node: Any, factor: float, divisors: tuple[float, ...]) -> Term:
    if TERM in node.metadata:
        return replace(node.metadata[TERM], factor=factor, divisors=divisors)
    name = operation(node)
    below = _input_nodes(node)[0] if name in ("Mean", "Sum") else None
    # Losses with a weight each are one part of their own.
    if below is None or any(operation(one) == "Stack" for one in _input_nodes(below)):
        return Term(name, "", math.nan, factor, divisors)
    num_terms = math.prod(node._saved_self_sym_sizes)
    masked = _count_masked(below) or (_count_filled(below) if name == "Sum" else 0)
    counted = num_terms - masked
    chosen = _skip_shape_nodes(below)
    is_chosen = operation(chosen) in ("Index", "Gather")
    # These are the values that a log_softmax has at the targets.
    if name == "Mean" and is_chosen and operation(_input_nodes(chosen)[0]) == "LogSoftmax":
        name = LOG_PROBABILITY
    # The factor of the part without its divisors.
    times = abs(factor) * math.prod(by for by in divisors if by > 1)
    if masked and name != "Sum" and abs(times * counted / num_terms - 1) < 1e-3:
        # Divided by the share of terms that count: their sum, divided by their number.
        name, factor, divisors = "Sum", factor / num_terms, (*divisors, counted)
    if name != "Sum":
        return Term(name, "mean", num_terms, factor, divisors, masked)
    is_mean = any(abs(by - num_terms) < 0.5 for by in divisors)
    return Term(name, "sum", counted, factor, divisors, masked * is_mean)


def _count_filled(node: Any) -> int:
    """Count the positions of a sum that are filled in, as by 0."""
    node = _skip_shape_nodes(node, "Neg")
    return int(_read_saved(node, "mask").sum()) if operation(node) == "MaskedFill" else 0


def _count_masked(node: Any) -> int:
    """Count the positions of a loss without reduction that are 0 by a mask or an ignored target."""
    node = _skip_shape_nodes(node)
    if operation(node) == "Mul":
        mask = _read_saved(node, "other")
        mask = _read_saved(node, "self") if mask is None else mask
        below = [*filter(None, _input_nodes(node))]
        is_mask = isinstance(mask, Tensor) and ((mask == 0) | (mask == 1)).all() & mask.any()
        if not is_mask or len(below) != 1:
            return 0
        of = _skip_shape_nodes(below[0])
        # A loss by hand takes the values of the targets.
        is_loss = hasattr(of, "_saved_reduction") or operation(of) == "Gather"
        return int((mask == 0).sum()) if is_loss else 0
    target, ignored = _read_saved(node, "target"), getattr(node, "_saved_ignore_index", None)
    if ignored is None or not isinstance(target, Tensor):
        return 0
    # Negative numbers are shown without their sign.
    return int((target == (ignored - 2**64 if ignored >= 2**63 else ignored)).sum())
