"""A script with `saving` on two ranks is killed and resumed, and stays equal to the bit.

python -m pytest tests/runs/test_attach_ranks.py
"""

import signal

import pytest
import torch
import torch.distributed as dist

from curry_train.runs import SavedRun, attach, saving
from curry_train.runs.ranks import Ranks

from ..rank_calls import run_on_ranks
from ..store_models import linear_training
from .attached_scripts import PLAIN, attached, flip_a_bit, on_ranks, start

STEPS = 4  # steps per epoch: 11 samples per rank, 3 per batch
EPOCHS = 3
RANKS = (0, 1)


def start_ranks(folder, script, *, at=0):
    """Start both ranks, with one worker each; `at` is the optimizer step in which they are killed.

    With 0 they are not.
    """
    (folder / "meet").unlink(missing_ok=True)
    meet = (folder / "meet").as_uri()
    return [start(folder, script, 1, at=at, RANK=str(rank), MEET=meet) for rank in RANKS]


def ended(processes):
    """Return status, losses and standard error of each rank.

    When one rank has died the other is killed, as torchrun does.
    """
    try:
        for each in processes:
            if each.wait(60) != 0:
                break
    finally:
        for each in processes:
            if each.poll() is None:
                each.kill()
    found = []
    for each in processes:
        out, error = each.communicate(timeout=60)
        found.append(
            (each.returncode, [line for line in out.splitlines() if line.startswith("loss")], error)
        )
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Run the script without `saving`, with a worker that draws from its rank's generator."""
    folder = tmp_path_factory.mktemp("plain")
    found = ended(start_ranks(folder, on_ranks(PLAIN)))
    assert [(status, len(losses)) for status, losses, _ in found] == [(0, EPOCHS * STEPS)] * 2, (
        found
    )
    assert found[0][1] != found[1][1]
    return [losses for _, losses, _ in found], torch.load(folder / "weights-0.pt")


def test_two_ranks_killed_damaged_and_resumed_are_bit_equal_to_an_uninterrupted_run(
    plain, tmp_path
):
    losses, weights = plain
    script = on_ranks(attached()).replace("    run.measured(", "    if rank == 0: run.measured(")
    found = ended(start_ranks(tmp_path, script, at=9))  # in the third epoch
    assert [(status, first) for status, first, _ in found] == [
        (-signal.SIGKILL, each[:8]) for each in losses
    ], found
    assert flip_a_bit(tmp_path / "run", "__1_*.distcp") == 8
    found = ended(start_ranks(tmp_path, script))  # from step 6, in the middle of the second epoch
    assert [(status, rest) for status, rest, _ in found] == [(0, each[6:]) for each in losses], (
        found
    )
    assert "rollback/step-00000008.dcp" in found[0][2]
    for rank in RANKS:
        ours = torch.load(tmp_path / f"weights-{rank}.pt")
        differing = [name for name in weights if not torch.equal(weights[name], ours[name])]
        assert [name for name in differing if rank == 0 or "running" not in name] == []
    run = SavedRun(tmp_path / "run")
    assert run.latest().step == EPOCHS * STEPS
    best = {one.step for one in run.committed("best-k")}
    assert best  # one rank evaluates for both
    assert best <= {4, 8, 12}


class SignalAt:
    """Count the collectives of `Ranks`, and signal this process around one of them."""

    def __init__(self, monkeypatch, number=None, *, after=False):
        self.calls = 0
        for name in ("highest", "all_do"):
            monkeypatch.setattr(Ranks, name, self.counting(getattr(Ranks, name), number, after))

    def counting(self, call, number, after):
        def counted(*given):
            self.calls += 1
            here = self.calls == number
            if here and not after:
                signal.raise_signal(signal.SIGTERM)
            answer = call(*given)
            if here and after:
                signal.raise_signal(signal.SIGTERM)
            return answer

        return counted


def train_three_steps(folder):
    """Return the steps done, and the exit status, 0 where the training came to its end."""
    torch.manual_seed(7)
    model, optimizer = linear_training()
    losses = []
    try:
        run = saving(model, optimizer, runs=folder, rollback_every=2, recovery_every=None)
        for batch in run.batches([torch.ones(1, 2)] * 3):
            loss = model(batch).sum()
            loss.backward()
            dist.all_reduce(model.weight.grad)
            optimizer.step()
            losses.append(loss.item())
            run.step(loss=loss)
        run.close()
    except SystemExit as stopped:
        return len(losses), stopped.code
    return len(losses), 0


def signalled_at_every_collective(folder):
    """Train with a signal to rank 1, to rank 0 or to both at different collectives."""
    own = dist.get_rank()
    with pytest.MonkeyPatch.context() as patched:
        whole = SignalAt(patched)
        assert train_three_steps(f"{folder}/whole") == (3, 0)
    cases = [((None, number), bool(number % 2)) for number in range(1, whole.calls)]
    cases += [((number, None), False) for number in range(1, whole.calls, 5)]
    cases += [((number, number + 3), False) for number in range(1, 26, 4)]
    found, told = [], []
    for index, (numbers, after) in enumerate(cases):
        with pytest.MonkeyPatch.context() as patched:
            SignalAt(patched, numbers[own], after=after)
            patched.setattr(attach.logger, "warning", lambda *words: told.append(words[-1]))
            steps, status = train_three_steps(f"{folder}/{index}")
        newest = SavedRun(f"{folder}/{index}").latest()
        found.append((numbers, after, steps, status, newest.step if newest else 0))
    return found, told


def test_a_signal_at_any_collective_stops_both_ranks_after_the_same_step(tmp_path):
    (first, told), (second, told_again) = run_on_ranks(
        f"{__file__}:signalled_at_every_collective", folder=str(tmp_path)
    )
    assert first == second
    assert told
    assert not told_again
    assert len(first) > 25
    assert {status for *_, status, _ in first} <= {0, 128 + signal.SIGTERM}
    assert all(steps == saved for *_, steps, _, saved in first), first
    # A signal while the run is opened counts before the first step, and one at the vote after a
    # step at the next vote.
    assert {steps for *_, steps, _, _ in first} == {0, 1, 2, 3}
