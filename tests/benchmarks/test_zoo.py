"""Tests of the model zoo: a dozen models hold the gates, and the record counts right.

python -m pytest tests/benchmarks/test_zoo.py
"""

import json
import re
import subprocess
from contextlib import suppress

import pytest

import zoo
from curry_train.core.blocks import NoBlocks
from curry_train.gates import discover
from curry_train.workloads.models import load_workload
from curry_train.workloads.workload import Case
from zoo_models import ZOO

SHORT = [model.name for model in ZOO.values() if model.is_short]
INSTALLED_FOR_TESTS = {"transformers", "snntorch"}

# Of each technique, the gates that compare the training of a step with the plain one.
SHORT_GATES = [
    "recompute/parity-full",
    "recompute/memory",
    "recompute/off",
    "sac/parity-sac",
    "sac/regions",
    "grad-accum/equal",
    "memory-plan/estimate",
]


def test_the_zoo_has_eighty_models_of_twenty_libraries():
    assert len(ZOO) >= 80
    assert len({model.library for model in ZOO.values()}) >= 20
    assert len(SHORT) >= 12


def test_every_library_of_the_zoo_is_installed_in_one_version():
    lines = zoo.REQUIREMENTS.read_text().splitlines()[1:]
    pinned = {re.sub("[-_.]+", "-", line.split("==")[0]).lower() for line in lines}
    assert len(pinned) == len(lines)
    named = {re.sub("[-_.]+", "-", model.library).lower() for model in ZOO.values()}
    assert named - pinned == INSTALLED_FOR_TESTS


# Libraries warn about what they still use of torch.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHORT)
def test_no_gate_fails_on_a_model_of_another_library(name):
    case = Case(load_workload(f"{ZOO[name].path}:{name}"))
    with suppress(NoBlocks):
        case, _ = case.with_running_blocks()
    gates = [gate for gate in discover() if gate.name in SHORT_GATES]
    assert len(gates) == len(SHORT_GATES)
    verdicts = {gate.name: gate.run(case) for gate in gates}
    failed = {gate: verdict for gate, verdict in verdicts.items() if verdict.passed is False}
    assert failed == {}
    assert any(verdict.passed for verdict in verdicts.values())


def test_a_record_names_files_without_the_folders_of_a_machine():
    cause = "in the forward of Net, /opt/site-packages/net/net.py:5 needs values"
    own = f"in the forward of Own, {zoo.ROOT}/benchmarks/zoo_science.py:7 needs values"
    found = zoo.without_folders({"not_applicable": {cause: 1, own: 2}})
    assert found == {
        "not_applicable": {
            "in the forward of Net, net/net.py:5 needs values": 1,
            "in the forward of Own, benchmarks/zoo_science.py:7 needs values": 2,
        }
    }


def row(**changed):
    plan = {
        "plain_bytes": 2048,
        "least_bytes": 512,
        "budget_bytes": 1280,
        "planned_bytes": 1024,
        "measured_bytes": 1024,
    }
    facts = dict(model="bert", library="transformers", status=0, held=51, failed={})
    facts |= dict(not_applicable={"no loop": 6}, blocks=3, coverage=0.94, plan=plan)
    return facts | changed


def test_the_summary_counts_a_failed_gate_a_wrong_plan_and_a_missing_one():
    wrong = row()["plan"] | {"measured_bytes": 2000}
    rows = [
        row(),
        row(status=1, failed={"sac/parity": "0.3; required 0"}, coverage=None),
        row(library="timm", plan=wrong, coverage=0.5),
        row(plan={"error": "status 1: out of luck"}),
    ]
    assert zoo.summary_of(rows) == {
        "models": 4,
        "libraries": 2,
        "status_0": 3,
        "held": 204,
        "failed": 1,
        "not_applicable": 24,
        "covered_90_percent": 2,
        "plans": 3,
        "plans_equal_to_the_byte": 2,
        "plans_within_budget": 2,
    }


def test_a_model_that_can_not_be_built_is_recorded_with_its_error(monkeypatch):
    def refuse(words, seconds):
        return subprocess.CompletedProcess(words, 2, "", "Error: no module named absent\n")

    monkeypatch.setattr(zoo, "_run", refuse)
    found = zoo.run_model(ZOO["bert"])
    assert found["status"] == 2
    assert found["error"] == "Error: no module named absent"
    assert found["plan"] == {"error": "status 2: Error: no module named absent"}
    assert zoo.summary_of([found])["status_0"] == 0


def test_a_run_that_is_resumed_keeps_the_rows_of_models_that_still_exist(tmp_path):
    path = tmp_path / "zoo.json"
    assert zoo._recorded(str(path)) == {}
    path.write_text(json.dumps({"models": [row(), row(model="left the zoo")]}))
    assert list(zoo._recorded(str(path))) == ["bert"]
