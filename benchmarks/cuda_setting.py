"""Sizes, device and rows of the CUDA evidence, which its pieces share.

A stand-in answers what torch.cuda is asked in a dry run, which runs toy sizes on the CPU.

Proof: `python -m pytest tests/benchmarks/test_evidence_cuda.py`.
"""

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "template"))

from curry_train.core.measure import is_out_of_memory
from curry_train.core.timing import time_in_turns
from curry_train.plan.device import DeviceProfile, find_profile, profile_of
from curry_train.plan.planner import Infeasible
from curry_train.workloads.models import transformer
from curry_train.workloads.workload import Case, Workload

ROOT = Path(__file__).resolve().parents[1]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One row of a piece, with the seconds that it takes on an H200 at most, as estimated."""

    key: str
    measure: Callable[[], Figures]
    seconds: float = 30.0


# The stand-in for torch.cuda.


class StandInCuda:
    """Answers what the pieces ask of `torch.cuda`, without a device; its figures mean nothing."""

    class memory:  # noqa: N801  a module of torch by this name
        @staticmethod
        def _record_memory_history(*options: Any, **named: Any) -> None:
            """Record nothing."""

        @staticmethod
        def _snapshot() -> dict[str, Any]:
            made = [
                {"action": "segment_alloc", "addr": 2**21, "size": 2**21, "stream": 0},
                {"action": "alloc", "addr": 2**21, "size": 2**20, "stream": 0},
                {"action": "free_requested", "addr": 2**21, "size": 2**20, "stream": 0},
                {"action": "free_completed", "addr": 2**21, "size": 2**20, "stream": 0},
                {"action": "segment_free", "addr": 2**21, "size": 2**21, "stream": 0},
                {"action": "snapshot", "addr": 0, "size": 0, "stream": 0},
            ]
            return {"device_traces": [made], "segments": []}

    def is_available(self) -> bool:
        return True

    def get_device_name(self) -> str:
        return "NVIDIA H200"

    def mem_get_info(self) -> tuple[int, int]:
        return 2**30, 2**30

    def max_memory_allocated(self) -> int:
        return 2**20

    def max_memory_reserved(self) -> int:
        return 2**21

    def memory_allocated(self) -> int:
        return 0

    def memory_reserved(self) -> int:
        return 0

    def empty_cache(self) -> None:
        """Give nothing back."""

    reset_peak_memory_stats = synchronize = empty_cache

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        assert fraction > 0


class Cuda:
    """Stand for `torch.cuda` in the pieces: hand on to it, or to the stand-in."""

    def __init__(self) -> None:
        self.api: Any = torch.cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(self.api, name)


cuda = Cuda()


# Sizes and device.


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama-like model."""

    depth: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int

    def workload(self, length: int) -> Workload:
        return transformer(length=length, **asdict(self))


LLAMAS = {
    "1B": LlamaShape(16, 2048, 32, 8, 8192, 128_256),
    "3B": LlamaShape(28, 3072, 24, 8, 8192, 128_256),
    "8B": LlamaShape(32, 4096, 32, 8, 14336, 128_256),
}
TOYS = {"toy": LlamaShape(2, 32, 2, 1, 64, 256)}


@dataclass(frozen=True)
class Timed:
    """A model whose step times are compared."""

    model: str
    length: int
    samples: int
    rounds: int

    @property
    def key(self) -> str:
        return f"{self.model}, {self.samples} of {self.length} tokens"


