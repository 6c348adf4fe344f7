"""Record what a training loop does, in order, while it runs as it is.

    trace = observe(train, num_steps=8)
    trace.windows[0].calls  # the backward calls of the first step

Torch's calls are replaced meanwhile by ones that record and then call the original.

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

import contextlib
import copy
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from operator import attrgetter, mul
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FSDPModule
from torch.distributions import Categorical, Distribution
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from ..core.blocks import in_transform
from ..core.digest import is_plain
from ..core.measure import heap_kept
from ..core.replaced_calls import Call, defining, replaced_calls, watched
from ..primitives.grad_flow_probe import in_backward
from ..runs.fingerprints import LoaderIterator
from ..workloads.models import LIBRARIES
from ..workloads.optimizers import parameters_of
from .loop_events import (
    FEWEST_STEPS,
    Backward,
    Clip,
    Cut,
    Dividing,
    Event,
    Fetch,
    Forward,
    Joining,
    LossCall,
    Scaling,
    Schedule,
    Scoring,
    Seeding,
    Shuffle,
    Step,
    Stepping,
    TorchCall,
    Trace,
    Versions,
    Zero,
    tensors_of,
    world_size,
)
from .loop_growth import Growth
from .loop_lines import (
    later_stage,
    loses,
    mistakes,
    users_frames,
    users_line,
    users_lines,
    users_text,
)
from .loop_loss import (
    ADDED,
    CHANCE,
    DRAWN,
    OF_TOKENS,
    ON_CLASSES,
    ON_VALUES,
    SCALE,
    TERM,
    digest,
    leaves,
    made_by,
    nodes_behind,
    notes_on,
    operation,
    term_of_call,
    terms_of,
    wrong_divergences,
)
from .loop_probe import probe
from .loop_targets import (
    columns_of,
    note_batches,
    note_targets,
    of_batch,
    tokens_of,
)
from .loop_weights import (
    MOST_OF_AVERAGE,
    MOST_SMALL,
    Gradient,
    copies_of,
    half_moved,
    has_equal_rows,
    instances_of,
    largest,
    leaves_alone,
    note_average,
    state_of,
    sum_of_small,
    versions_of,
)

# A quick loop goes on to the second epoch, up to so many steps for each that was asked for.
MORE_STEPS = 5
MORE_SECONDS = 10.0
# Up to so many where another stage of the training may follow.
MOST_STEPS = 50
# Names of models that shift the labels themselves, as those of Hugging Face.
SHIFTS = ("ForCausalLM", "LMHeadModel")
# Losses whose targets are -1 or 1.
ON_SIGNS = (
    "cosine_embedding_loss",
    "hinge_embedding_loss",
    "margin_ranking_loss",
    "soft_margin_loss",
)
# Operations of a loss with another value, and all that change nothing where their result is not
# used.
ADDING = ("__add__", "__radd__", "__iadd__", "__sub__")
SCALING = ("__mul__", "__rmul__", "mul", "__truediv__")
PURE = (
    *ADDING,
    *SCALING,
    "add",
    "sub",
    "div",
    "clamp",
    "masked_fill",
    "lerp",
    "transpose",
    "permute",
    "squeeze",
    "unsqueeze",
    "relu",
    "tanh",
)
# Torch's modules of layers that change nothing where their result is not used.
PURE_LAYERS = ("torch.nn.modules.activation", "torch.nn.modules.dropout")
LOOK = "look for the first value that is not finite: curry-train grad-flow"


class EnoughSteps(BaseException):
    """The loop has made the steps that were asked for."""


class Observer(Trace):
    """A trace with the replaced calls that write to it."""

    # When the first step ended.
    first_step_time: float
    # The versions of all gradients after a backward call.
    at_backward: Versions
    schedule_depth: int
    # Leaves that models were given and that get a gradient, in this window.
    inputs: list[Tensor]
    # Leaves from which an input of a model was computed, by id.
    leaves: set[int]
    # Values that are most of trained weights, as 0.99 times them: the weights, and their share.
    shares: WeakIdKeyDictionary
    # The last call of torch.autograd.grad whose result has no graph.
    grad_place: str
    is_attack: bool
    # Where dropout was drawn first, by its shape and rate, which are those of a recompute, and the
    # states of the generator with which it was drawn.
    masks: dict[Any, str]
    mask_states: set[int]
    # Noise that the loop has drawn since the last call of a model.
    noise: WeakIdKeyDictionary
    # Of each iterator: its loader, and a mark of this pass over it.
    loaders: dict[int, tuple[DataLoader[Any], object]]
    growth: Growth
    gradient: Gradient

    def __init__(self, num_steps: int, when_enough: Callable[[Trace], None]) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.when_enough = when_enough
        self.loss_call: LossCall | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        replacements = (
            (owner, name, self._make_replacement(handle))
            for handle, owner, *names in self._replacements()
            for name in names
        )
        data: Any = Tensor.data
        detached = watched(self._make_replacement(self._on_detach), data.__get__)
        set_to = watched(self._make_replacement(self._on_write), data.__set__)
        with (
            replaced_calls(replacements, self._on_step_begin, self._on_step_end),
            mock.patch.object(Tensor, "data", property(detached, set_to)),
        ):
            yield

    def _make_replacement(self, handle: Callable[[TorchCall], Any]) -> Call:
        def run(*args: Any, **options: Any) -> Any:
            call = TorchCall(*args, **options)
            # Tensors of a transform must not escape from it.
            if not in_transform():
                # A handler that is a class is the kind of event that the call is.
                self.note(handle) if isinstance(handle, type) else handle(call)
            return call.run()

        return run

    def _replacements(self) -> Iterator[tuple[Any, ...]]:
        """Yield what handles calls, or the event that they are, their owner, and their names."""
        yield self._on_detach, Tensor, "detach", "argmax", "max", "topk"
        yield self._on_detach, torch, "argmax", "max", "topk"
        yield self._on_arithmetic, Tensor, *ADDING, *SCALING
        yield self._on_view, Tensor, "view", "reshape"
        yield self._on_write, Tensor, "add_", "copy_", "lerp_"
        # Around those of the same calls.
        yield self._on_pure_call, Tensor, *PURE
        yield self._on_pure_call, torch, "clamp", "relu", "tanh"
        yield self._on_pure_call, F, "normalize", "softmax", "relu", "gelu", "silu"
        yield self._on_log_softmax, Tensor, "log_softmax"
        yield self._on_loss, F, *ON_CLASSES, *ON_VALUES
        yield self._on_loss_of_signs, F, *ON_SIGNS
        yield self._on_dropout, F, "dropout", "dropout1d", "dropout2d", "dropout3d"
        yield self._on_attention, F, "scaled_dot_product_attention"
        for owner in (nn.utils, nn.utils.clip_grad):
            yield self._on_clip, owner, "clip_grad_norm_", "clip_grad_value_"
        yield self._on_zero_grad, Optimizer, "zero_grad"
        yield self._on_new_optimizer, Optimizer, "__init__"
        yield self._on_optimizer_attribute, Optimizer, "__setattr__"
        yield self._on_zero_grad, nn.Module, "zero_grad"
        yield self._on_module, nn.Module, "__call__"
        yield self._on_train_mode, nn.Module, "train"
        yield self._on_load_state_dict, nn.Module, "load_state_dict"
        yield self._on_state_dict, nn.Module, "state_dict"
        for kind in defining(Distribution, "sample"):
            yield self._on_sample, kind, "sample"
        yield self._on_sample, torch, "normal"
        yield self._on_noise, torch, "randn_like"
        yield self._on_categorical, Categorical, "__init__"
        for kind in defining(Distribution, "log_prob"):
            yield self._on_log_prob, kind, "log_prob"
        for kind in defining(LRScheduler, "step"):
            yield self._on_schedule, kind, "step"
        yield self._on_scaler, torch.amp.GradScaler, "scale", "unscale_", "step", "update"
        yield self._on_backward, torch.autograd, "backward"
        yield self._on_autograd_grad, torch.autograd, "grad"
        # Compiled code can't be observed; the same code runs uncompiled.
        yield _skip_compile, torch, "compile"
        yield _skip_compile, nn.Module, "compile"
        yield self._on_loader, DataLoader, "__iter__"
        yield self._on_fetch, LoaderIterator, "__next__"
        yield Seeding, torch, "manual_seed"
        yield Shuffle, torch, "randperm"
        yield Shuffle, random, "shuffle"
        yield Shuffle, random.Random, "shuffle"
        yield Shuffle, numpy.random, "shuffle", "permutation", "default_rng"
        yield Joining, Join, "__enter__"
        yield Dividing, FSDPModule, "set_gradient_divide_factor"

    # Data.

    def _on_loader(self, call: TorchCall) -> None:
        self.loaders[id(call.run())] = call.owner, object()

    def _on_fetch(self, call: TorchCall) -> None:
        loader, epoch = self.loaders.get(id(call.owner), (None, None))
        batch = None
        try:
            batch = call.run()
        finally:
            if loader is not None:
                facts = of_batch(batch)
                self.last_fetches[loader] = self.note(Fetch, loader=loader, epoch=epoch, **facts)

    # The forward pass and the loss.

    def _on_module(self, call: TorchCall) -> None:
        module = call.owner
        has_gradients = torch.is_grad_enabled()
        ran = self.modules_run[has_gradients]
        if not ran.get(module):
            ran[module] = users_line("checkpoint") if module.training else ""
        event = None
        # A loss is a module too, without parameters. The first call of lazy ones makes them.
        is_model = any(True for _ in module.parameters())
        is_inner = self.depth or in_backward()
        if is_model and not (is_inner or any(map(nn.parameter.is_lazy, module.parameters()))):
            # Without its result, which has the graph.
            self.model_call = copy.copy(call)
            self.noise.clear()
            with torch.no_grad():
                event = self._note_forward(call, has_gradients=has_gradients)
                self._note_views(call.tensors if has_gradients else [])
        is_pure = type(module).__module__ in PURE_LAYERS and not getattr(module, "inplace", False)
        self._note_unused_result(type(module).__name__, call.caller, is_pure=is_pure)
        is_quiet = self.depth and is_model and module.training and not has_gradients
        if is_quiet and module not in self.frozen_parts:
            own = [*module.parameters()]
            if not any(one.requires_grad for one in own):
                self.frozen_parts |= dict.fromkeys(module.modules(), (module, sum_of_small(own)))
        is_known = has_gradients and is_model and Scoring not in self.last
        for one in call.tensors if self.samples and is_known else ():
            if place := self.samples.get(one if one._base is None else one._base, ""):
                self.fault(
                    "accumulation",
                    "a sample passes no gradient on",
                    "call rsample() of a distribution",
                    place,
                    value=self.num_steps_made,
                )
        # A module without parameters is a loss, or a part of another one.
        self.depth += is_model
        begun = _num_exchanges()
        try:
            output = call.run()
        finally:
            self.depth -= is_model
        # Of a frozen layer with a hook that calls requires_grad_, as for adapters.
        if isinstance(output, Tensor) and output.is_leaf:
            self.leaves.add(id(output))
        if has_gradients and event:
            event.exchanges = _num_exchanges() > begun
            self._note_outputs(event, tensors_of(output))
            if isinstance(output, tuple):  # a state is among them
                event.outputs = frozenset(map(digest, tensors_of(output)))

    def _note_views(self, inputs: list[Tensor]) -> None:
        """Note an input whose halves are alike, and are both in a batch."""
        for one in inputs[:1]:
            # Tokens are given twice on purpose, where dropout is the only difference.
            if is_plain(one) and one.is_floating_point() and one.dim() > 1:
                half = one[: len(one) // 2]
                counts = (fetch.digests.count(digest(half)) for fetch in self.last_fetches.values())
                if torch.equal(half, one[len(half) :]) and max(counts, default=0) > 1:
                    self.fault(
                        "data",
                        "two views of a batch are the same",
                        "draw a random view for each",
                        value=digest(half),
                    )

    def _note_forward(self, call: TorchCall, *, has_gradients: bool) -> Forward:
        module, inputs = call.owner, call.tensors
        given = [it for one in inputs if one.requires_grad for it in leaves(one)]
        self.inputs += [one for one in given if not isinstance(one, nn.Parameter)]
        self.leaves.update(map(id, given))
        # A function of the module may have put results in their place.
        parameters = {one: name for name, one in module.named_parameters() if one.is_leaf}
        is_trained = has_gradients and any(one.requires_grad for one in module.parameters())
        if is_trained and module not in self.roots:
            self.roots.append(module)
            self.names = parameters | self.names
        small = [one for one in parameters if one.numel() < MOST_SMALL]
        small = [one for one in small if one.requires_grad] or small
        device = inputs[0].device.type if inputs else "cpu"
        is_autocast = torch.is_autocast_enabled(device)
        return self.note(
            Forward,
            module=module,
            training=module.training,
            digests=tuple(map(digest, inputs)),
            addresses=tuple(one.data_ptr() for one in inputs if is_plain(one)),
            # A dimension more is that of several models.
            is_one_sample=bool(inputs)
            and all(one.dim() in (2, 4) and has_equal_rows(one) for one in inputs),
            num_samples=len(inputs[0]) if inputs and inputs[0].dim() else 0,
            autocast=torch.get_autocast_dtype(device) if is_autocast else None,
            generator=_generator(),
            weights=(digest(small[0]), digest(small[-1])) if small else (0.0, 0.0),
            syncs=getattr(module, "require_backward_grad_sync", None),
            behind=frozenset(given),
            tokens=tokens_of(call.options.get("input_ids", *call.args[1:2])),
            cause=None if module.training else self.causes.get(module),
        )

    def _note_outputs(self, event: Forward, outputs: list[Tensor]) -> None:
        # A digest is a sum. A mask may well hold infinity.
        if not any(
            all(map(math.isfinite, digests)) for digests in (event.digests, map(digest, outputs))
        ):
            self.fault(
                "data",
                "the model is given values that are not finite",
                "look at how the data is read and normalized",
                event,
            )
        tokens = event.tokens
        event.returned = tuple(digest(one[:1]) for one in outputs if one.dim() and is_plain(one))
        for one in outputs:
            self._mark_when_reached(one, event, "is_trained_on")
            if tokens is not None and one.shape[:-1] == tokens.shape:
                notes_on(one)[OF_TOKENS] = True
        labels = tokens_of(self.model_call.options.get("labels"))
        if labels is not None and any(
            type(one).__name__.endswith(SHIFTS) for one in event.module.modules()
        ):
            note_targets(self, event, labels[:, 1:])

    def _on_log_softmax(self, call: TorchCall) -> None:
        if made_by(call.owner) == "Softmax":
            self.fault(
                "logits", "log_softmax gets probabilities", "give it the values before softmax"
            )

    def _on_loss_of_signs(self, call: TorchCall) -> None:
        target = call.argument("target")
        if target.numel() and not target.min():
            self.fault(
                "targets",
                f"{call.function.__name__} gets 0 where it takes -1",
                "give it 2 * target - 1",
            )

    def _mark_when_reached(self, one: Tensor, event: Event, name: str) -> None:
        """Set an attribute of an event when a backward pass reaches a tensor."""
        if one.grad_fn is not None and is_plain(one):
            one.register_hook(lambda _: None if self.is_attack else setattr(event, name, True))

    def _on_loss(self, call: TorchCall) -> None:
        value = call.run()
        if isinstance(value, Tensor) and torch.is_grad_enabled() and not value.requires_grad:
            self.grad_place = users_line()
        if isinstance(value, Tensor) and value.requires_grad:
            bound = call.bound()
            bound.apply_defaults()
            options = bound.arguments
            if "log_probs" in options:  # of ctc_loss
                lengths = torch.as_tensor(options["target_lengths"])
                options |= {"input": options["log_probs"].flatten(0, -2), "target": lengths}
            term, doubts = term_of_call(call.function.__name__, options)
            if value.numel() == 1 and term.reduction != "none":
                notes_on(value)[TERM] = term
            target = options["target"]
            columns = columns_of(next(iter(self.model_call.tensors), None), target)
            event = self.note(LossCall, term=term, targets=digest(target), columns=columns)
            forward = self.last.get(Forward)
            self.loss_call = event
            for check, of_check in doubts.items():
                for doubt in of_check:
                    self.fault(check, *doubt, event)
            if forward and target in self.noise:
                self.fault(
                    "targets",
                    "the targets are noise that no model was given",
                    "give the loss the noise that was added to the input",
                    event,
                )
            if term.name != "ctc_loss":  # whose target is the number of labels of each sample
                note_batches(self, target, event)
            self._mark_when_reached(value, event, "is_used")
            if forward and term.name in ("cross_entropy", "nll_loss"):
                note_targets(
                    self,
                    forward,
                    target,
                    options["ignore_index"],
                    options["input"],
                    is_whole=term.reduction != "none",
                )

    def _on_write(self, call: TorchCall) -> None:
        one, *others = call.args
        # Before training, entries that a checkpoint lacks stay; a negative factor is a decay.
        numbers = (by for by in (*others, *call.options.values()) if isinstance(by, int | float))
        newest = min(numbers, default=1)
        if self.num_made and not self.step_depth and newest > 0 and is_plain(one):
            tensors = tensors_of(others)
            # A module that is moved sets the data of its weights, which may be there already.
            if call.function.__name__ != "__set__":
                note_average(self, one, tensors, newest)
            for weight, share in [self.shares[it] for it in tensors if it in self.shares]:
                if digest(one) != digest(weight):
                    note_average(self, one, [weight], share)

    def _on_pure_call(self, call: TorchCall) -> None:
        given = (*call.args, *call.options.values())
        is_pure = "out" not in call.options and not any(one is True for one in given)
        self._note_unused_result(call.function.__name__.strip("_"), call.caller, is_pure=is_pure)

    def _note_unused_result(self, name: str, caller: Any, *, is_pure: bool) -> None:
        if is_pure and loses(caller):
            hint = "assign it, or change the tensor in place, as by mul_()"
            self.fault("results", f"the result of {name} is not used", hint)

    def _on_arithmetic(self, call: TorchCall) -> None:
        value, name = call.run(), call.function.__name__
        both = [one for one in (*call.args, *call.options.values()) if isinstance(one, Tensor)]
        if not isinstance(value, Tensor):
            return
        if name in ("__sub__", "__mul__") and len(both) == 2:
            self._note_outer_product(*both)
        if self.num_made and not self.step_depth:
            self._note_share(value, both[0], *call.args)
        # `first` has no gradient, if one of them has none.
        first, *_, other = sorted(both * 2, key=attrgetter("requires_grad"))
        is_difference = name == "__sub__" and len(both) > 1 and all(map(is_plain, both))
        is_known = is_difference and (
            first.requires_grad
            # A weight and its own memory, as that of detach().
            or (other.is_leaf and first.data_ptr() == other.data_ptr())
        )
        is_known &= value.shape[:1].numel() > 1
        if is_known and first.any() and not value.any():
            self.fault(
                "moves",
                "two values that are equal are subtracted, each with a gradient",
                "compare other data, or take one from before: clone() kept weights, detach() old "
                "probabilities",
                value=self.num_made.total(),
            )
        if name in SCALING:
            self._note_weighted_loss(value, first, other)
        elif value.numel() == 1 and value.grad_fn is not None and value.is_floating_point():
            number = next((one for one in call.args if one is not other), other)
            is_tensor = isinstance(number, Tensor)
            if not (is_tensor and (number.requires_grad or not self.grad_place)):
                place = self.grad_place if is_tensor else users_line()
                notes_on(value)[ADDED] = place, float(number)

    def _note_share(self, value: Tensor, factor: Tensor, *given: Any) -> None:
        """Note a value that is most of trained weights: 0.99 times them, or a sum with that."""
        for one in given:
            if isinstance(one, Tensor) and one in self.shares:
                self.shares[value] = self.shares[one]
            elif isinstance(one, float) and MOST_OF_AVERAGE < one < 1:
                for weight in self.of_roots(trained=True):
                    if weight.shape == value.shape and digest(weight) == digest(factor):
                        self.shares[value] = weight, one

    def _note_weighted_loss(self, value: Tensor, weight: Tensor, one: Tensor) -> None:
        """Note a loss that is multiplied by weights, and noise that is by an exponential."""
        node: Any = one.grad_fn
        is_noise = weight.numel() > 1 and not weight.requires_grad
        if is_noise and operation(node) == "Exp":
            node.next_functions[0][0].metadata[DRAWN] = users_line()
        nodes = {node} if is_noise else set[Any]()
        # The weight of a focal loss is a function of the loss itself.
        if weight.requires_grad and not (value.dim() or weight is one):
            nodes = nodes_behind(weight) & nodes_behind(one)
        # Both have a gradient, and one of them is the probability of a sample.
        if Scoring in self.last and weight.requires_grad and weight.shape == one.shape:
            only = nodes_behind(weight) ^ nodes_behind(one)
            if any(CHANCE in each.metadata for each in only):
                self.fault(
                    "targets",
                    "the factor of a sample's probability passes gradients on",
                    "detach() the advantage",
                )
        if any(TERM in each.metadata for each in nodes - {None}):
            self.fault(
                "accumulation",
                "a loss that is one number is multiplied by weights of its terms",
                'give the loss reduction="none", multiply, and take the mean then',
            )

    def _on_view(self, call: TorchCall) -> None:
        if call.caller.f_code.co_filename.startswith(LIBRARIES):
            return
        one, value = call.owner, call.run()
        before, after = ([size for size in it.shape if size > 1] for it in (one, value))
        is_moved = one.dim() == value.dim() > 2 and sorted(before) == sorted(after)
        # Heads that join the samples, as in view(T, B * heads, -1), may have as many values.
        is_moved &= "*" not in users_text()
        # Channels that become the last dimension, such as the classes of an image. Dimensions that
        # are merged in their order leave those before them.
        is_moved |= (
            len(before) > len(after)
            and after[-1:] == before[1:2]
            and math.prod(after[:-1]) not in itertools.accumulate(before, mul)
        )
        # Heads of attention that are merged. A norm of groups may have as many as an image rows.
        is_heads = len(before) == 4 and before[::2] == after[:2] != before[:2]
        is_moved |= is_heads and made_by(one).startswith(("Bmm", "ScaledDot"))
        if is_moved and before != after:
            self.fault(
                "logits",
                f"a view of shape {[*one.shape]} as {[*value.shape]} mixes the dimensions",
                "call permute() first, as images.permute(0, 3, 1, 2)",
                value=digest(value),
            )

    def _note_outer_product(self, one: Tensor, other: Tensor) -> None:
        """Note a result of each output with each target, where one of them has a column."""
        column, row = (one, other) if one.dim() == 2 else (other, one)
        number = len(row) if row.dim() else 0
        shapes = [*column.shape], [*row.shape]
        # The row may be the result of such a comparison already. In a model only a column that is
        # trained counts: a row may be weights there, and a table the weights of a graph.
        rows = [[number]] * (column.requires_grad or not self.depth)
        rows += [[number] * 2] * (column.requires_grad and not self.depth)
        is_outer = number > 1 and shapes[0] == [number, 1] and shapes[1] in rows
        # A view, as by unsqueeze, is a comparison of each with each on purpose.
        if not is_outer or column._base is not None or one.requires_grad == other.requires_grad:
            return
        # A row that is the same in each step, such as one of centers, is no target.
        self.fault(
            "logits",
            f"shapes {shapes[0]} and {shapes[1]} are combined, each value with each",
            "give both the same shape, as by squeeze(1) or unsqueeze(1)",
            value=digest(other if one.requires_grad else one),
        )

    def _on_detach(self, call: TorchCall) -> None:
        one = call.owner
        is_made = self.depth or one.grad_fn is not None
        is_ours = call.caller.f_globals.get("__package__") == __package__
        if one.requires_grad and is_made and not is_ours:
            place = users_line()
            self.behind_detach[place] = self.behind_detach.get(place) or {*leaves(one)}
            self.note(Cut, behind=self.behind_detach[place])

    def _on_sample(self, call: TorchCall) -> None:
        own = call.owner
        given = vars(own) if isinstance(own, Distribution) else (call.args, call.options)
        is_passed = any(one.requires_grad for one in tensors_of(given))
        is_passed &= getattr(own, "has_rsample", True) and torch.is_grad_enabled()
        for one in tensors_of(call.run()):
            self.samples[one] = users_line() if is_passed else ""

    def _on_log_prob(self, call: TorchCall) -> None:
        self.note(Scoring)
        if any(one in self.samples for one in call.tensors):
            notes_on(call.run())[CHANCE] = True

    def _on_categorical(self, call: TorchCall) -> None:
        chances, logits = call.argument("probs"), call.argument("logits")
        if isinstance(logits, Tensor) and made_by(logits) in ("Softmax", "Sigmoid"):
            self.fault("logits", "its logits are probabilities", "give it as probs=")
        if isinstance(chances, Tensor) and chances.dim() == 2 and len(chances) > 1:
            over_samples, over_classes = ((chances.sum(dim) - 1).abs().max() for dim in (0, 1))
            if over_samples < 1e-3 < over_classes:
                self.fault(
                    "logits",
                    "probabilities add up to 1 over the samples, not over the classes",
                    "call softmax(-1)",
                )

    def _on_autograd_grad(self, call: TorchCall) -> None:
        wanted = call.listed("inputs")
        if not call.argument("create_graph"):
            self.grad_place = users_line()
            # Gradients of inputs alone, as of an attack, train nothing.
            self.is_attack = not any(isinstance(one, nn.Parameter) for one in wanted)
        try:
            found = tensors_of(call.run())
        finally:
            self.is_attack = False
        is_part = call.argument("create_graph") and found and all(map(is_plain, found))
        if is_part and not any(map(torch.any, found)):
            self.fault(
                "moves",
                "a derivative that the loss is computed from is 0",
                "take a smooth activation, such as tanh: the second derivative of a ReLU is 0",
                value=self.num_steps_made,
            )

    def _on_noise(self, call: TorchCall) -> None:
        if not self.depth:
            self.noise[call.run()] = True

    def _on_dropout(self, call: TorchCall) -> None:
        forward, owner = self.last.get(Forward), call.caller.f_locals.get("self")
        options = {"p": 0.5, "training": None, **call.bound().arguments}
        if forward and options["p"] and self.depth:
            is_layer = isinstance(owner, nn.modules.dropout._DropoutNd)
            forward.drops |= not is_layer
            # A layer or a call may be in training mode on purpose, to draw several predictions.
            is_on = options["training"]
            is_lost = is_on is None or (
                # In an evaluation a layer that `eval` does not find.
                is_on
                and is_layer
                and not torch.is_grad_enabled()
                and owner not in forward.module.modules()
            )
            if is_lost and not (forward.training or in_backward()):
                self.fault(
                    "mode",
                    "dropout acts in evaluation mode",
                    "pass training=self.training to F.dropout, or make nn.Dropout in __init__",
                )
            if is_on is not False:
                self._note_mask((options["input"].shape, options["p"]))

    def _note_mask(self, kind: Any) -> None:
        """Note the random numbers of dropout; in a backward pass it is a forward pass again."""
        state = _generator()
        if not in_backward():
            self.masks.setdefault(kind, users_line("checkpoint"))
            self.mask_states.add(state)
        elif kind in self.masks and state not in self.mask_states:
            self.fault(
                "mode",
                "dropout is recomputed with other random numbers",
                "leave out preserve_rng_state=False of the checkpoint",
                self.masks[kind],
            )

    def _on_attention(self, call: TorchCall) -> None:
        mask = call.options.get("attn_mask", *call.args[3:4])
        is_floats = isinstance(mask, Tensor) and mask.is_floating_point()
        if is_floats and mask.any() and (mask == mask.bool()).all():
            self.fault(
                "targets",
                "the attention mask is 0 and 1 in floats",
                "numbers are added to the scores: give it as bool",
            )

    # The backward pass.

    def _on_backward(self, call: TorchCall) -> None:
        loss, *_ = call.listed("tensors")
        if in_backward() or loss.numel() != 1:
            return
        parameters: list[Tensor] = [*self.roots.parameters()]
        for optimizer in self.optimizers:
            parameters += parameters_of(optimizer)
        # Also of modules that no other one has.
        for module in self.modules_run[True]:
            parameters += nn.Module.parameters(module, recurse=False)
        terms, numbers, scale, is_second = terms_of(loss)
        event = self.note(
            Backward,
            value=float(loss.detach()),
            scale=scale,
            dirty={one for one in parameters if one.grad is not None and largest(one.grad)},
            terms=terms,
            is_second=is_second,
            cause=self.loss_call,
        )
        for place, number in numbers:
            self.fault(
                "accumulation",
                "a part of the loss changes and has no gradient",
                "add the tensor, without item() or detach(); use create_graph=True for a "
                "gradient in a loss",
                place,
                value=number,
            )
        for check, measured, hint, place in wrong_divergences(loss):
            self.fault(check, measured, hint, place or event.place, event.value)
        if not math.isfinite(event.value):
            self.fault("sign", f"the loss is {event.value}", LOOK, event)
        if torch.is_autocast_enabled(loss.device.type):
            self.fault(
                "autocast",
                "backward runs under autocast",
                "end the autocast block before loss.backward()",
                event,
            )
        before = versions_of(parameters)
        event.is_next = all(before[key] == self.at_backward.get(key) for key in before)
        call.run()
        self.at_backward = after = versions_of(parameters)
        event.reached = frozenset(key for key in after if after[key] != before[key])
        self.gradient = Gradient(one for one in parameters if one in event.reached)
        self.with_gradient |= {key for key in after if after[key] is not None}
        event.of_inputs = any(one.grad is not None for one in self.inputs)
        self.inputs.clear()
        self.loss_call = None
        self.grad_place = ""
        if not self.num_made and len(self.of(Backward)) > 50 * self.num_steps:
            self.when_enough(self)

    def _on_scaler(self, call: TorchCall) -> None:
        scaler, name = call.owner, call.function.__name__
        if not scaler.is_enabled():
            return
        if name in ("unscale_", "step"):
            self.gradient.use()
        own = call.argument("optimizer")
        self.note(Scaling, call=name, scaler=scaler, optimizer=own)
        value = call.run()
        if name == "scale" and isinstance(value, Tensor):
            notes_on(value)[SCALE] = float(scaler.get_scale())
        elif name == "step" and not isinstance(self.events[-1], Step):
            self.note(Stepping, optimizer=own)

    def _on_clip(self, call: TorchCall) -> None:
        most = float(call.bound().args[1])
        # It gives the norm of the gradients and leaves them as they are.
        if math.isinf(most):
            return
        given = call.listed("parameters")
        self.gradient.use()
        event = self.note(Clip, parameters=frozenset(given))
        if not given:
            self.fault(
                "clipping",
                "it clips no parameter",
                "pass model.parameters() anew; a generator is empty after one use",
                event,
            )
        if not most:
            self.fault(
                "clipping",
                "gradients are clipped to 0",
                "a norm of 1.0 is usual; leave the clipping out for none",
                event,
            )
        is_scaled = getattr(self.last.get(Backward), "scale", 1.0) != 1.0
        since = itertools.takewhile(lambda one: one.call != "scale", reversed(self.of(Scaling)))
        unscaled = {it for one in since if one.optimizer for it in parameters_of(one.optimizer)}
        if is_scaled and any(one.grad is not None for one in event.parameters - unscaled):
            self.fault(
                "clipping",
                "gradients are clipped while they are scaled",
                "call scaler.unscale_(optimizer) before it",
                event,
            )

    def _on_zero_grad(self, call: TorchCall) -> None:
        owner = call.owner
        is_module = isinstance(owner, nn.Module)
        parameters = frozenset(owner.parameters() if is_module else parameters_of(owner))
        if any(parameter.grad is not None for parameter in parameters):
            self.note(Zero, parameters=parameters)

    # Models and steps.

    def _on_load_state_dict(self, call: TorchCall) -> None:
        found = call.run()
        num_keys = len(call.owner.state_dict())
        if found.unexpected_keys and len(found.missing_keys) == num_keys > 0:
            self.fault(
                "moves",
                f"none of {num_keys} weights is loaded: no name is in the file",
                "compare the names, such as a prefix; strict=True (the default) would refuse it",
            )

    def _on_state_dict(self, call: TorchCall) -> None:
        if "state_dict().update(" in users_text():
            self.fault(
                "results",
                "the dictionary is changed that state_dict() returns, not the model",
                "call load_state_dict()",
            )

    def _on_new_optimizer(self, call: TorchCall) -> None:
        call.run()
        one = call.owner
        self.optimizers.append(one)
        self.groups[one] = {
            name: [group.get(name) for group in one.param_groups] for name in ("lr", "weight_decay")
        }
        # Not a line of the object's own class, where that is the user's.
        lines = users_lines(*(f"{kind.__qualname__}.__init__" for kind in type(one).__mro__))
        self.causes[one] = Event(lines)

    def _on_optimizer_attribute(self, call: TorchCall) -> None:
        one, name, value = call.args
        if (
            name == "lr"
            and type(one).__module__.startswith("torch.")
            and value not in rates_of(one)
        ):
            self.fault(
                "schedule",
                "a rate that the optimizer does not read",
                'set group["lr"] of each group in optimizer.param_groups',
            )

    def _on_train_mode(self, call: TorchCall) -> None:
        # Each part is set by a call, and `eval` calls this, also where a model has its own.
        if call.owner.training != call.bound().arguments.get("mode", True):
            self.causes[call.owner] = Event(users_lines())

    def _on_schedule(self, call: TorchCall) -> None:
        scheduler, caller = call.owner, call.caller
        self.schedule_depth += 1
        try:
            call.run()
        finally:
            self.schedule_depth -= 1
        if caller.f_code.co_name == "_initial_step":
            text, *_ = users_text(8).partition(")\n")
            self.schedules.append((users_line(), scheduler.optimizer, text))
        elif not self.schedule_depth:
            is_per_process = caller.f_globals.get("__name__") == "accelerate.scheduler"
            number = world_size() if is_per_process else 1
            self.note(
                Schedule,
                scheduler=scheduler,
                rates=rates_of(scheduler.optimizer),
                num_expected=number,
            )

    def _on_step_begin(self, optimizer: Optimizer, *_: Any) -> None:
        if not self.step_depth:
            self.gradient.use()
            self.before = state_of(optimizer), copies_of(parameters_of(optimizer))
        self.step_depth += 1

    def _on_step_end(self, optimizer: Optimizer, *_: Any) -> None:
        self.step_depth -= 1
        if self.step_depth:  # an optimizer that steps another one
            return
        frames = users_frames()
        self.files |= {one.f_code.co_filename for one in frames}
        for frame in () if self.num_made[optimizer] else frames:
            for fault in mistakes(frame.f_code):
                self.fault(*fault)
        state, values = self.before
        parameters = parameters_of(optimizer)
        own = values or {}
        moved = frozenset(one for one, value in own.items() if not torch.equal(value, one.detach()))
        slopes = {one: largest(one.grad) for one in parameters if one.grad is not None}
        # The loop may have set them by hand.
        self.with_gradient |= slopes.keys()
        event = self.note(
            Step,
            optimizer=optimizer,
            rates=rates_of(optimizer),
            state=(state, state_of(optimizer)),
            weights=(sum(map(digest, own.values())), sum(map(digest, own))),
            versions=versions_of(parameters),
            **self.gradient.facts(slopes),
            moved=None if values is None else moved,
            slopes=slopes,
            half_moved=half_moved(own),
            in_backward=in_backward(),
            generator=_generator(),
            cause=self.causes.get(optimizer),
        )
        plain = (one for one in parameters if one in slopes and is_plain(one))
        self.optimizer_by_address |= {one.data_ptr(): (one, event.origin) for one in plain}
        if not all(map(math.isfinite, slopes.values())):
            self.fault("sign", "a step on gradients that are not finite", LOOK, event)
        if frozen := moved.intersection(self.of_roots(trained=False)):
            self.fault(
                "moves",
                f"frozen parameters move: {self.named(frozen)}",
                "leave frozen parameters out of the optimizer",
                event,
            )
        del self.before, values, own
        # A warm-up may begin with a rate of 0, and a model with a head of zeros.
        if any(event.rates) or not event.rates:
            probe(self)
        self.first_step_time = self.first_step_time or time.monotonic()
        self.num_made[optimizer] += 1
        self.growth.count(self.num_steps_made)
        if self.num_made[optimizer] == FEWEST_STEPS:
            self.lone_leaves |= leaves_alone(self, self.leaves)
        if self._is_enough(self.num_made[optimizer]):
            self.finish()
            self.when_enough(self)

    def _is_enough(self, num_steps: int) -> bool:
        """Return whether to end; a quick loop goes on until its second epoch has begun."""
        if num_steps < self.num_steps:
            return self.num_made.total() >= MOST_STEPS * self.num_steps
        self.unreached_line = later_stage()
        # Ranks must end at the same step, whatever time each has taken.
        is_late = world_size() > 1 or time.monotonic() - self.first_step_time > MORE_SECONDS
        if is_late or num_steps >= self.num_steps * (
            MOST_STEPS if self.unreached_line else MORE_STEPS
        ):
            return True
        fetches = self.of(Fetch)
        batches = [one.digests for one in fetches]
        # Past the first four batches of another pass. Without a DataLoader no pass is known.
        is_again = not all(batches) and all(batches[-4:])
        return is_again and fetches[-1].loader is fetches[0].loader and not self.unreached_line

    def finish(self) -> None:
        for place, measured in self.growth.found.values():
            self.fault(
                "growth",
                measured,
                "keep a number, a bounded number of tensors, or remove the hook's handle",
                place,
            )
        for place in self.growth.graphs:
            self.fault(
                "graph",
                "a tensor keeps the graph of each step",
                "keep loss.item() or tensor.detach() in place of the tensor",
                place,
            )
        for module in self.modules_run[False] | self.modules_run[True]:
            for name, parameter in module.named_parameters(recurse=False):
                self.names.setdefault(parameter, f"{type(module).__name__}.{name}")


def rates_of(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def _generator() -> int:
    return hash(torch.get_rng_state().numpy().tobytes())


def _num_exchanges() -> int:
    """Count the collective calls of all groups of ranks so far."""
    groups: Any = torch.distributed.distributed_c10d._world.pg_map
    return sum(one._get_sequence_number_for_group() for one in groups)


def _skip_compile(call: TorchCall) -> None:
    model = call.argument("model")
    call.result = (lambda function: function) if model is None else model


def _stop(trace: Trace) -> None:
    raise EnoughSteps


def observe(
    train: Callable[[], Any], *, num_steps: int, when_enough: Callable[[Trace], None] = _stop
) -> Trace:
    """Run a training loop until one of its optimizers has made a number of steps."""
    observer = Observer(num_steps, when_enough)
    # Those that the loop was given; it may make more.
    observer.optimizers += instances_of(Optimizer)
    # What is there already is not looked through after each step.
    with heap_kept(), observer.installed(), contextlib.suppress(EnoughSteps):
        try:
            train()
        except Exception as error:  # noqa: BLE001 - the user's script may raise anything
            # A rank whose steps are all made has ended.
            if world_size() == 1 or "by peer" not in str(error):
                observer.error = error
        observer.unreached_line = ""
        observer.finish()
    return observer
