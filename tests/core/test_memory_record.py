"""A full GPU leaves a snapshot of its rank, and the error is raised again.

CUDA's recorder is replaced: this runs without a GPU.
"""

import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from curry_train.core import memory_recorder
from curry_train.plan import memory_record

from .. import snapshot_files
from ..command_runs import ran


class Recorder:
    """Stand-in for torch.cuda.memory: notes the calls, and dumps a small snapshot."""

    def __init__(self):
        self.calls = []
        self.commands = []
        self.fails = False

    def history(self, enabled="all", max_entries=None):
        self.calls.append("off" if enabled is None else max_entries)

    def dump(self, path):
        made = snapshot_files.Recorder()
        made.allocate(2000)
        snapshot_files.write(Path(path), made.snapshot())
        if self.fails:
            raise OSError(28, "No space left on device")

    def run(self, command, **options):
        """Run `python -m curry_train ...` in this process."""
        self.commands.append(command)
        assert options["env"]["CUDA_VISIBLE_DEVICES"] == ""
        return subprocess.CompletedProcess(command, 0, stdout=ran(*command[3:]).stdout)


def processes(run):
    """Return the module of processes with another `run`, for the recorder alone."""
    return SimpleNamespace(**{**vars(subprocess), "run": run})


@pytest.fixture
def recorder(monkeypatch):
    found = Recorder()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", found.history)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", found.dump)
    monkeypatch.setattr(memory_recorder, "subprocess", processes(found.run))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return found


def fill(path, error=None):
    """Run out of memory, directly or as the cause of another error."""
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if error is not None:
        error.__cause__ = full
    with pytest.raises(type(error or full)), memory_record(path):
        raise error or full


def test_a_full_device_leaves_a_snapshot_and_its_owners(recorder, tmp_path, capsys):
    fill(tmp_path / "run/oom")
    written = tmp_path / "run/oom.pickle"
    assert pickle.loads(written.read_bytes())["segments"]
    assert recorder.calls == [memory_recorder.MOST_RECORDED_EVENTS, "off"]
    assert recorder.commands == [
        [sys.executable, "-m", "curry_train", "memory", "--snapshot", str(written)]
    ]
    shown = capsys.readouterr().err
    assert f"the snapshot is {written}" in shown
    assert "reserved" in shown


def test_an_earlier_snapshot_stays_and_a_cause_counts(recorder, tmp_path):
    fill(tmp_path / "oom")
    fill(tmp_path / "oom", RuntimeError("the step failed"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["oom-2.pickle", "oom.pickle"]


def test_only_the_full_rank_writes_under_its_number(recorder, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    fill(tmp_path / "oom")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ValueError, match="another"), memory_record(tmp_path / "oom"):
        raise ValueError("another error")
    with memory_record(tmp_path / "oom"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["oom-rank-3.pickle"]
    assert recorder.calls.count("off") == 3


def test_a_full_disk_and_a_missing_command_are_a_line_each(recorder, tmp_path, monkeypatch, capsys):
    recorder.fails = True
    fill(tmp_path / "oom")
    assert "can't be written: [Errno 28]" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    recorder.fails = False

    def missing(command, **_):
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(memory_recorder, "subprocess", processes(missing))
    fill(tmp_path / "oom")
    assert f"curry-train memory --snapshot {tmp_path / 'oom.pickle'}" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_recorded(tmp_path, capsys):
    with memory_record(tmp_path / "oom"):
        pass
    assert "no CUDA device, so no memory is recorded" in capsys.readouterr().err


def test_train_names_a_full_device(monkeypatch):
    def fill(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("curry_train.cli.train.open_named_run", fill)
    assert ran("train --device cpu", status=1).stderr == "Error: CUDA out of memory\n"
