"""A workload read off a script trains as its first step, and the script goes no further.

python -m pytest tests/workloads/test_from_script.py
"""

import atexit
import copy
import importlib.util
import runpy
import socket
import sys
from pathlib import Path

import pytest
import torch

from curry_train.plan import plan
from curry_train.primitives import GradientAccumulation, train_window
from curry_train.workloads import Case, WorkloadError, load_workload
from curry_train.workloads.optimizers import SteppedTogether

from ..command_runs import ran
from ..plan_models import measured
from ..toy_steps import all_equal
from .user_scripts import ARGUMENTS, DATA, SCRIPTS

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with the module that the scripts share, and go there.

    Accelerate keeps one state in a process: what an earlier test left is undone.
    """
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
    (tmp_path / "shared.py").write_text(DATA)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("shared", None)


def launch(monkeypatch):
    """Set the variables that torchrun gives to one process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost"}
    for name, value in (variables | {"MASTER_PORT": port}).items():
        monkeypatch.setenv(name, str(value))


def written(folder, name, monkeypatch):
    """Write a script, and return the text from which its workload is loaded."""
    if "torchrun" in name:
        launch(monkeypatch)
    (folder / f"{name}.py").write_text(SCRIPTS[name])
    return " ".join((f"script={name}.py", *ARGUMENTS.get(name, ())))


def loaded(text):
    """Write a script into the current folder, and load its workload."""
    Path("train.py").write_text(text)
    return load_workload("script=train.py")


def files(folder):
    found = (one.name for one in folder.rglob("*") if one.is_file())
    return {name for name in found if not name.endswith((".py", ".pyc"))}


def step_of(workload):
    """Take the optimizer step of a workload on its own batch, and return the module."""
    case = Case(workload, batch_size=workload.own_batch)
    module = case.build()
    batches = [case.batch() for _ in range(workload.accumulation)]
    window = next(GradientAccumulation(len(batches)).windows(iter(batches), count=workload.count))
    optimizer = workload.optimizer(module)
    if isinstance(optimizer, torch.optim.LBFGS):

        def closure():
            optimizer.zero_grad()
            loss = workload.mean_loss(module, batches[0])
            loss.backward()
            return loss

        optimizer.step(closure)
    else:
        train_window(module, window, workload.loss, optimizer)
    return module


def run_to_the_end(folder, name, monkeypatch):
    """Run a script as Python would, and return what it has trained."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *ARGUMENTS.get(name, ())])
    monkeypatch.setattr(torch, "compile", uncompiled)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: None)
    monkeypatch.setattr(atexit, "register", lambda function, *arguments: function)
    runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
    return torch.load(folder / "trained.pt")


def uncompiled(model=None, **options):
    return uncompiled if model is None else model


# Files that scripts write before their first step.
WRITTEN_BEFORE = {"event_writer": {"config.txt"}, "lightning_cli": {"config.yaml"}}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_step_of_what_is_read_is_the_scripts_own_first_step(folder, monkeypatch, name):
    """And nothing was written, in finally blocks and at the exit of Python too."""
    if name == "lightning_cli":
        reason = "jsonargparse is in another environment: make long has it"
        pytest.importorskip("jsonargparse", reason=reason)
    at_exit = []
    register = atexit.register
    monkeypatch.setattr(
        atexit, "register", lambda one, *given: (at_exit.append(one), register(one, *given))
    )
    workload = load_workload(written(folder, name, monkeypatch))
    written_before = {one for one in files(folder) if not one.startswith("events.")}
    assert written_before == WRITTEN_BEFORE.get(name, set())
    module = step_of(workload)
    assert "write" not in [one.__name__ for one in at_exit]
    trained = run_to_the_end(folder, name, monkeypatch)
    mine = module.state_dict()
    assert mine.keys() == trained.keys()
    assert [key for key in mine if not torch.equal(mine[key], trained[key])] == []


def test_the_factory_that_is_printed_makes_the_same_workload(folder):
    (folder / "train.py").write_text(SCRIPTS["argparse_main"])
    ended = ran("memory --script train.py --factory kept.py -- --lr 0.5")
    assert "wrote kept.py: use it as --model kept.py:build" in ended.output
    assert "AdamW, lr 0.5" in ended.output
    factory = load_workload("kept.py:build")
    direct = load_workload("script=train.py --lr 0.5")
    case = Case(direct, batch_size=8)
    module = case.build()
    assert torch.equal(factory.loss(module, case.batch()), direct.loss(module, case.batch()))
    # The view had the sizes of the script's batch.
    assert direct.loss(module, case.batch(3)).isfinite()
    assert "torch.nn.functional.cross_entropy(value_1, batch[" in (folder / "kept.py").read_text()
    assert importlib.util.find_spec("shared") is not None


def require_sum_over_samples(workload, *sizes):
    """Compare the loss of a batch with the sum of those of its parts."""
    case = Case(workload, batch_size=sum(sizes))
    module, batch = case.build(), case.batch()
    parts = sum(workload.loss(module, part) for part in case.split(batch, [*sizes]))
    assert torch.allclose(parts, workload.loss(module, batch), rtol=1e-6)


def test_flattened_targets_belong_to_their_rows(folder, monkeypatch):
    workload = load_workload(written(folder, "shifted_targets", monkeypatch))
    assert workload.is_divisible
    require_sum_over_samples(workload, 1, 3)


@pytest.mark.parametrize(
    "call",
    [
        "F.cross_entropy(model(inputs, None), torch.arange(5), weight=torch.ones(10))",
        "model(inputs, torch.zeros(10, 10)).sum()",
        "model(torch.tensor(0.5), inputs).sum()",
    ],
)
def test_what_only_happens_to_be_longer_is_no_flattened_target(folder, call):
    workload = loaded(f"""
