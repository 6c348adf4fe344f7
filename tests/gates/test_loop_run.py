"""Scripts and trainers run in a process of their own, and leave no trace.

Run: `python -m pytest tests/gates/test_loop_run.py`.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from warm_python import warm_python

from curry_train.gates import loop_run
from curry_train.gates.loop_run import ChangedFiles, LoopFailed, preflight_program


@pytest.fixture(autouse=True)
def interpreters_have_imported_torch(monkeypatch):
    monkeypatch.setattr(sys, "executable", warm_python())


SCRIPT = """\
import os
import sys

import torch
from torch.nn import functional as F

divided_by = float(sys.argv[1])
model = torch.nn.Linear(8, 5)
optimizer = torch.optim.AdamW(model.parameters())
with open("log.txt", "a") as log:
    log.write("begins")
os.makedirs("output/today", exist_ok=True)
for number in range(1000):
    loss = F.cross_entropy(model(torch.randn(4, 8)), torch.randint(5, (4,)))
    (loss / divided_by).backward()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
        torch.save(model.state_dict(), "output/today/weights.pt")
        with open("output/today/losses.txt", "a") as losses:
            losses.write(str(loss.item()))
        os.replace("log.txt", "log_of_today.txt")
        os.replace("log_of_today.txt", "log.txt")
os.remove("log.txt")
"""

RANKS = """\
import contextlib
import sys

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

kind = sys.argv[1]
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(128, 8), torch.randint(5, (128,)))
bare = torch.nn.Linear(8, 5)
model = bare if kind == "unwrapped" else DistributedDataParallel(bare)
optimizer = torch.optim.AdamW(bare.parameters(), 1e-2)
sampler = None if kind == "same" else DistributedSampler(data)
for epoch in range(9):
    if sampler:
        sampler.set_epoch(epoch)
    for number, (inputs, labels) in enumerate(DataLoader(data, 4, sampler=sampler)):
        is_without = kind == "never" or (kind in ("right", "same") and number % 2 == 0)
        with model.no_sync() if is_without else contextlib.nullcontext():
            (F.cross_entropy(model(inputs), labels) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
"""

HUGGING_FACE = """\
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, labels[:, 1:].flatten())


def trainer(kind):
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2,
    )
    rows = []
    for length in torch.randint(4, 16, (64,)).tolist():
        tokens = torch.randint(64, (17,))
        labels = tokens.clone()
        labels[length:] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    arguments = TrainingArguments(
        "output", per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=9,
        save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
    )
    return kind(LlamaForCausalLM(config), arguments, train_dataset=rows)


def right():
    return trainer(Trainer)


def wrong():
    return trainer(OwnLoss)
"""

LIGHTNING = """\
import pytorch_lightning
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Module(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 5)

    def training_step(self, batch, index):
        inputs, labels = batch
        return F.cross_entropy(self.layer(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class ByHand(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        self.manual_backward(super().training_step(batch, index))
        self.optimizers().step()


def trainer(module, **options):
    data = TensorDataset(torch.randn(64, 8), torch.randint(5, (64,)))
    made = pytorch_lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, **options
    )
    return made, module, DataLoader(data, 8, shuffle=True)


def right():
    return trainer(Module(), accumulate_grad_batches=2, gradient_clip_val=1.0)


def wrong():
    return trainer(ByHand())
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    Path("log.txt").write_text("before\n")
    return tmp_path


def failed(kind, *words):
    verdicts = preflight_program(kind, words, num_steps=3)
    return {verdict.gate: verdict.measured for verdict in verdicts if verdict.passed is False}


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("divided_by", "expected"),
    [
        ("2", {}),
        ("1", "train.py:15: the gradients of a window are 2 times those of one batch"),
    ],
)
def test_a_script_is_checked_and_its_files_are_put_back(folder, divided_by, expected):
    found = failed("script", "train.py", divided_by)
    assert found == ({"loop/accumulation": expected} if expected else {})
    assert files(folder) == {"train.py", "log.txt"}
    assert Path("log.txt").read_text() == "before\n"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("right", set()),
        ("same", {"ranks.py:23: all ranks see the same samples"}),
        ("never", {"ranks.py:23: a step without a sync between ranks"}),
        ("often", {"ranks.py:23: 2 syncs in a window"}),
        ("unwrapped", {"ranks.py:25: weights differ from rank to rank after the step"}),
    ],
)
def test_ranks_are_compared(folder, kind, expected):
    Path("ranks.py").write_text(RANKS)
    verdicts = preflight_program("script", ["ranks.py", kind], num_steps=3, num_ranks=2)
    failed = [verdict for verdict in verdicts if verdict.passed is False]
    assert {verdict.gate for verdict in failed} <= {"loop/ranks"}
    assert {verdict.measured for verdict in failed} == expected


