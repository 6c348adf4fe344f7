"""`runs record` runs a script untouched, and `runs locate` names where two records differ.

Run: `python -m pytest tests/cli/test_runs_locate.py`.
"""

import functools
import json
import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest

from curry_train.cli import runs_locate

from ..command_runs import flat, ran, read_json
from ..runs.recorded_training import recorded
from ..warm_python import start_warm

record = functools.partial(ran, "runs record")
locate = functools.partial(ran, "runs locate")

SCRIPT = """\
import sys

import torch
from torch.nn import functional as F

torch.manual_seed(0)
scale = float(sys.argv[1])


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 5)

    def forward(self, x):
        return self.second(self.first(x) * scale)


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(1000):
    loss = F.cross_entropy(model(torch.randn(4, 8)), torch.randint(5, (4,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save(model.state_dict(), "weights.pt")
    with open("log.txt", "a") as log:
        log.write(str(loss.item()))
"""

RANKS = """\
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(10):
    inputs = torch.randn(2, 4, 8)[rank]
    if number == 1 and rank == 1 and sys.argv[1] == "wrong":
        inputs = inputs * 1.5
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

# The second rank alone has another rate in its second step.
SHARDED = RANKS.replace("DistributedDataParallel(torch", "fully_shard(torch").replace(
    "inputs = inputs * 1.5", "optimizer.param_groups[0]['lr'] = 0.2"
)
SHARDED = f"from torch.distributed.fsdp import fully_shard\n{SHARDED}"

TRAINER = """\
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def make():
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2,
    )
    tokens = torch.randint(64, (64, 17))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        "output", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=9,
        report_to=[], use_cpu=True, disable_tqdm=True,
    )
    return Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)


def seeded():
    torch.manual_seed(0)
    return make()


def other():
    torch.manual_seed(0)
    trainer = make()
    trainer.model.model.layers[1].input_layernorm.variance_epsilon = 1e-3
    return trainer
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    start_warm(monkeypatch)
    return tmp_path


@pytest.mark.parametrize(
    ("model", "first"),
    [
        ("Model()", ", in its own code after model.first"),
        ("torch.compile(Model(), backend='eager')", " has equal inputs and another output"),
    ],
)
def test_two_scripts_are_recorded_and_the_operation_is_named_from_elsewhere(folder, model, first):
    (folder / "train.py").write_text(SCRIPT.replace("Model()", model))
    for name, scale in (("of/mine/A", "1.0"), ("B", "1.5")):
        ended = record(f"--script train.py --steps 2 --out {name} -- {scale}")
        assert "recorded 2 of 2 steps" in ended.output
    assert sorted(path.name for path in folder.iterdir()) == ["B", "of", "train.py"]
    text = flat(locate("of/mine/A B --op --json found.json", status=1).stdout)
    assert text.startswith(f"step 1, forward: model, call 0{first}")
    assert "aten.mul.Tensor (train.py:17): argument other is 1.0 in A and 1.5 in B" in text
    result = read_json("found.json")
    place = {"step": 1, "phase": "forward", "path": "model", "call": 0}
    assert (result["place"], result["equal"]) == (place, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import torch\ntorch.nn.Linear(2, 2)(torch.ones(2))",
            "it made no optimizer step",
        ),
        ("import torch\nmodel = )", "train.py, line 2"),
    ],
)
def test_a_script_without_a_step_leaves_no_record(folder, text, message):
    (folder / "train.py").write_text(text)
    for _ in "ab":
        assert message in flat(record("--script train.py --out A", status=2).stderr)


