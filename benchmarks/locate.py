"""Score and cost of `runs locate`: planted differences, equal runs, and others that round.

    python benchmarks/locate.py --json evidence/locate.json
    python benchmarks/locate.py --part costs --json evidence/locate.json  # the others stay

Faults are drawn over the modules, parameters and calls of each training, until so many have an
effect; one that changes no bit of the run, such as a flip that dropout hides, is drawn again.
Proof: `python -m pytest tests/benchmarks/test_recorders.py`.
"""

import ast
import functools
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._debug_mode import DebugMode

from curry_train.cli.runs_locate import _find_first
from curry_train.gates.loop_run import run_ranks
from curry_train.runs import fingerprints, record_run
from curry_train.runs.fingerprints import read_fingerprints
from curry_train.runs.locate import Located, expected_values, first_operation, locate
from curry_train.runs.rounding import NUM_NOISES, Exchange
from locate_faults import (
    KINDS,
    SOUND,
    Fault,
    Planter,
    Training,
    cases_of_ranks,
    fault_of_rank,
    record,
    record_ranks,
)
from locate_models import MODELS, quietly, sized_gpt2
from recording import Figures, record_parser, write_record

# Models that compile within a minute.
COMPILED = ("sampled",)


# Trainings are recorded once each; a process makes the records of one job.


@functools.cache
def sound(name: str, operations_in_step: int = 0) -> list[Figures]:
    return record(name, operations_in_step=operations_in_step)


@functools.cache
def kept(name: str, base=nullcontext) -> tuple[Any, str]:
    """Return a run that kept its values, and their folder."""
    values = tempfile.mkdtemp()
    with base():
        return record(name, exchange=Exchange(values)), values


@functools.cache
def noise(name: str, base, expected: str) -> list[Any]:
    """Return runs with noise; those of all Bs that leave dtypes and calls as they are are the same.

    `expected` is what `expected_values` returns of A, as text.
    """
    _, values = kept(name, base)
    of_a = [ast.literal_eval(expected)]
    with base():
        return [
            record(name, exchange=Exchange(values, expected=of_a, noise=seed))
            for seed in range(NUM_NOISES)
        ]


def with_tolerance(name: str, b, fault: Fault, base=nullcontext, around=nullcontext) -> Located:
    """Compare a run with the sound one, where noise is no difference.

    Both run inside of the context `base`, and B inside of `around`, too.
    """
    a, values = kept(name, base)
    of_a, of_b = expected_values(a, b, 1)
    exchange = Exchange(values, expected=[of_b])
    with base(), around():
        other = record(name, fault, exchange=exchange)
    return locate(a, other, noise(name, base, repr(of_a)))


def is_named(found: Located, fault: Fault) -> bool:
    place = found.place
    if not place or (place["step"], place["phase"]) != (fault.step, fault.phase):
        return False
    is_call = fault.call in (None, place["call"]) or place["call"] is None
    is_place = fault.path in ("", place["path"]) and is_call
    # Where several calls may have made a gradient, all are named.
    is_listed = f"{fault.path}, call {fault.call}" in found.headline
    return (is_place or is_listed) and fault.note in "\n".join(found.notes)


def of_fault(name: str, kind: str, seed: int) -> Figures | None:
    """Plant a fault and locate it; nothing where the training has no place for one."""
    for attempt in range(9):
        operations = sound(name, operations_in_step=2)
        fault = Planter(sound(name), operations, f"{name} {kind} {seed} {attempt}").draw(kind)
        if fault is None:
            return None
        b = record(name, fault)
        found = locate(sound(name), b)
        if not found.is_equal:
            break
    else:
        return None
    operation = ""
    if fault.operations and found.kind:
        step = found.place["step"]
        again = record(name, fault, operations_in_step=step)
        operation = first_operation(sound(name, step), again, found)
    tolerant = with_tolerance(name, b, fault)
    return {
        "model": name,
        "kind": kind,
        "expected": [fault.step, fault.phase, fault.path, fault.call],
        "named": is_named(found, fault),
        "operation": operation,
        "operation_named": (
            any(word in operation for word in fault.operations) if fault.operations else None
        ),
        "named_with_tolerance": is_named(tolerant, fault),
        "headline": found.headline,
    }


