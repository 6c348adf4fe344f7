"""Time the steps of a training beside saves in the background, with this saver and others.

    python benchmarks/saving_cost.py --json evidence/saving_cost.json

In turns, a training saves at the first of every 35 steps: not at all, with `BackgroundSaver`, with
`async_save` of torch.distributed.checkpoint (its default and its process), and with
`torch_checkpointing` if it is installed. Each round compares the steps after a save with those of
the round without one: all of them, those while the save was under way, and the slowest. A call that
begins a save, or waits before the optimizer's step, is time of its step. A small model is timed by
the whole loop with `saving(..., in_background=True)`.
Proof: `python -m pytest tests/benchmarks/test_saving_cost.py`.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import shutil
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from curry_train.core.wording import provenance, write_json
from curry_train.runs import saving
from curry_train.runs.background import BackgroundSaver
from curry_train.runs.state import TrainingState
from curry_train.runs.store import Store

BYTES_PER_PARAMETER = 12  # float32 weights and the two moments of Adam
LAYER_WIDTH = 1024
SMALL_WIDTH = 135  # six layers, 1.3 MB with the moments
# A save takes about as long whatever a step takes, so its part of the loop falls with longer steps.
SMALL_BATCHES = (32, 512, 2048)
# The goals: all steps of a round with a save, its slowest step, and the loop of a small model.
MOST_OF_STEPS = 1.03
MOST_OF_ONE_STEP = 1.3
MOST_OF_SMALL_LOOP = 1.05


class NoSaver:
    """Saves nothing; the interface of the savers."""

    def __init__(self, state: TrainingState, folder: Path) -> None:
        self.state = state
        self.folder = folder

    def begin(self, number: int) -> None:
        """Begin a save; called before forward."""

    def before_step(self) -> None:
        """Wait until the parameters may change."""

    @property
    def is_busy(self) -> bool:
        return False

    def finish(self) -> None:
        """Wait for the save, and remove it."""

    def close(self) -> None: ...


class OurSaver(NoSaver):
    """BackgroundSaver, whose hook waits before the optimizer's step."""

    def __init__(self, state: TrainingState, folder: Path) -> None:
        super().__init__(state, folder)
        self.store = Store(folder)
        self.store.open()
        self.saver = BackgroundSaver(self.store)

    def begin(self, number: int) -> None:
        self.saver.save("rollback", number, self.state)

    @property
    def is_busy(self) -> bool:
        return self.saver.busy

    def finish(self) -> None:
        self.saver.finish()
        for saved in self.store.committed("rollback"):
            self.store.discard(saved)

    def close(self) -> None:
        self.saver.close()
        self.store.close()


class FutureSaver(NoSaver):
    """A saver whose save in progress is a future."""

    def __init__(self, state: TrainingState, folder: Path) -> None:
        super().__init__(state, folder)
        self.saved: Any = None

    @property
    def is_busy(self) -> bool:
        return self.saved is not None and not self.saved.done()

    def finish(self) -> None:
        if self.saved is not None:
            self.saved.result()
            self.saved = None
        shutil.rmtree(self.folder, ignore_errors=True)


class TorchSaver(FutureSaver):
    """`async_save` of torch.distributed.checkpoint, in a thread or in a process."""

    kind = "thread"

    def __init__(self, state: TrainingState, folder: Path) -> None:
        super().__init__(state, folder)
        self.staged: Any = None

    def begin(self, number: int) -> None:
        from torch.distributed.checkpoint.state_dict_saver import (
            AsyncCheckpointerType,
            AsyncSaveResponse,
            async_save,
        )

        answer = async_save(
            dict(self.state.snapshot().tensors),
            checkpoint_id=self.folder / str(number),
            async_checkpointer_type=AsyncCheckpointerType(self.kind),
        )
        if isinstance(answer, AsyncSaveResponse):
            self.staged = answer.staging_completion
            self.saved = answer.upload_completion
        else:
            self.saved = answer

    def before_step(self) -> None:
        if self.staged is not None:
            self.staged.result()
            self.staged = None


class TorchProcessSaver(TorchSaver):
    kind = "process"


