"""The compile memory budget with inductor and its cache, and with DDP and FSDP2.

python -m pytest tests/primitives/test_memory_budget_inductor.py
"""

import os
import shutil
import subprocess

import pytest
import torch
from compiled_models import TRACING, block_class, build, by_torch_alone, dropout, loss, rows, step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tree import ROOT
from warm_python import warm_python

from curry_train.core.measure_compiled import measure_allocated, saved_bytes
from curry_train.core.parity import compare
from curry_train.gates.two_ranks import run_on_ranks
from curry_train.primitives.compile_budget import memory_budget
from curry_train.workloads.models import transformer
from curry_train.workloads.workload import Case

pytestmark = TRACING
needs_cpp = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="inductor needs a C++ compiler"
)


def gradients_on_ranks():
    case = Case(transformer(depth=2, dim=32, length=16, vocabulary=64))
    batch, found = case.split(case.batch(4), [2, 2])[torch.distributed.get_rank()], {}
    for kind in ("ddp", "fsdp2"):
        gradients, saved = [], []
        for budget in (None, 0.2):
            model = case.build()
            if budget is not None:
                memory_budget(model, budget, backend="aot_eager")
            if kind == "ddp":
                model = nn.parallel.DistributedDataParallel(model)
            else:
                for block in [*model.layers, model]:
                    fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
            for _ in range(2):
                model.zero_grad()
                case.workload.mean_loss(model, batch).backward()
            gradients.append(
                [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]
            )
            saved.append(measure_allocated(model, batch, case.workload.mean_loss).held_bytes)
        found[kind] = all(map(torch.equal, *gradients)), saved
    return found


@pytest.mark.long
def test_two_ranks_have_the_same_gradients_and_fewer_bytes_under_ddp_and_fsdp2():
    for found in run_on_ranks(f"{__file__}:gradients_on_ranks"):
        for equal, saved in found.values():
            assert equal
            assert saved[1] < 0.8 * saved[0]


@pytest.mark.long
@needs_cpp
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_inductor_draws_once_at_zero_and_torchs_own_setting_draws_again(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    block = block_class(dropout)
    models = [build(block).to(device) for _ in range(2)]
    for model, budget in zip(models, (1.0, 0.0), strict=True):
        memory_budget(model, budget, batch=rows().to(device), loss=loss)
    batch = rows().to(device)
    assert compare(*[step(model, batch) for model in models]).holds
    assert saved_bytes(models[1], batch, loss) < 0.5 * saved_bytes(models[0], batch, loss)
    if device == "cpu":  # as long as this holds, draws must be kept
        alone = by_torch_alone(block_class(dropout), 0.0, backend="inductor")
        assert not compare(step(models[0]), step(alone), tolerance=0.05).holds


IN_A_PROCESS = """
import sys
import warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from torch._dynamo.utils import counters
from curry_train.core.measure_compiled import saved_bytes
from curry_train.primitives.compile_budget import memory_budget

for budget in map(float, sys.argv[1:]):
    block = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 16), nn.Sigmoid())
    model = nn.Sequential(block)
    memory_budget(model, budget, blocks="0")
    # The cache is written once backward is compiled too.
    model(torch.ones(64, 16)).sum().backward()
    print(saved_bytes(model, torch.ones(64, 16), lambda model, batch: model(batch).sum()))
print(counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.long
@needs_cpp
def test_the_compilers_cache_distinguishes_budgets_across_processes(tmp_path):
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "template")}

    def run(*budgets):
        command = [warm_python(), "-c", IN_A_PROCESS, *budgets]
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
        )
        return list(map(int, done.stdout.split()))

    most, least, hits = run("1.0", "0.0")
    assert most > least
    assert hits == 0
    assert run("0.0") == [least, 1]
