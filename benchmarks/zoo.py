"""Run models of other libraries through all gates and a verified plan, and record it.

    python benchmarks/zoo.py --json evidence/zoo.json   # all: more than an hour on two cores
    python benchmarks/zoo.py --only bert vit_pytorch    # some, printed

`make zoo` installs the libraries next to the project's own environment and runs all models. Models
that an earlier run recorded in the same file are skipped with `--resume`.
Proof: `python -m pytest tests/benchmarks/test_zoo.py`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from curry_train.core.wording import format_bytes, provenance, write_json
from side_environment import install_beside
from zoo_models import ZOO, ZooModel

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / ".venv" / "zoo"
REQUIREMENTS = Path(__file__).with_name("zoo_requirements.txt")

# Seconds for all gates of a model, and for its plan.
LONGEST_GATES = 900
LONGEST_PLAN = 600

STATUS_OF_TIMEOUT = 124


def main() -> None:
    """Run the models that were asked for, two at a time, and record each as soon as it ends."""
    options = _parse_options()
    if options.plan:
        print(json.dumps(plan_of(options.plan)))
        return
    if options.install:
        install_beside(ENVIRONMENT, REQUIREMENTS)
        return

    recorded = _recorded(options.json) if options.resume else {}
    wanted = options.only or [name for name in ZOO if name not in recorded]
    unknown = sorted({*wanted} - set(ZOO))
    if unknown:
        sys.exit(f"no model {', '.join(unknown)}; the zoo has {', '.join(ZOO)}")

    cores = SimpleQueue[int]()
    for number in range(options.workers):
        cores.put(number)
    with ThreadPoolExecutor(options.workers, initializer=_use_one_core, initargs=(cores,)) as pool:
        for row in pool.map(run_model, [ZOO[name] for name in wanted]):
            recorded[row["model"]] = without_folders(row)
            print(line_of(row), flush=True)
            if options.json:
                rows = [recorded[name] for name in ZOO if name in recorded]
                summary = summary_of(rows)
                facts = provenance(torch.device("cpu"))
                write_json(options.json, facts | {"summary": summary, "models": rows})
    print(text_of(summary_of(recorded.values())))


def without_folders(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose files are named from the library's or the project's folder on."""
    text = re.sub(r"/[^\s\"]*/site-packages/", "", json.dumps(row)).replace(f"{ROOT}/", "")
    named: dict[str, Any] = json.loads(text)
    return named


def _use_one_core(numbers: "SimpleQueue[int]") -> None:
    """Keep this thread and the processes that it starts on a core of its own.

    On one core `validate` starts no processes, which would import the model's library once more
    each: 29 instead of 70 s of a processor for GPT-2.
    """
    available = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {available[numbers.get() % len(available)]})


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="PATH", help="record the results here")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these models")
    parser.add_argument("--resume", action="store_true", help="keep what PATH has already")
    parser.add_argument("--workers", type=int, default=2, help="models at a time (default: 2)")
    parser.add_argument("--install", action="store_true", help="install the libraries and end")
    parser.add_argument("--plan", metavar="NAME", help="plan one model here, and print JSON")
    options = parser.parse_args()
    if options.resume and not options.json:
        parser.error("--resume needs --json, the file with the earlier results")
    return options


def _recorded(path: str) -> dict[str, dict[str, Any]]:
    if not Path(path).exists():
        return {}
    rows = json.loads(Path(path).read_text())["models"]
    return {row["model"]: row for row in rows if row["model"] in ZOO}


def run_model(model: ZooModel) -> dict[str, Any]:
    """Run all gates and a verified plan of one model, each in a process of its own."""
    started = time.monotonic()
    row: dict[str, Any] = {"model": model.name, "library": model.library}
    row |= gates_of(model)
    row["plan"] = _run_plan(model)
    row["seconds"] = round(time.monotonic() - started)
    return row


