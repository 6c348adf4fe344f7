"""A run's whole state in one file, on one rank and on two. `python -m pytest tests/test_saved_state.py`."""

import random
import types

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from curry_train.core import load_workload
from curry_train.core.ranks import run_on_ranks
from curry_train.core.workload import Case
from curry_train.saved_state import TrainingState, read_state, saved_states, write_state

CASE = Case(load_workload("mlp"))


def fresh(wrap=lambda module: module, seed=0, scaler=None):
    torch.manual_seed(seed)
    module = wrap(Case(CASE.workload, seed=seed).build())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    return TrainingState(module, optimizer, scaler, types.SimpleNamespace(position=0))


def step(state):
    loss = CASE.workload.mean_loss(state.model, CASE.batch())
    state.optimizer.zero_grad()
    (loss + torch.rand(()) + random.random()).backward()
    state.optimizer.step()
    state.step, state.data.position = state.step + 1, state.data.position + 4
    return loss.item()


def test_what_is_read_goes_on_as_if_nothing_had_been(tmp_path):
    state = fresh(scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    for _ in range(3):
        step(state)
    path = write_state(tmp_path, state)
    drawn = torch.rand(3).tolist(), random.random()
    losses = [step(state) for _ in range(3)]
    again = fresh(seed=1, scaler=torch.amp.GradScaler("cpu"))
    read_state(path, again)
    assert (again.step, again.data.position, again.scaler.get_scale()) == (3, 12, 8.0)
    assert (torch.rand(3).tolist(), random.random()) == drawn
    assert [step(again) for _ in range(3)] == losses


def test_learning_rate_stays_that_of_the_configuration(tmp_path):
    state = fresh()
    step(state)
    path = write_state(tmp_path, state)
    again = fresh()
    again.optimizer.param_groups[0]["lr"] = 0.5
    read_state(path, again)
    assert again.optimizer.param_groups[0]["lr"] == 0.5


def test_oldest_files_go_by_their_step_and_no_other_file(tmp_path):
    state = fresh()
    step(state)
    (tmp_path / "step-notes.pt").touch()
    for number in (9, 10, 100):
        state.step = number
        write_state(tmp_path, state, keep=2)
    assert [path.name for path in saved_states(tmp_path)] == ["step-00000010.pt", "step-00000100.pt"]
    assert (tmp_path / "step-notes.pt").exists()


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    state = fresh()
    step(state)
    path = write_state(tmp_path, state)
    before = path.read_bytes()

    def full(saved, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        write_state(tmp_path, state)
    assert path.read_bytes() == before
    assert saved_states(tmp_path) == [path]


def test_a_damaged_file_and_one_of_another_model_are_told(tmp_path):
    state = fresh()
    step(state)
    path = write_state(tmp_path, state)
    other = Case(load_workload("transformer")).build()
    with pytest.raises(ValueError, match="was saved from another model or optimizer"):
        read_state(path, TrainingState(other, torch.optim.AdamW(other.parameters()), None, state.data))
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"can't read the saved state .*step-00000001\.pt"):
        read_state(path, state)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_write_one_file_that_one_rank_reads(tmp_path, kind):
    losses = run_on_ranks(f"{__file__}:write_on_two_ranks", folder=str(tmp_path), kind=kind)
    alone = fresh(seed=1)
    (path,) = saved_states(tmp_path)
    read_state(path, alone)
    assert alone.step == 2
    assert step(alone) == pytest.approx(losses[0], rel=1e-6)


def write_on_two_ranks(folder, kind):
    from pathlib import Path

    def shard(module):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        return module

    state = fresh({"ddp": DistributedDataParallel, "fsdp2": shard}[kind])
    for _ in range(2):
        step(state)
    write_state(Path(folder), state)
    return step(state)
