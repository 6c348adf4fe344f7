"""Find the gates of techniques and run them on workloads.

Proof: `python -m pytest tests/cli/test_cli.py tests/gates/test_implementation.py`.
"""

import functools
import importlib
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from ..workloads.models import load_workload
from ..workloads.workload import Case, Workload
from .verdict import Gate, Implementation, Judged, Verdict, judge, load_implementation

TECHNIQUES = (
    "bench",
    "checkpoint-policy",
    "grad-accum",
    "grad-flow",
    "loss-spike",
    "memory-plan",
    "recompute",
    "sac",
    "snn-timesteps",
)

# First words of gate names that are not the name of the technique whose module holds the gates.
TECHNIQUE_OF_GATES = {"run-journal": "checkpoint-policy"}


def _module_of(technique: str) -> Any:
    return importlib.import_module(f"{__package__}.{technique.replace('-', '_')}")


def gates_of(technique: str) -> tuple[Gate, ...]:
    """Return the gates of one technique; imports only its module."""
    return _module_of(technique).GATES


def judged_of(technique: str) -> tuple[Judged, ...]:
    """Return what the gates of one technique judge, the main callable first."""
    return _module_of(technique).JUDGED_CALLABLES


def techniques_of(patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the techniques that gate patterns may match, in the order of `TECHNIQUES`.

    All of them, if a pattern has wildcards in its first word or starts with an unknown one.
    """
    words = [pattern.partition("/")[0] for pattern in patterns]
    found = {TECHNIQUE_OF_GATES.get(word, word) for word in words}
    if not found or not found <= set(TECHNIQUES):
        return TECHNIQUES
    return tuple(technique for technique in TECHNIQUES if technique in found)


def discover(patterns: Sequence[str] = ()) -> tuple[Gate, ...]:
    """Return every gate of the techniques that the patterns name; of all without patterns."""
    return tuple(gate for technique in techniques_of(patterns) for gate in gates_of(technique))


# Run every gate on every workload, in parallel on the cores of a CPU.

GATES_WORTH_A_PROCESS = 20  # starting a process takes as long as running ten gates


@dataclass(frozen=True)
class GateRow:
    """A verdict and the workload that it was measured on."""

    workload: str
    verdict: Verdict


def measure_rows(
    cases: Sequence[Case],
    gates: Sequence[Gate],
    *,
    implementations: Sequence[Implementation] = (),
    num_processes: int | None = None,
) -> Iterator[GateRow]:
    """Yield one row for each case and gate, in their order.

    With `implementations` the gates judge these instead of ours. `num_processes` defaults to the
    number that pays off. Worker processes look up case, gate and implementations by name, so more
    than one process needs cases that `load_workload` made.
    """
    if num_processes is None:
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        worthwhile = len(cases) * len(gates) // GATES_WORTH_A_PROCESS
        on_cpu = all(case.device.type == "cpu" for case in cases)
        num_processes = min(worthwhile, cores) if on_cpu else 1
    if num_processes < 2:
        if implementations:
            gates = [judge(gate, implementations) for gate in gates]
        yield from (GateRow(case.workload.name, gate.run(case)) for case in cases for gate in gates)
        return

    threads = max(1, torch.get_num_threads() // num_processes)
    named = tuple(f"{given.judged}={given.spec}" for given in implementations)
    tasks = [
        (case.workload.spec, _settings(case), gate.name, named) for case in cases for gate in gates
    ]
    # Spawn, because a fork of a process that has used threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, torch.set_num_threads, (threads,)) as pool:
        try:
            verdicts = pool.map(_measure, *zip(*tasks, strict=True))
            names = (case.workload.name for case in cases for _ in gates)
            yield from (
                GateRow(name, verdict) for name, verdict in zip(names, verdicts, strict=True)
            )
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _settings(case: Case) -> dict[str, Any]:
    return {name: value for name, value in vars(case).items() if name != "workload"}


def _measure(
    spec: str, settings: dict[str, Any], gate_name: str, implementations: tuple[str, ...]
) -> Verdict:
    case = Case(_loaded(spec), **settings)
    gate = {gate.name: gate for gate in discover([gate_name])}[gate_name]
    if implementations:
        gate = judge(gate, _implementations(implementations))
    return gate.run(case)


@functools.cache
def _implementations(named: tuple[str, ...]) -> list[Implementation]:
    """Load implementations once per process, for all gates."""
    judged = {technique: judged_of(technique) for technique in TECHNIQUES}
    return [load_implementation(text, judged) for text in named]


@functools.cache
def _loaded(spec: str) -> Workload:
    """Load a workload once per process, for all of its gates."""
    return load_workload(spec)
