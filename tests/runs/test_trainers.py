"""Checkpoints of other trainers are committed, and the newest whole one is found.

python -m pytest tests/runs/test_trainers.py
"""

import logging
import math
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from curry_train.cli.runs_inspect import inspect_checkpoint
from curry_train.runs import (
    DamagedCheckpoint,
    SpikeConfig,
    commit_checkpoints,
    newest_whole,
    record_training,
    trainers,
)
from curry_train.runs.trainers import commit_file, commit_folder

from ..journals import lines_of
from ..library_trainers import Model, hugging_face, lightning, weights
from ..store_models import flip

pytestmark = pytest.mark.filterwarnings("ignore")


def written(folder, value):
    (folder / "below").mkdir(parents=True)
    (folder / "model.bin").write_bytes(bytes([value]) * 1000)
    (folder / "below/optimizer.bin").write_bytes(bytes([value + 1]) * 10)
    return folder


def newest(folder):
    """Return the path of the newest whole checkpoint in a folder."""
    found = newest_whole(folder)
    return found and str(Path(found).relative_to(folder))


# Folders and files.


def test_the_newest_committed_folder_is_found_whatever_its_name_says(tmp_path):
    """After a run was taken up from step 100, step 200 is newer than the old step 300."""
    assert newest(tmp_path / "not there") is None
    # Lightning begins a new folder at each start.
    places = ("version_0/checkpoint-100", "version_0/checkpoint-300", "version_1/checkpoint-200")
    for place in places:
        commit_folder(written(tmp_path / place, 1))
    written(tmp_path / "version_0/checkpoint-400", 1)
    assert newest(tmp_path) == places[-1]
    found = inspect_checkpoint(tmp_path / places[-1])
    assert found.whole is True
    assert list(found.hashed.values()) == [2]


# tests/runs/test_store_damage.py damages files in more ways, and the same functions find them.
def test_a_damaged_folder_is_passed_over_with_a_warning(tmp_path, caplog):
    commit_folder(written(tmp_path / "checkpoint-1", 1))
    flip(commit_folder(written(tmp_path / "checkpoint-2", 2)) / "below/optimizer.bin", 3)
    with caplog.at_level(logging.WARNING):
        assert newest(tmp_path) == "checkpoint-1"
    assert "checkpoint-2" in caplog.text
    assert inspect_checkpoint(tmp_path / "checkpoint-2").whole is not True
    flip(tmp_path / "checkpoint-1/model.bin")
    assert newest(tmp_path) is None


def test_a_file_is_whole_before_and_after_the_moment_of_its_rename(tmp_path):
    final = tmp_path / "last.ckpt"
    for content in b"first", b"second", b"third", b"fourth":
        (tmp_path / ".new").write_bytes(content)
        commit_file(tmp_path / ".new", final)
        assert newest(tmp_path) == "last.ckpt"
        if content == b"third":
            # A kill before the rename leaves the new manifest next to the old file.
            final.write_bytes(b"second")
            assert newest(tmp_path) == "last.ckpt"
    final.write_bytes(b"fifth!")
    assert newest(tmp_path) is None


# Hugging Face.


def trainer_of(folder, **options):
    torch.manual_seed(0)
    rows = [{"inputs": torch.randn(2), "labels": torch.randn(1)} for _ in range(8)]
    options = {"max_steps": 6, "save_steps": 2, "logging_strategy": "no"} | options
    return hugging_face(folder, rows, Model(nn.Linear(2, 1)), **options)


def folders(path):
    return sorted(one.name for one in path.iterdir())


