"""Predict fine-tuning steps of other libraries, measure them on the CPU, and record both.

    python benchmarks/finetune.py --json evidence/finetune.json   # all: minutes on two cores
    python benchmarks/finetune.py --only Lion lora mixtral        # some, printed
    python benchmarks/finetune.py --only dora --json evidence/finetune.json   # added to the others

`make finetune` installs the libraries beside the project's own environment and runs all rows. A row
is predicted from shapes alone, or says why the model was measured instead, or why a class of the
same layout was. Routers are perturbed
between forward and backward, and the gradients compared with those of the plain model. Adapters
are saved without their base, and resumed.

Proof: `python -m pytest tests/benchmarks/test_finetune.py`.
"""

import argparse
import copy
import importlib.metadata
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import finetune_models
from curry_train.core.wording import provenance, write_json
from curry_train.plan.estimate import Sketch
from curry_train.plan.optimizers import make_optimizer
from curry_train.plan.planner import Infeasible, Planner
from curry_train.plan.shapes import host_bytes
from curry_train.plan.timeline import record_step_storages, timeline_of
from curry_train.primitives import apply_sac, keep_routing, recompute_blocks
from curry_train.runs import StateMismatch, Store, TrainingState, saving
from curry_train.workloads.models import load_workload, mlp
from curry_train.workloads.workload import Case, Workload
from finetune_models import ADAPTERS, EXPERTS, OPTIMIZERS, SAMPLES, VOCABULARY, trained
from side_environment import install_beside

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / ".venv" / "finetune"
REQUIREMENTS = Path(__file__).with_name("finetune_requirements.txt")
MODELS = Path(__file__).with_name("finetune_models.py")
LIBRARIES = ("transformers", "peft", "torchao", "bitsandbytes", "lion-pytorch")
# Models whose plan is applied and measured.
PLANNED = ("lora_on_all_layers", "dora", "lora_on_torchao_int8", "mixtral")
NUM_PERTURBED = 1000
BY_LAYOUT = (
    "torchao makes it on CUDA and XPU alone: a class with the layout of its source is measured"
)

Change = Callable[[nn.Module], object]


def leave(module: nn.Module) -> None:
    """Change nothing."""


def recompute_all(module: nn.Module) -> None:
    """Recompute every block, and keep the choices of routers."""
    recompute_blocks(module)
    keep_routing(module)


TECHNIQUES: dict[str, tuple[Change, bool]] = {
    "plain": (leave, False),
    "recompute, accumulated": (recompute_all, True),
    "sac": (apply_sac, False),
}


