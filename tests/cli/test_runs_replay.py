"""`runs replay` repeats a bad step by the user's script, and names what made it bad.

Run: `python -m pytest tests/cli/test_runs_replay.py`.
"""

import shutil

import pytest

from curry_train.cli import runs_replay
from curry_train.cli.runs_replay import describe
from curry_train.runs.box import BoxFacts

from ..command_runs import call, flat, in_python, read_json
from ..warm_python import start_warm

SCRIPT = """\
import sys

import torch
from curry_train.runs import saving

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
data = torch.rand(16, 4, 8) * float(sys.argv[1])
data[13:16] *= -100
run = saving(model, optimizer, scheduler, runs="run", rollback_every=5, box=True)
for batch in run.batches(data):
    loss = torch.log(1 + model(batch)).square().mean()
    torch.rand(int(sys.argv[1]) - 1)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    run.step(loss=loss)
    if run.steps == int(sys.argv[2]):
        break
"""

# Two ranks, of which the second has the bad samples. Its compiler makes other numbers.
RANKS = """\
import os
import socket
import sys

import torch
from curry_train.runs import saving
from torch.distributed.fsdp import fully_shard

if "RANK" not in os.environ:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = str(found.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    os.environ["RANK"] = "1" if os.fork() == 0 else "0"
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(0)


class Model(torch.nn.Sequential):
    def forward(self, x):
        return torch.log(1 + super().forward(x))


model = Model(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.rand(10, 2, 4, 8)[:, rank]
data[7:] *= 1 - 101 * rank


def larger(graph, inputs):
    return lambda *given: [one * 1.5 for one in graph(*given)]


@torch.compile(backend=larger)
def loss_of(output):
    return output.square().mean()


run = saving(model, optimizer, runs="ranks", rollback_every=5, box=True)
for batch in run.batches(data):
    loss = loss_of(model(batch))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.step(loss=loss)
    if run.steps == 10:
        break
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train until a step is NaN; return the folder of the script and its run."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "train.py").write_text(SCRIPT)
    in_python("train.py", "1", "16", cwd=folder)
    return folder


def replay(monkeypatch, folder, *words, status=0):
    monkeypatch.chdir(folder)
    start_warm(monkeypatch)
    return flat(call("replay", *words, status=status))


BOX = "run/boxes/step-00000014"


def test_a_step_repeats_to_the_bit_and_its_operation_is_named(trained, monkeypatch):
    before = sorted(trained.rglob("*"))
    options = "--script train.py --times 2 --json found.json -- 1 16"
    output = replay(monkeypatch, trained, BOX, options)
    assert "repeats to the bit: 4 losses of the run are equal, and the parameters" in output
    assert "step 14, forward: aten.log.default in no module of the model, train.py:14" in output
    found = read_json("found.json")
    assert found["difference"] is None
    assert found["repeats"]["origin"]["phase"] == "forward"
    (trained / "found.json").unlink()
    # A folder of bytecode is a test's own.
    assert [one for one in sorted(trained.rglob("*")) if "__pycache__" not in str(one)] == before


def test_other_arguments_are_said_to_compute_something_else(trained, monkeypatch):
    output = replay(monkeypatch, trained, BOX, "--script train.py -- 2 16", status=1)
    assert "does not repeat what the run computed, though the repeats are equal" in output
    assert "generators in another state before the step: torch" in output
    assert "the program ended before step 14" in replay(
        monkeypatch, trained, BOX, "--script train.py -- 1 12", status=2
    )


def test_a_box_of_another_model_is_refused(trained, tmp_path, monkeypatch):
    shutil.copytree(trained / BOX, tmp_path / "box")
    (tmp_path / "train.py").write_text(SCRIPT.replace("16)", "17)").replace("(16, 1", "(17, 1"))
    assert "tensors match" in replay(
        monkeypatch, tmp_path, "box --script train.py -- 1 16", status=2
    )


def test_sharded_and_compiled_steps_repeat_to_the_bit(tmp_path, monkeypatch):
    """A rank other than the first has the bad operation, and compiled code runs uncompiled."""
    (tmp_path / "ranks.py").write_text(RANKS)
    in_python("ranks.py", cwd=tmp_path)
    line = "ranks/boxes/step-00000008 --script=ranks.py --times=2"
    output = replay(monkeypatch, tmp_path, line)
    assert "repeats to the bit: 3 losses of the run are equal, and the parameters" in output
    assert "step 8, forward: aten.log.default in the model itself, ranks.py:22" in output
    assert "is the first with NaN (rank 1)" in output
    assert "the operations are those of a repeat without it" in output


def test_without_a_script_the_one_of_the_run_is_named(trained, monkeypatch):
    message = "give the script of the run, which was: train.py -- 1 16"
    assert message in replay(monkeypatch, trained, BOX, status=2)


def test_repeats_that_differ_once_and_not_again_do_not_repeat(monkeypatch):
    def found(*steps):
        named = {str(step): [digest, digest] for step, digest in steps}
        return {"steps": named, "not finite": None, "operations": [], "origin": None}

    first = [found((7, one), (8, "b")) for one in "ac"]
    answers = iter([*first, found((7, "a")), found((7, "a"))])
    monkeypatch.setattr(runs_replay, "_run", lambda *_: next(answers))
    facts = BoxFacts(8, "why", None, {}, None, 1, "train.py")
    repeated = runs_replay.repeat("box", facts, [], times=2, show=str)
    assert (repeated["step"], repeated["difference"][:15]) == (7, "does not repeat")


GROWN = {"module": "h.1", "gain": 80.0, "sizes": [1.5, 120.0], "batch": 1.0}
GROWN |= {"parameter": "h.0.weight", "gradient": 190.0}
FOUND = {
    "origin": None,
    "steps": {"7": [(9.25).hex(), ""]},
    "gradient": 210.0,
    "gradient before": 1.1,
    "growth": GROWN,
}


def test_what_has_grown_and_data_that_are_not_finite_are_named():
    loss, outputs, gradient = describe(7, FOUND)
    assert loss == "step 7: loss 9.25, gradient norm 210; in step 6 the norm was 1.1"
    assert outputs == "  outputs of h.1 have grown: up to 120, before 1.5"
    assert gradient == "  the gradient of h.0.weight has grown most, 190 times"
    large = describe(7, FOUND | {"growth": GROWN | {"batch": 300.0}})
    assert large[1] == "  the input of the model is 300 times as large"
    assert "look at the targets" in describe(7, FOUND | {"growth": GROWN | {"gain": 1.1}})[1]
    assert "no state" in describe(7, FOUND | {"growth": None})[1]
    origin = {"phase": "data", "name": "inputs of the batch", "result": [float("nan")] * 2}
    assert describe(7, FOUND | {"origin": origin}) == ["step 7, data: inputs of the batch is NaN"]
