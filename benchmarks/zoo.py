"""Run models of other libraries through all gates and a verified plan, and record it.

    make zoo ARGS='--json evidence/zoo.json'   # all: some hours on one core
    make zoo ARGS='--only bert vit_pytorch'    # some, printed

`make zoo` installs the libraries next to the project's own environment. Models that an earlier run
recorded in the same file are skipped with `--resume`.
Proof: `python -m pytest tests/benchmarks/test_recorders.py`.
"""

import json
import os
import re
import tempfile
from collections.abc import Collection
from pathlib import Path

import torch

from process_group import run_python
from recording import ROOT, Figures, record_parser, write_record
from zoo_models import ZOO

MODELS = ROOT / "benchmarks/zoo_models.py"

# Seconds for all gates of a model, and for its plan.
LONGEST_GATES = 900
LONGEST_PLAN = 600


def main() -> None:
    """Run the models that were asked for, and record each as soon as it ends."""
    parser = record_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=[*ZOO], metavar="NAME", help="these models")
    parser.add_argument("--resume", action="store_true", help="keep what PATH has already")
    parser.add_argument("--plan", metavar="NAME", help="plan one model here, and print JSON")
    options = parser.parse_args()
    if options.plan:
        print(json.dumps(plan_of(options.plan)))
        return

    recorded = {}
    if options.resume and Path(str(options.json)).exists():
        rows = json.loads(Path(options.json).read_text())["models"]
        recorded = {row["model"]: row for row in rows}
    wanted = options.only or [name for name in ZOO if name not in recorded]
    # On one core `validate` starts no processes, which would import the model's library once more
    # each: 29 instead of 70 s of a processor for GPT-2.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for name in wanted:
        recorded[name] = run_model(name)
        print(*recorded[name].values(), sep=", ", flush=True)
        rows = [recorded[name] for name in ZOO if name in recorded]
        write_record(options.json, {"summary": summary_of(rows), "models": rows})
    print(summary_of(recorded.values()))


def run_model(name: str) -> Figures:
    """Run all gates and a verified plan of one model, each in a process of its own."""
    row = {"model": name, "library": ZOO[name], **gates_of(name)}
    status, output = run_python(
        ROOT, __file__, "--plan", name, seconds=LONGEST_PLAN, PYTHONWARNINGS="ignore"
    )
    last = output.strip().rpartition("\n")[2]
    row["plan"] = {"error": f"status {status}: {last}"} if status != 0 else json.loads(last)
    # Files are named from the library's or the project's folder on.
    text = re.sub(r"/[^\s\"]*/site-packages/", "", json.dumps(row)).replace(f"{ROOT}/", "")
    return json.loads(text)


def gates_of(name: str) -> Figures:
    """Run `validate` as a user would, and return its status, and what held and failed."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "gates.json"
        words = ("scripts/validate_checkpointing.py", "--model", f"{MODELS}:{name}", "--json")
        status, output = run_python(
            ROOT, *words, str(written), seconds=LONGEST_GATES, PYTHONWARNINGS="ignore"
        )
        found = json.loads(written.read_text()) if written.exists() else {"results": []}

    results = found["results"]
    failed = {
        row["gate"]: f"{row['measured']}; required {row['required']}"
        for row in results
        if row["passed"] is False
    }
    held = sum(row["passed"] is True for row in results)
    error = {} if results else {"error": output.strip()[-500:]}
    return {"status": status, "held": held, "failed": failed} | error


def plan_of(name: str) -> Figures:
    """Plan a model for half of what a plan can save, and measure a real step of the plan."""
    from curry_train.gates.memory_plan import measure_real_peak
    from curry_train.plan.planner import Infeasible, Planner
    from curry_train.workloads import Case
    from curry_train.workloads.models import load_workload

    workload = load_workload(f"{MODELS}:{name}")
    samples = workload.own_batch or 2
    with Planner(workload, device="cpu", optimizer="adamw") as planner:
        options = {"global_batch": samples, "microbatch": samples}
        plain_bytes = planner.plan(2**40, **options).peak_bytes
        try:
            planner.plan(1, **options)
        except Infeasible as error:
            least_bytes = error.least_bytes
        plan = planner.plan((plain_bytes + least_bytes) // 2, **options)
    # As `plan --verify` does.
    case = Case(workload, dtype=torch.float32, batch_size=plan.microbatch)
    measured = measure_real_peak(case, plan.apply, optimizer="adamw", accumulated=plan.steps > 1)
    return {"planned_bytes": plan.peak_bytes, "measured_bytes": measured}


def summary_of(rows: Collection[Figures]) -> Figures:
    """Count models, libraries, statuses and plans."""
    plans = [row["plan"] for row in rows]
    verified = [plan for plan in plans if "error" not in plan]
    exact = [plan for plan in verified if plan["planned_bytes"] == plan["measured_bytes"]]
    return {
        "models": len(rows),
        "libraries": len({row["library"] for row in rows}),
        "status_0": sum(row["status"] == 0 for row in rows),
        "plans": len(verified),
        "plans_equal_to_the_byte": len(exact),
    }


if __name__ == "__main__":
    main()
