"""A journal is read and continued after its process died at any byte of a write.

python -m pytest tests/runs/test_journal_kill.py
"""

from journals import clock, lines_of, plant

from curry_train.runs.journal import Journal, read_events


def test_a_journal_cut_at_any_byte_of_its_last_lines_is_continued(tmp_path):
    """Keep whole events, skip a torn one, and number attempts correctly."""
    path = plant(tmp_path / "run", last=3) / "journal.jsonl"
    whole = path.read_bytes()
    ends = [place + 1 for place in range(len(whole)) if whole[place : place + 1] == b"\n"]
    for length in range(0, len(whole) + 1, 3):
        path.write_bytes(whole[:length])
        kept = sum(end - 1 <= length for end in ends)
        torn = whole[:length].rpartition(b"\n")[2] if length + 1 not in ends else b""
        with Journal(tmp_path / "run", clock=clock()) as journal:
            if not kept:
                assert journal.empty
                journal.start()
                continue
            journal.resume(1)
            journal.step(2, loss=1.0, learning_rate=1.0)
        lines = lines_of(tmp_path / "run")
        num_warnings = sum(line["kind"] == "warning" for line in lines)
        assert len(lines) == kept + 2 + num_warnings, length
        damaged = []
        assert len(list(read_events(path, damaged))) == len(lines)
        assert len(damaged) == bool(torn), length
        assert (lines[kept]["kind"], lines[kept]["attempt"], lines[-1]["attempt"]) == (
            "resume",
            2,
            2,
        )