from shared import *

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 10)
    def forward(self, x, other):
        return self.head(other if x.dim() == 0 else x)

model, inputs = Model(), torch.randn(5, 6)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{call}.backward()
optimizer.step()
""")
    assert "flatten" not in workload.factory


LOOPS = {
    "next step": [
        """
for _ in range(2):
    view = model(x).view(5)
    sparse = view.to_sparse()
    sparse.sum().backward()
    sgd.step()
""",
        "for _ in range(2):\n    output = model(x)\n    output.sum().backward()\n    sgd.step()",
        """
def forward():
    output = model(x)
    return {"output": output, "loss": output.sum()}
def main():
    step = 0
    while step < 2:
        step += 1
        found = forward()
        found["loss"].backward()
        sgd.step()
main()
""",
    ],
    "loss": [
        "for _ in range(2):\n    model(x).sum().backward()\n    sgd.step()",
        """
def loss_of():
    output = model(x)
    return output.sum()
for _ in range(2):
    loss = loss_of()
    loss.backward()
    sgd.step()
""",
        """
import asyncio, multiprocessing, signal, time
signal.setitimer(signal.ITIMER_REAL, 0.1)
time.sleep(0.2)
multiprocessing.get_context("fork").Process(target=time.sleep, args=[600]).start()
def train():
    model(x).sum().backward()
    sgd.step()
async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print)
    await asyncio.to_thread(train)
asyncio.run(main())
""",
    ],
}


@pytest.mark.parametrize(("until", "loop"), [(key, one) for key in LOOPS for one in LOOPS[key]])
def test_it_shows_how_long_it_holds_what_the_model_returned(folder, until, loop):
    start = "from shared import *\nmodel, x = nn.Linear(6, 1), torch.randn(5, 6)\n"
    start += "sgd = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    assert loaded(start + loop).output_until == until


NOTES = {
    "gan": "and the others (Adam) train other parameters, which are left out",
    "own_batches": "it uses compile, which is left out",
    "amp_scaler": "it uses GradScaler, whose scale is left out",
    "ddp_under_torchrun": "it trains on ranks: this is one, without its wrapper",
    "accumulation": "2 batches a step",
    "matrices_and_others": "SGD, lr 0.1; AdamW, lr 0.01",
    "step_in_backward": "it steps inside of backward; here all gradients are there",
}


@pytest.mark.parametrize("name", NOTES)
def test_what_is_left_out_is_said(folder, monkeypatch, name):
    assert NOTES[name] in "; ".join(load_workload(written(folder, name, monkeypatch)).notes)


def test_a_module_of_a_package_runs_with_its_relative_imports(folder):
    package = folder / "project/training"
    package.mkdir(parents=True)
    for one in (package, package.parent):
        (one / "__init__.py").touch()
    (package / "model.py").write_text("from shared import net\n")
    text = SCRIPTS["argparse_main"].replace("import *", "import *\nfrom .model import net")
    (package / "train.py").write_text(text)
    workload = load_workload("script=project/training/train.py --lr 0.1")
    assert workload.notes[0].startswith("project/training/train.py, at train.py:")
    assert workload.own_batch == 8


def test_a_plan_counts_the_state_of_both_optimizers(folder, monkeypatch):
    spec = written(folder, "matrices_and_others", monkeypatch)
    workload = load_workload(spec)
    timeline = measured(workload, 8, optimizer=workload.optimizer)
    found = plan(spec, 2**30, global_batch=8, microbatch=8, chunked_loss=False)
    assert found.peak_bytes == timeline.peak.bytes_alive


def test_optimizers_that_step_together_load_their_state():
    def made(layer, rate):
        parameters = layer.parameters()
        return SteppedTogether([torch.optim.SGD([one], rate, momentum=0.9) for one in parameters])

    layer = torch.nn.Linear(2, 2)
    optimizer = made(layer, 0.1)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    other = copy.deepcopy(layer)
    loaded = made(other, 0.5)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, same in zip(layer.parameters(), other.parameters(), strict=True):
        same.grad = one.grad
    SteppedTogether(optimizer.optimizers).step()
    loaded.step()
    assert all_equal(layer.parameters(), other.parameters())


def test_an_optimizer_that_needs_a_gpu_to_be_made_is_taken_by_its_layout(folder):
    workload = loaded(
        """