def faults(name: str, count: int) -> list[Figures]:
    """Plant faults in one training, of each kind in turn."""
    begin = list(MODELS).index(name)
    numbers = range(begin, begin + 20 * count)
    rows = (of_fault(name, KINDS[number % len(KINDS)], number) for number in numbers)
    return list(itertools.islice(filter(None, rows), count))


def equal(name: str, count: int) -> list[Figures]:
    """Record pairs of equal runs, each with a seed of its own."""
    found = [locate(*[record(name, seed=seed) for _ in "AB"]) for seed in range(count)]
    accused = [one.headline for one in found if not one.is_equal]
    return [{"model": name, "pairs": count, "accused": accused}]


# Runs that differ by rounding alone.


def of_layers(change: Callable[..., Any]) -> Fault:
    def plant(training: Training) -> None:
        for module in training.model.modules():
            if type(module) is nn.Linear:
                module.forward = functools.partial(change, module)

    return Fault(plant=plant)


def in_two_sums(module: nn.Linear, inputs):
    """Multiply as two ranks with half of the inputs each, and add their results."""
    half = module.in_features // 2
    first = F.linear(inputs[..., :half], module.weight[:, :half])
    second = F.linear(inputs[..., half:], module.weight[:, half:])
    return first + second if module.bias is None else first + second + module.bias


def in_double(module: nn.Linear, inputs):
    bias = None if module.bias is None else module.bias.double()
    return F.linear(inputs.double(), module.weight.double(), bias).to(inputs.dtype)


compiled = Fault(plant=lambda training: training.model.compile())
# Around whole steps a cache would keep the weights of the first one.
in_bfloat16 = functools.partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)
without_mkldnn = functools.partial(torch.backends.mkldnn.flags, enabled=False)
of_math_attention = functools.partial(
    torch.nn.attention.sdpa_kernel, torch.nn.attention.SDPBackend.MATH
)


@contextmanager
def of_two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


# For each kind: the context of both runs, that of run B, and the change to B's layers.
ROUNDINGS = {
    "two sums": (nullcontext, nullcontext, of_layers(in_two_sums)),
    "double": (nullcontext, nullcontext, of_layers(in_double)),
    "kernels": (nullcontext, without_mkldnn, SOUND),
    "attention": (nullcontext, of_math_attention, SOUND),
    "kernels in bfloat16": (in_bfloat16, without_mkldnn, SOUND),
    "two sums in bfloat16": (in_bfloat16, nullcontext, of_layers(in_two_sums)),
    "bfloat16 against float32": (nullcontext, in_bfloat16, SOUND),
    "threads": (nullcontext, of_two_threads, SOUND),
    "compiled": (nullcontext, nullcontext, compiled),
}


def rounding(name: str, count: int) -> list[Figures]:
    """Record pairs that round differently; without an operation of the kind they are equal."""
    rows = []
    for kind, (base, around, fault) in ROUNDINGS.items():
        if kind == "compiled" and name not in COMPILED:
            continue
        with base(), around():
            b = record(name, fault)
        if locate(kept(name, base)[0], b).is_equal:
            continue
        tolerant = with_tolerance(name, b, fault, base, around)
        rows.append(
            {
                "model": name,
                "kind": kind,
                "accused": not tolerant.is_equal,
                "headline": tolerant.headline,
            }
        )
    return rows[:count]


# Ranks, in two processes of their own.


def ranks(name: str, count: int) -> list[Figures]:
    folder = tempfile.mkdtemp()
    job = functools.partial(record_ranks, Path(folder), count)
    run_ranks(job, ["script"], num_ranks=2, ignored=[folder])

    def located(b: str, a: str) -> tuple[int, Located]:
        pairs = [[read_fingerprints(Path(folder, it), rank) for it in (a, b)] for rank in range(2)]
        return _find_first([locate(*pair) for pair in pairs])

    rows = []
    for number, (kind, name) in enumerate(cases_of_ranks(count)):
        rank, found = located(f"fault-{number}", f"right-{name}")
        fault = fault_of_rank(number, kind, read_fingerprints(Path(folder, f"right-{name}"), 1))
        is_right = rank == 1 and is_named(found, fault)
        rows.append({"kind": kind, "headline": found.headline, "named": is_right})
    _, found = located("FSDP2", "one process")
    rows.append({"kind": "FSDP2", "headline": found.headline, "equal": found.is_equal})
    return rows


