"""Read a journal in spite of damage to its file, and the history of a run from it.

python -m pytest tests/runs/test_journal_reading.py
"""

import math
from pathlib import Path

import pytest

from curry_train.runs import Journal, read_history
from curry_train.runs.journal import (
    LONGEST_LINE_BYTES,
    JournalError,
    encode_event,
    event_number,
    parse_event,
    printable,
    read_events,
)

from ..journals import plant, plant_eventful

AT = {"time": 1.5, "step": 3, "attempt": 2}


def good(step=1, **facts):
    return encode_event("step", facts, time=1.0, step=step, attempt=1)


def read(folder, content):
    path = folder / "journal.jsonl"
    path.write_bytes(content)
    damaged = []
    return [event.step for event in read_events(path, damaged)], damaged


def test_a_line_accepts_numbers_of_torch_and_numpy_and_writes_the_rest_as_text():
    import numpy
    import torch

    facts = {"loss": torch.tensor(math.nan), "a": numpy.float32(2), "n": numpy.int64(3)}
    line = encode_event("step", facts | {"norms": [math.inf], "place": Path("x")}, **AT)
    expected = {"loss": "nan", "a": 2.0, "n": 3, "norms": ["inf"], "place": "x"}
    assert parse_event(line).facts == expected


def test_what_is_no_figure_counts_as_nan():
    assert all(math.isnan(event_number(value)) for value in ("nan", None, "12", [], 10**400))


EVENT = b'{"v":1,"time":1,"step":1,"attempt":1,"kind":"step"}\n'
NO_EVENTS = [
    b"\xff\xfe\x00garbage\n",
    b"\x00" * 100 + b"\n",
    b'{"v":1,"time":1.0,"st\n',
    b"[" * 200_000 + b"\n",
    b"[1, 2]\n",
    b'{"step": 1, "loss": 2.0}\n',
    EVENT.replace(b'"v":1', b'"v":2'),
    EVENT.replace(b'"time":1', b'"time":"now"'),
    EVENT.replace(b'"step"}', b"3}"),
    EVENT.replace(b'"step":1', b'"step":-1'),
    EVENT.replace(b'"step":1', b'"step":1' + b"0" * 30),
]


def test_damage_in_the_middle_is_counted_and_the_rest_is_read(tmp_path):
    content = good(1) + good(2) + b"".join(NO_EVENTS) + good(4)
    assert read(tmp_path, content) == ([1, 2, 4], list(range(3, 3 + len(NO_EVENTS))))


def test_a_line_of_any_length_is_read_in_bounded_memory(tmp_path):
    content = good(1) + b"x" * (3 * LONGEST_LINE_BYTES) + b"\n" + good(4)
    assert read(tmp_path, content) == ([1, 4], [2, 3, 4, 5])


def test_a_file_without_an_event_is_an_error(tmp_path):
    message = "holds no event: the run died while it started, or is starting just now"
    with pytest.raises(JournalError, match=message):
        read(tmp_path, b'{"v":1,"ti')


def test_a_run_is_found_by_its_path_or_its_name(tmp_path):
    root = tmp_path / "runs"
    for name in ("run-001", "night"):
        plant(root / name)
    (tmp_path / "empty").mkdir()
    for name in ("run-001", "run-001@1", "run-001/journal.jsonl", root / "run-001"):
        assert read_history(name, root=root).path == root / "run-001/journal.jsonl"
    for name, message in {
        "run-02": r"^run-02 is no run with a journal; did you mean 'run-001'\?$",
        str(root / "other"): r"runs has night, run-001$",
        str(tmp_path / "none/x"): "none has no run with a journal$",
        str(tmp_path / "empty"): r"empty is no run with a journal; ",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_history(name, root=root)


def test_text_of_a_file_does_not_move_the_cursor_and_is_cut():
    assert printable("a\x1b[2Jb\nc\ud800é") == r"a\x1b[2Jb\nc\ud800é"
    assert printable("x" * 400, longest=10) == "xxxxxxx..."


def test_a_history_up_to_an_attempt_is_the_run_at_that_time():
    folder = plant_eventful("run")
    second = read_history(f"{folder}@2")
    assert list(second.steps.step) == list(range(1, 31))
    assert len(second.attempts) == 2
    assert list(read_history(f"{folder}/journal.jsonl@1").steps.step) == list(range(1, 21))
    with pytest.raises(ValueError, match="has no attempt 4: the last one is 3"):
        read_history(f"{folder}@4")
    folder.rename("run@2")  # a name given by the user comes first
    assert len(read_history("run@2").attempts) == 3


def test_dev_metrics_of_rolled_back_steps_are_dropped(tmp_path):
    with Journal(tmp_path) as journal:
        for step in (10, 20):
            journal.write("eval", step=step, metric="dev_loss", value=float(step))
        journal.write("rollback", step=10, from_step=20, reason="x")
        # Of a step that is measured twice the later figure counts.
        for value in (4.0, 5.0):
            journal.write("eval", step=30, metric="dev_loss", value=value)
    steps = read_history(tmp_path).metrics["dev_loss"]
    assert (list(steps.step), list(steps.values["value"])) == ([10, 30], [10.0, 5.0])
    assert list(steps.superseded[0].values["value"]) == [20.0]
