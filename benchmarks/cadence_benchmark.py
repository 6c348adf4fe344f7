"""Benchmark the automatic save cadence against its overhead bound.

Trains for real, saves as the policy decides, and checks the overhead after every save.
`python benchmarks/cadence_benchmark.py --seconds 60 --json checkpoint_cadence.json` records it,
with the interval of Young and Daly for a mean time between failures of an hour, a day and a week.
Proof: `python -m pytest tests/benchmarks/test_store_benchmark.py -k cadence`.
"""

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from curry_train.core.wording import provenance, write_json
from curry_train.runs.background import BackgroundSaver
from curry_train.runs.policy import SavingPolicy, young_daly
from curry_train.runs.policy_config import PolicyConfig
from curry_train.runs.store import Store
from store_benchmark import LAYER_WIDTH, made_state

HOURS_BETWEEN_FAILURES = (1, 24, 168)
SAVE_SECONDS = 60.0


def measure_cadence(
    folder: Path, *, mib: int, seconds: float, overhead: float, background: bool
) -> dict[str, Any]:
    """Train for `seconds` and measure the overhead of the saves.

    `highest` is the largest ratio of the time of all saves to the time of all steps so far, taken
    after each save.
    """
    state = made_state(mib * 2**20)
    config = PolicyConfig(rollback_every="auto", recovery_every=None, overhead=overhead)
    saved: list[int] = []
    costs: list[float] = []
    highest = 0.0
    saving = 0.0
    stepping = 0.0
    with Store(folder) as store:
        saver = BackgroundSaver(store) if background else None
        policy = SavingPolicy(store, config, saver=saver)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            began = time.perf_counter()
            stalled_before = saver.stalled if saver else 0.0
            state.model(torch.randn(64, LAYER_WIDTH)).square().mean().backward()
            state.optimizers[0].step()
            state.optimizers[0].zero_grad()
            state.step += 1
            ended = time.perf_counter()

            # The optimizer step waits for a background save; that time belongs to the save.
            waited = (saver.stalled if saver else 0.0) - stalled_before
            stepping += ended - began - waited
            committed = policy.after_step(state.step, state, {})
            saving += time.perf_counter() - ended + waited

            saved += [one.step for one in committed]
            if committed and saver is None:
                costs.append(time.perf_counter() - ended)
            if committed:
                highest = max(highest, saving / stepping)
        saved += [one.step for one in policy.finish()]
        if saver is not None:
            saver.close()
    return {
        "bound": overhead,
        "highest": highest,
        "at_the_end": saving / stepping,
        "saves": len(saved),
        "each": costs,
        "steps": state.step,
        "seconds": saving + stepping,
        "saving_seconds": saving,
        "state_bytes": sum(tensor.nbytes for tensor in state.snapshot().tensors.values()),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description="Check that the automatic cadence keeps its overhead bound on this disk."
    )
    parser.add_argument("--mib", type=int, default=64, help="size of the state in MiB")
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="training time, for foreground saves and again for background saves",
    )
    parser.add_argument("--overhead", type=float, default=0.035, help="bound on the overhead")
    parser.add_argument("--folder", help="write here; files are removed afterwards")
    parser.add_argument("--json", metavar="PATH", help="write the figures; - is standard output")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    found = provenance(torch.device("cpu"))
    for name in ("foreground", "background"):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found[name] = measure_cadence(
                Path(folder),
                mib=options.mib,
                seconds=options.seconds,
                overhead=options.overhead,
                background=name == "background",
            )
        row = found[name]
        held = "holds" if row["highest"] <= row["bound"] else "does not hold"
        print(
            f"{name}: {row['saves']} saves took {row['highest']:.2%} at most, "
            f"of {row['bound']:.2%}: {held}"
        )
    found["young_daly"] = {
        "save_seconds": SAVE_SECONDS,
        "minutes": {
            f"{hours}h": young_daly(SAVE_SECONDS, hours * 3600.0) / 60
            for hours in HOURS_BETWEEN_FAILURES
        },
    }
    if options.json:
        write_json(options.json, found)


if __name__ == "__main__":
    main()
