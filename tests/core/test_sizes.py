"""Parse sizes of memory, refuse wrong ones with a message, and write records.

python -m pytest tests/core/test_sizes.py
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curry_train.core.wording import format_bytes, parse_bytes, write_json


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 25_769_803_776),
        ("24GB", 24_000_000_000),
        ("512MiB", 536_870_912),
        ("1.5 KiB", 1536),
        (" 2tib ", 2_199_023_255_552),
        ("9000000", 9_000_000),
        (f"1{'0' * 400}B", 10**400),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-2GiB", "must be at least 1 byte"),
        ("0.1B", "must be at least 1 byte"),
        ("abc", "write a number and a unit, such as 24GiB"),
        ("GiB", "write a number and a unit"),
        ("1e3MiB", "write a number and a unit"),
        ("24", r"has no unit: write 24GiB \(2\*\*30 bytes each\) or 24GB"),
        ("1048575", r"has no unit: write 1048575MiB"),
        ("24576", r"has no unit: write 24576MiB \(2\*\*20 bytes each\) or 24576MB"),
        ("24G", "has the unit 'G': use one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"),
    ],
)
def test_an_invalid_size_is_refused_in_one_line(text, message):
    with pytest.raises(ValueError, match=message) as raised:
        parse_bytes(text)
    assert "\n" not in str(raised.value)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (50 * 2**20, "50.0 MiB"),
        (2**40, "1.00 TiB"),
        (2**52, "4096 TiB"),
    ],
)
def test_sizes_are_written(size, text):
    assert format_bytes(size) == text


@given(st.integers(1, 2**50))
def test_a_printed_size_parses_to_the_digits_shown(size):
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.006)


def test_json_has_a_row_a_line(tmp_path):
    rows = [{"name": name, "peaks": list(range(40))} for name in "ab"]
    record = {"date": "2026-11-24", "rows": rows, "none": {}}
    write_json(str(tmp_path / "run.json"), record)
    text = (tmp_path / "run.json").read_text()
    assert json.loads(text) == record
    assert len(text.splitlines()) == 8
