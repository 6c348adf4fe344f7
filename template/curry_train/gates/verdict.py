"""Gates: checks of a technique on the user's model, their verdicts, and how they run.

A gate's verdict depends on the user's model, loss, implementation or machine. A check that comes
out the same for every user is a test of this package.

    verdicts = list(measure_all([Case(load_workload("mlp"))], discover(["recompute"])))

`claims.toml` has a table for each gate with its promises; `claims` reads it.

Proof: `python -m pytest tests/gates/test_verdict.py tests/cli/test_cli.py`.
"""

import copyreg
import fnmatch
import functools
import gc
import importlib
import inspect
import itertools
import multiprocessing
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..core.blocks import NoBlocks
from ..core.wording import did_you_mean
from ..core.wording import error_in_a_line as error_in_a_line
from ..plan.optimizers import NeedsClosure
from ..runs.random_state import num_cores
from ..workloads.models import load_workload, users_frames
from ..workloads.workload import Case, IndivisibleBatch, Workload
from .implementation import CONTRACTS, Counted, Implementation

T = TypeVar("T")
LESS_MEMORY = "try a smaller --batch-size, or --shrink"


# Printed as the requirement of a gate that raised an error.
TO_RUN = "to run"
# Part of the refusal of a state that no checkpoint holds.
UNSAVED = "can't be saved"

# What of the user's a gate may run; the loop is that of a script or Trainer.
KINDS_THAT_RUN = ("model", "loss", "implementation", "machine", "loop")


@dataclass(frozen=True)
class Verdict:
    """Result of one gate.

    If the claim does not apply, `passed` is None and `hint` has the reason.
    """

    gate: str
    passed: bool | None
    measured: str
    required: str
    hint: str = ""

    # What of the user's the gate ran, of `KINDS_THAT_RUN`.
    ran: tuple[str, ...] = ()

    # The name of what was measured; empty for a loop alone.
    workload: str = ""


# What a check returns: the measured and the required figure, and what to do, if anything.
Outcome = tuple[str, str, str]


class NotApplicable(ValueError):
    """Raised by a check whose claim does not apply to the model; the message has the reason."""


class RankFailed(RuntimeError):
    """Another process raised an error; its note names the line of the user that raised it."""


def not_applicable(gate: str, why: str) -> Verdict:
    return Verdict(gate, None, "not applicable", "", why)


# How torch refuses saved-tensor hooks, which recompute, offload and the count of saved bytes need.
NO_HOOKS_INSIDE = "don't yet support saved tensor hooks"
WHY_NO_HOOKS = (
    "a module calls torch.func.grad, vjp, jacrev or hessian, inside which torch allows no hooks of "
    "saved tensors: use torch.autograd.grad with create_graph=True there"
)


@dataclass(frozen=True)
class Gate:
    """A named claim and the function that checks it on a case.

    The check holds if its outcome has nothing to do. A keyword parameter of it with the name of a
    contract (`implementation.CONTRACTS`) takes the user's implementation; its default is ours.
    """

    name: str
    check: Callable[..., Outcome]

    # Whether it measures the user's machine too: times, or a disk.
    machine: bool = False

    # Whether it waits for ranks, which are processes of their own.
    on_ranks: bool = False

    # About how many forward passes of the model it takes, for the estimate of the time.
    steps: int = 10

    @property
    def takes(self) -> tuple[str, ...]:
        """The contracts of which it takes another implementation."""
        parameters = inspect.signature(self.check).parameters
        return tuple(name for name in CONTRACTS if name in parameters)

    def run(self, case: Case, given: Sequence[Implementation] = ()) -> Verdict:
        """Check a case, with the user's implementations in place of ours; note what was run.

        A gate that takes none of the given ones does not apply.
        """
        taken = {one.name: one for one in given if one.name in self.takes}
        if given and not taken:
            why = "takes no --impl; it runs only without it"
            if self.takes:
                named = ", ".join(one.name for one in given)
                why = f"takes --impl of {' and '.join(self.takes)}, and {named} was given"
            return not_applicable(self.name, why)
        workload = count_calls(case.workload)
        build, loss = workload.build, workload.loss
        for one in (build, loss, *given):
            one.num_calls = 0
        verdict = self._run_check(replace(case, workload=workload), taken)
        ran = {
            # A gate may end before a batch reaches the model that it built.
            "model": build.num_calls and (loss.num_calls or verdict.required != TO_RUN),
            "loss": loss.num_calls,
            "implementation": any(one.num_calls for one in given),
            "machine": self.machine,
        }
        return replace(verdict, ran=tuple(kind for kind in ran if ran[kind]))

    def _run_check(self, case: Case, given: Mapping[str, Implementation]) -> Verdict:
        """Return the verdict; a check that fails on the user's model is a gate that fails."""
        try:
            measured, required, hint = self.check(case, **given)
            return Verdict(self.name, not hint, measured, required, hint)
        except NoBlocks as error:
            why = error.in_short
        except (NotApplicable, IndivisibleBatch, NeedsClosure) as error:
            why = str(error)
        except (MemoryError, torch.OutOfMemoryError) as error:
            # CUDA goes on for many sentences.
            why = f"memory ran out ({str(error).partition('. ')[0]}): {LESS_MEMORY}"
        except (RankFailed, ValueError) as error:
            why = str(error)
            if UNSAVED not in why:
                # Our own errors state what to do. The user's may have no text.
                measured, hint = "could not be measured", why or where_to_look(error)
                if isinstance(error, RankFailed):
                    measured, hint = f"raised on a rank: {why}", error.__notes__[0]
                return Verdict(self.name, False, measured, TO_RUN, hint)
        except Exception as error:  # noqa: BLE001
            # The user's model may raise anything, and the other gates must still run.
            if NO_HOOKS_INSIDE not in str(error):
                measured = f"raised {error_in_a_line(error)}"
                return Verdict(self.name, False, measured, TO_RUN, where_to_look(error))
            why = WHY_NO_HOOKS
        return not_applicable(self.name, why)


