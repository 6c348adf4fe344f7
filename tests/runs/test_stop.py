"""A signal at any moment ends a run between two steps, with its state saved and status 143.

python -m pytest tests/runs/test_stop.py
"""

import functools
import multiprocessing
import signal
import subprocess
import threading
import time
from signal import SIGTERM, raise_signal

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from curry_train.runs import BackgroundSaver, RunError, SavedRun, Store, saving
from curry_train.runs.attach import STOP_SIGNALS, Stop

from ..store_models import linear_training, newest_step


@pytest.fixture
def later():
    """Count the signals that reach the handler of the program around a run."""
    reached = []
    before = signal.signal(SIGTERM, lambda number, frame: reached.append(number))
    yield reached
    signal.signal(SIGTERM, before)


def run_of(folder, **options):
    return saving(*linear_training(), runs=folder, rollback_every=100, **options)


def train(run, loader, *, after_step=lambda number: None):
    """Train one pass, and return the exit status."""
    model = run.state.model
    try:
        for batch in run.batches(loader):
            model(batch[0]).sum().backward()
            run.state.optimizers[0].step()
            run.step()
            after_step(run.steps)
        run.close()
    except SystemExit as stopped:
        return stopped.code
    return 0


def batches(num_workers=0, **options):
    return DataLoader(TensorDataset(torch.ones(6, 2)), num_workers=num_workers, **options)


def test_a_signal_while_a_run_is_opened_ends_it_before_the_first_step(tmp_path, monkeypatch, later):
    open_store = Store.open

    def open_late(store, **options):
        raise_signal(SIGTERM)
        open_store(store, **options)

    monkeypatch.setattr(Store, "open", open_late)
    run = run_of(tmp_path)
    assert train(run, batches()) == 128 + SIGTERM
    assert (run.steps, SavedRun(tmp_path).latest(), later) == (0, None, [])
    with Store(tmp_path):
        pass  # the run has released the folder


def test_a_run_that_can_not_be_opened_gives_back_the_signals_and_the_folder(tmp_path, later):
    assert train(run_of(tmp_path), batches()) == 0
    with pytest.raises(RunError, match="holds no step 7"):
        run_of(tmp_path, resume=7)
    raise_signal(SIGTERM)
    assert later == [SIGTERM]
    with Store(tmp_path):
        pass


def test_a_signal_during_the_last_save_in_the_background_does_not_end_it(
    tmp_path, monkeypatch, later
):
    end = BackgroundSaver.__exit__

    def end_late(*saver_and_error):
        raise_signal(SIGTERM)
        end(*saver_and_error)

    monkeypatch.setattr(BackgroundSaver, "__exit__", end_late)
    assert train(run_of(tmp_path, in_background=True), batches()) == 0
    assert newest_step(tmp_path) == 6
    assert later == []
    raise_signal(SIGTERM)
    assert later == [SIGTERM]


@pytest.mark.parametrize("num_open", [0, 8])
def test_a_process_that_the_training_started_can_be_terminated(tmp_path, later, num_open):
    """Fork while the run handles signals; the child has the handlers from before the run.

    Other runs may have been left open before, in any number.
    """
    left_open = [Stop(STOP_SIGNALS) for _ in range(num_open)]
    signal.signal(SIGTERM, signal.SIG_DFL)
    run = run_of(tmp_path)
    ours, others = multiprocessing.Pipe()

    def wait():
        others.send("ready")
        time.sleep(60)

    child = multiprocessing.get_context("fork").Process(target=wait)
    child.start()
    assert ours.recv() == "ready"
    child.terminate()
    child.join(10)
    ended = child.exitcode
    child.kill()
    run.close()
    assert signal.getsignal(SIGTERM) is signal.SIG_DFL
    for stop in reversed(left_open):
        stop.release()
    assert ended == -SIGTERM


def note_worker(path, worker):
    path.write_text(str(worker))


def test_a_signal_to_the_whole_process_group_leaves_the_workers_of_the_loader(tmp_path, later):
    """Signal the workers alone: the training would end with their error in the middle of a step."""
    workers = []

    def signal_workers(step):
        if step == 1:
            workers.extend(multiprocessing.active_children())
            # As another process does it: the kernel names the sender.
            (worker,) = workers
            subprocess.run(["/bin/sh", "-c", f"kill -TERM {worker.pid}"], check=True)
            time.sleep(0.2)

    own_start = functools.partial(note_worker, tmp_path / "worker")
    loader = batches(1, worker_init_fn=own_start, persistent_workers=True)
    run = run_of(tmp_path / "run")
    assert train(run, loader, after_step=signal_workers) == 0
    assert run.steps == 6
    assert loader.worker_init_fn is own_start
    assert (tmp_path / "worker").read_text() == "0"
    (worker,) = workers
    # Only this process, which started the worker, ends it.
    assert worker.is_alive()
    before = signal.getsignal(signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    worker.terminate()
    worker.join(10)
    signal.signal(signal.SIGCHLD, before)
    assert worker.exitcode == 0


@pytest.mark.parametrize(("window", "done"), [(3, 2), (4, 1)])
def test_a_signal_within_an_accumulation_window_waits_for_its_end(tmp_path, window, done):
    """The gradients of a part of a window are not saved; the last window may be a short one."""
    run = run_of(tmp_path)

    def loop():
        for number, _ in enumerate(run.batches(batches()), start=1):
            if number == 5:
                raise_signal(SIGTERM)
            if number % window == 0:
                run.step()
        run.close()

    with pytest.raises(SystemExit):
        loop()
    assert (run.steps, run.data.batch) == (done, 6)


def test_a_stop_after_a_step_saves_it_and_is_told(tmp_path, later, caplog):
    before = threading.active_count()  # other libraries' threads may stay in the process
    run = run_of(tmp_path)

    def stop(step):
        if step == 3:
            raise_signal(SIGTERM)

    assert train(run, batches(), after_step=stop) == 128 + SIGTERM
    assert newest_step(tmp_path) == 3
    assert "SIGTERM after step 3: saved at step 3, in " in caplog.text
    assert "start again to go on" in caplog.text
    assert threading.active_count() <= before