# Costs.


def small_gpt2() -> Callable[[], None]:
    model = sized_gpt2(n_layer=4, n_embd=256, n_head=4, n_positions=128, vocab_size=4096)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(4096, (4, 128))

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def costs(name: str, count: int) -> list[Figures]:
    """Time a step with each recorder in turn."""
    step = small_gpt2()

    def seconds(begin: Callable[[], AbstractContextManager[Any]]) -> float:
        with begin():
            step()
            start = time.process_time()
            step()
            return time.process_time() - start

    def recording(level: str) -> AbstractContextManager[Any]:
        return record_run(tempfile.mkdtemp(), steps=3, level=level)

    @contextmanager
    def debugging() -> Iterator[None]:
        with DebugMode(), DebugMode.log_tensor_hashes():
            yield

    setups = {
        "plain": nullcontext,
        "all": lambda: recording("all"),
        "modules": lambda: recording("modules"),
        "DebugMode": debugging,
    }
    rounds = [[seconds(begin) for begin in setups.values()] for _ in range(count)]
    medians = dict(zip(setups, map(statistics.median, zip(*rounds, strict=True)), strict=True))
    ratios = {name: value / medians["plain"] for name, value in medians.items()}
    return [{"ratio": ratios}]


def score(found: Figures) -> Figures:
    """Count over the parts that were recorded; None stands for a ratio that was not measured."""
    faults, equal, rounding, ranks, costs = (found.get(part, []) for part in COUNTS)
    asked = [one["operation_named"] for one in faults if one["operation_named"] is not None]
    of_a_rank = [one["named"] for one in ranks if "named" in one]
    (ratio,) = [one["ratio"] for one in costs] or [{}]
    return {
        "faults": len(faults),
        "named": sum(one["named"] for one in faults),
        "operations": len(asked),
        "operations_named": sum(asked),
        "named_with_tolerance": sum(one["named_with_tolerance"] for one in faults),
        "equal_pairs": sum(one["pairs"] for one in equal),
        "equal_pairs_accused": sum(len(one["accused"]) for one in equal),
        "ratio": ratio.get("all"),
        "ratio_of_modules": ratio.get("modules"),
        "ratio_of_DebugMode": ratio.get("DebugMode"),
        "rounding_pairs": len(rounding),
        "rounding_pairs_accused": sum(one["accused"] for one in rounding),
        "faults_of_a_rank": len(of_a_rank),
        "faults_of_a_rank_named": sum(of_a_rank),
    }


# So many of each part, spread over the trainings; of costs, rounds.
COUNTS = {"faults": 200, "equal": 1000, "rounding": 200, "ranks": 10, "costs": 7}
ALONE = ("ranks", "costs")


def work(job: tuple[str, str, int]) -> list[Figures]:
    """Record a part on one training, in a process of its own."""
    part, name, count = job
    torch.set_num_threads(1)
    # Versions and the state of the code are the same in each record of this process.
    fingerprints._read_environment = functools.cache(fingerprints._read_environment)
    with tempfile.TemporaryDirectory(prefix="locate-") as tempfile.tempdir, quietly():
        return globals()[part](name, count)


def main() -> None:
    """Record what `runs locate` finds and costs."""
    parser = record_parser(__doc__)
    parser.add_argument("--part", action="append", choices=COUNTS, help="only this part")
    parser.add_argument("--count", type=int, help="so many faults or pairs in each part")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=[*MODELS], metavar="MODEL")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    options = parser.parse_args()
    found = {}
    if options.part and options.json and Path(options.json).exists():
        before = json.loads(Path(options.json).read_text())
        # Its command records all parts.
        found = {key: before[key] for key in ("command", *COUNTS) if key in before}
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
        for part in options.part or COUNTS:
            names = ["all"] if part in ALONE else options.only
            each, rest = divmod(options.count or COUNTS[part], len(names))
            jobs = [(part, name, each + (place < rest)) for place, name in enumerate(names)]
            rows = []
            for job, made in zip(jobs, pool.imap(work, jobs), strict=True):
                rows += made
                print(f"{part}: {job[1]}, {len(made)} recorded", file=sys.stderr)
            found[part] = rows
    summary = score(found)
    print(summary)
    write_record(options.json, {"score": summary, **found})


if __name__ == "__main__":
    main()