def where_to_look(error: BaseException) -> str:
    """Name the user's own line: the last of the traceback that is in no library and not ours."""
    if isinstance(error, SyntaxError):
        return f"correct {error.filename}, line {error.lineno}"
    # A factory's error is the cause of the one that names the factory.
    if own := users_frames(error) or (error.__cause__ and users_frames(error.__cause__)):
        return f"correct your {own[-1].filename}, line {own[-1].lineno}: {own[-1].line}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"no line of yours: it was raised in {last.filename}, line {last.lineno}"


# Forget the results that gates of one case share.
_forget: list[Callable[[], None]] = []


def shared(make: Callable[[Any], T]) -> Callable[[Any], T]:
    """Let a function make its result once for all gates of a case; its next case drops it."""
    kept = functools.lru_cache(maxsize=1)(make)
    _forget.append(kept.cache_clear)
    return kept


def drop_shared_results() -> None:
    """Free what gates share, such as gradients on the device."""
    for forget in _forget:
        forget()


@shared
def count_calls(workload: Workload) -> Any:
    """Return the workload with a `build` and a `loss` that count their calls.

    The same workload gives the same object again, so that results which gates share stay valid.
    """
    return replace(workload, build=Counted(workload.build), loss=Counted(workload.loss))


# Find the gates of techniques, each by the name of its module.

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


@dataclass(frozen=True)
class Claim:
    """A promise of a technique that a gate checks."""

    name: str  # <technique>.<word>
    gate: str
    text: str
    broken_by: str


@functools.cache
def claims() -> tuple[Claim, ...]:
    """Read the claims of all gates, in the order of the file."""
    tables = tomllib.loads(Path(__file__).with_name("claims.toml").read_text(encoding="utf-8"))
    return tuple(
        Claim(f"{technique_of(gate)}.{word}", gate, text, broken_by)
        for gate, entries in tables.items()
        for word, (text, broken_by) in entries.items()
    )


def technique_of(gate: str) -> str:
    """Return the technique, and skill, that a gate belongs to."""
    return gate.partition("/")[0]


def discover(patterns: Sequence[str] = ()) -> tuple[Gate, ...]:
    """Return the gates that match any pattern; without patterns, all.

    A pattern is a technique (`grad-accum`) or a glob (`grad-accum/*-window`). One that matches no
    gate, such as `recompute/memry`, is an error.
    """
    modules = (technique.replace("-", "_") for technique in TECHNIQUES)
    gates: dict[str, Gate] = {
        gate.name: gate
        for module in modules
        for gate in importlib.import_module(f"{__package__}.{module}").GATES
    }
    chosen = set[str]()
    for pattern in patterns or ["*"]:
        found = fnmatch.filter(gates, f"{pattern}/*" if pattern in TECHNIQUES else pattern)
        if not found:
            advice = did_you_mean(pattern, [*TECHNIQUES, *gates])
            raise ValueError(f"no gate matches {pattern!r}; {advice} (validate --list has all)")
        chosen.update(found)
    return tuple(gate for name, gate in gates.items() if name in chosen)


# Run every gate on every workload, in parallel on the cores of a CPU.

GATES_WORTH_A_PROCESS = 20  # starting a process takes as long as running ten gates


def measure_all(
    cases: Sequence[Case], gates: Sequence[Gate], *, implementations: Sequence[Implementation] = ()
) -> Iterator[Verdict]:
    """Yield the verdict of each gate on each case, in their order, as soon as it is there.

    With `implementations` the gates check these instead of ours. Worker processes look up case and
    implementations by name, so more than one process needs cases that `load_workload` made.
    """
    pool = None
    num_processes = min(len(cases) * len(gates) // GATES_WORTH_A_PROCESS, num_cores())
    if num_processes > 1 and all(case.device.type == "cpu" for case in cases):
        # Spawn, because a fork of a process that has used threads may hang.
        context = multiprocessing.get_context("spawn")
        threads = max(1, torch.get_num_threads() // num_processes)
        pool = ProcessPoolExecutor(num_processes, context, _start_worker, (threads,))
    try:
        runs = []
        for case, gate in itertools.product(cases, gates):
            run: Callable[[], Verdict] = functools.partial(gate.run, case, implementations)
            # Gates on ranks run in this process, so that all use the same ranks.
            if pool is not None and not gate.on_ranks:
                run = pool.submit(run).result
            runs.append((case, run))
        for case, run in runs:
            yield replace(run(), workload=case.workload.name)
    except BrokenProcessPool as error:
        raise RuntimeError(
            "memory ran out (the system ended a process): validate one model at a time, and "
            f"{LESS_MEMORY}"
        ) from error
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        drop_shared_results()


def _start_worker(threads: int) -> None:
    """Set the threads, and keep what is imported out of the garbage that measurements collect."""
    # Imported here because not every command needs the compiler; the first optimizer does.
    import torch._dynamo

    torch.set_num_threads(threads)
    discover()
    gc.collect()
    gc.freeze()


@functools.cache
def _load_once(spec: str) -> Workload:
    """Load a workload, once per process for all gates."""
    return load_workload(spec)


# A workload is pickled by its name, with which another process loads it.
copyreg.pickle(Workload, lambda workload: (_load_once, (workload.spec,)))