import torch
class CPUOffloadOptimizer(torch.optim.Optimizer):
    __module__ = "torchao.optim.cpu_offload"
    def __init__(self, params, **options): raise AssertionError("only CUDA & XPU")
layer = torch.nn.Linear(64, 64)
optimizer = CPUOffloadOptimizer([{"params": layer.parameters(), "lr": 0.5}], weight_decay=0.1)
torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
layer(torch.ones(2, 64)).square().mean().backward()
optimizer.step()
"""
    )
    layer = workload.build()
    made = workload.optimizer(layer)
    assert (made.param_groups[0]["lr"], made.param_groups[0]["weight_decay"]) == (0.5, 0.1)
    layer(torch.ones(2, 64)).sum().backward()
    made.step()
    assert {*made.state} == {layer.bias}
    assert made.on_host() == [layer.weight]


REFUSED = {
    "print('done')": "it made no optimizer step: weights",
    "import sys; sys.exit(3)": "it ended with 3 before an optimizer step",
    "\nraise KeyError('LOCAL_RANK')": r"it raised KeyError: 'LOCAL_RANK' \(train.py:2\).*launcher",
    "\nraise AssertionError('Torch not compiled with CUDA enabled')": (
        r"it raised .* \(train.py:2\); this machine has no CUDA.*is_available.*--target h100"
    ),
    "import torch\ntorch.multiprocessing.spawn(print, nprocs=4)": "it starts 4 processes",
    """
import torch
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, gradient): return gradient * 2
layer = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
(Double.apply(layer(torch.ones(3, 2))).mean() + layer(torch.ones(3, 2)).mean()).backward()
optimizer.step()
""": r"the loss needs a tensor of shape \(3, 1\) that no function of torch has made",
    """
import torch
layer = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
computed = {name: 2 * one for name, one in layer.named_parameters()}
torch.func.functional_call(layer, computed, torch.ones(3, 2)).mean().backward()
optimizer.step()
""": "it calls a Linear on parameters that it computes",
    """
import torch
from torch.distributed.fsdp import fully_shard
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
layer = fully_shard(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
layer(torch.ones(3, 2)).mean().backward()
optimizer.step()
""": "its model is sharded by fully_shard, which can't be copied: shard it only on several ranks",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_can_not_be_taken_over_is_said(folder, text, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(WorkloadError, match=f"(?s)train.py: {REFUSED[text]}"):
        loaded(text)


def test_a_loss_that_is_a_sum_over_samples_stays_one(folder):
    workload = loaded(SCRIPTS["two_modules"].replace(".mean()", ".sum()"))
    assert "its loss is a sum over samples" in workload.notes[-1]
    require_sum_over_samples(workload, 3, 5)


@pytest.mark.parametrize("name", ["accumulation", "ddp_under_torchrun"])
def test_a_process_group_that_was_there_stays(folder, monkeypatch, name):
    """Gates on several ranks read the script in each rank, inside their own group."""
    launch(monkeypatch)
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        load_workload(written(folder, name, monkeypatch))
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()
