"""Repeat a step of a run that was kept in a box, and record what its operations make.

    with Replay(box, until=180, root=folder, end=end).running():
        run_the_script()

The script runs again as it is. Its call of `saving` loads the state of the box, gives the batch and
the generators to the bad step, and ends the script after it. Nothing is saved.

Proof: `python -m pytest tests/runs/test_box.py tests/cli/test_runs_replay.py`.
"""

import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..core.digest import digest, is_plain
from ..core.generators import same_state, unwatched
from ..core.measure import backward_node
from .box import BoxFacts, digest_of, read_facts, read_rank
from .fingerprints import leaves_of, users_line
from .parameters import bare_name
from .policy import with_infinite_sum
from .random_state import restore_random_state, take_random_state
from .ranks import RunError
from .spike import RECOVERIES_FILE_NAME
from .state import TrainingState

# Options of `saving` in a replay.
NOTHING_SAVED = {"rollback_every": None, "recovery_every": None, "best_k": 0}
Range = tuple[float, float]


class Replay:
    """Stands for the boxes of a run in the process that repeats a step.

    The steps `until` and the one before it are recorded. `end` gets what was found.
    """

    current: ClassVar["Replay | None"] = None

    def __init__(
        self, box: str, *, until: int, root: Path, end: Callable[[dict[str, Any]], NoReturn]
    ) -> None:
        self.facts: BoxFacts = read_facts(box)
        self.root = root
        self.resume = None if self.facts.checkpoint is None else "latest"
        self._content = read_rank(box, int(os.environ.get("RANK", "0")))
        self._until = until
        self._end = end
        self._begun = 0
        self._recorded: dict[int, StepRecord] = {}
        self._batches: list[Any] | None = None
        self.found: dict[str, Any] = {"steps": {}, "notes": [], "not finite": None}
        if self.facts.checkpoint is not None:
            kind = self.facts.checkpoint.partition("/")[0]
            (root / kind).symlink_to(Path(box, kind).absolute())
        if (recoveries := Path(box, RECOVERIES_FILE_NAME)).is_file():
            (root / recoveries.name).symlink_to(recoveries.absolute())

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        Replay.current = self
        try:
            yield
        finally:
            Replay.current = None

    def attach(self, state: TrainingState) -> None:
        """Begin to repeat a training, whose state is loaded."""
        self._state = state
        self.found["began after"] = state.step
        if state.step >= self._until:
            raise RunError(f"the state is that of step {state.step}, not before {self._until}")

    def begin(self) -> None:
        """Begin a step: restore its generators, and record it if it is asked for."""
        step = self._state.step + 1
        if step == self._begun:
            return
        self._begun = step
        if step == self.facts.step:
            self._restore()
        if step == self._until - 1 or step == self._until:
            self._recorded[step] = StepRecord(self._state.model)
            self._recorded[step].__enter__()

    def _restore(self) -> None:
        saved = self._content["generators"]
        generators = self._state.generators
        if saved is not None:
            now = take_random_state(generators)
            if not all(same_state(now[name], saved[name]) for name in now.keys() & saved.keys()):
                self.found["notes"].append("the generators were in another state before the step")
            restore_random_state(saved, generators)
        self._batches = self._content["batches"] and list(self._content["batches"])

    def hand_out(self, batch: Any) -> Any:
        """Return the batch that the step had in the run."""
        self.begin()
        if self._begun == self.facts.step and self._batches:
            kept = self._batches.pop(0)
            if _digests(kept) != _digests(batch):
                self.found["notes"].append("the script's own batch is another one than the box's")
            batch = kept
        if self._begun in self._recorded:
            self._recorded[self._begun].note_batch(batch)
        return batch

    def stepped(self, loss: float) -> None:
        """Compare the state after a step; end after the last one."""
        step = self._state.step
        if recorded := self._recorded.get(step):
            recorded.__exit__(None, None, None)
        self.found["steps"][str(step)] = [loss.hex(), digest_of(self._state)]
        parameters = dict(self._state.model.named_parameters())
        if with_infinite_sum(parameters) and self.found["not finite"] is None:
            self.found["not finite"] = step
        if step >= self._until:
            self._finish(None)

    def keep(self, step: int, reason: str, *, found_at: int) -> None:
        """End at a step that can't be made, because it is not finite."""
        if found_at > self._state.step:
            self._recorded[step].__exit__(None, None, None)
            self.found["steps"][str(step)] = ["nan", digest_of(self._state)]
            self._finish(reason)

    def _finish(self, reason: str | None) -> NoReturn:
        bad = self._recorded[max(self._recorded)]
        good = self._recorded.get(max(self._recorded) - 1)
        by_design = set() if good is None else good.sources.keys()
        origins = [one for key, one in bad.sources.items() if key not in by_design]
        self.found |= {
            "reason": reason,
            "operations": bad.operations,
            "origin": next(iter(origins), None),
            "growth": None if good is None else growth(good, bad),
            "gradient": bad.gradient_norm(),
            "gradient before": None if good is None else good.gradient_norm(),
        }
        self._end(self.found)


