"""Ranks save and load together, and a rank's death leaves committed checkpoints intact.

python -m pytest tests/runs/test_store_ranks.py
"""

import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from curry_train.runs import BackgroundSaver, RunError, SavedRun, Store, load_chosen

from ..rank_calls import run_on_ranks
from ..store_models import (
    At,
    CountedFiles,
    equal,
    fail,
    network,
    new_state,
    save_best,
    save_both,
    tensors_of,
    train,
)


def sharded():
    model = network()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    return model


BUILD = {"fsdp2": sharded, "ddp": lambda: DistributedDataParallel(network())}


def hash_of(tensors):
    """Hash the state that is equal for every world size: all but each rank's generators."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("rank-")}
    return [
        [name, tensor.double().sum().item(), list(tensor.shape)]
        for name, tensor in sorted(kept.items())
    ]


def on_two_ranks(folder):
    """Run all tests of two ranks in one start of them."""
    found = {}
    for kind in ("fsdp2", "ddp"):
        state, other = (new_state(seed, build=BUILD[kind]) for seed in (5, 9))
        torch.manual_seed(dist.get_rank())  # each rank has its own data
        train(state, 2)
        with Store(f"{folder}/{kind}") as store:
            save_both(store, 2, state)
            before, ahead = tensors_of(state), train(state, 3)
            torch.manual_seed(70)
            notes = store.load(store.latest(), other)
            exact = equal(tensors_of(other), before) and train(other, 3) == ahead
            found[kind] = {"state": hash_of(before), "exact": exact, "notes": notes}
    found["background"] = in_background(f"{folder}/background")
    for rank in (0, 1):
        for background in (False, True):
            found[f"error {rank} {background}"] = failing_rank(
                f"{folder}/error{rank}{background}", rank, background
            )
    return found | {
        "disk": on_a_disk_that_fails(f"{folder}/disk"),
        "alone": loaded(f"{folder}/alone", sharded),
    }


def in_background(folder):
    state, other = (new_state(seed, build=sharded) for seed in (5, 9))
    train(state, 1)
    num_threads = threading.active_count()
    with Store(folder) as store, BackgroundSaver(store) as saver:
        before = tensors_of(state)
        saver.save("rollback", 2, state)
        train(state, 2)
        store.load(saver.finish(), other)
        save_best(saver, 3, state)
        store.verify(saver.finish())
    left = threading.active_count() - num_threads
    return {"exact": equal(tensors_of(other), before), "threads left": left}


def failing_rank(folder, rank, background):
    state = new_state(build=sharded)
    message = "saved"
    with CountedFiles() as files, Store(folder) as store:
        store.save("rollback", 1, state)
        if dist.get_rank() == rank:
            files.ask = At(3, fail(OSError(5, "Input/output error")))
        try:
            if background:
                with BackgroundSaver(store, timeout=20) as saver:
                    saver.save("rollback", 2, state)
            else:
                store.save("rollback", 2, state)
        except RunError as error:
            message = f"{type(error).__name__}: {error}"
        files.ask = lambda operation: None
        return {
            "message": message,
            "committed": [saved.step for saved in store.committed("rollback")],
        }


def unreadable_after(number, folder, read=Path.open):
    """Let reads of a checkpoint fail after a number of its files were opened."""
    left = iter(range(number))

    def opened(path, *mode):
        if folder in str(path) and next(left, None) is None:
            raise OSError(5, "Input/output error")
        return read(path, *mode)

    return mock.patch.object(Path, "open", opened)


def unreadable(folder, kind, rank, after):
    """Return each rank's outcome of a load and a resume when one rank's disk fails."""
    found = {}
    newest = (
        "best-k/dev_loss-1-step-00000002.dcp" if kind == "best-k" else "rollback/step-00000002.dcp"
    )
    for how in ("load", "resume"):
        state = new_state(9, build=sharded)
        fails = dist.get_rank() == rank
        try:
            with unreadable_after(after if fails else 1000, newest):
                if how == "load":
                    SavedRun(folder).load(newest, state)
                    continue
                resumed = load_chosen(folder, state, "best" if kind == "best-k" else "latest")
            found[how] = [resumed.saved.step, list(resumed.damaged)]
        except RunError as error:
            found[how] = f"{type(error).__name__}: {error}"
    return found


def on_a_disk_that_fails(folder):
    state = new_state(5, build=sharded)
    with Store(folder) as store:
        for step in (1, 2):
            store.save("rollback", step, state)
            save_best(store, step, state, 3.0 - step)
    return {
        f"{kind} {rank} {after}": unreadable(folder, kind, rank, after)
        for kind in ("rollback", "best-k")
        for rank in (0, 1)
        for after in (0, 4)
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def alone(folder):
    """Save a state of one rank, and return it."""
    state = new_state(seed=3)
    train(state, 2)
    with Store(folder / "alone") as store:
        save_both(store, 2, state)
    return hash_of(tensors_of(state))


@pytest.fixture(scope="module")
def answers(folder, alone):
    return run_on_ranks(f"{__file__}:on_two_ranks", folder=str(folder))


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_two_ranks_resume_bit_equal(answers, folder, kind):
    """Cover batch statistics, which differ by rank, also under FSDP2, which shares none."""
    assert [(answer[kind]["exact"], answer[kind]["notes"]) for answer in answers] == [
        (True, [])
    ] * 2
    run = SavedRun(folder / kind)
    run.verify(run.latest())


def test_ranks_save_in_the_background(answers, folder):
    assert [answer["background"] for answer in answers] == [{"exact": True, "threads left": 0}] * 2
    files = sorted(
        path.name for path in (folder / "background/rollback/step-00000002.dcp").iterdir()
    )
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "state.pt"]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_is_raised_on_all(answers, rank, background):
    found = [answer[f"error {rank} {background}"] for answer in answers]
    assert [answer["committed"] for answer in found] == [[1], [1]]
    assert "Input/output error" in found[0]["message"]
    assert "Input/output error" in found[1]["message"]


def test_a_read_error_on_one_rank_is_handled_alike_on_all(answers):
    """A failure at any file makes both ranks raise or both take the previous checkpoint."""
    found = [answer["disk"] for answer in answers]
    broken = {"rollback": 0, "best-k": 0}
    for case in found[0]:
        kind, rank, _ = case.split()
        own, other = found[int(rank)][case], found[1 - int(rank)][case]
        if "load" in own:
            broken[kind] += 1
            assert own["load"].startswith("DamagedCheckpoint: ")
            assert "Input/output error" in own["load"]
            assert other["load"].startswith(f"DamagedCheckpoint: rank {rank}: Damaged")
            assert own["resume"][0] == other["resume"][0] == 1
        else:
            assert own == other, (
                case
            )  # no file was left to fail, but for the manifests that a resume reads
    assert broken["rollback"] >= 4
    # The library maps the parameters, and its reads are not counted here.
    assert broken["best-k"] >= 2


def loaded(folder, build):
    """Return the newest and the best state, and the notes of their loads."""
    found = {}
    for what in ("latest", "best"):
        state = new_state(seed=9, build=build)
        notes = load_chosen(folder, state, what).notes
        found[what] = {"state": hash_of(tensors_of(state)), "notes": notes}
    return found


def model_of(rows):
    return [row for row in rows if row[0].startswith("model.")]


def test_one_rank_loads_a_checkpoint_of_two_and_two_one_of_one(answers, alone, folder):
    saved = answers[0]["fsdp2"]["state"]
    found = loaded(folder / "fsdp2", network)
    assert found["latest"]["notes"][0] == "saved by 2 ranks, loaded by 1: the state is bit-equal"
    assert found["latest"]["state"] == saved
    assert model_of(found["best"]["state"]) == model_of(saved)
    for rank, answer in enumerate(answer["alone"] for answer in answers):
        assert answer["latest"]["state"] == alone
        assert model_of(answer["best"]["state"]) == model_of(alone)
        seeded = f"rank {rank} was not there at the save: its generators are seeded anew"
        assert (seeded in answer["latest"]["notes"]) == (rank == 1)
