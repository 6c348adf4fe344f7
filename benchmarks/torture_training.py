"""Define the tiny training of the torture, with every generator in use.

Proof: `python -m pytest tests/benchmarks/test_torture.py`.
"""

import hashlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from store_models import WIDTH, network
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from curry_train.runs import SavedRun, Store, TrainingState
from curry_train.runs.layout import BEST_KIND, SavedCheckpoint, read_manifest
from curry_train.runs.store import STATE_FILE_NAME
from curry_train.runs.values import load
from torture_ranks import start

STEPS = 24
SAMPLES = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3))


class Training:
    """Draw inputs from a data position and four generators; dropout draws from one."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        torch.manual_seed(5)
        model = network()
        if world > 1:
            mesh = init_device_mesh("cpu", (world,))
            for part in (model[0], model[3], model):
                fully_shard(part, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        self.order, self.rank = torch.Generator().manual_seed(11 + rank), rank
        self.state = TrainingState(model, optimizer, scheduler, generators={"order": self.order})
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(100 + rank)

    def step(self) -> None:
        state = self.state
        first = state.position + int(torch.randint(0, 64, (1,), generator=self.order))
        noise = torch.randn(6, WIDTH) * (random.random() + numpy.random.random())
        inputs = SAMPLES[(first + torch.arange(6)) % 64] + noise
        state.model(inputs).square().mean().backward()
        state.optimizers[0].step()
        state.optimizers[0].zero_grad()
        state.parts["scheduler-0"].step()
        state.step += 1
        state.position += 6

    def live(self, *, model_only: bool = False) -> str:
        """Hash all state that the next step depends on, without the code that saves it."""
        found, state = hashlib.blake2b(digest_size=16), self.state
        held = [*state.model.state_dict().values()]
        if not model_only:
            held += [
                tensor for kept in state.optimizers[0].state.values() for tensor in kept.values()
            ]
            held += [torch.get_rng_state(), self.order.get_state()]
        for tensor in held:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            found.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        if model_only:
            return found.hexdigest()
        found.update(
            repr((random.getstate(), numpy.random.get_state()[1].tobytes(), state.step)).encode()
        )
        found.update(
            repr(
                (
                    state.position,
                    numpy.random.get_state()[2:],
                    state.parts["scheduler-0"].state_dict(),
                )
            ).encode()
        )
        return found.hexdigest()


def dev_loss(step: int) -> float:
    """Return a dev loss that goes up and down, has ties, and improves in the long run."""
    return (step * 37 % 23 // 2) / 10 - step // 12


def contents(run: SavedRun, saved: SavedCheckpoint) -> dict[str, str]:
    """Hash each tensor of a checkpoint and its JSON; a best-k has only the model."""
    contents, fill = run.open_content(saved.folder, read_manifest(run.files, saved.folder))
    held = {
        name: torch.empty(facts.shape, dtype=facts.dtype)
        for name, facts in contents.tensors.items()
    }
    fill(held)
    found = {
        name: _hash(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in held.items()
    }
    # Equal values may have other bytes in another process, as objects are shared otherwise.
    values = load(run.files.read(f"{saved.folder}/{STATE_FILE_NAME}"))
    with numpy.printoptions(threshold=sys.maxsize):
        return found | {STATE_FILE_NAME: _hash(repr([values["values"], values["ranks"]]).encode())}


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Expected:
    """The steps of an uninterrupted run, in memory on each rank and on the disk."""

    live: dict[tuple[int, int], str]
    saved: dict[int, dict[str, str]]

    def is_as_saved(self, saved: SavedCheckpoint, found: dict[str, str]) -> bool:
        wanted = self.saved[saved.step]
        if saved.kind == BEST_KIND:
            wanted = {
                name: held
                for name, held in wanted.items()
                if name.startswith("model.") or name == STATE_FILE_NAME
            }
        return found == wanted


def straight(world: int, folder: Path) -> Expected:
    """Train without a kill or resume, saving each step in the foreground by the store alone."""
    ranks = start(world, _straight_life, folder=folder)
    ranks.listen(lambda reports: False)
    ranks.end()
    if any(ranks.statuses.values()):
        raise RuntimeError(
            f"the straight run of {world} ranks failed: "
            f"{[one for one in ranks.reports if one.word == 'failed']}"
        )
    run = SavedRun(folder)
    live = {(one.rank, one.what[0]): one.what[1] for one in ranks.reports}
    return Expected(live, {one.step: contents(run, one) for one in run.committed("rollback")})


def _straight_life(rank: int, world: int, say: Callable[..., None], *, folder: Path) -> None:
    training = Training(rank, world)
    with Store(folder) as store:
        for _ in range(STEPS):
            training.step()
            say("live", [training.state.step, training.live()])
            store.save("rollback", training.state.step, training.state)


def warm_up(folder: Path) -> None:
    """Import once what each rank would import."""
    torch.set_num_threads(1)
    training = Training()
    training.step()
    with Store(folder) as store:
        store.load(store.save("rollback", 1, training.state), training.state)