def test_hugging_face_resumes_from_the_newest_whole_checkpoint(tmp_path):
    straight = trainer_of(tmp_path)
    commit_checkpoints(straight).train()
    assert newest(tmp_path) == "checkpoint-6"

    # The library alone loads a flipped bit of its weights in silence.
    model = tmp_path / "checkpoint-6/model.safetensors"
    flip(model, model.stat().st_size - 2)
    assert newest(tmp_path) == "checkpoint-4"
    resumed = commit_checkpoints(trainer_of(tmp_path))
    resumed.train(resume_from_checkpoint=newest_whole(tmp_path))
    assert torch.equal(weights(resumed.model), weights(straight.model))
    # Step 6 was saved again, in place of the damaged one.
    assert newest(tmp_path) == "checkpoint-6"
    assert folders(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_a_finished_run_of_hugging_face_that_is_resumed_trains_no_step_in_silence(tmp_path, caplog):
    commit_checkpoints(trainer_of(tmp_path)).train()
    finished = commit_checkpoints(trainer_of(tmp_path))
    finished.train(resume_from_checkpoint=newest_whole(tmp_path))
    assert finished.state.global_step == 7
    assert "step 6 of 6 was saved already, and the Trainer trains step 7 now" in caplog.text


class Killed(BaseException):
    pass


def dies_at(step, trainer):
    """Return a function that ends the training at a step as a kill would."""

    def die(*arguments, **options):
        if trainer.state.global_step == step:
            raise Killed

    return die


def test_a_save_over_a_committed_checkpoint_may_die(tmp_path, monkeypatch):
    commit_checkpoints(trainer_of(tmp_path)).train()
    again = commit_checkpoints(trainer_of(tmp_path, learning_rate=0.1))
    monkeypatch.setattr(again, "_save_rng_state", dies_at(6, again))
    with pytest.raises(Killed):
        again.train()
    # The half-written folder of step 6 gives way to the one that was committed before.
    assert newest(tmp_path) == "checkpoint-4"
    shutil.rmtree(tmp_path / "checkpoint-4")
    shutil.rmtree(tmp_path / "checkpoint-2")
    assert newest(tmp_path) == "checkpoint-6"
    assert folders(tmp_path) == ["checkpoint-6"]


def test_a_limit_that_is_set_later_counts_after_the_commit_and_is_given_back(tmp_path):
    """With a limit of one the library alone deletes the older one before."""
    trainer = commit_checkpoints(trainer_of(tmp_path))
    trainer.args.save_total_limit = 1

    def commit(path):
        dies_at(4, trainer)()
        return commit_folder(path)

    with mock.patch.object(trainers, "commit_folder", commit), pytest.raises(Killed):
        trainer.train()
    assert newest(tmp_path) == "checkpoint-2"
    assert folders(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    trainer.train()
    assert folders(tmp_path) == ["checkpoint-6"]
    assert trainer.args.save_total_limit == 1


# Accelerate.


def accelerated(folder, **options):
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=str(folder), **options)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    return commit_checkpoints(accelerator), *accelerator.prepare(model, optimizer)


def test_accelerate_writes_under_another_name_and_renames(tmp_path):
    accelerator, model, _ = accelerated(tmp_path)
    target = tmp_path / "state"
    assert accelerator.save_state(str(target)) == str(target)
    assert newest(tmp_path) == "state"
    first = model.weight.detach().clone()

    nn.init.ones_(model.weight)
    with mock.patch.object(torch, "save", side_effect=Killed), pytest.raises(Killed):
        accelerator.save_state(str(target))
    assert newest(tmp_path) == "state"
    accelerator.load_state(str(target))
    assert torch.equal(model.weight, first)

    nn.init.ones_(model.weight)
    accelerator.save_state(str(target))
    flip(target / "model.safetensors", 100)
    assert newest(tmp_path) is None
    with pytest.raises(ValueError, match="needs a folder"):
        accelerator.save_state()


def test_a_save_removes_what_interrupted_ones_left_and_no_other_checkpoint(tmp_path):
    accelerator, *_ = accelerated(tmp_path, total_limit=1)
    (tmp_path / ".checkpoint_2.hidden-0123abcd").mkdir()
    (tmp_path / ".other.removed-0123abcd").mkdir()
    (tmp_path / ".other.hidden-0123abcd").mkdir()
    accelerator.save_state(str(tmp_path / "checkpoint_1"))
    accelerator.save_state(str(tmp_path / "checkpoint_2"))
    # A save of another name may be under way. The limit is that of Accelerate's own naming.
    assert folders(tmp_path) == [".other.hidden-0123abcd", "checkpoint_1", "checkpoint_2"]


def test_accelerates_own_naming_keeps_its_limit_after_the_commit(tmp_path):
    accelerator, _, _ = accelerated(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    for _ in range(4):
        accelerator.save_state()
    assert folders(tmp_path / "checkpoints") == ["checkpoint_2", "checkpoint_3"]
    assert newest(tmp_path) == "checkpoints/checkpoint_3"
    flip(tmp_path / "checkpoints/checkpoint_3/optimizer.bin")
    assert newest(tmp_path) == "checkpoints/checkpoint_2"


# Lightning.


def linear():
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def fitted(folder, *, samples=None, change=commit_checkpoints, ckpt_path=None, **options):
    """Train four steps, and return the model."""
    saves = {"every_n_train_steps": 1, "save_top_k": 2, "monitor": "step", "mode": "max"}
    saves |= {"dirpath": folder, "save_last": True}
    trainer, module = lightning(linear, saves=saves, max_steps=4, **options)
    samples = torch.ones(16, 2) if samples is None else samples
    change(trainer).fit(module, DataLoader(samples, batch_size=4), ckpt_path=ckpt_path)
    return module.model


def test_lightning_files_are_committed_found_and_verified(tmp_path):
    model = fitted(tmp_path)
    files = [name for name in folders(tmp_path) if name.endswith(".ckpt")]
    assert files == ["epoch=0-step=3.ckpt", "epoch=0-step=4.ckpt", "last.ckpt"]
    # A manifest goes with its file when Lightning deletes one.
    assert folders(tmp_path) == sorted([*files, *(f"{name}.manifest.json" for name in files)])
    assert newest(tmp_path) == "last.ckpt"
    path = tmp_path / "last.ckpt"
    assert "pytorch-lightning_version" in inspect_checkpoint(path).values
    assert [*inspect_checkpoint(path).hashed.values()] == [1]

    flip(path, path.read_bytes().index(model.weight.detach().numpy().tobytes()))
    assert inspect_checkpoint(path).whole is False
    assert newest(tmp_path) == "epoch=0-step=4.ckpt"
    with pytest.raises(DamagedCheckpoint, match=r"last\.ckpt is not what was saved"):
        fitted(tmp_path / "again", ckpt_path=path)


# The journal.


def steps_of(folder):
    return [(one["step"], one["loss"]) for one in lines_of(folder) if one["kind"] == "step"]


def test_a_spike_ends_the_training_of_hugging_face_where_it_would_be_rolled_back(tmp_path, caplog):
    options = {"save_steps": 1, "logging_strategy": "steps", "logging_steps": 1}
    trainer = trainer_of(tmp_path / "out", **options, logging_nan_inf_filter=False)
    trainer.train_dataset[0]["labels"].fill_(float("nan"))
    record_training(trainer, tmp_path / "run", watch=SpikeConfig(action="rollback")).train()
    # It logs after the journal has ended.
    trainer.evaluate(trainer.train_dataset)
    step = trainer.state.global_step
    assert step < 6
    assert f"checkpoint-{step}" not in folders(tmp_path / "out")
    logged = [(one["step"], float(one["loss"])) for one in trainer.state.log_history[: step - 1]]
    assert logged == steps_of(tmp_path / "run")[:-1]
    assert [event["kind"] for event in lines_of(tmp_path / "run")][-2:] == ["spike", "stop"]
    assert f": start again from a checkpoint from before step {step}" in caplog.text


def test_the_journal_of_lightning_has_the_mean_loss_of_each_step(tmp_path):
    samples = torch.arange(32.0).reshape(16, 2)
    record = partial(record_training, folder=tmp_path / "run")
    fitted(tmp_path / "recorded", samples=samples, change=record, accumulate_grad_batches=2)
    steps = steps_of(tmp_path / "run")
    assert [step for step, _ in steps] == [1, 2, 3, 4]
    layer = linear()
    means = [layer(samples[start : start + 4]).square().mean().item() for start in (0, 4)]
    assert steps[0][1] == pytest.approx(sum(means) / 2, rel=1e-6)
    # It ends at a spike, and what was saved before it stays.
    samples[8:] = math.nan
    watched = partial(record, watch=SpikeConfig(action="rollback"))
    fitted(tmp_path / "spike", samples=samples, change=watched)
    assert folders(tmp_path / "spike")[1] == "epoch=0-step=2.ckpt"


def test_the_journal_of_another_object_is_refused():
    with pytest.raises(TypeError, match=r"call saving\(\.\.\., journal=True\) in the loop"):
        record_training(nn.Linear(1, 1), "run")
