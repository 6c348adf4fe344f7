"""A script with `saving` is killed, damaged and resumed, and stays equal to the bit.

python -m pytest tests/runs/test_attach.py
"""

import difflib
import functools
import re
import signal
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from curry_train.loop import run_training_steps
from curry_train.runs import RunError, saving

from ..store_models import equal, linear_training, newest_step, regressor
from ..toy_steps import all_equal
from .attached_scripts import PLAIN, attached, flip_a_bit, start

STEPS = 6  # steps per epoch


def run(folder, script, *words, at=0):
    """Return the exit status, the lines of losses and of dev losses, and standard error."""
    process = start(folder, script, *words, at=at)
    out, error = process.communicate(timeout=200)
    lines = out.splitlines()
    return (
        process.returncode,
        [x for x in lines if x[:4] == "loss"],
        [x for x in lines if x[:3] == "dev"],
        error,
    )


@pytest.fixture(scope="module")
def run_plain(tmp_path_factory):
    """Run the script without `saving`, once for the same words."""

    @functools.cache
    def plain(*words):
        folder = tmp_path_factory.mktemp("plain")
        status, losses, devs, error = run(folder, PLAIN, *words)
        assert (status, len(losses), error) == (0, 3 * STEPS, "")
        return folder, losses, devs

    return plain


def test_it_takes_at_most_ten_lines():
    lines = difflib.ndiff(PLAIN.splitlines(), attached().splitlines())
    assert 3 < sum(line.startswith("+ ") for line in lines) <= 10


@pytest.mark.parametrize("words", [(0,), (2,), (2, "own")], ids=str)
def test_a_run_killed_damaged_and_resumed_twice_is_bit_equal_to_an_uninterrupted_one(
    tmp_path, run_plain, words
):
    folder, losses, devs = run_plain(*words)
    status, first, _, _ = run(
        tmp_path / "ours", attached(), *words, at=9
    )  # in the middle of the second epoch
    assert (status, first) == (-signal.SIGKILL, losses[:8])
    assert flip_a_bit(tmp_path / "ours/run") == 8
    status, second, _, error = run(
        tmp_path / "ours", attached(), *words, at=7
    )  # from step 6 to 13, in the third epoch
    assert (status, second) == (-signal.SIGKILL, losses[6:12]), error
    assert flip_a_bit(tmp_path / "ours/run") == 12
    status, third, rest, error = run(tmp_path / "ours", attached(), *words)
    assert (status, third) == (0, losses[10:]), error
    assert "rollback/step-00000012.dcp" in error
    assert rest == devs[1:]
    assert equal(torch.load(folder / "weights.pt"), torch.load(tmp_path / "ours/weights.pt"))
    assert newest_step(tmp_path / "ours/run") == 3 * STEPS


def attach(folder, **options):
    torch.manual_seed(0)
    return saving(*linear_training(), runs=folder, **{"rollback_every": 1, **options})


def go(run, batches, *, epochs=None):
    done = []
    for _ in [None] if epochs is None else run.epochs(range(epochs)):
        for batch in run.batches(batches):
            run.state.model(torch.ones(2)).sum().backward()
            run.state.optimizers[0].step()
            run.step(loss=1.0)
            done.append(batch)
    return done


def test_any_iterable_works_as_a_loader_and_a_with_statement_closes_the_run(tmp_path):
    with attach(tmp_path) as run:
        assert (run.resumed, go(run, "abcd")) == (None, list("abcd"))
    with attach(tmp_path) as run:
        assert run.resumed.saved.step == run.steps == 4
        assert go(run, "abcdef") == ["e", "f"]
    with pytest.raises(ValueError, match=r"^the run is closed: "):
        run.step()


def test_a_figure_that_is_measured_within_a_window_makes_no_save_due(tmp_path):
    with attach(tmp_path, rollback_every="auto") as run:
        # The first save is due after 8 steps or figures.
        for number, _ in enumerate(run.batches("a" * 9)):
            assert run.store.latest() is None
            if number % 2:
                run.measured(size=1)
            else:
                run.step()


def test_a_loader_whose_resume_is_not_exact_is_named_once_in_a_run(tmp_path, caplog):
    loader = DataLoader(range(2), num_workers=1, persistent_workers=True)
    with attach(tmp_path) as run:
        go(run, loader, epochs=3)
    assert caplog.text.count("persistent_workers keep") == 1


def test_finished_epochs_are_not_trained_again(tmp_path):
    with attach(tmp_path) as run:
        go(run, "ab", epochs=2)
    with attach(tmp_path) as run:
        assert go(run, "ab", epochs=2) == []
        assert go(run, "ab", epochs=3) == ["a", "b"]
    with attach(tmp_path) as run, pytest.raises(ValueError, match="the run is in epoch 2: put"):
        go(run, "ab")


