"""Measure the available host memory, and reuse the buffers of a pool.

python -m pytest tests/primitives/test_host_memory.py
"""

import mmap

import pytest

from curry_train.primitives import host_memory
from curry_train.primitives.host_memory import (
    HostMemoryShort,
    HostPool,
    available_host_bytes,
    require_host_memory,
)

MEMINFO = "MemTotal: 64 kB\nMemAvailable:   48 kB\n"
JOB = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/user/job\n"}
SECOND, FIRST = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/meminfo": MEMINFO}, 48 * 1024),
        ({"proc/meminfo": "MemFree: 10 kB\n"}, None),
        ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n"}, 48 * 1024),
        (JOB | {f"{SECOND}/user/memory.max": "5"}, 48 * 1024),  # a limit without its use
        (JOB | {f"{SECOND}/memory.max": "5000", f"{SECOND}/memory.current": "4000"}, 1000),
        (JOB | {f"{SECOND}/memory.max": f"{2**40}", f"{SECOND}/memory.current": "0"}, 48 * 1024),
        (
            JOB
            | {
                f"{SECOND}/user/job/memory.max": "max\n",
                f"{SECOND}/user/job/memory.current": "1000\n",
                f"{SECOND}/user/memory.max": "9000\n",
                f"{SECOND}/user/memory.current": "5000\n",
                f"{SECOND}/user/memory.stat": "anon 4000\ninactive_file 500\n",
            },
            4500,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/\n4:hugetlb,memory:/seen/outside\n0::/\n",
                f"{FIRST}/memory.limit_in_bytes": "9000\n",
                f"{FIRST}/memory.usage_in_bytes": "2000\n",
                f"{FIRST}/memory.stat": "inactive_file 9\ntotal_inactive_file 100\n",
            },
            7100,
        ),
    ],
)
def test_available_memory_is_the_least_that_the_kernel_and_control_groups_allow(
    tmp_path, files, expected
):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_host_bytes(tmp_path) == expected


def test_the_pool_reuses_buffers_that_fit_and_frees_those_that_do_not():
    pool = HostPool(pinned=False)
    first = pool.take(5000)
    assert first.nbytes == pool.reserved_bytes == 8192
    pool.give(first)
    assert pool.take(100) is first  # up to four pages fit, five do not
    pool.give(first)
    large = pool.take(5 * 4096)
    assert pool.reserved_bytes == large.nbytes == 20480  # the idle first buffer was freed
    pool.give(large)
    assert pool.take(4096).nbytes == pool.reserved_bytes == 4096
    pool.clear()
    assert pool.reserved_bytes == 4096  # this buffer is in use


def test_too_little_memory_is_an_error_with_both_figures(monkeypatch):
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 2**30)
    require_host_memory(2**30)
    with pytest.raises(
        HostMemoryShort,
        match=r"needs 3.00 GiB more of host memory and 1.00 GiB is available: offload",
    ):
        HostPool(pinned=False).reserve([2**30, 2**31])
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: None)
    require_host_memory(2**60)  # a system without this figure


def test_a_refused_allocation_is_an_error_of_host_memory_not_of_the_device(monkeypatch):
    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    pool = HostPool(pinned=False)
    with pytest.raises(
        HostMemoryShort, match=r"gave no 4.00 KiB of memory \(.*Cannot allocate.*\): offload fewer"
    ):
        pool.take(1)
    assert pool.reserved_bytes == 0