def main() -> None:
    """Run the rows that were asked for, print each, and record them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="PATH", help="record the results here")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these rows")
    parser.add_argument("--install", action="store_true", help="install the libraries and end")
    options = parser.parse_args()
    if options.install:
        install_beside(ENVIRONMENT, REQUIREMENTS)
        return
    known = [*OPTIMIZERS, *ADAPTERS, *EXPERTS]
    wanted = options.only or known
    if unknown := sorted({*wanted} - {*known}):
        sys.exit(f"no row {', '.join(unknown)}; there are {', '.join(known)}")

    warnings.simplefilter("ignore")
    rows = []
    for row in rows_of(wanted):
        rows.append(row)
        print(line_of(row), flush=True)
    plans = [plan_row(name) for name in PLANNED if name in wanted]
    routing = perturbed_runs(NUM_PERTURBED) if {*EXPERTS} & {*wanted} else None
    resumes = [resume_row(name) for name in wanted if name in ADAPTERS]
    print(summary_of(rows), plans, resumes, routing)
    if options.json:
        facts = provenance(torch.device("cpu"))
        versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
        found = facts | {"versions": versions, "rows": rows, "plans": plans}
        found |= {"resumes": resumes, "routing": routing}
        path = Path(options.json)
        if options.only and path.exists():
            found = beside_earlier(found, json.loads(path.read_text()), known)
        write_json(options.json, found | {"summary": summary_of(found["rows"])})


def beside_earlier(
    found: dict[str, Any], earlier: dict[str, Any], known: list[str]
) -> dict[str, Any]:
    """Add the rows of an earlier record by the same versions, in the order of all names."""
    for name in ("torch", "python", "device", "versions"):
        if found[name] != earlier[name]:
            sys.exit(f"{name} of the record is {earlier[name]}, here {found[name]}: run all rows")
    again = {row["name"] for row in found["rows"]}
    merged = dict(found, command=earlier["command"], routing=found["routing"] or earlier["routing"])
    for part in ("rows", "plans", "resumes"):
        rows = [row for row in earlier.get(part, []) if row["name"] in {*known} - again] + found[
            part
        ]
        merged[part] = sorted(rows, key=lambda row: known.index(row["name"]))
    return merged


def rows_of(wanted: list[str]) -> Iterator[dict[str, Any]]:
    """Predict and measure each row."""
    base = mlp(depth=2, width=128)
    for name in wanted:
        if name in OPTIMIZERS:
            found = compare(base, optimizer=OPTIMIZERS[name])
            yield {"kind": "optimizer", "name": name, "technique": "plain"} | found
            continue
        kind = "experts" if name in EXPERTS else "adapters"
        workload = load_workload(f"{MODELS}:{name}")
        for technique, (change, accumulated) in TECHNIQUES.items():
            found = compare(workload, change=change, accumulated=accumulated)
            yield {"kind": kind, "name": name, "technique": technique} | found


def compare(
    workload: Workload,
    *,
    optimizer: Any = "adamw",
    change: Change = leave,
    accumulated: bool = False,
) -> dict[str, Any]:
    """Predict a step, measure the real one, and compare peak, parameters and optimizer state."""
    with Sketch(workload, optimizer=optimizer) as sketch:
        step = sketch.step(SAMPLES, accumulated=accumulated, change=change)
        case = Case(workload, blocks=sketch.case.blocks)
        why_real = sketch.why_real
    module = case.build()
    made = make_optimizer(optimizer, module)
    change(module)
    lives = record_step_storages(
        module,
        case.batch(SAMPLES),
        workload.mean_loss,
        optimizer=made,
        blocks=case.blocks,
        accumulated=accumulated,
    )
    measured = figures_of(timeline_of(lives, type(module).__name__))
    predicted = figures_of(step.timeline)
    found = {
        "predicted": predicted,
        "measured": measured,
        "equal": predicted == measured,
        "why_real": why_real,
    }
    by_layout = {"by_layout": BY_LAYOUT, "host_bytes": host_bytes(made)}
    return found | (by_layout if by_layout["host_bytes"] else {})


def figures_of(timeline: Any) -> dict[str, int]:
    """Return the bytes that a row compares."""
    return {
        "peak_bytes": timeline.peak.bytes_alive,
        "parameter_bytes": timeline.owners["parameters"][0],
        "state_bytes": timeline.owners["optimizer state"][0],
    }


def plan_row(name: str) -> dict[str, Any]:
    """Plan a model for half of what a plan can save, and measure a real step of the plan."""
    workload = load_workload(f"{MODELS}:{name}")
    options = {"global_batch": SAMPLES, "microbatch": SAMPLES}
    with Planner(workload, device="cpu", optimizer="adamw") as planner:
        plain = planner.plan(2**40, **options)
        try:
            least_bytes = planner.plan(1, **options).peak_bytes
        except Infeasible as error:
            least_bytes = error.least_bytes
        plan = planner.plan((plain.peak_bytes + least_bytes) // 2, **options)
    case = Case(workload, batch_size=SAMPLES)
    module = case.build()
    plan.apply(module)
    lives = record_step_storages(
        module, case.batch(), workload.mean_loss, optimizer=make_optimizer("adamw", module)
    )
    measured = timeline_of(lives, name).peak.bytes_alive
    return {
        "name": name,
        "plain_bytes": plain.peak_bytes,
        "planned_bytes": plan.peak_bytes,
        "measured_bytes": measured,
        "equal": plan.peak_bytes == measured,
        "why_real": plan.settings["why_real"],
    }


def resume_row(name: str) -> dict[str, Any]:
    """Save adapters alone, resume onto the same base and another, and compare with one run."""
    make = getattr(finetune_models, name)
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        once = trained_adapters(make, runs / "once", epochs=2)
        trained_adapters(make, runs / "resumed", epochs=1)
        resumed = trained_adapters(make, runs / "resumed", epochs=2)
        try:
            trained_adapters(make, runs / "resumed", epochs=3, seed=1)
        except StateMismatch as error:
            refusal = "another base" in str(error)
        else:
            refusal = False
        with Store(runs / "sizes") as store:
            optimizer = torch.optim.AdamW(trained(once))
            state = TrainingState(once, optimizer, trained_only=True)
            num_bytes = store.save("rollback", 1, state).num_bytes
    parameters = zip(trained(once), trained(resumed), strict=True)
    return {
        "name": name,
        "equal": all(torch.equal(one, other) for one, other in parameters),
        "another_base_refused": refusal,
        "checkpoint_bytes": num_bytes,
    }


def trained_adapters(
    make: Callable[[], Any], folder: Path, *, epochs: int, seed: int = 0
) -> nn.Module:
    """Train adapters on a base drawn by a seed, from the newest checkpoint in a folder."""
    torch.manual_seed(seed)
    module: nn.Module = make()[0]
    optimizer = torch.optim.AdamW(trained(module), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(VOCABULARY, (4, 2, 16), generator=generator)
    with saving(module, optimizer, runs=folder, rollback_every=1, trained_only=True) as run:
        for _ in run.epochs(range(epochs)):
            for batch in run.batches(list(data)):
                module(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step()
    return module


def line_of(row: dict[str, Any]) -> str:
    """Return one line about a row."""
    peaks = row["predicted"]["peak_bytes"], row["measured"]["peak_bytes"]
    verdict = "equal" if row["equal"] else "DIFFERENT"
    how = " (measured twice)" if row["why_real"] else ""
    how += f" (by layout, {row['host_bytes']:,} on the host)" if "by_layout" in row else ""
    return f"{row['name']}, {row['technique']}: {peaks[0]:,} {peaks[1]:,} {verdict}{how}"


def summary_of(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Count rows by how they were predicted."""
    by_layout = [row for row in rows if "by_layout" in row]
    others = [row for row in rows if "by_layout" not in row]
    predicted = [row for row in others if row["why_real"] is None]
    return {
        "rows": len(rows),
        "predicted_from_shapes": len(predicted),
        "equal": sum(row["equal"] for row in predicted),
        "measured_instead": len(others) - len(predicted),
        "by_layout": len(by_layout),
    }


