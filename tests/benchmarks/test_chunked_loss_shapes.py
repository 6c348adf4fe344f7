"""The chunked loss takes no more bytes or time than torch's own in any recorded shape.

python -m pytest tests/benchmarks/test_chunked_loss_shapes.py
"""

from dataclasses import asdict

import pytest
from torch.nn import functional as F

from chunked_loss_shapes import SHAPES, HeadShape, ours, peak_bytes, theirs

from ..command_runs import read_json
from ..tree import ROOT

pytestmark = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy"
)


def test_record_has_less_bytes_and_time_than_torchs_in_each_of_20_shapes():
    recorded = read_json(ROOT / "evidence/chunked_loss.json")
    assert [entry["shape"] for entry in recorded["shapes"]] == list(map(asdict, SHAPES))
    assert len(SHAPES) == recorded["num_shapes"] == 20
    for entry in recorded["shapes"]:
        assert entry["peak_ratio"] <= 1, entry
        assert entry["time_ratio"] <= 1, entry


@pytest.mark.parametrize(
    "shape",
    [
        HeadShape(512, 64, 1000),
        HeadShape(256, 128, 512),
        HeadShape(256, 32, 2048, "bfloat16"),
        HeadShape(256, 32, 2048, bias=True),
        HeadShape(512, 64, 1000, ignored=0.5),
    ],
    ids=str,
)
def test_peak_is_below_torchs(shape):
    assert peak_bytes(shape, ours) < 0.9 * peak_bytes(shape, theirs)
