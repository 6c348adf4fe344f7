"""What grad-flow costs: a probed step and a step between against the plain one; what hooks by hand cost and count.

    python -m curry_train.grad_flow_overhead --json evidence/grad_flow.json

Proof: `python -m pytest tests/test_grad_flow_overhead.py`.
"""

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .core.builtin import transformer
from .core.measure import measure_memory
from .core.provenance import provenance, write_json
from .core.workload import Case, Workload
from .options import choose_device, json_option
from .primitives.grad_flow import GradFlow
from .primitives.recompute import recompute_blocks

Around = Callable[[nn.Module, torch.optim.Optimizer], Any]
NEVER = 10**9  # the first step is due at 0, so a step after it is one between


def sizes() -> dict[str, tuple[Workload, int]]:
    """The built-in transformer, and one whose products are large enough to hide what is small; with batch sizes."""
    larger = transformer(depth=4, dim=384, heads=6, kv_heads=3, vocabulary=2048, length=128)
    return {"transformer": (transformer(), 4), "llama_like": (larger, 4)}


class HooksByHand(contextlib.AbstractContextManager[Any]):
    """What is often written: hooks on the leaves that ask each tensor for three numbers, one by one."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.calls: Counter[str] = Counter()
        self.figures: list[float] = []
        self.handles: list[Any] = []
        for name, module in model.named_modules():
            if not any(True for _ in module.children()):
                self.handles.append(module.register_forward_hook(self.hook(name)))
        self.handles.append(optimizer.register_step_pre_hook(lambda *_: self.gradients(model)))

    def hook(self, name: str) -> Callable[..., None]:
        def see(module: nn.Module, arguments: Any, output: Tensor) -> None:
            self.calls[name] += 1
            self.see(output.detach())

        return see

    def see(self, tensor: Tensor) -> None:
        for figure in (
            tensor.norm(),
            (tensor == 0).float().mean(),
            tensor.isfinite().float().mean(),
        ):
            self.figures.append(figure.item())

    def gradients(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                self.see(parameter.grad)

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()


class Operations(TorchDispatchMode):
    """Counts operations."""

    num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


WAYS: dict[str, Around] = {
    "plain": lambda model, optimizer: contextlib.nullcontext(),
    "between": lambda model, optimizer: GradFlow(model, optimizer, every=NEVER, first_step=1),
    "probed": lambda model, optimizer: GradFlow(model, optimizer, every=1),
    "probed_without_updates": lambda model, optimizer: GradFlow(
        model, optimizer, every=1, updates=False
    ),
    "by_hand": HooksByHand,
}


@contextlib.contextmanager
def _trainer(case: Case, around: Around) -> Iterator[Callable[[], None]]:
    module, batch = case.build(), case.batch()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        case.workload.mean_loss(module, batch).backward()
        optimizer.step()
        if case.device.type == "cuda":
            torch.cuda.synchronize(case.device)

    with around(module, optimizer):
        yield step


def measure_costs(case: Case, *, repeats: int) -> dict[str, Any]:
    """Median seconds of each way, in turns, and operations of one step; both as ratios of the plain step's too."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    operations = {}
    with contextlib.ExitStack() as stack:
        steps = {way: stack.enter_context(_trainer(case, around)) for way, around in WAYS.items()}
        for way, step in steps.items():
            step()
            with Operations() as counted:
                step()
            operations[way] = counted.num_calls
        for _ in range(repeats):
            for way, step in steps.items():
                start = time.perf_counter()
                step()
                seconds[way].append(time.perf_counter() - start)
    plain = statistics.median(seconds["plain"])
    return {
        way: {
            "seconds": statistics.median(seconds[way]),
            "ratio": statistics.median(seconds[way]) / plain,
            "operations": operations[way],
            "operations_ratio": operations[way] / operations["plain"],
        }
        for way in WAYS
    }


def measure_counting(case: Case) -> dict[str, Any]:
    """Calls of the layers of the first block in one step: as the bare model has them, and as each way has it."""
    found = {}
    for recompute in (False, True):
        module, batch = case.build(), case.batch()
        if recompute:
            recompute_blocks(module)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
        flow, by_hand = (
            GradFlow(module, optimizer, every=1, layers="layers.0.*"),
            HooksByHand(module, optimizer),
        )
        with flow, by_hand:
            case.workload.mean_loss(module, batch).backward()
            optimizer.step()
        layers = flow.records[0].layers
        found["recompute" if recompute else "bare"] = {
            "grad_flow": sum(layers[name].calls for name in by_hand.calls if name in layers),
            "by_hand": sum(calls for name, calls in by_hand.calls.items() if name in layers),
        }
    return found


def measure_held(case: Case) -> dict[str, int]:
    """Activation bytes after forward, plain and while probing."""
    module, batch = case.build(), case.batch()
    plain = measure_memory(module, batch, case.workload.mean_loss)
    with GradFlow(module) as flow:
        probed = measure_memory(module, batch, case.workload.mean_loss)
        flow.step()
    return {
        "plain_bytes": plain.held_bytes,
        "probed_bytes": probed.held_bytes,
        "plain_peak_bytes": plain.peak_bytes,
        "probed_peak_bytes": probed.peak_bytes,
    }


def drift_of_float32() -> float:
    """How far `norm()` of 2**24 float32 numbers on this CPU is from their norm."""
    x = torch.randn(2**24, generator=torch.Generator().manual_seed(0))
    return abs(x.norm().item() / x.double().norm().item() - 1)


@click.command()
@click.option("--repeats", default=15, type=click.IntRange(1), show_default=True)
@click.option(
    "--model",
    "names",
    multiple=True,
    type=click.Choice(list(sizes())),
    help="Repeatable; all if left out.",
)
@click.option(
    "--device", default="auto", type=click.Choice(["auto", "cuda", "cpu"]), show_default=True
)
@json_option(default="-")
def main(repeats: int, names: tuple[str, ...], device: str, json_path: str) -> None:
    """Measure, and write the figures."""
    place, rows = choose_device(device), {}
    for name in names or sizes():
        workload, batch_size = sizes()[name]
        case = Case(workload, place, batch_size=batch_size)
        rows[name] = {
            "batch_size": batch_size,
            "parameters": sum(parameter.numel() for parameter in case.build().parameters()),
            "cost": measure_costs(case, repeats=repeats),
            "calls": measure_counting(case),
            "held": measure_held(case),
        }
    drift = {"float32_norm_drift": drift_of_float32()}
    write_json(json_path, provenance(place) | {"repeats": repeats} | rows | drift)


if __name__ == "__main__":
    main()
