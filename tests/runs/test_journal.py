"""One process writes a journal, one event a line, and changes no foreign file.

python -m pytest tests/runs/test_journal.py
"""

import errno
import io
import logging
from pathlib import Path

import pytest
import torch

from curry_train.runs.journal import Journal, JournalError, read_events

from ..journals import clock, lines_of, plant


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda j: j.write("save", step=-1), ValueError, "a step is a whole number from 0, got -1"),
        (
            lambda j: j.write("step", step=1, loss=1.0, time=3.0, v=1),
            ValueError,
            "facts called time, v: rename them",
        ),
        (
            lambda j: j.write("step", step=1, loss=torch.ones(2)),
            ValueError,
            "step of step 1 can't be written as JSON",
        ),
    ],
)
def test_a_wrong_call_is_an_error_and_writes_nothing(tmp_path, act, error, message):
    with Journal(tmp_path) as journal:
        before = (tmp_path / "journal.jsonl").read_bytes()
        with pytest.raises(error, match=message):
            act(journal)
        assert (tmp_path / "journal.jsonl").read_bytes() == before
        assert journal.attempt == 1
        journal.write("step", step=1, loss=1.0, learning_rate=1.0)


def test_a_journal_begins_with_the_start_of_a_run_or_its_resume():
    for folder, step in (("new", 0), ("new", 0), ("new", 2), ("without", 3)):
        Path(folder).mkdir(exist_ok=True)
        Journal(folder, step=step).close()
    found = [(line["kind"], line["step"], line["attempt"]) for line in lines_of("new")]
    assert found[:3] == [("start", 0, 1), ("resume", 0, 2), ("resume", 2, 3)]
    # The run was resumed, and its first part had no journal.
    assert [line["kind"] for line in lines_of("without")] == ["resume"]


def test_a_journal_cut_at_any_byte_of_its_lines_is_continued(tmp_path):
    """Keep whole events, skip a torn one, and number attempts correctly."""
    path = plant(tmp_path, last=3) / "journal.jsonl"
    whole = path.read_bytes()
    for length in range(0, len(whole) + 1, 3):
        path.write_bytes(whole[:length])
        before = lines_of(tmp_path)
        with Journal(tmp_path, step=1 if before else 0, clock=clock()) as journal:
            if not before:
                assert [line["kind"] for line in lines_of(tmp_path)] == ["start"]
                continue
            journal.write("step", step=2, loss=1.0, learning_rate=1.0)
        rest = lines_of(tmp_path)[len(before) :]
        assert {line["attempt"] for line in rest} == {2}, length
        assert (rest[0]["kind"], rest[-1]["kind"]) == ("resume", "step")
        damaged = []
        assert len([*read_events(path, damaged)]) == len(before) + len(rest)
        assert len(damaged) == len(whole[:length].splitlines()) - len(before), length


def test_a_file_that_is_not_a_journal_is_refused_and_unchanged(tmp_path):
    path = tmp_path / "journal.jsonl"
    content = bytes(range(256)) * 9000
    path.write_bytes(content)
    with pytest.raises(JournalError, match="not a journal of a run: line 1 is no event"):
        Journal(tmp_path)
    assert path.read_bytes() == content


def test_a_place_where_no_journal_can_be_written_is_reported(tmp_path):
    with pytest.raises(JournalError, match="can't be written: No such file or directory"):
        Journal(tmp_path / "none")
    (tmp_path / "journal.jsonl").mkdir()
    with pytest.raises(JournalError, match="can't be written: Is a directory"):
        Journal(tmp_path)


def test_steps_missing_in_the_journal_are_reported_at_the_resume():
    plant("run", last=20)
    Journal("run", step=30).close()
    assert lines_of("run")[-1]["reason"] == "steps 21 to 30 are not in this journal"


def test_a_full_disk_loses_events_with_a_warning_and_training_continues(tmp_path, caplog):
    """Cover a partial line too: the next one must not continue it."""

    class Disk(io.FileIO):
        room = None

        def write(self, data):
            if self.room is None:
                return super().write(data)
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            part, self.room = super().write(data[: self.room]), 0
            return part

    with Journal(tmp_path) as journal, caplog.at_level(logging.WARNING):
        journal._file.close()
        journal._file = Disk(tmp_path / "journal.jsonl", "a")
        for step, free in ((1, None), (2, 30), (3, 0), (4, 0), (5, None), (6, None)):
            journal._file.room = free
            journal.write("step", step=step, loss=1.0, learning_rate=1.0)
    assert [record.message.split(": ", 1)[1] for record in caplog.records] == [
        "No space left on device; training goes on without its journal"
    ]
    damaged = []
    assert [(event.kind, event.step) for event in read_events(journal.path, damaged)] == [
        ("start", 0), ("step", 1), ("step", 5), ("step", 6),
    ]  # fmt: skip
    assert damaged == [3]