@dataclass(frozen=True)
class Setting:
    """Sizes and device of a run: those of the evidence, or toy sizes on the CPU."""

    device: torch.device
    dtype: torch.dtype
    models: Mapping[str, LlamaShape]
    lengths: tuple[int, ...]
    timed: tuple[Timed, ...]
    # Memory limits in GiB for the largest batch, and the largest batch that is tried.
    limits: tuple[float, ...]
    most_samples: int
    # Tokens, width and classes of a head; bytes of a state that is saved, and rows of its steps.
    head: tuple[int, int, int]
    state_bytes: int
    state_rows: int
    is_dry: bool = False
    # Where the pieces' files are, and the card whose memory is predicted where there is none.
    folder: Path = Path()
    target: str = "NVIDIA H200"
    # When the pieces must be done, on the clock of `time.monotonic`.
    until: float = float("inf")

    @property
    def card(self) -> str:
        name: str = cuda.get_device_name() if cuda.is_available() else self.target
        return name

    @property
    def profile(self) -> DeviceProfile:
        """The rates of the device for plans: from its data sheet if there is one, or measured."""
        return find_profile("cpu") if self.is_dry else profile_of(self.device)

    @property
    def seconds_left(self) -> float:
        return self.until - time.monotonic()


EVIDENCE = Setting(
    device=torch.device("cuda"),
    dtype=torch.bfloat16,
    models=LLAMAS,
    lengths=(2048, 4096, 8192),
    # With fewer samples the optimizer's step of 8B owns the peak, whatever the strategy.
    timed=(Timed("1B", 4096, 4, 12), Timed("8B", 4096, 2, 8), Timed("3B", 8192, 1, 12)),
    limits=(24, 80),
    most_samples=256,
    head=(8192, 4096, 128_256),
    state_bytes=8 * 2**30,
    state_rows=512,
)
DRY_RUN = Setting(
    device=torch.device("cpu"),
    dtype=torch.float32,
    models=TOYS,
    lengths=(16,),
    timed=(Timed("toy", 16, 2, 2),),
    limits=(1,),
    most_samples=2,
    head=(64, 16, 128),
    state_bytes=2**20,
    state_rows=8,
    is_dry=True,
)


def fresh_device() -> None:
    """Give back all memory, also the workspaces of matrix products, and forget the peaks."""
    gc.collect()
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    cuda.empty_cache()
    cuda.reset_peak_memory_stats()


def on_device(workload: Workload, setting: Setting) -> Workload:
    """Return a workload whose model is built on the device in its dtype, not moved there."""

    def build() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(setting.dtype)
        try:
            with torch.device(setting.device):
                return workload.build()
        finally:
            torch.set_default_dtype(before)

    return replace(workload, build=build)


def case_of(setting: Setting, model: str, length: int, samples: int = 1) -> Case:
    workload = on_device(setting.models[model].workload(length), setting)
    return Case(workload, device=setting.device, dtype=setting.dtype, batch_size=samples)


def attention_kernel(setting: Setting, model: str, length: int) -> str:
    """Name the kernel that torch chooses for the attention of a model.

    It depends on the card and on the cuDNN that torch comes with.
    """
    shape = setting.models[model]
    width = shape.dim // shape.heads
    query, key = (
        torch.empty(1, heads, length, width, device=setting.device, dtype=setting.dtype)
        for heads in (shape.heads, shape.kv_heads)
    )
    choice = torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=True)
    return SDPBackend(choice).name.lower()


# Rows that hold several figures: go on after what can't be measured, and time in turns.


@contextlib.contextmanager
def recorded(errors: dict[str, str], name: str) -> Iterator[None]:
    """Record what a device or a library can't do, and go on with the next.

    An error that leaves the device unusable is raised, since all that follows would fail too.
    """
    # Here, because an error holds the tensors of its frames until the block of `with` has ended.
    fresh_device()
    try:
        yield
    except (RuntimeError, ValueError, ImportError, Infeasible) as error:
        errors[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if not is_out_of_memory(error):
            cuda.synchronize()


def timed_in_turns(
    ways: Sequence[Callable[[], object]], setting: Setting, *, rounds: int, warmup: int
) -> list[list[float]]:
    """Time ways in turns, for fewer rounds where the time that is left does not allow all."""
    for way in ways:
        way()
    cuda.synchronize()
    started = time.monotonic()
    for way in ways:
        way()
    cuda.synchronize()
    a_round = time.monotonic() - started
    affordable = setting.seconds_left / a_round - warmup
    rounds = int(max(1, min(rounds, affordable)))
    return time_in_turns(ways, rounds=rounds, warmup=warmup, wait=cuda.synchronize)