ROUNDS = """\
import os
import sys

import torch
from torch.nn import functional as F

assert not sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
if os.environ.get("TORCH_HALVES") or os.environ.get("HALVES"):

    def in_two_sums(x):
        weight = model[0].weight
        return F.linear(x[:, :32], weight[:, :32], model[0].bias) + x[:, 32:] @ weight[:, 32:].T

    model[0].forward = in_two_sums
model[1].eps = float(os.environ.get("TORCH_EPSILON", "1e-5"))
groups = [{"params": []}, {"params": model.parameters()}]
optimizer = torch.optim.SGD(groups, lr=0.1)
while True:
    model(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def record_with(name, **variables):
    with mock.patch.dict(os.environ, variables):
        record(f"--script rounds.py --steps 2 --out {name}")


def test_a_measured_tolerance_accepts_rounding(folder):
    (folder / "rounds.py").write_text(ROUNDS)
    record_with("A")
    record_with("B", TORCH_HALVES="1")
    assert locate("A B", status=1).stdout.startswith("step 1, forward: model.0, call 0")
    ended = locate("A B --tolerance auto")
    assert "differ by rounding alone" in flat(ended.output)
    assert sorted(path.name for path in folder.iterdir()) == ["A", "B", "rounds.py"]
    # A record has no other variables, so C's program would run as A's does.
    record_with("C", HALVES="1")
    ended = locate("A C --tolerance auto", status=2)
    assert "B does not repeat itself (step 1, forward: model.0" in flat(ended.output)


def test_the_setting_that_makes_the_difference_is_found(folder):
    (folder / "rounds.py").write_text(ROUNDS)
    record_with("A", TORCH_OTHER="1")
    record_with("B", TORCH_OTHER="2", TORCH_EPSILON="1e-4")
    python = f"{sys.executable} -m curry_train runs record --steps 2"
    command = f'sh -c "{python} --script {{script}} --out {{out}} -- {{arguments}}"'
    locate(f"A B --bisect '{command}' --json found.json", status=1)
    settings = read_json("found.json")["settings"]
    assert settings["variable TORCH_OTHER"] == "makes none"
    assert settings["variable TORCH_EPSILON"].startswith("makes the difference: step 1, forward")


def record_as(folder, fault, **variables):
    """Record a training here as one that was started with these variables."""
    observed = recorded(folder, fault)
    observed[0].variables = variables
    (folder / "rank-0.jsonl").write_text("\n".join([*map(json.dumps, map(vars, observed)), ""]))


def test_settings_that_only_act_together_are_found_together(folder, monkeypatch):
    def stand_in(command, settings, out):
        both = [settings[f"variable TORCH_{one}"] for one in ("ONE", "OTHER")]
        recorded(Path(out), "epsilon" if both == ["2", "2"] else "")

    monkeypatch.setattr(runs_locate, "_run_template", stand_in)
    for name, fault, value in (("A", "", "1"), ("B", "epsilon", "2")):
        record_as(folder / name, fault, TORCH_ONE=value, TORCH_OTHER=value)
    text = flat(locate("A B --bisect it", status=1).stdout)
    assert "variable TORCH_ONE: makes none variable TORCH_OTHER: makes none" in text
    both = "all of these: makes the difference: step 1, forward: model.h.1.ln, call 0"
    assert both in text
    assert "what makes it" not in text

    monkeypatch.setattr(
        runs_locate, "_run_template", lambda command, settings, out: recorded(Path(out))
    )
    text = flat(locate("A B --bisect it", status=1).stdout)
    assert "all of these: makes none what makes it: a setting that is not recorded" in text


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ('sh -c "touch {out}; exit 1"', "the command ended with status 1"),
        ("no-such-program {out}", "the command can't be run"),
        ("echo {nothing}", "a field that no record has"),
        ("echo {}", "a field that no record has"),
        ('true {out} "', "an open quote"),
        ("true {out}", "has to write a record"),
    ],
)
def test_a_command_that_records_nothing_is_refused(folder, command, text):
    record_as(folder / "A", "", TORCH_OTHER="1")
    record_as(folder / "B", "epsilon", TORCH_OTHER="2")
    assert text in flat(locate(f"A B --bisect '{command}'", status=2).output)


@pytest.mark.parametrize(
    ("script", "first"),
    [
        (RANKS, "step 2, data: the loop gives other data: input 0 of model, call 0"),
        (SHARDED, "step 2, optimizer: SGD gets equal gradients and leaves another model.weight"),
    ],
)
def test_the_rank_that_differs_is_named(folder, script, first):
    (folder / "ranks.py").write_text(script)
    for name in ("right", "wrong"):
        record(f"--script ranks.py --ranks 2 --steps 2 --out {name} -- {name}")
    text = flat(locate("right wrong", status=1).stdout)
    start = json.loads((folder / "right/rank-1.jsonl").read_text().splitlines()[0])
    assert start["environment"]["world_size"] == 2
    assert text.startswith(first)
    assert "(rank 1 of 2)" in text


def test_a_trainer_of_hugging_face_is_recorded(folder):
    (folder / "trainers.py").write_text(TRAINER)
    for name in ("seeded", "other"):
        record(f"--trainer trainers.py:{name} --steps 1 --out {name}")
    text = flat(locate("seeded other", status=1).stdout)
    assert text.startswith("step 1, forward: model.model.layers.1.input_layernorm, call 0"), text
    assert "variance_epsilon of model.model.layers.1.input_layernorm is 1e-06 in A" in text


def test_equal_records_end_with_status_0(folder):
    recorded(folder / "A")
    recorded(folder / "B")
    ended = locate("A B")
    assert ended.stdout.startswith("equal: ")
    assert "A is a record: compare two" in flat(ran("runs diff A B", status=2).output)
    # A difference on one rank alone is found.
    recorded(folder / "C", "epsilon")
    for name, other in (("A", "B"), ("B", "C")):
        shutil.copy(folder / other / "rank-0.jsonl", folder / name / "rank-1.jsonl")
    ended = locate("A B", status=1)
    assert "(rank 1 of 2)" in flat(ended.output)


def test_a_loop_of_ones_own_cannot_be_run_again(folder):
    recorded(folder / "A")
    recorded(folder / "B", "epsilon")
    ended = locate("A B --op", status=2)
    assert "need `runs record`" in flat(ended.output)
    ended = locate("A B --bisect 'true {out}'", status=2)
    assert "the command sets none of what differs" in flat(ended.output)
