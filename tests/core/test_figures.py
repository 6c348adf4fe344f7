"""Figures of tables and pictures have three digits and a unit that fits.

python -m pytest tests/core/test_figures.py
"""

import pytest

from curry_train.core.wording import (
    format_count,
    format_duration,
    format_mebibytes,
    format_percent,
    format_seconds,
    three_digits,
)


@pytest.mark.parametrize(
    ("form", "number", "text"),
    [
        (three_digits, 0.1234, "0.12"),
        (three_digits, 12.34, "12.3"),
        (three_digits, 1234.5, "1234"),
        (format_count, 7, "7.00"),
        (format_count, 950, "950"),
        (format_count, 1234, "1234"),
        (format_count, 41_234, "41.2k"),
        (format_count, 2.5e6, "2.50M"),
        (format_count, 3e9, "3.00G"),
        (format_mebibytes, 0, "0.00"),
        (format_mebibytes, 2**20 // 50, "0.02"),
        (format_mebibytes, 1536 * 2**10, "1.50"),
        (format_mebibytes, 3 * 2**30, "3072"),
        (format_seconds, 0.01234, "12.3 ms"),
        (format_seconds, 1.5, "1.50 s"),
        (format_percent, 0.256, "26%"),
        (format_percent, 0.0567, "5.7%"),
        (format_percent, None, "-"),
        (format_duration, 0, "0:00"),
        (format_duration, 61, "1:01"),
        (format_duration, 3725, "1:02:05"),
    ],
)
def test_a_figure_has_three_digits_and_its_unit(form, number, text):
    assert form(number) == text