# Perturb routers between forward and backward.

NUM_EXPERTS = 4
NUM_TOKENS = 24
EXPERT_WIDTH = 8


class TiedRouter(nn.Module):
    """Choose two experts by equal scores and a bias, which training code updates in place."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(EXPERT_WIDTH, NUM_EXPERTS, bias=False)
        self.score.weight.data[1:] = self.score.weight.data[:1]
        self.register_buffer("balance", torch.zeros(NUM_EXPERTS))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.softmax(self.score(x), -1)
        chosen = torch.topk(scores.detach() + self.balance, 2, dim=-1).indices
        return scores.gather(-1, chosen), chosen


class RoutedBlock(nn.Module):
    """A block whose experts have equal shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.router = TiedRouter()
        self.experts = nn.Parameter(torch.randn(NUM_EXPERTS, EXPERT_WIDTH, EXPERT_WIDTH) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x)
        out = torch.einsum("tkwv,tw->tkv", self.experts[chosen], x).tanh()
        mixed: torch.Tensor = x + (weights[..., None] * out).sum(1)
        return mixed


class Routed(nn.Module):
    """Blocks with experts; with `by_torch` each runs under torch's checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RoutedBlock() for _ in range(2))
        self.by_torch = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.by_torch else block(x)
        return x.square().mean()


def perturbed_gradients(
    model: nn.Module, batch: torch.Tensor, shift: torch.Tensor | None
) -> list[torch.Tensor]:
    """Return the gradients of a step in which the bias of each router moves before backward."""
    loss = model(batch)
    if shift is not None:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name.endswith("balance"):
                    buffer += shift
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def perturbed_runs(num_runs: int) -> dict[str, int]:
    """Count the runs whose gradients equal those without recompute, and torch's that do not."""
    equal = 0
    errors = 0
    torch_differs = 0
    for seed in range(num_runs):
        torch.manual_seed(seed)
        plain = Routed()
        batch = torch.randn(NUM_TOKENS, EXPERT_WIDTH)
        shift = torch.randn(NUM_EXPERTS)
        ours = copy.deepcopy(plain)
        recompute_all(ours)
        theirs = copy.deepcopy(plain)
        theirs.by_torch = True
        expected = perturbed_gradients(plain, batch, None)
        equal += all(map(torch.equal, perturbed_gradients(ours, batch, shift), expected))
        try:
            found = perturbed_gradients(theirs, batch, shift)
        except RuntimeError:
            errors += 1
        else:
            torch_differs += not all(map(torch.equal, found, expected))
    return {
        "runs": num_runs,
        "equal": equal,
        "torch_checkpoint_differs": torch_differs,
        "torch_checkpoint_raises": errors,
    }


if __name__ == "__main__":
    main()
