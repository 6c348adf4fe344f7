"""Benchmark of the checkpoint store: cost of integrity, and stall of background saves.

Integrity is compared with a plain `dcp.save`, and background saves with synchronous ones. Both are
measured in pairs, and the median of the pairs' ratios counts.
`python benchmarks/store_benchmark.py --json checkpoint_save.json` records it.
Proof: `python -m pytest tests/benchmarks/test_store_benchmark.py`.
"""

import argparse
import functools
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

from curry_train.core.wording import provenance, write_json
from curry_train.runs.background import BackgroundSaver
from curry_train.runs.state import TrainingState
from curry_train.runs.store import Store

BYTES_PER_PARAMETER = 12  # float32 weights and the two moments of Adam
LAYER_WIDTH = 1024


def made_state(num_bytes: int) -> TrainingState:
    """Make a model and AdamW with its moments, together of about `num_bytes`."""
    layers = max(1, round(num_bytes / (BYTES_PER_PARAMETER * LAYER_WIDTH * LAYER_WIDTH)))
    model = nn.Sequential(*[nn.Linear(LAYER_WIDTH, LAYER_WIDTH) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainingState(model, optimizer)
    _step(state)
    return state


def _step(state: TrainingState) -> None:
    state.model(torch.randn(8, LAYER_WIDTH)).square().mean().backward()
    state.optimizers[0].step()
    state.optimizers[0].zero_grad()


def _seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure_integrity(state: TrainingState, folder: Path, *, pairs: int) -> dict[str, Any]:
    """Compare the seconds of the store's save with those of `dcp.save` of the same tensors.

    `dcp.save` syncs its files too.
    """
    plain: list[float] = []
    ours: list[float] = []
    tensors = dict(state.snapshot().tensors)
    with Store(folder / "ours") as store:
        for number in range(pairs + 1):  # the first pair warms up

            def save_plain(number: int = number) -> None:
                save(tensors, checkpoint_id=folder / f"plain-{number}")

            def save_ours(number: int = number) -> None:
                store.save("recovery", number, state)

            def clear_plain(number: int = number) -> None:
                shutil.rmtree(folder / f"plain-{number}")

            def clear_ours() -> None:
                store.discard(store.committed("recovery")[0])

            actions = [(plain, save_plain, clear_plain), (ours, save_ours, clear_ours)]
            for seconds, save_once, clear in actions if number % 2 else actions[::-1]:
                os.sync()  # otherwise this save would also wait for earlier writes
                seconds.append(_seconds(save_once))
                clear()
    return {**_compared(plain[1:], ours[1:]), "algorithm": store.algorithm}


def measure_stall(state: TrainingState, folder: Path, *, pairs: int) -> dict[str, Any]:
    """Compare the stall of the training thread by a background save with a synchronous save.

    After each background save, forward and backward passes run for as long as a synchronous save
    takes; then the optimizer steps.
    """
    synchronous: list[float] = []
    stalled: list[float] = []
    window: list[float] = []
    with Store(folder / "stall") as store, BackgroundSaver(store) as saver:
        for number in range(pairs + 1):
            save_now = functools.partial(store.save, "recovery", 2 * number, state)
            synchronous.append(_seconds(save_now))

            stalled_before = saver.stalled
            saver.save("recovery", 2 * number + 1, state)
            window.append(_seconds(lambda: _window(state, synchronous[-1])))
            stalled.append(saver.stalled - stalled_before)
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
    """Run forward and backward passes for `seconds`, then an optimizer step."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        state.model(torch.randn(64, LAYER_WIDTH)).square().mean().backward()
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
    parser = argparse.ArgumentParser(description="Measure the checkpoint store on this disk.")
    parser.add_argument("--mib", type=int, default=1024, help="size of the state in MiB")
    parser.add_argument("--pairs", type=int, default=7, help="timed pairs of saves")
    parser.add_argument("--folder", help="write here; files are removed afterwards")
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
    for name, most in (("integrity", 1.10), ("stall", 0.05)):
        ratio = found[name]["ratio"]
        held = "holds" if ratio <= most else "does not hold"
        print(f"{name}: {ratio:.3f} of plain, at most {most:.2f}: {held}")
    if options.json:
        write_json(options.json, found)


if __name__ == "__main__":
    main()
