"""Fine-tuning steps are predicted and measured as the record of them says.

python -m pytest tests/benchmarks/test_finetune.py
"""

import contextlib
import json
import tempfile
from types import SimpleNamespace

import pytest
from torch import nn

import finetune
import finetune_models
from curry_train.runs import saving
from finetune_models import ADAPTERS, EXPERTS, OPTIMIZERS

RECORD = json.loads((finetune.ROOT / "evidence" / "finetune.json").read_text())


def test_a_row_compares_peak_parameters_and_state():
    row = finetune.compare(finetune.mlp(depth=2, width=32), optimizer=OPTIMIZERS["Adafactor"])
    assert row["equal"]
    assert row["predicted"]["peak_bytes"] > row["predicted"]["parameter_bytes"] > 0
    wrong = {**row, "predicted": {**row["predicted"], "peak_bytes": 1}, "equal": False}
    named = {"kind": "optimizer", "name": "Adafactor", "technique": "plain"}
    assert "DIFFERENT" in finetune.line_of(named | wrong)
    by_layout = row | {"by_layout": "a reason", "host_bytes": 8}
    assert "8 on the host" in finetune.line_of(named | by_layout)
    assert finetune.summary_of([row, wrong, row | {"why_real": "a reason"}, by_layout]) == {
        "rows": 4,
        "predicted_from_shapes": 2,
        "equal": 1,
        "measured_instead": 1,
        "by_layout": 1,
    }


def test_a_perturbed_router_changes_torchs_gradients_and_none_of_ours():
    found = finetune.perturbed_runs(5)
    assert found["equal"] == 5
    assert found["torch_checkpoint_differs"] + found["torch_checkpoint_raises"] >= 3


def test_the_record_has_every_row_and_at_least_thirty_are_predicted_and_equal():
    names = {row["name"] for row in RECORD["rows"]}
    assert names == {*OPTIMIZERS, *ADAPTERS, *EXPERTS}
    assert RECORD["summary"] == finetune.summary_of(RECORD["rows"])
    assert RECORD["summary"]["equal"] == RECORD["summary"]["predicted_from_shapes"] >= 30
    assert all(plan["equal"] for plan in RECORD["plans"])
    assert [row["equal"] for row in RECORD["rows"] if "by_layout" in row] == [True] * 3
    assert RECORD["routing"]["equal"] == RECORD["routing"]["runs"] == finetune.NUM_PERTURBED
    assert {row["name"] for row in RECORD["resumes"]} == {*ADAPTERS}
    for row in RECORD["resumes"]:
        assert row["equal"]
        assert row["another_base_refused"]
    assert set(RECORD["versions"]) == {*finetune.LIBRARIES}


def test_rows_that_ran_again_replace_theirs_in_the_record_and_no_other():
    again = [row | {"equal": False} for row in RECORD["rows"] if row["name"] == "dora"]
    found = RECORD | {"rows": again, "plans": [], "routing": None}
    known = [*OPTIMIZERS, *ADAPTERS, *EXPERTS]
    merged = finetune.beside_earlier(found, RECORD, known)
    changed = [row["name"] for row in merged["rows"] if not row["equal"]]
    assert changed == ["dora"] * len(again)
    assert [row["name"] for row in merged["rows"]] == [row["name"] for row in RECORD["rows"]]
    assert merged["plans"] == [plan for plan in RECORD["plans"] if plan["name"] != "dora"]
    assert merged["routing"] == RECORD["routing"]
    with pytest.raises(SystemExit, match="run all rows"):
        finetune.beside_earlier(found | {"torch": "1.0"}, RECORD, known)


class SmallAdapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.up = nn.Linear(16, 16)

    def forward(self, input_ids, labels):
        rows = input_ids.float() / 256
        return SimpleNamespace(loss=(self.base(rows) + self.up(rows)).square().mean())


def test_a_resume_that_is_not_equal_or_takes_another_base_is_recorded(monkeypatch):
    monkeypatch.setattr(finetune_models, "lora", lambda: (SmallAdapter(), None))
    row = finetune.resume_row("lora")
    assert row["equal"]
    assert row["another_base_refused"]

    @contextlib.contextmanager
    def forgetful(*arguments, runs, **options):
        folder = tempfile.mkdtemp(dir=runs.parent)
        with saving(*arguments, runs=folder, **options) as run:
            yield run

    monkeypatch.setattr(finetune, "saving", forgetful)
    assert not finetune.resume_row("lora")["another_base_refused"]

    trained_adapters = finetune.trained_adapters
    calls = iter((2, 1, 1, 1))
    monkeypatch.setattr(
        finetune,
        "trained_adapters",
        lambda *arguments, epochs, **options: trained_adapters(
            *arguments, epochs=next(calls), **options
        ),
    )
    assert not finetune.resume_row("lora")["equal"]
