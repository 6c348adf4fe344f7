"""Scripts and trainers run in a process of their own, and leave no trace.

Run: `python -m pytest tests/gates/test_loop_run.py`.
"""

import functools
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from curry_train.gates import loop_run
from curry_train.gates.loop_run import ChangedFiles, LoopFailed, preflight_program, put_back

from ..command_runs import wait_for
from ..warm_python import start_warm


@pytest.fixture(autouse=True)
def interpreters_have_imported_torch(monkeypatch):
    start_warm(monkeypatch)


SCRIPT = """\
import io
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
        for place in io.BytesIO(), "output/today/weights.pt":
            torch.save(model.state_dict(), f=place)
            if number > 1:
                if isinstance(place, io.BytesIO):
                    place.seek(0)
                model.load_state_dict(torch.load(place))
        from safetensors.torch import save_file
        save_file(model.state_dict(), f"weights_{number}.safetensors")
        with open("output/today/losses.txt", "a") as losses:
            losses.write(str(loss.item()))
        os.replace("log.txt", "log_of_today.txt")
        os.replace("log_of_today.txt", "log.txt")
os.remove("log.txt")
"""

RANKS = """\
import contextlib
import os
import sys

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

kind = sys.argv[1]


def train(rank):
    size = int(os.environ["LOCAL_WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(0)
    # Of three microbatches the last one is a window by itself.
    num_samples = 24 if kind == "short" else 128
    data = TensorDataset(torch.randn(num_samples, 8), torch.randint(5, (num_samples,)))
    bare = torch.nn.Linear(8, 5)
    is_bare = kind in ("unwrapped", "averaged", "summed")
    model = bare if is_bare else DistributedDataParallel(bare)
    optimizer = torch.optim.AdamW(bare.parameters(), 1e-2)
    sampler = None if kind == "same" else DistributedSampler(data)
    if kind == "joins":
        contextlib.ExitStack().enter_context(model.join())
    for epoch in range(9):
        if sampler:
            sampler.set_epoch(epoch)
        for number, (inputs, labels) in enumerate(DataLoader(data, 4, sampler=sampler)):  # fetch
            if kind == "joins" and rank and number > 1:
                break
            is_never = kind in ("never", "local")
            is_last = number % 2 == 1 or number == num_samples / 8 - 1
            is_without = not is_bare and (is_never or not (kind == "often" or is_last))
            with model.no_sync() if is_without else contextlib.nullcontext():
                loss = F.cross_entropy(model(inputs), labels) / 2  # forward
                if kind == "counted":
                    labels[rank:1] = -100
                    count = (labels >= 0).sum()
                    torch.distributed.all_reduce(count)
                    loss = F.cross_entropy(model(inputs), labels, reduction="sum") / count / 2
                if kind == "passes":
                    loss = (loss + F.cross_entropy(model(inputs), labels) / 2) / 2
                (loss / 2 if kind in ("twice", "averaged") else loss).backward()  # backward
                if kind == "parts":
                    model(inputs).square().mean().div(2).backward()
            if is_last and not (kind == "uneven" and rank and number > 2):
                for one in bare.parameters() if kind in ("averaged", "summed") else ():
                    torch.distributed.all_reduce(one.grad)
                optimizer.step()  # step
                optimizer.zero_grad()
            if number % 4 == 3 and kind == "local":
                for one in bare.parameters():
                    torch.distributed.all_reduce(one.data.div_(2))


if __name__ == "__main__":
    if kind in ("averaged", "summed"):
        torch.multiprocessing.spawn(train, nprocs=2)
    else:
        train(int(os.environ["RANK"]))
"""

SHARDED = """\
import sys

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

torch.distributed.init_process_group("gloo")
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
for layer in (model[0], model):
    fully_shard(layer, mesh=mesh)
    if "divides" in sys.argv:
        layer.set_force_sum_reduction_for_comms(True)  # gloo has no other one
        layer.set_gradient_divide_factor(1.0)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
torch.manual_seed(torch.distributed.get_rank())
for number in range(40):
    model.set_requires_gradient_sync(number % 2 == 1)
    loss = F.cross_entropy(model(torch.randn(4, 8)), torch.randint(5, (4,)), reduction="sum")
    (loss / (8 if "mean" in sys.argv else 16)).backward()  # backward
    if number % 2:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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


def trainer(kind, **options):
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=False, **options,
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


class LeftInEvalMode(Trainer):
    def compute_loss(self, model, *args, **options):
        return super().compute_loss(model.eval(), *args, **options)


class OfTheHeadAlone(Trainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.AdamW(self.model.lm_head.parameters())
        return self.optimizer


def right():
    return trainer(Trainer)


def wrong():
    return trainer(OwnLoss)


def eval_mode():
    return trainer(LeftInEvalMode, attention_dropout=0.1)


def head_alone():
    return trainer(OfTheHeadAlone)


# As with adapters: blocks recompute from a frozen embedding.
def reentrant():
    made = trainer(Trainer)
    made.model.model.embed_tokens.requires_grad_(False)
    made.model.gradient_checkpointing_enable({"use_reentrant": True})
    made.model.disable_input_require_grads()
    return made
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


class Divided(Module):
    def training_step(self, batch, index):
        return super().training_step(batch, index) / 2


class Scheduled(Module):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def right():
    return trainer(Scheduled(), accumulate_grad_batches=2, gradient_clip_val=1.0)


def wrong():
    return trainer(ByHand())


def divided():
    return trainer(Divided(), accumulate_grad_batches=2)
"""

