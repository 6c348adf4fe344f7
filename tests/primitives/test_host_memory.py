"""Measure the available host memory, and refuse what it can't hold.

python -m pytest tests/primitives/test_host_memory.py
"""

import mmap

import pytest

from curry_train.primitives import HostMemoryShort, offload
from curry_train.primitives.offload import available_host_bytes, host_buffer, require_host_memory

MEMINFO = "MemTotal: 64 kB\nMemAvailable:   48 kB\n"
JOB = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/user/job\n"}
SECOND = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
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
    ],
)
def test_available_memory_is_the_least_that_the_kernel_and_control_groups_allow(
    tmp_path, files, expected
):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_host_bytes(tmp_path) == expected


def test_too_little_memory_is_an_error_with_both_figures(monkeypatch):
    monkeypatch.setattr(offload, "available_host_bytes", lambda: 2**30)
    require_host_memory(2**30)
    with pytest.raises(
        HostMemoryShort,
        match=r"^offload needs 3,072.00 MiB more of host memory and 1,024.00 MiB is available",
    ):
        require_host_memory(3 * 2**30)
    monkeypatch.setattr(offload, "available_host_bytes", lambda: None)
    require_host_memory(2**60)  # a system without this figure


def test_a_refused_allocation_is_an_error_of_host_memory_not_of_the_device(monkeypatch):
    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(
        HostMemoryShort, match=r"^the host gave no 1.00 MiB \(.*Cannot allocate.*\): offload fewer"
    ):
        host_buffer(2**20, pinned=False)