def gates_of(model: ZooModel) -> dict[str, Any]:
    """Run `validate` as a user would, and return its status, counts, causes and coverage."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "gates.json"
        words = ["scripts/validate_checkpointing.py", "--model", model.path]
        ended = _run([*words, "--json", str(written)], LONGEST_GATES)
        found = json.loads(written.read_text()) if written.exists() else {"results": []}

    results = found["results"]
    failed = {
        row["gate"]: f"{row['measured']}; required {row['required']}"
        for row in results
        if row["passed"] is False
    }
    causes = Counter(row["hint"] for row in results if row["passed"] is None)
    blocks = next(iter(found.get("blocks", {}).values()), {})
    row = {
        "status": ended.returncode,
        "held": sum(row["passed"] is True for row in results),
        "failed": failed,
        "not_applicable": dict(causes),
        "blocks": len(blocks.get("names", [])),
        "coverage": blocks.get("coverage"),
    }
    if not results:
        row["error"] = (ended.stderr or ended.stdout).strip()[-500:]
    return row


def _run_plan(model: ZooModel) -> dict[str, Any]:
    ended = _run([str(Path(__file__)), "--plan", model.name], LONGEST_PLAN)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or ["no message"]
        return {"error": f"status {ended.returncode}: {lines[-1]}"}
    planned: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return planned


def _run(words: list[str], seconds: int) -> subprocess.CompletedProcess[str]:
    """Run a script of the project in the zoo's environment, or in this one if there is none."""
    theirs = ENVIRONMENT / "bin" / "python"
    python = str(theirs) if theirs.exists() else sys.executable
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "template"), str(Path(__file__).parent)]
    )
    command = [python, *words]
    try:
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        message = f"took more than {seconds} s"
        return subprocess.CompletedProcess(command, STATUS_OF_TIMEOUT, "", message)


def plan_of(name: str) -> dict[str, Any]:
    """Plan a model for half of what a plan can save, and measure a real step of the plan."""
    from curry_train.plan.planner import Infeasible, Planner
    from curry_train.plan.timeline import measure_timeline
    from curry_train.workloads.models import load_workload
    from curry_train.workloads.workload import Case

    workload = load_workload(ZOO[name].path)
    samples = workload.own_batch or 2
    with Planner(workload, device="cpu", optimizer="adamw") as planner:
        options = {"global_batch": samples, "microbatch": samples}
        plain = planner.plan(2**40, **options)
        try:
            least_bytes = planner.plan(1, **options).peak_bytes
        except Infeasible as error:
            least_bytes = error.least_bytes
        budget_bytes = (plain.peak_bytes + least_bytes) // 2
        plan = planner.plan(budget_bytes, **options)
        why_real = plan.settings["why_real"]

    case = Case(workload, batch_size=samples)
    module = case.build()
    plan.apply(module)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    measured = measure_timeline(
        module, case.batch(), workload.mean_loss, optimizer=optimizer, accumulated=False
    ).peak.bytes_alive
    return {
        "plain_bytes": plain.peak_bytes,
        "least_bytes": least_bytes,
        "budget_bytes": budget_bytes,
        "planned_bytes": plan.peak_bytes,
        "measured_bytes": measured,
        "measured_for_real": why_real,
    }


# Format rows and summaries.


def line_of(row: dict[str, Any]) -> str:
    """Return one line about a model, at most 100 columns wide."""
    counts = f"{row['held']} held, {len(row['failed'])} failed"
    coverage = "-" if row["coverage"] is None else f"{row['coverage']:.0%}"
    plan = row["plan"]
    planned = "no plan" if "error" in plan else _plan_text(plan)
    name = f"{row['model']:<24} status {row['status']:<3}"
    return f"{name} {counts:<19} {row['blocks']:>3} blocks {coverage:>4}  {planned}"


def _plan_text(plan: dict[str, Any]) -> str:
    plain, planned = format_bytes(plan["plain_bytes"]), format_bytes(plan["planned_bytes"])
    return f"{plain} to {planned}, {plan['planned_bytes'] / plan['measured_bytes']:.2%} of measured"


def summary_of(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Count models, libraries, statuses, failed gates, causes and plans."""
    every = list(rows)
    plans = [row["plan"] for row in every]
    verified = [plan for plan in plans if "error" not in plan]
    exact = [plan for plan in verified if plan["planned_bytes"] == plan["measured_bytes"]]
    within = [plan for plan in verified if plan["measured_bytes"] <= plan["budget_bytes"]]
    covered = [row for row in every if (row["coverage"] or 0) >= 0.9]
    return {
        "models": len(every),
        "libraries": len({row["library"] for row in every}),
        "status_0": sum(row["status"] == 0 for row in every),
        "held": sum(row["held"] for row in every),
        "failed": sum(len(row["failed"]) for row in every),
        "not_applicable": sum(sum(row["not_applicable"].values()) for row in every),
        "covered_90_percent": len(covered),
        "plans": len(verified),
        "plans_equal_to_the_byte": len(exact),
        "plans_within_budget": len(within),
    }


def text_of(summary: dict[str, Any]) -> str:
    return (
        f"{summary['models']} models of {summary['libraries']} libraries: "
        f"{summary['status_0']} with status 0; {summary['held']} gates held, "
        f"{summary['failed']} failed, {summary['not_applicable']} not applicable\n"
        f"{summary['plans']} plans verified: {summary['plans_equal_to_the_byte']} equal to the "
        f"byte, {summary['plans_within_budget']} within the budget"
    )


if __name__ == "__main__":
    main()