ACCELERATE = """\
import sys

import torch
from accelerate import Accelerator
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

kind = sys.argv[1]
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
data = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(5, (64,))), 4, shuffle=True)
model = torch.nn.Linear(8, 5)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
bare = optimizer
model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
for _ in range(9):
    for inputs, labels in data:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), labels)
            accelerator.backward(loss / 2 if kind == "divided" else loss)
            if accelerator.sync_gradients or kind == "clipped":
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            (bare if kind == "bare" else optimizer).step()
            scheduler.step()
            optimizer.zero_grad()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    Path("log.txt").write_text("before\n")
    return tmp_path


def failed(kind, *words, **options):
    verdicts = preflight_program(kind, words, num_steps=3, **options)
    return {verdict.gate: verdict.measured for verdict in verdicts if verdict.passed is False}


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("divided_by", "expected"),
    [("2", {}), ("1", "train.py:16: the gradients of a window are 2 times those of one batch")],
)
def test_a_script_is_checked_and_its_files_are_put_back(folder, divided_by, expected):
    found = failed("script", "train.py", divided_by)
    assert found == ({"loop/accumulation": expected} if expected else {})
    assert files(folder) == {"train.py", "log.txt"}
    assert Path("log.txt").read_text() == "before\n"


HEALTHY_RANKS = ("right", "averaged", "passes", "parts", "local", "short", "joins")


@pytest.mark.parametrize(
    ("kind", "line", "expected"),
    [
        *((kind, "", "") for kind in HEALTHY_RANKS),
        ("same", "fetch", "all ranks see the same samples"),
        ("never", "forward", "a step without a sync between ranks"),
        ("often", "forward", "2 syncs in a window"),
        ("unwrapped", "step", "weights differ from rank to rank after the step"),
        ("summed", "backward", "gradients are summed over the ranks"),
        ("twice", "backward", "gradients are averaged over the ranks twice"),
        ("counted", "backward", "gradients are averaged over the ranks twice"),
        ("uneven", "step", "steps [3, 1]"),
    ],
)
def test_ranks_are_compared(folder, kind, line, expected):
    Path("ranks.py").write_text(RANKS)
    found = failed("script", "ranks.py", kind, num_ranks=2)
    (number,) = [
        at for at, text in enumerate(RANKS.splitlines(), 1) if text.endswith(f"  # {line}")
    ] or [0]
    assert found == ({"loop/ranks": f"ranks.py:{number}: {expected}"} if expected else {})


WORKERS = """\
import os
import subprocess

import torch

child = subprocess.Popen(["sleep", "60"])
os.write(2, f"worker {child.pid} ".encode())


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, number):
        os.write(2, f"worker {os.getpid()} ".encode())
        return torch.randn(8)


model = torch.nn.Linear(8, 5)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for rows in torch.utils.data.DataLoader(Rows(), num_workers=1):
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    optimizer.step()
"""


def test_workers_of_a_loader_end_with_the_loop(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(WORKERS)
    preflight_program("script", ["train.py"])
    for number in re.findall(r"worker (\d+)", capfd.readouterr().err):
        # The command line of a process that has ended, and is not waited for, is empty.
        words = Path("/proc", number, "cmdline")
        assert not words.exists() or not words.read_bytes()


@pytest.mark.parametrize("kind", ["mean", "divides", "terms"])
def test_a_sharded_model_is_checked_on_two_ranks(folder, kind):
    """FSDP2 averages, so that a loss divided by the terms of all ranks is divided twice."""
    Path("sharded.py").write_text(SHARDED)
    measured = "gradients are averaged over the ranks twice"
    expected = {"loop/ranks": f"sharded.py:22: {measured}"} if kind == "terms" else {}
    assert failed("script", "sharded.py", kind, num_ranks=2) == expected


def test_a_script_of_a_package_has_its_relative_imports(folder):
    Path("mine").mkdir()
    Path("mine/__init__.py").touch()
    Path("mine/train.py").write_text(f"from .place import nothing\n{SCRIPT}")
    Path("mine/place.py").write_text("nothing = None\n")
    assert failed("script", "mine/train.py", "2") == {}


WITH_AN_UNUSED_LAYER = """\
class Model(torch.nn.Linear):
    def forward(self, inputs):
        self.unused(inputs)
        return super().forward(inputs)


