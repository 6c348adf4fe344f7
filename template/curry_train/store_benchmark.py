"""What the store costs: integrity against a plain `dcp.save`, and the stall of a save in the background.

Both are measured in turns, plain and ours one after the other, and the median of the pairs' ratios counts.
`python -m curry_train.store_benchmark --json checkpoint_save.json` records it.
Proof: `python -m pytest tests/test_store_benchmark.py`.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from .core.provenance import provenance, write_json
from .runs.background import BackgroundSaver
from .runs.state import TrainingState
from .runs.store import Store

BYTES_PER_PARAMETER = 12  # float32 weights and the two moments of Adam
WIDTH = 1024


def made_state(num_bytes: int) -> TrainingState:
    """A model and AdamW with its moments, of about so many bytes."""
    layers = max(1, round(num_bytes / (BYTES_PER_PARAMETER * WIDTH * WIDTH)))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainingState(model, optimizer)
    _step(state)
    return state


def _step(state: TrainingState) -> None:
    state.model(torch.randn(8, WIDTH)).square().mean().backward()
    state.optimizers[0].step()
    state.optimizers[0].zero_grad()


def _seconds(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def measure_integrity(state: TrainingState, folder: Path, *, pairs: int) -> dict[str, Any]:
    """Seconds of the store's save over those of `dcp.save` of the same tensors, which syncs its files too."""
    plain, ours = list[float](), list[float]()
    tensors = dict(state.snapshot().tensors)
    with Store(folder / "ours") as store:
        for number in range(pairs + 1):  # the first warms up

            def save_plain(number: int = number) -> None:
                save(tensors, checkpoint_id=folder / f"plain-{number}")

            def save_ours(number: int = number) -> None:
                store.save("recovery", number, state)

            def clear_plain(number: int = number) -> None:
                shutil.rmtree(folder / f"plain-{number}")

            def clear_ours() -> None:
                store.discard(store.committed("recovery")[0])

            acts = [(plain, save_plain, clear_plain), (ours, save_ours, clear_ours)]
            for seconds, act, clear in acts if number % 2 else acts[::-1]:
                os.sync()  # what is still on its way to the disk would be waited for by whoever comes next
                seconds.append(_seconds(act))
                clear()
    return {**_compared(plain[1:], ours[1:]), "algorithm": store.algorithm}


def measure_stall(state: TrainingState, folder: Path, *, pairs: int) -> dict[str, Any]:
    """Seconds that the training thread waits for a save in the background, over those of one in the foreground. Between
    two optimizer steps so many forward and backward passes are run as one synchronous save takes time."""
    synchronous, stalled, window = list[float](), list[float](), list[float]()
    with Store(folder / "stall") as store, BackgroundSaver(store) as saver:
        for number in range(pairs + 1):
            synchronous.append(
                _seconds(lambda number=number: store.save("recovery", 2 * number, state))
            )  # type: ignore[misc]
            before = saver.stalled
            saver.save("recovery", 2 * number + 1, state)
            window.append(_seconds(lambda: _window(state, synchronous[-1])))
            stalled.append(saver.stalled - before)
            saver.finish()
            for saved in store.committed("recovery"):
                store.discard(saved)
    ratios = _compared(synchronous[1:], stalled[1:])
    return {
        **ratios,
        "first_ratio": stalled[0] / synchronous[0],
        "window_seconds": statistics.median(window[1:]),
    }


def _window(state: TrainingState, seconds: float) -> None:
    """Forward and backward passes for some time, then a step."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        state.model(torch.randn(64, WIDTH)).square().mean().backward()
    state.optimizers[0].step()
    state.optimizers[0].zero_grad()


def _compared(plain: list[float], ours: list[float]) -> dict[str, Any]:
    ratios = [after / before for before, after in zip(plain, ours, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "pairs": len(ratios),
        "plain_seconds": statistics.median(plain),
        "seconds": statistics.median(ours),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="What the store costs, on this machine's disk.")
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--folder", help="where to write; it is emptied again")
    parser.add_argument("--json", metavar="PATH", help="write the figures; - is standard output")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    state = made_state(options.mib * 2**20)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        found = {
            **provenance(torch.device("cpu")),
            "state_bytes": sum(tensor.nbytes for tensor in state.snapshot().tensors.values()),
            "integrity": measure_integrity(state, folder, pairs=options.pairs),
            "stall": measure_stall(state, folder, pairs=options.pairs),
        }
    for what, most in (("integrity", 1.10), ("stall", 0.05)):
        held = "holds" if found[what]["ratio"] <= most else "does not hold"
        print(f"{what}: {found[what]['ratio']:.3f} of plain, at most {most:.2f}: {held}")
    if options.json:
        write_json(options.json, found)


if __name__ == "__main__":
    main()
