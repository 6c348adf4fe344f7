"""Parse sizes of memory, refuse wrong ones with a message, and write records.

python -m pytest tests/core/test_wording.py
"""

import json

import pytest

from curry_train.core.wording import (
    did_you_mean,
    format_bytes,
    format_count,
    format_duration,
    format_mebibytes,
    format_percent,
    format_seconds,
    nearest,
    parse_bytes,
    write_json,
)


def test_json_has_a_row_a_line(tmp_path):
    rows = [{"name": name, "peaks": list(range(40))} for name in "ab"]
    record = {"date": "2026-11-24", "rows": rows, "none": {}}
    write_json(str(tmp_path / "run.json"), record)
    text = (tmp_path / "run.json").read_text()
    assert json.loads(text) == record
    assert len(text.splitlines()) == 8


@pytest.mark.parametrize(
    ("form", "given", "expected"),
    [
        (format_bytes, 0, "0 B"),
        (format_bytes, 1536, "1.50 KiB"),
        (format_bytes, 2**40, "1.00 TiB"),
        (parse_bytes, "24GiB", 25_769_803_776),
        (parse_bytes, "24GB", 24_000_000_000),
        (parse_bytes, "1.5 KiB", 1536),
        (parse_bytes, " 2tib ", 2_199_023_255_552),
        (parse_bytes, "9000000", 9_000_000),
        (parse_bytes, f"1{'0' * 400}B", 10**400),
        (format_count, 7, "7.00"),
        (format_count, 1234, "1234"),
        (format_count, 41_234, "41.2k"),
        (format_count, 2.5e6, "2.50M"),
        (format_count, 3e9, "3.00G"),
        (format_mebibytes, 0, "0.00"),
        (format_mebibytes, 2**20 // 50, "0.02"),
        (format_mebibytes, 1536 * 2**10, "1.50"),
        (format_seconds, 0.01234, "12.3 ms"),
        (format_seconds, 1.5, "1.50 s"),
        (format_percent, 0.256, "26%"),
        (format_percent, 0.0567, "5.7%"),
        (format_percent, None, "-"),
        (format_duration, 3725, "1:02:05"),
    ],
)
def test_sizes_are_read_and_figures_have_three_digits_and_their_unit(form, given, expected):
    assert form(given) == expected


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MLP", "mlp"),
        ("grad_acum", "grad-accum"),
        ("grad accum", "grad-accum"),
        ("memory-budget", "memory_budget"),
        ("bert", None),
    ],
)
def test_the_nearest_name_ignores_case_and_dashes(name, meant):
    known = ("mlp", "transformer", "resnet", "grad-accum", "memory_budget")
    assert nearest(name, known) == meant
    message = did_you_mean(name, known)
    assert message == (f"did you mean {meant!r}?" if meant else f"there are {', '.join(known)}")
    assert did_you_mean("bert", known, otherwise="use one of ours") == "use one of ours"
