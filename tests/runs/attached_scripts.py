"""Run a training script, plain or with `saving` attached, and kill it at a step.

    python tests/runs/attached_scripts.py KILL_AT SCRIPT.py

The process is killed in its optimizer step number KILL_AT, and never for 0.

Proof: `python -m pytest tests/runs/test_attach.py`.
"""

import os
import runpy
import signal
import sys
import warnings

PLAIN = """
import random, sys
import numpy, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Noisy(Dataset):
    def __len__(self):
        return 22
    def __getitem__(self, index):
        noise = torch.rand(4) + random.random() + numpy.random.rand()
        return torch.full((4,), float(index)) / 22 + noise / 9, torch.tensor(index % 3)

workers, generator = int(sys.argv[1]), torch.Generator() if "own" in sys.argv else None
torch.manual_seed(3); random.seed(3); numpy.random.seed(3)
model = nn.Sequential(
    nn.Linear(4, 16), nn.Dropout(0.3), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=workers, generator=generator)
for epoch in range(3):
    model.train()
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("loss", epoch, loss.item().hex(), flush=True)
    scheduler.step()
    model.eval()
    with torch.no_grad():
        batches = DataLoader(Noisy(), 11)
        dev = sum(nn.functional.cross_entropy(model(x), y).item() for x, y in batches)
    print("dev", epoch, dev.hex(), scheduler.get_last_lr(), flush=True)
torch.save(model.state_dict(), "weights.pt")
"""

CHANGES = (
    ("import numpy, torch\n", "import numpy, torch\nfrom curry_train.runs import saving\n"),
    (
        "for epoch in range(3):\n",
        'run = saving(model, optimizer, scheduler, runs="run", '
        "rollback_every=2, recovery_every=None)\n"
        "for epoch in run.epochs(range(3)):\n",
    ),
    ("in loader:\n", "in run.batches(loader):\n"),
    ("        optimizer.step()\n", "        optimizer.step()\n        run.step(loss=loss)\n"),
    ('    print("dev"', '    run.measured(dev_loss=dev)\n    print("dev"'),
    ("torch.save(", "run.close()\ntorch.save("),
)


# Changes that turn the plain script into one for several ranks.
ON_RANKS = (
    ("import random, sys\n", "import os, random, sys\n"),
    (
        "torch.manual_seed(3); random.seed(3); numpy.random.seed(3)\n",
        "import torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "from torch.utils.data.distributed import DistributedSampler\n"
        "rank = int(os.environ['RANK'])\n"
        "dist.init_process_group('gloo', init_method=os.environ['MEET'], rank=rank, world_size=2)\n"
        "torch.manual_seed(3 + rank); random.seed(3 + rank); numpy.random.seed(3 + rank)\n",
    ),
    ("optimizer = ", "model = DistributedDataParallel(model)\noptimizer = "),
    ("loader = ", "sampler = DistributedSampler(Noisy())\nloader = "),
    ("batch_size=4, shuffle=True", "batch_size=3, sampler=sampler"),
    ("    model.train()\n", "    sampler.set_epoch(epoch)\n    model.train()\n"),
    (
        'torch.save(model.state_dict(), "weights.pt")',
        'torch.save(model.state_dict(), f"weights-{rank}.pt")\nos._exit(0)',
    ),
)


def on_ranks(script):
    """Change the script for two gloo ranks with a DistributedSampler and their own noise."""
    return _changed(script, ON_RANKS)


def attached():
    """Return the script with the few lines that `saving` needs."""
    return _changed(PLAIN, CHANGES)


def _changed(script, changes):
    for old, new in changes:
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script


def start(folder, script, *words, at=0, **environment):
    """Start the script in a folder; it is killed in its optimizer step `at`, and never for 0."""
    from ..command_runs import started
    from ..warm_python import warm_python

    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(script)
    return started(warm_python(), __file__, at, "script.py", *words, cwd=folder, **environment)


def flip_a_bit(run_folder, name="*.distcp"):
    """Flip a bit in the largest file of this name in the newest checkpoint; return its step."""
    from curry_train.runs import SavedRun

    from ..store_models import flip_largest

    newest = SavedRun(run_folder).latest()
    flip_largest(run_folder / newest.folder, name)
    return newest.step


def kill_at(step):
    """Kill this process during the optimizer step with this number."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    count = 0

    def after_step(*_):
        nonlocal count
        count += 1
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(after_step)


if __name__ == "__main__":
    # The tests keep each worker to one core, and torch warns of more loaders than cores.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    kill_at(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