model = Model(8, 5)
model.unused = torch.nn.Linear(8, 5)
"""


SAID = {
    "the loop ended after 2 of 3 steps": SCRIPT.replace("1000", "4"),
    # The loss of a model may well not depend on all of its layers.
    "in an optimizer, but without a gradient: unused.bias, unused.weight": SCRIPT.replace(
        "model = torch.nn.Linear(8, 5)\n", WITH_AN_UNUSED_LAYER
    ),
    "no data: make some": "import sys\nsys.exit('no data: make some')",
    "preflight: train.py:33 was not reached; if it trains too": f"{SCRIPT}finetune(model)\n",
}


@pytest.mark.parametrize("text", SAID)
def test_what_a_loop_left_out_is_said_and_no_fault(folder, capfd, text):
    Path("train.py").write_text(SAID[text])
    assert failed("script", "train.py", "2") == {}
    assert text in " ".join(capfd.readouterr().err.split())


def test_an_error_of_the_script_names_its_line(folder):
    with pytest.raises(LoopFailed, match=r"^ValueError: .*: correct your .*train.py, line 8"):
        failed("script", "train.py", "half")
    assert Path("log.txt").read_text() == "before\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import os\nos._exit(5)", "with status 5 .*: leave os._exit out"),
        ("raise KeyError('RANK')", "line 1: .*; it is for a launcher: put RANK=0"),
        (RANKS, "starts 2 ranks of its own: give --ranks 2"),
    ],
)
def test_a_script_without_a_result_is_told_what_to_do(folder, text, message):
    Path("train.py").write_text(text)
    with pytest.raises(LoopFailed, match=message):
        failed("script", "train.py", "summed")


# Of each framework a healthy program and faults: the check that finds it.
PROGRAMS = [
    ("Trainer", "right", ""),
    ("Trainer", "wrong", "accumulation"),
    ("Trainer", "eval_mode", "mode"),
    ("Trainer", "head_alone", "optimizer"),
    ("Trainer", "reentrant", "moves"),
    ("Lightning", "right", ""),
    ("Lightning", "wrong", "zeroed"),
    ("Lightning", "divided", "accumulation"),
    ("Accelerate", "right", ""),
    ("Accelerate", "divided", "accumulation"),
    ("Accelerate", "clipped", "clipping"),
    ("Accelerate", "bare", "accumulation zeroed"),
]
SOURCES = {"Trainer": HUGGING_FACE, "Lightning": LIGHTNING, "Accelerate": ACCELERATE}


@pytest.mark.parametrize(("framework", "kind", "expected"), PROGRAMS)
def test_the_loop_of_a_framework_is_checked(folder, framework, kind, expected):
    Path("mine.py").write_text(SOURCES[framework])
    is_script = framework == "Accelerate"
    words = ["script", "mine.py", kind] if is_script else ["trainer", f"mine.py:{kind}"]
    assert sorted(failed(*words)) == [f"loop/{check}" for check in expected.split()]
    assert files(folder) == {"train.py", "log.txt", "mine.py"}


# A few steps can't show that a call is missing, so the code is searched for it. Here no line steps
# the schedule, and none looks for infinities.
UNCALLED = """\
import torch

model = torch.nn.Linear(8, 5)
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
scaler = torch.amp.GradScaler("cpu")
for epoch in range(9):
    for _ in range(8):
        scaler.scale(model(torch.randn(2, 8)).square().mean()).backward()
        scaler.unscale_(optimizer)
        optimizer.step()
        scaler.update()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            "    schedule.step  # lacks its brackets\n",
            {"loop/results": 14, "loop/schedule": 5, "loop/scaler": 11},
        ),
        ("        assert model.weight.isfinite().all()\n    schedule.step()\n", {}),
    ],
)
def test_calls_are_missing_if_no_line_has_them(folder, more, expected):
    Path("mine.py").write_text(UNCALLED + more)
    found = failed("script", "mine.py")
    assert {gate: int(text.split(":")[1]) for gate, text in found.items()} == expected


def test_the_schedule_of_accelerate_steps_once_for_each_process(folder):
    Path("mine.py").write_text(ACCELERATE)
    assert failed("script", "mine.py", "right", num_ranks=2) == {}


BEHIND = """\
import os
import time

import torch

model = torch.nn.Linear(8, 5)
optimizer = torch.optim.AdamW(model.parameters())
for number in range(12 if os.environ["RANK"] == "1" else 2):
    optimizer.zero_grad()
    model(torch.randn(2, 8)).square().mean().backward()
    optimizer.step()
    time.sleep(0.4)
"""