def test_two_loops_over_batches_are_refused(tmp_path):
    with attach(tmp_path) as run:
        open_loop = run.batches("ab")
        next(open_loop)
        with pytest.raises(ValueError, match="another loop over batches is open"):
            go(run, "ab")
    with attach(tmp_path / "other") as run:
        next(run.epochs(range(2)))
        go(run, "ab")
        with pytest.raises(ValueError, match="an epoch has one loop"):
            go(run, "ab")


def test_an_error_runs_no_collective_that_other_ranks_might_not_join(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "curry_train.runs.background.BackgroundSaver.finish", lambda self: asked.append(self)
    )

    def breaks():
        with attach(tmp_path, in_background=True) as run:
            for _ in run.batches("ab"):
                raise KeyError("the body of the loop breaks")

    with pytest.raises(KeyError, match="breaks"):
        breaks()
    assert asked == []


def test_starting_a_new_run_in_the_folder_of_another_fails_before_deleting(tmp_path):
    with attach(tmp_path) as run:
        go(run, "abcd")
    started = time.monotonic()
    with pytest.raises(RunError, match="resume from it"), attach(tmp_path, resume=None) as run:
        go(run, "abcd")
    assert time.monotonic() - started < 10
    assert newest_step(tmp_path) == 4


def test_a_scheduler_that_was_not_passed_is_refused(tmp_path):
    """Refuse it, because it would restart at each resume without an error."""
    model, optimizer = linear_training()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    with pytest.raises(
        ValueError, match=r"has a learning rate scheduler that saving\(\) was not given"
    ):
        saving(model, optimizer, runs=tmp_path / "run")
    with pytest.raises(TypeError, match=r"got SGD and Linear$"):
        saving(optimizer, model, runs=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    saving(model, optimizer, extra={"mine": scheduler}, runs=tmp_path / "run").close()


def test_an_optimizer_that_the_loop_has_used_has_no_forgotten_schedule(tmp_path):
    model, optimizer = linear_training()
    options = {"steps": 1, "schedule": lambda step: 0.5}
    run_training_steps(
        model, optimizer, [torch.ones(2)], lambda model, x: model(x).sum(), **options
    )
    saving(model, optimizer, runs=tmp_path / "run").close()


def test_a_measure_that_chooses_no_best_is_named_at_the_end(tmp_path, caplog):
    for options in ({}, {"best_k_metric": "loss"}, {"best_k": 0}):
        run = saving(nn.Linear(1, 1), runs=tmp_path / str(options), **options)
        run.step(1.0)
        run.measured(f1=0.5)
        run.close()
    assert caplog.messages == [
        "no best-K was kept: best_k_metric is dev_loss, and the loop measured f1"
    ]


def trained_to(folder, until):
    """Train until so many steps are done; return the weights and the number of steps trained."""
    model = regressor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = DataLoader(torch.randn(20, 4), batch_size=4, shuffle=True)
    run = saving(model, optimizer, runs=folder, rollback_every=100)
    num_trained = 0
    while run.continues(until=until):
        for inputs in run.batches(data):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            run.step(loss=loss)
            num_trained += 1
    run.close()
    return [parameter.detach() for parameter in model.parameters()], num_trained


def test_a_loop_that_ends_by_steps_is_safe_on_a_finished_run_and_goes_on_bit_equal(
    tmp_path, caplog
):
    for until, num_trained in ((7, 7), (7, 0), (5, 0), (10, 3), (13, 3)):
        weights, trained = trained_to(tmp_path / "parts", until)
        assert trained == num_trained
    ended = f"{tmp_path}/parts: resumed at step 7, and trained no further step"
    assert caplog.messages == [ended] * 2
    whole, trained = trained_to(tmp_path / "whole", 13)
    assert trained == 13
    assert all_equal(weights, whole)


UNCAUGHT = """
import errno, unittest.mock
from curry_train.runs import saving
from torch import nn
with saving(nn.Linear(2, 1), runs="run", rollback_every=1) as run:
    full = OSError(errno.ENOSPC, "No space left on device")
    with unittest.mock.patch("os.fsync", side_effect=full):
        run.step(loss=1.0)
"""


def test_a_store_that_can_not_be_used_ends_a_script(tmp_path):
    status, _, _, error = run(tmp_path, UNCAUGHT)
    assert status == 1
    line = error.splitlines()[-1]
    assert re.search(r"SaveError: .* was not saved: .*No space left.*free some space, or", line)
    with pytest.raises(ValueError, match="no run can be written there"):
        saving(nn.Linear(2, 1), runs=__file__)
