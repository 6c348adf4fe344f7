"""Parameters of a checkpoint become safetensors that other libraries load.

python -m pytest tests/cli/test_export.py
"""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from curry_train.cli.runs import export_parameters
from curry_train.runs import DamagedCheckpoint, SavedRun, Store

from ..command_runs import call, flat, read_json
from ..language_models import language_model
from ..store_models import equal, flip, new_state, save_both, train


def transformer():
    return language_model("GPT2", num_hidden_layers=1, n_positions=16)


@pytest.fixture
def saved():
    state = new_state()
    train(state, 1)
    with Store("run") as store:
        save_both(store, 1, state)
    return SavedRun("run"), state.model


@pytest.mark.parametrize("kind", ["latest", "best-k"])
def test_exported_parameters_are_the_saved_ones(saved, kind):
    run, model = saved
    checkpoint = kind if kind == "latest" else run.committed("best-k")[0].folder
    call("export run", checkpoint, "--out out --json out.json")
    found = load_file("out/model.safetensors")
    assert equal(found, model.state_dict())
    assert found.keys() == set(read_json("out.json")["names"])


def test_a_run_is_inspected_by_its_checkpoint(saved):
    assert "give one of its checkpoints" in flat(call("inspect run", status=2))
    assert call("inspect run/latest").splitlines()[-1] == "whole: yes"


def test_a_damaged_checkpoint_is_not_exported(saved):
    run, _ = saved
    (path,) = Path("run/rollback").glob("*/*.distcp")
    flip(path)
    with pytest.raises(DamagedCheckpoint, match="another hash"):
        export_parameters(run, "latest", Path("out"))
    assert [*Path().glob("*out*")] == []
    Path("out").mkdir()
    with pytest.raises(ValueError, match="give a new folder"):
        export_parameters(run, "latest", Path("out"))


def test_from_pretrained_loads_what_was_exported():
    """Tied parameters are written once, and tied again by transformers."""
    state = new_state(build=transformer)
    model = state.model
    with Store("run") as store:
        store.save("rollback", 1, state)
    model.config.save_pretrained("config")
    export_parameters(SavedRun("run"), "latest", Path("out"), config="config/config.json")

    loaded, report = type(model).from_pretrained("out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert equal(loaded.state_dict(), model.state_dict())
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
