"""Train whole runs by a configuration: recompute, ranks, resume, own models.

Run with `python -m pytest tests/trainer/test_training.py`.
"""

import contextlib
import json
import os
import signal

import pytest
import torch

from curry_train.plan import plan
from curry_train.trainer import train_run

from ..rank_calls import run_on_ranks
from ..training_models import opened

TINY = (
    "model=tests.training_models:tiny",
    "steps=6",
    "batch_size=8",
    "microbatch=2",
    "evaluate={every: 3, samples: 10}",
)


def losses(runs, *words, resume=None, stop_after=None):
    """Return the loss of each step, and the run."""
    found = []

    def hook(report):
        found.append(report.loss)
        if report.step == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    with opened(runs, *TINY, *words, resume=resume) as run:
        train_run(run, watch=[lambda run: contextlib.nullcontext(hook)])
    return found, run


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_default_model_learns_text_within_60_steps(tmp_path, seed):
    """Beat 3.2 nats per byte, the entropy of byte frequencies; chance is 5.5."""
    with opened(tmp_path, f"seed={seed}", "steps=60", "evaluate.every=60") as run:
        report = train_run(run)
    assert report.last.dev_loss < 2.75


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return losses(tmp_path_factory.mktemp("plain"))[0]


def test_a_plan_for_a_smaller_microbatch_is_refused(tmp_path):
    options = {"without": ("sac", "offload"), "chunked_loss": False}
    made = plan("tests.training_models:tiny", 2**30, global_batch=8, microbatch=1, **options)
    (tmp_path / "plan.json").write_text(json.dumps(made.to_json()))
    with pytest.raises(
        ValueError, match=r"plan\.json is for a microbatch of 1, and 2 samples .* set microbatch=1"
    ):
        losses(tmp_path, f"recompute={{strategy: plan, plan: {tmp_path}/plan.json}}")


HALF_LEARNED = "data.source=tests.training_models:half_learned"
ON_RANKS = {
    "ddp": ["parallel=ddp"],
    "fsdp2": ["parallel=fsdp2"],
    "fsdp2, bfloat16": ["parallel=fsdp2", "precision=bfloat16"],
    "fsdp2, float16": ["parallel=fsdp2", "precision=float16"],
    "half": ["parallel=fsdp2", HALF_LEARNED],
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Stop a run of one process after three steps; return its losses and the run."""
    return losses(tmp_path_factory.mktemp("stopped"), stop_after=3)


@pytest.fixture(scope="module")
def ranked(tmp_path_factory, stopped):
    """Train each configuration on two ranks, one after another, and resume the stopped run."""
    runs = str(tmp_path_factory.mktemp("ranked"))
    saved = stopped[1].attached.store.latest().location
    return run_on_ranks(f"{__file__}:on_ranks", runs=runs, kinds=ON_RANKS, saved=saved)


def on_ranks(runs, kinds, saved):
    found = {kind: losses(runs, *words) for kind, words in kinds.items()}
    found["resumed"] = losses(runs, "parallel=fsdp2", resume=saved)
    with opened(runs, *TINY, "parallel=ddp"):
        drawn = torch.rand(4).tolist()
    answers = {
        kind: {"losses": step_losses, "folder": str(run.folder)}
        for kind, (step_losses, run) in found.items()
    }
    return answers | {"drawn": drawn}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_ranks_give_the_losses_of_one(ranked, plain, parallel):
    assert ranked[0][parallel]["losses"] == pytest.approx(plain, rel=1e-6)
    assert ranked[0][parallel]["folder"] == ranked[1][parallel]["folder"]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_losses_in_half_precision_stay_near_those_in_float32(tmp_path, ranked, plain, precision):
    for found in (
        losses(tmp_path, f"precision={precision}")[0],
        ranked[0][f"fsdp2, {precision}"]["losses"],
    ):
        assert found == pytest.approx(
            plain, rel=0.01
        )  # of 8 bits of mantissa; losses fall by 12% meanwhile
        assert found != plain


def test_ranks_with_different_numbers_of_tokens_weigh_each_token_equally(tmp_path, ranked):
    """Give ranks different numbers of terms: a mean of means would be off by percents."""
    alone, _ = losses(tmp_path, HALF_LEARNED)
    whole, _ = losses(tmp_path, HALF_LEARNED, "microbatch=8")
    assert ranked[0]["half"]["losses"] == pytest.approx(alone, rel=1e-6)
    assert whole == pytest.approx(alone, rel=1e-6)


def test_dropout_draws_other_numbers_on_each_rank(ranked):
    assert ranked[0]["drawn"] != ranked[1]["drawn"]


def test_a_run_resumes_on_another_number_of_ranks(ranked, stopped, plain):
    assert stopped[0] + ranked[0]["resumed"]["losses"] == pytest.approx(plain, rel=1e-6)


def test_a_stopped_run_resumes_bit_equal(tmp_path):
    words = ("model=tests.training_models:with_dropout",)
    whole, _ = losses(tmp_path, *words)
    first, ended = losses(tmp_path, *words, stop_after=4)
    assert (ended.attached.steps, ended.attached.ended_by) == (4, "SIGTERM")
    rest, resumed = losses(tmp_path, *words, resume=ended.folder.name)
    assert first + rest == whole
    assert resumed.folder == ended.folder


def test_a_users_own_data_and_model_train(tmp_path):
    words = (
        "model=tests.training_models:line",
        "data.source=tests.training_models:points",
        "steps=150",
        "batch_size=20",
    )
    found, _ = losses(
        tmp_path, *words, "optimizer={name: sgd, learning_rate: 1.0, weight_decay: 0}"
    )
    assert found[-1] < 0.3 < found[0]


def test_matrices_decay_and_vectors_do_not(tmp_path):
    with opened(tmp_path, *TINY) as run:
        groups = run.optimizer.param_groups
        for group in groups:
            decay = {0.1 if parameter.dim() >= 2 else 0.0 for parameter in group["params"]}
            assert decay == {group["weight_decay"]}
        assert sum(len(group["params"]) for group in groups) == len(list(run.model.parameters()))