class PackageSaver(FutureSaver):
    """`torch_checkpointing`, which stages in the background and writes in another process."""

    def __init__(self, state: TrainingState, folder: Path) -> None:
        super().__init__(state, folder)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        # Direct I/O fails for files of other sizes than whole blocks on some file systems.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        config = CheckpointManager.Config.with_async_save()
        self.manager = CheckpointManager(dataclasses.replace(config, storage_config=storage))

    def begin(self, number: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = dict(self.state.snapshot().tensors)
        self.saved = self.manager.save(str(self.folder / str(number)), {"state": tensors})

    def before_step(self) -> None:
        # The lock waits for the copies; nothing else begins a save meanwhile.
        with self.manager.lock():
            pass

    def close(self) -> None:
        self.manager.close()


SAVERS: dict[str, Callable[[TrainingState, Path], NoSaver]] = {
    "none": NoSaver,
    "ours": OurSaver,
    "dcp": TorchSaver,
    "dcp_process": TorchProcessSaver,
    "torch_checkpointing": PackageSaver,
}


@dataclass(frozen=True)
class Round:
    """The seconds of the steps after one save, and how many of them began while it ran."""

    steps: Sequence[float]
    num_under_way: int


def made_state(num_bytes: int) -> TrainingState:
    """Make a model and AdamW with its moments, together of about `num_bytes`."""
    layers = max(1, round(num_bytes / (BYTES_PER_PARAMETER * LAYER_WIDTH * LAYER_WIDTH)))
    model = nn.Sequential(*[nn.Linear(LAYER_WIDTH, LAYER_WIDTH) for _ in range(layers)])
    return TrainingState(model, torch.optim.AdamW(model.parameters()))


def one_round(saver: NoSaver, number: int, *, every: int, batch: int) -> Round:
    """Begin a save, and train until the next one is due."""
    state = saver.state
    seconds = []
    under_way = 0
    for index in range(every):
        began = time.perf_counter()
        if index == 0:
            saver.begin(number)
        state.model(torch.randn(batch, LAYER_WIDTH)).square().mean().backward()
        saver.before_step()
        state.optimizers[0].step()
        state.optimizers[0].zero_grad()
        seconds.append(time.perf_counter() - began)
        under_way += saver.is_busy or index == 0
    saver.finish()
    return Round(seconds, under_way)


def measure(
    state: TrainingState, folder: Path, names: Sequence[str], *, rounds: int, every: int, batch: int
) -> dict[str, Any]:
    """Train rounds with each saver in turn; return the figures of each saver."""
    savers = {name: SAVERS[name](state, folder / name) for name in names}
    found: dict[str, list[Round]] = {name: [] for name in names}
    for number in range(rounds + 1):
        order = list(names) if number % 2 else list(reversed(names))
        for name in order:
            os.sync()  # otherwise this round would also wait for the files of the one before
            found[name].append(one_round(savers[name], number, every=every, batch=batch))
    for saver in savers.values():
        saver.close()
    # The first round of each saver makes its buffers and processes.
    return {name: figures(found[name], found["none"]) for name in names}


def figures(rounds: Sequence[Round], plain: Sequence[Round]) -> dict[str, Any]:
    """Compare each round, after the first, with the round without a save beside it."""
    all_steps = []
    under_way = []
    slowest = []
    for with_save, without in zip(rounds[1:], plain[1:], strict=True):
        typical = statistics.median(without.steps)
        all_steps.append(sum(with_save.steps) / sum(without.steps))
        busy = with_save.steps[: max(1, with_save.num_under_way)]
        under_way.append(statistics.fmean(busy) / statistics.fmean(without.steps))
        slowest.append(max(with_save.steps) / typical)
    return {
        "all_steps": statistics.median(all_steps),
        "steps_under_way": statistics.median(under_way),
        "slowest_step": statistics.median(slowest),
        "slowest_step_of_all": max(slowest),
        "first_save_step": rounds[0].steps[0] / statistics.median(plain[0].steps),
        "num_steps_under_way": statistics.median(each.num_under_way for each in rounds[1:]),
        "step_seconds": statistics.median(plain[-1].steps),
    }


def small_loop(num_steps: int, folder: Path | None, *, every: int, batch: int) -> float:
    """Return the seconds of a loop of a small model, with saves where a folder is given."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(SMALL_WIDTH, SMALL_WIDTH), nn.ReLU()]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [torch.randn(batch, SMALL_WIDTH)] * num_steps
    began = time.perf_counter()
    if folder is None:
        for samples in batches:
            _small_step(model, optimizer, samples)
        return time.perf_counter() - began

    run = saving(
        model, optimizer, runs=folder, rollback_every=every, recovery_every=None, in_background=True
    )
    began = time.perf_counter()
    for samples in run.batches(batches):
        run.step(loss=_small_step(model, optimizer, samples))
    seconds = time.perf_counter() - began
    run.close()
    return seconds


def _small_step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def measure_small(
    folder: Path, *, rounds: int, num_steps: int, every: int, batch: int
) -> dict[str, Any]:
    """Compare the loop with saves with the loop alone, in turns."""
    ratios = []
    plain = []
    for number in range(rounds + 1):
        alone = small_loop(num_steps, None, every=every, batch=batch)
        path = folder / f"small-{batch}-{number}"
        saved = small_loop(num_steps, path, every=every, batch=batch)
        plain.append(alone)
        ratios.append(saved / alone)
    return {
        "loop": statistics.median(ratios[1:]),
        "lowest": min(ratios[1:]),
        "highest": max(ratios[1:]),
        "every": every,
        "batch": batch,
        "step_seconds": statistics.median(plain[1:]) / num_steps,
    }


@contextlib.contextmanager
def alone_in_a_group() -> Any:
    """Make a process group of one rank, which torch's savers need."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def installed(names: Sequence[str]) -> list[str]:
    """Return the savers whose package is there, with `none` first."""
    has_package = importlib.util.find_spec("torch_checkpointing") is not None
    wanted = [name for name in names if name != "torch_checkpointing" or has_package]
    return ["none", *[name for name in wanted if name != "none"]]


def show(found: dict[str, Any]) -> None:
    """Print one line for each saver, and whether ours meets the goals."""
    for name, each in found["savers"].items():
        print(
            f"{name:20s} all steps {each['all_steps']:.3f}, under way "
            f"{each['steps_under_way']:.3f}, slowest {each['slowest_step']:.2f}"
        )
    ours = found["savers"].get("ours", {})
    checks = [
        ("all steps", ours.get("all_steps"), MOST_OF_STEPS),
        ("slowest step", ours.get("slowest_step"), MOST_OF_ONE_STEP),
    ]
    for each in found["small"]:
        name = f"small loop, steps of {each['step_seconds'] * 1e3:.1f} ms"
        checks.append((name, each["loop"], MOST_OF_SMALL_LOOP))
    for name, value, most in checks:
        if value is not None:
            print(f"{name}: {value:.3f}, at most {most}: {'holds' if value <= most else 'missed'}")


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Measure what background saves cost the steps.")
    parser.add_argument("--mib", type=int, default=1024, help="size of the state in MiB")
    parser.add_argument("--every", type=int, default=35, help="steps from one save to the next")
    parser.add_argument("--batch", type=int, default=256, help="rows of a batch")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each saver")
    parser.add_argument("--savers", nargs="*", default=list(SAVERS), choices=list(SAVERS))
    parser.add_argument("--small-steps", type=int, default=1000, help="steps of the small loop")
    parser.add_argument(
        "--small-batches", type=int, nargs="*", default=SMALL_BATCHES, help="rows of its batches"
    )
    parser.add_argument("--folder", help="write here; files are removed afterwards")
    parser.add_argument("--json", metavar="PATH", help="write the figures; - is standard output")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", module="torch")
    names = installed(options.savers)
    with tempfile.TemporaryDirectory(dir=options.folder) as name, alone_in_a_group():
        folder = Path(name)
        state = made_state(options.mib * 2**20)
        small = [
            measure_small(
                folder, rounds=options.rounds, num_steps=options.small_steps, every=50, batch=batch
            )
            for batch in options.small_batches
        ]
        savers = measure(
            state, folder, names, rounds=options.rounds, every=options.every, batch=options.batch
        )
        found = {
            **provenance(torch.device("cpu")),
            "cores": len(os.sched_getaffinity(0)),
            "state_bytes": sum(tensor.nbytes for tensor in state.snapshot().tensors.values()),
            "every": options.every,
            "rounds": options.rounds,
            "savers": savers,
            "small": small,
        }
        if "torch_checkpointing" in names:
            found["torch_checkpointing"] = importlib.metadata.version("torch_checkpointing")
    show(found)
    if options.json:
        write_json(options.json, found)


if __name__ == "__main__":
    main()
