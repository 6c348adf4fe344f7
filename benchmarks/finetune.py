"""Predict fine-tuning steps of other libraries, measure them on the CPU, and record both.

    make finetune ARGS='--json evidence/finetune.json'   # all: minutes on two cores
    make finetune ARGS='--only Lion lora mixtral'        # some, printed

`make finetune` installs the libraries in an environment of their own and runs all rows. A row is
predicted from shapes alone; otherwise it has the reason why the model was measured instead.

Proof: `python -m pytest tests/benchmarks/test_finetune.py`.
"""

import warnings
from collections.abc import Callable

import torch
from torch import nn

from curry_train.plan.estimate import Sketch
from curry_train.plan.optimizers import make_optimizer
from curry_train.plan.timeline import measure_timeline
from curry_train.primitives import apply_sac, keep_routing, recompute_blocks
from curry_train.workloads.models import load_workload, mlp
from curry_train.workloads.workload import Case, Workload
from finetune_models import FACTORIES, OPTIMIZERS, SAMPLES
from recording import ROOT, Figures, record_parser, write_record

MODELS = ROOT / "benchmarks/finetune_models.py"

Change = Callable[[nn.Module], object]


def leave(module: nn.Module) -> None:
    """Change nothing."""


def recompute_all(module: nn.Module) -> None:
    """Recompute every block, and keep the choices of routers."""
    recompute_blocks(module)
    keep_routing(module)


TECHNIQUES = {
    "plain": {},
    "recompute, accumulated": {"change": recompute_all, "accumulated": True},
    "sac": {"change": apply_sac},
}


def main() -> None:
    """Run the rows that were asked for, print each, and record them."""
    known = [*OPTIMIZERS, *FACTORIES]
    parser = record_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=known, metavar="NAME", default=known)
    options = parser.parse_args()

    warnings.simplefilter("ignore")
    rows = []
    for name in options.only:
        if name in OPTIMIZERS:
            workload = mlp(depth=2, width=128)
            techniques = {"plain": {"optimizer": OPTIMIZERS[name]}}
        else:
            workload = load_workload(f"{MODELS}:{name}")
            techniques = TECHNIQUES
        for technique, given in techniques.items():
            row = {"name": name, "technique": technique}
            rows.append(row | compare(workload, SAMPLES, **given))
            print(*rows[-1].values(), sep=", ", flush=True)
    summary = summary_of(rows)
    print(summary)
    write_record(options.json, {"rows": rows, "summary": summary})


def compare(
    workload: Workload,
    samples: int,
    *,
    optimizer="adamw",
    dtype: torch.dtype = torch.float32,
    change: Change = leave,
    accumulated: bool = False,
) -> Figures:
    """Predict a step, measure the real one, and compare peak, parameters and optimizer state."""
    with Sketch(workload, optimizer=optimizer, dtype=dtype) as sketch:
        step = sketch.step(samples, accumulated=accumulated, change=change)
        case = Case(workload, dtype=dtype, blocks=sketch.case.blocks)
        why_real = sketch.why_real
    module = case.build()
    made = make_optimizer(optimizer, module)
    change(module)
    measured = figures_of(
        measure_timeline(
            module,
            case.batch(samples),
            workload.mean_loss,
            optimizer=made,
            blocks=case.blocks,
            accumulated=accumulated,
        )
    )
    predicted = figures_of(step.timeline)
    return {
        "predicted": predicted,
        "measured": measured,
        "equal": predicted == measured,
        "why_real": why_real,
    }


def figures_of(timeline) -> dict[str, int]:
    """Return the bytes that a row compares."""
    return {
        "peak_bytes": timeline.peak.bytes_alive,
        "parameter_bytes": timeline.owners["parameters"][0],
        "state_bytes": timeline.owners["optimizer state"][0],
    }


def summary_of(rows: list[Figures]) -> dict[str, int]:
    """Count rows by how they were predicted."""
    predicted = [row for row in rows if row["why_real"] is None]
    return {
        "predicted_from_shapes": len(predicted),
        "equal": sum(row["equal"] for row in predicted),
    }


if __name__ == "__main__":
    main()