def test_a_script_of_a_package_has_its_relative_imports(folder):
    Path("mine").mkdir()
    Path("mine/__init__.py").touch()
    Path("mine/train.py").write_text(f"from .place import nothing\n{SCRIPT}")
    Path("mine/place.py").write_text("nothing = None\n")
    assert failed("script", "mine/train.py", "2") == {}


def test_an_error_of_the_script_names_its_line(folder):
    with pytest.raises(LoopFailed, match=r"^ValueError: .*: correct your .*train.py, line 7"):
        preflight_program("script", ["train.py", "half"], num_steps=3)
    assert Path("log.txt").read_text() == "before\n"


@pytest.mark.parametrize(
    ("source", "kind", "expected"),
    [
        (HUGGING_FACE, "right", set()),
        (HUGGING_FACE, "wrong", {"loop/accumulation"}),
        (LIGHTNING, "right", set()),
        (LIGHTNING, "wrong", {"loop/zeroed"}),
    ],
    ids=["Trainer", "a Trainer that ignores num_items_in_batch", "Lightning", "manual Lightning"],
)
def test_the_loop_of_a_trainer_is_checked(folder, source, kind, expected):
    Path("mine.py").write_text(source)
    assert set(failed("trainer", f"mine.py:{kind}")) == expected
    assert files(folder) == {"train.py", "log.txt", "mine.py"}


# Changes of what was there before, and whether the loop goes on.
CHANGES = [
    ("with open('link.txt', 'a') as file: file.write('more')", True),
    ("os.remove('link.txt')", True),
    ("os.replace('log.txt', 'link.txt')", True),
    ("os.makedirs('new/deep'); open('new/deep/a', 'w').close(); os.rename('new', 'newer')", True),
    ("os.rename('kept', 'moved')", False),
    ("__import__('shutil').rmtree('kept', ignore_errors=True)", False),
    ("os.remove('kept/empty.txt'); os.rmdir('kept')", False),
]


@pytest.mark.parametrize(("change", "goes_on"), CHANGES)
def test_nothing_that_was_there_is_lost(folder, change, goes_on):
    Path("kept").mkdir()
    Path("kept/empty.txt").touch()
    Path("target.txt").write_text("target")
    Path("link.txt").symlink_to("target.txt")
    before = files(folder)
    changed = ChangedFiles()
    with changed.noticed(), nullcontext() if goes_on else pytest.raises(RuntimeError, match="kept"):
        exec(change, {"os": os})  # noqa: S102 - the change of a user's script
    changed.put_back()
    assert files(folder) == before
    assert Path("link.txt").readlink() == Path("target.txt")
    assert Path("target.txt").read_text() == "target"
    assert Path("log.txt").read_text() == "before\n"


def test_a_file_too_large_for_a_copy_is_not_changed(folder, monkeypatch):
    monkeypatch.setattr(loop_run, "LARGEST_COPY", 3)
    changed = ChangedFiles()
    with changed.noticed(), pytest.raises(RuntimeError, match=r"log\.txt, which is too large"):
        Path("log.txt").write_text("after")
    changed.put_back()
    assert Path("log.txt").read_text() == "before\n"