class StepRecord(TorchDispatchMode):
    """Records the operations of one step, and what is the first to be not finite."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # A line for each operation: phase, module, name, source line, digests of its results.
        self.operations: list[list[str]] = []
        # What makes NaN or infinity out of finite values, in order, by a key for its place.
        self.sources: dict[str, dict[str, Any]] = {}
        # The largest absolute input and output of each module, and the norm of each gradient.
        self.sizes: dict[str, Range] = {}
        self.gradients: dict[str, float] = {}
        self._counts = Counter[str]()
        self._modules: list[str] = []
        # Module and line of the forward operation that made each node of backward.
        self._made_by: dict[int, tuple[str, str]] = {}
        self._hooks: list[Any] = []
        for inner, module in model.named_modules():
            name = bare_name(model, inner) if inner else ""
            self._hooks += [
                module.register_forward_pre_hook(self._entering(name)),
                module.register_forward_hook(
                    self._leaving(name), with_kwargs=True, always_call=True
                ),
            ]
        for inner, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.is_leaf:
                hook = self._gradient(bare_name(model, inner))
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for hook in self._hooks:
            hook.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._modules.append(name)

        return enter

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, options: Any, output: Any) -> None:
            self._modules.pop()
            if torch.is_grad_enabled():
                before = self.sizes.get(name, (0.0, 0.0))
                sizes = _size((args, options)), _size(output)
                self.sizes[name] = max(before[0], sizes[0]), max(before[1], sizes[1])

        return leave

    def _gradient(self, name: str) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            assert parameter.grad is not None
            with unwatched():
                self.gradients[name] = float(parameter.grad.detach().double().norm())

        return note

    def gradient_norm(self) -> float:
        return math.hypot(*self.gradients.values())

    def note_batch(self, batch: Any) -> None:
        """Note NaN and infinity that come with the data."""
        for name, one in leaves_of(batch).items():
            found = value_range(one)
            if found is not None and not _is_finite(found):
                source = {"phase": "data", "name": f"{name} of the batch", "result": found}
                self.sources.setdefault(f"batch {name}", source)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        given = tree_leaves((args, options))
        # An operation in place overwrites what it is given.
        before = [found for one in given if (found := value_range(one)) is not None]
        output = func(*args, **options)
        module, line, phase = self._place()
        name = str(func)
        tensors = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
        # An operation of lists returns nothing; new memory has any values.
        results = tensors or [one for one in given if isinstance(one, Tensor)]
        results = [] if "empty" in name else results
        digests = " ".join(digest(one) for one in results)
        self.operations.append([phase, module, name, line, digests])
        place = f"{phase} {module} {name}"
        self._counts[place] += 1
        after = [found for one in results if (found := value_range(one)) is not None]
        if makes_not_finite(before, after):
            source: dict[str, Any] = {"phase": phase, "module": module, "name": name, "line": line}
            source["inputs"] = before
            source["result"] = next(one for one in after if not _is_finite(one))
            self.sources[f"{place} {self._counts[place]}"] = source
        return output

    def _place(self) -> tuple[str, str, str]:
        """Return module, line and phase of the operation that runs now."""
        node = backward_node()
        if node is not None:
            return *self._made_by.get(node._sequence_nr(), ("", users_line())), "backward"
        place = self._modules[-1] if self._modules else "", users_line()
        # The node of an operation is made before the operation runs.
        self._made_by.setdefault(torch._C._autograd._get_sequence_nr() - 1, place)
        return *place, "forward" if torch.is_grad_enabled() or self._modules else "after backward"


def makes_not_finite(before: list[Range], after: list[Range]) -> bool:
    """Return whether an operation has made NaN or infinity of finite values, or NaN of infinity."""
    if all(map(_is_finite, after)):
        return False
    if all(map(_is_finite, before)):
        return True
    has_nan = [any(math.isnan(low) for low, _ in ranges) for ranges in (before, after)]
    return has_nan == [False, True]


def value_range(value: Any) -> Range | None:
    """Return the least and the largest value of a tensor or number of floats; NaN if it has one."""
    if isinstance(value, float):
        return value, value
    if not isinstance(value, Tensor):
        return None
    with unwatched():
        tensor = value.detach()
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        is_float = tensor.is_floating_point() or tensor.is_complex()
        if not is_float or not is_plain(tensor) or tensor.is_meta or not tensor.numel():
            return None
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        low, high = torch.aminmax(tensor.float() if tensor.itemsize == 1 else tensor)
        return float(low), float(high)


def _is_finite(found: Range) -> bool:
    return math.isfinite(found[0]) and math.isfinite(found[1])


def _size(values: Any) -> float:
    ranges = [value_range(one) for one in tree_leaves(values) if isinstance(one, Tensor)]
    return max([abs(end) for found in ranges if found for end in found], default=0.0)


def _digests(batch: Any) -> list[str]:
    return [digest(one) for one in leaves_of(batch).values() if isinstance(one, Tensor)]


def growth(good: StepRecord, bad: StepRecord) -> dict[str, Any]:
    """Name the module whose outputs have grown most against its inputs, and the largest gradient.

    Modules that hold this one grow as it does, so the innermost of those is named that have at
    least half of the growth, in powers of ten.
    """

    def ratio(name: str, end: int) -> float:
        before = good.sizes[name][end]
        return bad.sizes[name][end] / before if before else 1.0

    common = [name for name in bad.sizes if name in good.sizes]
    gains = {name: ratio(name, 1) / (ratio(name, 0) or 1.0) for name in common}
    least = math.sqrt(max(gains.values(), default=1.0))
    grown = [name for name in common if gains[name] >= least]
    inner = [
        name
        for name in grown
        if not any(one != name and one.startswith(f"{name}." if name else "") for one in grown)
    ]
    named = max(inner, key=lambda name: gains[name], default="")
    gradients = {
        name: norm / good.gradients[name]
        for name, norm in bad.gradients.items()
        if good.gradients.get(name)
    }
    largest = max(gradients, key=lambda name: gradients[name], default="")
    return {
        "module": named,
        "gain": gains.get(named, 1.0),
        "sizes": [one.sizes.get(named, (0.0, 0.0))[1] for one in (good, bad)],
        "batch": ratio(common[-1], 0) if common else 1.0,
        "parameter": largest,
        "gradient": gradients.get(largest, 1.0),
    }
