"""Set up all tests: a warm python for ranks, a frozen heap, and a user's environment.

Ranks are forked from a python that has imported torch. Objects that exist when a test starts are
frozen for the garbage collector: measurements collect garbage first, and with all libraries loaded
each collection would take a third of a second. Variables that `make test` sets for its own commands
are removed, so that tests start commands as a user does. Each worker keeps to one core.

Proof: `python -m pytest tests/core/test_measure.py`.
"""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for variable_of_make in (
    "PYTHON",
    "MAKEFLAGS",
    "MAKEOVERRIDES",
    "MAKELEVEL",
    "MFLAGS",
    "PYTEST_ADDOPTS",
):
    os.environ.pop(variable_of_make, None)


def pytest_configure(config: pytest.Config) -> None:
    """Keep each worker, and the processes that its tests start, on a core of its own.

    Commands start as many processes as they find cores, and every one imports torch; with another
    worker that takes half as long again as on one core.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


@pytest.fixture(scope="session", autouse=True)
def ranks_have_imported_torch() -> None:
    from tests.warm_python import WarmPython

    from curry_train.gates import two_ranks as ranks

    ranks.PYTHON_EXECUTABLE = WarmPython()


@pytest.fixture(autouse=True)
def path_of_imports_stays() -> Iterator[None]:
    """Restore `sys.path` after each test: loading a user's model puts its folder there."""
    before = sys.path
    sys.path = [*before]
    yield
    sys.path = before


@pytest.fixture
def pair_of_four_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Yield a group of two of four simulated ranks, which all have the values of this one."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def of_equal_ranks(tensor: Any, group: Any = None, **_: Any) -> None:
        tensor.mul_(dist.get_world_size(group))

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    monkeypatch.setattr(dist, "all_reduce", of_equal_ranks)
    try:
        yield dist.new_group([0, 1])
    finally:
        dist.destroy_process_group()


@pytest.fixture
def cuda_generators(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """Simulate the generators of two CUDA devices; return their states, which are numbers."""
    import torch

    states: dict[int, Any] = {0: 3, 1: 5}

    def index_of(device: Any) -> int:
        place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        assert place.type == "cuda"
        return place.index or 0

    def set_state(state: Any, device: Any = "cuda") -> None:
        states[index_of(device)] = state

    stand_ins = {
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: len(states),
        "get_rng_state": lambda device="cuda": states[index_of(device)],
        "set_rng_state": set_state,
        "manual_seed_all": lambda seed: states.update(dict.fromkeys(states, seed)),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return states


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes long and shows nearly the same as another test: `make long` runs it."""
    lines = (Path(__file__).parent / "tests" / "long.txt").read_text().splitlines()
    names = tuple(line for line in lines if not line.startswith("#"))
    for item in items:
        if item.nodeid.startswith(names):
            item.add_marker("long")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a device that is not there, and freeze the heap again before each test."""
    import torch

    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    # Tests import more modules.
    gc.collect()
    gc.freeze()
    # Counting a million of them takes longer than most tests.
    gc.get_freeze_count = lambda: 10**6