def test_a_rank_that_is_behind_is_waited_for_while_it_makes_steps(folder, monkeypatch):
    monkeypatch.setattr(loop_run, "SECONDS_TO_FOLLOW", 3.0)
    Path("behind.py").write_text(BEHIND)
    verdicts = preflight_program("script", ["behind.py"], num_steps=20, num_ranks=2)
    measured = next(verdict.measured for verdict in verdicts if verdict.gate == "loop/ranks")
    assert measured == "behind.py:11: steps [2, 12]"


DEEP = """\
import sys
from types import SimpleNamespace

import torch


class Model(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        layers = [torch.nn.Linear(config.width, config.width) for _ in range(config.num_layers)]
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, given):
        return self.layers(given)


# The whole model has 108 GB.
model = Model(SimpleNamespace(num_layers=int(sys.argv[1]), width=int(sys.argv[2])))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(2, int(sys.argv[2]))).square().mean().backward()
    optimizer.step()
"""


def test_a_model_too_large_for_the_machine_is_built_with_fewer_layers(folder):
    Path("deep.py").write_text(DEEP)
    assert preflight_program("script", ["deep.py", "4000", "2600"], num_steps=3, num_layers=2)
    with pytest.raises(LoopFailed, match=r"--shrink: no model is built from a configuration"):
        failed("script", "deep.py", "2", "8", num_layers=2)
    with pytest.raises(LoopFailed, match="--shrink 2"):
        failed("script", "deep.py", "1", "10000000")


WRITING = """\
import os
import threading

import torch


def write():
    number = 0
    while True:
        number += 1
        os.makedirs(f"made/{number % 50}", exist_ok=True)
        open(f"made/{number % 50}/{number}", "w").close()


os.mkdir("made")
threading.Thread(target=write, daemon=True).start()
model = torch.nn.Linear(8, 5)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(9):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""


def test_files_that_a_thread_goes_on_to_write_are_removed_too(folder):
    Path("writing.py").write_text(WRITING)
    before = files(folder)
    failed("script", "writing.py")
    assert files(folder) == before


CHANGING = """\
import os
import time

os.remove("log.txt")
os.mkdir("made")
open("train.py", "w").close()
os.rename("train.py", "moved.py")
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_the_files_as_they_were(folder, number):
    Path("changing.py").write_text(CHANGING)
    before = files(folder)
    # Not the warm one, which would get the signal in place of the command.
    words = [
        f"{sys.prefix}/bin/python",
        "-m",
        "curry_train",
        "preflight",
        "--script",
        "changing.py",
    ]
    # A shell's jobs in the background ignore SIGINT, and so does what they start.
    usual = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, preexec_fn=usual)
    wait_for(Path("moved.py").exists)
    process.send_signal(number)
    assert process.wait(timeout=60)
    assert files(folder) == before


# Changes of what was there before, and whether the loop goes on.
CHANGES = [
    ("with open('link.txt', 'a') as file: file.write('more')", True),
    ("os.remove('link'); os.mkdir('link'); open('link/empty.txt', 'w').close()", True),
    ("os.replace('log.txt', 'link.txt')", True),
    ("os.makedirs('new/deep'); open('new/deep/a', 'w').close(); os.rename('new', 'newer')", True),
    ("os.rename('kept', 'moved')", False),
    ("__import__('shutil').rmtree('kept', ignore_errors=True)", False),
    ("os.remove('kept/empty.txt'); os.rmdir('kept')", False),
]


@pytest.mark.parametrize(("change", "goes_on"), CHANGES)
def test_nothing_that_was_there_is_lost(folder, tmp_path_factory, change, goes_on):
    Path("kept").mkdir()
    Path("kept/empty.txt").touch()
    Path("target.txt").write_text("target")
    Path("link.txt").symlink_to("target.txt")
    Path("link").symlink_to("kept")
    before = files(folder)
    changes = tmp_path_factory.mktemp("changes")
    changed = ChangedFiles(changes)
    with changed.noticed(), nullcontext() if goes_on else pytest.raises(RuntimeError, match="kept"):
        exec(change, {"os": os})  # noqa: S102 - the change of a user's script
    put_back(changes)
    assert files(folder) == before
    assert Path("link.txt").readlink() == Path("target.txt")
    assert Path("target.txt").read_text() == "target"
    assert Path("log.txt").read_text() == "before\n"


def test_a_file_too_large_for_a_copy_is_not_changed(folder, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(loop_run, "LARGEST_COPY", 3)
    changes = tmp_path_factory.mktemp("changes")
    changed = ChangedFiles(changes)
    with changed.noticed(), pytest.raises(RuntimeError, match=r"log\.txt, which is too large"):
        Path("log.txt").write_text("after")
    put_back(changes)
    assert Path("log.txt").read_text() == "before\n"
