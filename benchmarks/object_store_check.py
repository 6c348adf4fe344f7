"""Check the store over the real S3 protocol, spoken by a server on this machine.

    pip install 'moto[server]' s3fs
    python benchmarks/object_store_check.py --json evidence/checkpoint_objects.json

Saves, loads, verifies, retains, locks, and kills writers at changes of the store. Without these two
packages `python -m pytest tests/runs/test_store_objects.py` checks the same on two file systems.
Proof: its record.
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "template"), str(ROOT / "tests")]
KILLS = (2, 4, 6, 8)
KEYS = {
    "AWS_ACCESS_KEY_ID": "none",
    "AWS_SECRET_ACCESS_KEY": "none",
    "AWS_DEFAULT_REGION": "us-east-1",
}
WRITER = """
import sys
sys.path[:0] = {paths}
from curry_train.runs import Store
from store_models import At, CountedObjects, die, new_state, train
state, url = new_state(), "s3://runs/killed-{number}"
at = At(None, die)
store = Store(url, files=CountedObjects(url, ask=at))
store.save("rollback", 1, state)
at.count, at.number = 0, {number}
train(state, 1)
store.save("rollback", 2, state)
"""


def checked(url: str) -> list[str]:
    """Save, load, retain and lock a run on the store, and return every violation."""
    from store_models import equal, new_state, tensors_of, train

    from curry_train.runs import LockedRun, Store
    from curry_train.runs.policy import SavingPolicy
    from curry_train.runs.policy_config import PolicyConfig, Retention

    wrong = []
    state = new_state()
    other = new_state(1)
    config = PolicyConfig(rollback_every=2, recovery_every=6, best_k=1, retention=Retention(2, 1))
    with Store(url) as store, SavingPolicy(store, config) as policy:
        while state.step < 10:
            train(state, 1)
            policy.after_step(state.step, state, {"loss": 1.0, "dev_loss": 1.0 / state.step})
        for kind, kept in (("rollback", [8, 10]), ("recovery", [6]), ("best-k", [10])):
            if [one.step for one in store.committed(kind)] != kept:
                wrong.append(f"{kind} {kept} were to stay")
            for one in store.committed(kind):
                store.verify(one)
        store.load("latest", other)
        if not equal(tensors_of(other), tensors_of(state)):
            wrong.append("what was loaded is not what was saved")
        try:
            Store(url).open()
            wrong.append("two writers")
        except LockedRun:
            pass
    return wrong


def killed(number: int) -> tuple[int, list[str]]:
    """Kill the writer at this change of its second save, and list what does not hold."""
    from store_models import new_state

    from curry_train.runs import Store

    code = WRITER.format(paths=[str(ROOT / "template"), str(ROOT / "tests")], number=number)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    with Store(f"s3://runs/killed-{number}") as store:
        steps = [one.step for one in store.committed("rollback")]
        for one in store.committed("rollback"):
            store.verify(one)
        store.load("latest", new_state(1))
        store.save("rollback", 3, new_state())
    return ended.returncode, [] if steps in ([1], [1, 2]) else [
        f"killed at change {number}: {steps} count"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="PATH", help="write the record")
    options = parser.parse_args()
    if any(importlib.util.find_spec(name) is None for name in ("moto", "s3fs")):
        sys.exit("this check needs a server and its client: pip install 'moto[server]' s3fs")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    os.environ |= KEYS | {"AWS_ENDPOINT_URL": "http://{}:{}".format(*server.get_host_and_port())}
    import boto3
    import fsspec
    import s3fs
    import torch

    from curry_train.core.wording import provenance, write_json

    boto3.client("s3").create_bucket(Bucket="runs")
    wrong = checked("s3://runs/whole")
    ends = [killed(number) for number in KILLS]
    server.stop()
    found = provenance(torch.device("cpu")) | {
        "fsspec": fsspec.__version__,
        "s3fs": s3fs.__version__,
    }
    found["server"] = "moto"
    found["kills"] = sum(status == -signal.SIGKILL for status, _ in ends)
    found["wrong"] = [*wrong, *(fault for _, each in ends for fault in each)]
    print(f"{found['kills']} writers killed; " + ("; ".join(found["wrong"]) or "all held"))
    if options.json:
        write_json(options.json, found)
    sys.exit(1 if found["wrong"] or found["kills"] != len(KILLS) else 0)


if __name__ == "__main__":
    main()
