"""Count which small changes of a technique its gates and its tests catch, and record it.

    python benchmarks/mutants.py --sample 40 --seed 7 --json R --resume  # of each technique
    python benchmarks/mutants.py --changed      # only lines that differ from the base commit
    python benchmarks/mutants.py sac --json R --missed tests --tests tests/test_x.py  # a new test

mutmut (of `.[dev]`) makes the mutants, and `mutant_forks.py` runs them: `mutmut run` takes eight
times as long here, because it starts torch again, and selects no test that starts processes.
A mutant that changes only the text of an error is not run. One that nothing catches is named with
its line; `mutants.yaml` has those that change nothing for a user, each with the reason.
`make mutants` runs it.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from mutant_forks import KINDS_OF_CHECKS, RECORDER, Mutant, MutatedModule, function_hashes, mutate

ROOT = Path(__file__).resolve().parents[1]
TABLE = yaml.safe_load(Path(__file__).with_name("mutants.yaml").read_text(encoding="utf-8"))
PACKAGE = "template/curry_train"
SECONDS_BETWEEN_WRITES = 20
# `--changed` ends within a minute, with what has begun.
MOST_SECONDS_FOR_CHANGES = 45.0
# Of a technique: torch is imported, and a few mutants run.
FEWEST_SECONDS = 15.0
# It fails if fewer than this share are caught, of at least so many that were run.
LEAST_SHARE = 0.6
FEWEST_TO_JUDGE = 20


@dataclass(frozen=True)
class Target:
    """Modules of a technique, and the gates, models and tests that are to catch their mutants."""

    modules: list[str]
    gates: list[str]
    models: list[str]
    tests: list[str]


# Reasons for which a mutant that nothing catches is none of a user's concern.
KINDS = {
    "message": "changes only the text of an error or a warning",
    "import": "runs when the module is imported, before a mutant can be selected",
    "guard": "removes a check of our own invariant, which holds",
    "equivalent": "computes the same",
    "elsewhere": "differs only on a GPU, another platform or another version",
    "speed": "computes the same, in more time or memory than a claim allows to measure",
}

TARGETS = {name: Target(**lists) for name, lists in TABLE["techniques"].items()}


# Run.


def copy_of_checkout(folder: Path) -> None:
    """Copy all files of the checkout that git does not ignore."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run(
    target: Target,
    modules: Mapping[str, MutatedModule],
    mutants: Sequence[Mutant],
    *,
    kinds: Sequence[str] = KINDS_OF_CHECKS,
    at_once: int,
    seconds: float,
) -> Iterator[dict[str, Any]]:
    """Yield a line for each mutant and kind of check, as soon as it is known."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name) / "checkout"
        copy_of_checkout(folder)
        for path, made in modules.items():
            (folder / PACKAGE / path).write_text(made.code, encoding="utf-8")
        with (folder / PACKAGE / "__init__.py").open("a", encoding="utf-8") as package:
            package.write(RECORDER)
        job = {
            "gates": target.gates,
            "models": target.models,
            "tests": target.tests,
            "mutants": [{"name": one.name, "function": one.key} for one in mutants],
            "kinds": kinds,
            "at_once": at_once,
            "until": time.time() + seconds,
            "log": f"{name}/log",
        }
        (Path(name) / "job.json").write_text(json.dumps(job), encoding="utf-8")
        variables = os.environ | {
            "PYTHONPATH": f"{folder / 'template'}{os.pathsep}{folder / 'tests/core'}",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "",
        }
        script = Path(__file__).with_name("mutant_forks.py")
        with subprocess.Popen(
            [sys.executable, str(script), f"{name}/job.json"],
            cwd=folder,
            env=variables,
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        ) as worker:
            assert worker.stdout is not None
            try:
                for line in worker.stdout:
                    row = json.loads(line)
                    if "error" in row:
                        _end_with_log(row["error"], job["log"])
                    yield row
            finally:
                worker.terminate()  # it kills its forks
        if worker.returncode:
            _end_with_log(f"the runner of mutants ended with {worker.returncode}", job["log"])


def _end_with_log(error: str, log: str) -> NoReturn:
    sys.exit(f"{error}:\n{Path(log).read_text(errors='replace')[-3000:]}")


def results(
    target: Target,
    modules: Mapping[str, MutatedModule],
    mutants: Sequence[Mutant],
    *,
    kinds: Sequence[str] = KINDS_OF_CHECKS,
    at_once: int,
    seconds: float,
    note: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Iterator[tuple[Mutant, dict[str, bool]]]:
    """Yield each mutant with whether gates and tests caught it.

    `note` gets what the checks do without a mutant.
    """
    by_name = {one.name: one for one in mutants}
    found: dict[str, dict[str, bool]] = {}
    if not mutants:
        return
    for row in run(target, modules, mutants, kinds=kinds, at_once=at_once, seconds=seconds):
        if "mutant" not in row:
            print_first_run(row)
            note(row)
            continue
        of_mutant = found.setdefault(row["mutant"], {})
        of_mutant[row["kind"]] = row["caught_by"] is not None
        if len(of_mutant) == len(kinds):
            yield by_name[row["mutant"]], of_mutant


def print_first_run(row: Mapping[str, Any]) -> None:
    """Print how long the checks take without a mutant, and which of them fail then."""
    no_time = f", no time for {row['left_out']} more" if row["left_out"] else ""
    print(
        f"{row['checks']} {row['kind']}: {row['seconds']} s without a mutant{no_time}", flush=True
    )
    for name, why in row["failed"].items():
        print(f"  left out, because it fails without a mutant: {name}: {why}", flush=True)


# Record.


class Record:
    """Numbers of the mutants that were missed or not run, by technique, module and function."""

    def __init__(self, path: Path | None, *, resume: bool) -> None:
        self._path = path
        self.reviewed = Reviewed(TABLE["reviewed"])
        self.techniques: dict[str, Any] = {}
        if path is not None and path.exists() and resume:
            self.techniques = json.loads(path.read_text(encoding="utf-8"))["techniques"]
        for technique, found in self.techniques.items():
            _drop_stale(TARGETS[technique], found)

    def begin(self, technique: str, modules: Mapping[str, MutatedModule]) -> None:
        """Add the functions of a technique that have no row yet."""
        found = self.techniques.setdefault(technique, {"modules": {}, "missed": []})
        for path, made in modules.items():
            rows = found["modules"].setdefault(path, {"functions": {}})
            rows["not_mutated"] = made.skipped
            for one in made.mutants:
                row = rows["functions"].setdefault(
                    one.function,
                    {"hash": made.hashes[one.function], "mutants": 0, "not_run": []},
                )
                row.setdefault("by_rule", [])
                row.setdefault("missed_by_gates", [])
                row.setdefault("missed_by_tests", [])
                if one.number > row["mutants"]:
                    row["mutants"] = one.number
                    row["not_run"].append(one.number)
                if one.kind and one.number not in row["by_rule"]:
                    row["by_rule"].append(one.number)
                    for name in ("not_run", "missed_by_gates", "missed_by_tests"):
                        row[name] = [number for number in row[name] if number != one.number]

    def row(self, technique: str, one: Mutant) -> dict[str, Any]:
        return self.techniques[technique]["modules"][one.module]["functions"][one.function]

    def add(self, technique: str, one: Mutant, caught: Mapping[str, bool]) -> None:
        """Add one mutant: whether gates and tests caught it."""
        row = self.row(technique, one)
        for kind, is_caught in caught.items():
            numbers = set(row[f"missed_by_{kind}"])
            numbers = numbers - {one.number} if is_caught else numbers | {one.number}
            row[f"missed_by_{kind}"] = sorted(numbers)
        if one.number in row["not_run"]:
            row["not_run"].remove(one.number)

    def write(self, technique: str, modules: Mapping[str, MutatedModule]) -> None:
        """Name the mutants that nothing catches, and write the record if it has a path."""
        found = self.techniques[technique]
        found["missed"] = [
            {
                "place": f"{one.module}:{one.line}",
                "function": one.function,
                "change": one.change,
            }
            | self.reviewed.reason(one)
            for made in modules.values()
            for one in made.mutants
            if self.is_missed(technique, one)
        ]
        found["summary"] = summary_of(found)
        if self._path is None:
            return
        import torch

        sys.path.insert(0, str(ROOT / "template"))
        from curry_train.core.wording import provenance, write_json

        total = total_of(found["summary"] for found in self.techniques.values())
        facts = provenance(torch.device("cpu"))
        ordered = {name: self.techniques[name] for name in TARGETS if name in self.techniques}
        write_json(str(self._path), facts | {"summary": total, "techniques": ordered})
        text = self._path.read_text(encoding="utf-8")
        in_a_line = re.sub(r"\[[\d,\s]+\]", lambda found: " ".join(found[0].split()), text)
        self._path.write_text(in_a_line, encoding="utf-8")

    def outcome(self, technique: str, one: Mutant) -> list[str]:
        """Return the names in OUTCOMES that count this mutant."""
        row = self.row(technique, one)
        if one.number in row["by_rule"]:
            return ["by rule"]
        if one.number in row["not_run"]:
            return ["not run"]
        caught = [
            f"caught by {kind}"
            for kind in KINDS_OF_CHECKS
            if one.number not in row[f"missed_by_{kind}"]
        ]
        return ["run", *(caught or ["missed"])]

    def is_missed(self, technique: str, one: Mutant, by: str = "both") -> bool:
        """Return whether gates, tests or neither of both caught a mutant that was run."""
        row = self.row(technique, one)
        kinds = KINDS_OF_CHECKS if by == "both" else (by,)
        return all(one.number in row[f"missed_by_{kind}"] for kind in kinds)


def _drop_stale(target: Target, found: dict[str, Any]) -> None:
    """Drop the rows of functions whose source is another one now."""
    for path, rows in list(found["modules"].items()):
        if path not in target.modules:
            del found["modules"][path]
            continue
        hashes = function_hashes((ROOT / PACKAGE / path).read_text(encoding="utf-8"))
        rows["functions"] = {
            name: row for name, row in rows["functions"].items() if hashes.get(name) == row["hash"]
        }


@dataclass(frozen=True)
class Reviewed:
    """Mutants that change nothing for a user, as a person found, by module and function."""

    by_function: dict[str, dict[str, list[dict[str, str]]]]

    def reason(self, one: Mutant) -> dict[str, str]:
        """Return kind and reason of a reviewed mutant; nothing for one that is not."""
        for entry in self.by_function.get(one.module, {}).get(one.function, ()):
            pattern = re.escape(entry["change"]).replace(r"\*", ".*")
            if re.fullmatch(pattern, one.change):
                return {"kind": entry["kind"], "reason": entry["reason"]}
        return {}


def summary_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Count the mutants of a technique; excused ones change nothing for a user."""
    rows = [row for rows in found["modules"].values() for row in rows["functions"].values()]
    num_run = sum(_num_run(row) for row in rows)
    excused = [one for one in found["missed"] if "kind" in one]
    counts = {
        "mutants": sum(row["mutants"] for row in rows),
        "not_run_by_rule": sum(len(row["by_rule"]) for row in rows),
        "not_run_yet": sum(len(row["not_run"]) for row in rows),
        "run": num_run,
        "excused": len(excused),
        "caught": num_run - len(found["missed"]),
    }
    return counts | _shares(counts)


