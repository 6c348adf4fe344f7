"""Two ranks decide together on saves, health, retention and resume.

python -m pytest tests/runs/test_saving_policy_ranks.py
"""

import logging
import math
from pathlib import Path

import torch
import torch.distributed as dist

from curry_train.runs import BackgroundSaver, PolicyConfig, Retention, SavingPolicy, Store

from ..rank_calls import run_on_ranks
from ..store_models import equal, flip, new_state, tensors_of, train
from .test_store_ranks import sharded

# A save of so small a state takes about as long as a step: up to 200 saves, and step 8 is kept.
AUTOMATIC = PolicyConfig(
    rollback_every="auto", recovery_every=None, overhead=1.0, retention=Retention(500, 3)
)
OFTEN = PolicyConfig(rollback_every=2, recovery_every=6, best_k=1, retention=Retention(2, 1))


def train_on(policy, state, until, **metrics):
    for _ in range(state.step, until):
        train(state, 1)
        policy.after_step(state.step, state, {"loss": 1.0} | metrics)


def on_two_ranks(folder):
    rank, found = dist.get_rank(), {}
    notes = []
    logging.getLogger("curry_train.runs.policy").addFilter(
        lambda record: notes.append(record.getMessage()) or True
    )
    state = new_state(5, build=sharded)
    with Store(f"{folder}/run") as store:
        policy = SavingPolicy(store, OFTEN)
        train_on(policy, state, 8, dev_loss=0.5)
        held = tensors_of(state)
        train_on(policy, state, 10, dev_loss=math.nan if rank else 0.1)  # on one rank alone
        with torch.no_grad():
            shard = state.model[0].weight.to_local()
            kept = shard.clone()
            shard.fill_(math.nan if rank else 0.0)  # of one rank
            policy.after_step(12, state, {"loss": 1.0})
            shard.copy_(kept)
        found["notes"] = [note for note in notes if "not saved" in note]
        found["kept"] = [
            [kind, one.step]
            for kind in ("rollback", "recovery", "best-k")
            for one in store.committed(kind)
        ]
        state.step = 12
        train_on(policy, state, 14)
    if rank == 0:
        # The second rank reads it.
        flip(next(Path(folder, "run/rollback/step-00000014.dcp").glob("__1_*.distcp")))
    dist.barrier()
    other = new_state(9, build=sharded)
    with Store(f"{folder}/run") as store, BackgroundSaver(store) as saver:
        policy = SavingPolicy(store, AUTOMATIC, saver=saver)
        resumed = policy.resume(other)
        found["resumed"] = [
            resumed.saved.step,
            list(resumed.damaged),
            equal(tensors_of(other), held),
        ]
        train_on(policy, other, 40)
        found["automatic"] = store.committed("rollback")[-1].step > 14
        policy.resume(other, "before-9")
        found["back"] = store.latest().step
    return found


def test_two_ranks_decide_as_one(tmp_path):
    first, second = run_on_ranks(f"{__file__}:on_two_ranks", folder=str(tmp_path))
    assert first == second
    assert first["notes"] == [
        "step 9 was not saved: dev_loss is nan",
        "step 10 was not saved: dev_loss is nan",
        "step 12 was not saved: 0.weight is not finite",
    ]
    assert first["kept"] == [["rollback", 8], ["recovery", 6], ["best-k", 1]]
    assert first["resumed"] == [8, ["rollback/step-00000014.dcp"], True]
    assert first["automatic"]
    assert first["back"] == 8