def _num_run(row: Mapping[str, Any]) -> int:
    return row["mutants"] - len(row["by_rule"]) - len(row["not_run"])


def _shares(counts: Mapping[str, Any]) -> dict[str, float]:
    """Return the share that gates and tests together caught, of those that change something."""
    counted = counts["run"] - counts["excused"]
    return {"share_caught": round(counts["caught"] / counted, 4) if counted else 0.0}


def total_of(summaries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the counts of all techniques."""
    counts = Counter[str]()
    for summary in summaries:
        counts.update({name: n for name, n in summary.items() if not name.startswith("share_")})
    return {**counts, **_shares(counts)}


# Print.


OUTCOMES = ("run", "caught by gates", "caught by tests", "missed", "by rule", "not run")


def print_lines(record: Record, technique: str, modules: Mapping[str, MutatedModule]) -> None:
    """Print a line for each source line: its mutants, and how many gates and tests caught."""
    for path, made in modules.items():
        print(f"{path}: line, then mutants {', '.join(OUTCOMES)}")
        by_line: dict[int, list[Mutant]] = {}
        for one in made.mutants:
            by_line.setdefault(one.line, []).append(one)
        for number, here in sorted(by_line.items()):
            counts = Counter[str]()
            for one in here:
                counts.update(record.outcome(technique, one))
            figures = " ".join(f"{counts[name]:4}" for name in OUTCOMES)
            print(f"  {number:4} {figures}  {here[0].function}")


def print_stale(reviewed: Reviewed, mutants: Sequence[Mutant]) -> None:
    """Print entries of the reviewed table that are of no mutant any more."""
    for module in {one.module: None for one in mutants}:
        for function, entries in reviewed.by_function.get(module, {}).items():
            for entry in entries:
                alone = Reviewed({module: {function: [entry]}})
                if not any(map(alone.reason, mutants)):
                    print(f"reviewed, and no mutant now: {module} {function}: {entry['change']}")


def print_missed(found: Mapping[str, Any]) -> None:
    """Print each mutant that neither gates nor tests caught; those without a reason come last."""
    for one in sorted(found["missed"], key=lambda one: "kind" not in one):
        why = f"{one['kind']}: {one['reason']}" if "kind" in one else "a gap"
        print(f"{one['place']} {one['function']}: {one['change']}  [{why}]")


def line_of(technique: str, counts: Mapping[str, Any]) -> str:
    return (
        f"{technique}: {counts['run']} of {counts['mutants']} mutants run "
        f"({counts['not_run_by_rule']} left out by rule, {counts['not_run_yet']} not yet), "
        f"{counts['excused']} excused; caught {counts['share_caught']:.1%}"
    )


# Changed lines.


def base_commit() -> str | None:
    """Return the commit that this branch left the main branch at, or the one before this."""
    for branch in ("origin/main", "main"):
        base = _git("merge-base", "HEAD", branch)
        if base and base != _git("rev-parse", "HEAD"):
            return base
    return _git("rev-parse", "--verify", "HEAD~1")


def _git(*words: str) -> str | None:
    ended = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return ended.stdout.strip() if ended.returncode == 0 else None


def changed_lines(base: str) -> dict[str, set[int]]:
    """Return the lines of each module of the package that differ from a commit."""
    text = _git("diff", "--unified=0", "--no-color", "--no-ext-diff", base, "--", PACKAGE) or ""
    return lines_of_diff(text)


def lines_of_diff(text: str) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    path = ""
    for line in text.splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/").removeprefix(f"{PACKAGE}/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            start, size = int(hunk[1]), int(hunk[2] or 1)
            found.setdefault(path, set()).update(range(start, start + size))
    return {path: lines for path, lines in found.items() if lines}


# Command line.


def main() -> None:
    """Run the mutants of the techniques that were asked for."""
    options = _parse_options()
    if options.changed:
        sys.exit(run_changed(options))
    record = Record(options.json and Path(options.json), resume=options.resume)
    started = time.monotonic()
    for technique in options.techniques or TARGETS:
        remaining = options.seconds - (time.monotonic() - started)
        run_technique(record, technique, options, seconds=remaining)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("techniques", nargs="*", metavar="TECHNIQUE", help=", ".join(TARGETS))
    parser.add_argument("--json", metavar="PATH", help="record the results here")
    parser.add_argument("--resume", action="store_true", help="keep what PATH has already")
    parser.add_argument(
        "--missed",
        choices=["both", *KINDS_OF_CHECKS],
        help="run again what neither caught, or what gates or tests did not catch",
    )
    parser.add_argument(
        "--tests", nargs="+", metavar="TEST", help="with --missed: in place of the technique's own"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="of each technique, N mutants")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sample")
    parser.add_argument("--lines", action="store_true", help="print counts for each source line")
    parser.add_argument("--changed", action="store_true", help="run mutants of changed lines only")
    parser.add_argument("--base", metavar="COMMIT", help="what --changed compares with")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--seconds", type=float, help="begin no mutant after this time")
    options = parser.parse_args()
    if unknown := sorted({*options.techniques} - {*TARGETS}):
        parser.error(f"no mutants for {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    if (options.resume or options.missed) and not options.json:
        parser.error("--resume and --missed need --json, the file with the earlier results")
    if options.tests and not options.missed:
        parser.error("--tests needs --missed: a new test is tried on what the others missed")
    options.resume = options.resume or options.missed is not None
    if options.seconds is None:
        options.seconds = MOST_SECONDS_FOR_CHANGES if options.changed else float("inf")
    return options


def run_technique(
    record: Record, technique: str, options: argparse.Namespace, *, seconds: float
) -> None:
    """Run the mutants of a technique that the record does not have, and print what is missed."""
    target = TARGETS[technique]
    if options.tests:
        target = replace(target, tests=options.tests)
    modules = {
        path: mutate(path, (ROOT / PACKAGE / path).read_text(encoding="utf-8"))
        for path in target.modules
    }
    record.begin(technique, modules)
    everything = [one for made in modules.values() for one in made.mutants]
    if options.missed:
        chosen = [one for one in everything if record.is_missed(technique, one, options.missed)]
    else:
        chosen = [one for one in everything if "not run" in record.outcome(technique, one)]
    if options.sample is not None:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    written = time.monotonic()
    kinds = (options.missed,) if options.missed in KINDS_OF_CHECKS else KINDS_OF_CHECKS
    for one, caught in results(
        target,
        modules,
        chosen,
        kinds=kinds,
        at_once=options.at_once,
        seconds=seconds,
    ):
        record.add(technique, one, caught)
        if time.monotonic() - written > SECONDS_BETWEEN_WRITES:
            record.write(technique, modules)
            written = time.monotonic()
    record.write(technique, modules)
    if options.lines:
        print_lines(record, technique, modules)
    print_stale(record.reviewed, everything)
    print_missed(record.techniques[technique])
    print(line_of(technique, record.techniques[technique]["summary"]), flush=True)


def run_changed(options: argparse.Namespace) -> int:
    """Run mutants of changed lines until the time is over; return the exit status.

    The status is 1 if gates and tests catch less than a share that no technique is below.
    """
    base = options.base or base_commit()
    if base is None:
        print("no earlier commit to compare with")
        return 0
    until = time.monotonic() + options.seconds
    reviewed = Reviewed(TABLE["reviewed"])
    modules_of = mutate_changed(changed_lines(base))
    caught_of_run: list[bool] = []
    left_out: list[int] = []
    for at, (technique, modules) in enumerate(modules_of.items()):
        mutants = [one for made in modules.values() for one in made.mutants if not one.kind]
        random.Random(0).shuffle(mutants)
        print(f"{technique}: {len(mutants)} mutants of lines that differ from {base[:10]}")
        remaining = until - time.monotonic()
        if remaining < FEWEST_SECONDS:
            print("  not run: no time is left")
            continue
        seconds = max(FEWEST_SECONDS, remaining / (len(modules_of) - at))
        for one, caught in results(
            TARGETS[technique],
            modules,
            mutants,
            at_once=options.at_once,
            seconds=seconds,
            note=lambda row: left_out.append(row["left_out"]),
        ):
            if any(caught.values()):
                caught_of_run.append(True)
            elif not reviewed.reason(one):
                caught_of_run.append(False)
                print(f"  missed: {one.module}:{one.line} {one.function}: {one.change}")
    num_run = len(caught_of_run)
    print(f"{sum(caught_of_run)} of the {num_run} mutants of changed lines that ran were caught")
    return int(is_too_few(caught_of_run, left_out))


def is_too_few(caught: Sequence[bool], left_out: Sequence[int]) -> bool:
    """Judge a share only if every gate and test had time to run."""
    if any(left_out):
        print(f"not judged: there was no time for {sum(left_out)} of the gates and tests")
        return False
    return len(caught) >= FEWEST_TO_JUDGE and sum(caught) < LEAST_SHARE * len(caught)


def mutate_changed(changed: Mapping[str, set[int]]) -> dict[str, dict[str, MutatedModule]]:
    """Return mutants of changed lines, by technique and module, where there are any."""
    found: dict[str, dict[str, MutatedModule]] = {}
    for technique, target in TARGETS.items():
        for path in target.modules:
            source = ROOT / PACKAGE / path
            if path not in changed or not source.exists():
                continue
            made = mutate(path, source.read_text(encoding="utf-8"), changed[path])
            if any(not one.kind for one in made.mutants):
                found.setdefault(technique, {})[path] = made
    return found


if __name__ == "__main__":
    main()
