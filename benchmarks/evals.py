"""Run coding agents on eval cases, with and without the skills, and grade their work.

    make evals ARGS='--dry-run'
    make evals ARGS='--agent "claude -p {prompt} --plugin-dir {plugin}" --arm none --arm whole'
    make evals ARGS='--grade grad-accum-uneven-lengths --folder DIR'

A case is a folder `evals/<technique>/<case>/`: `case.yaml` in the format of `claude plugin eval`,
the `fixture/` that the agent works on, and `graders/grade.py`. That command reads the cases too, of
a plugin that has them in its folder `evals/`, but its own graders run no programs.

Tags: a case is `hard`, if a tool answers what it asks, or `smoke`: at most twelve easy ones, which
notice an agent or a page that got worse. The solutions of a hard case note the commands that solve
it, and an attempt without them by whoever wrote the case: solved or not, and in how many commands.
Twelve or more of them were not solved, or took three times the commands.

Arms: `none` has no plugin, `gutted` the same folders and scripts with the text of every skill cut
out, `whole` the plugin as it is, `index` no skills but the command on PATH and the lines of
`curry-train agents-md` in AGENTS.md and CLAUDE.md. `{prompt}`, `{plugin}` and `{case}` are replaced
in the command of an agent, which runs in a copy of the fixture with a home of its own, for the time
that the case allows. The python that comes first on PATH is the agent's: it needs torch, and no
curry-train.

Proof: `python -m pytest tests/evals/test_evals.py`.
"""

import fnmatch
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.tree import files

from copies import ROOT, copy_files
from curry_train import __version__
from evals_grading import grade, score
from evals_scripted import IDLE, solutions
from process_group import run_group
from recording import record_parser, write_record

ARMS = ("none", "gutted", "whole", "index")
SHORT = "short"  # the tag of the cases that run in every test
HIDDEN = ("evals", "tests", "evidence", "benchmarks")  # what no agent under test may read
MANIFESTS = ("plugin.json", ".claude-plugin/plugin.json", ".claude-plugin/marketplace.json")
# Figures of the runs of an arm, whose interval a record has.
FIGURES = ("score", "tool_calls", "tokens", "seconds")
SCRIPTED = shlex.join([sys.executable, str(ROOT / "benchmarks/evals_scripted.py")])


@dataclass(frozen=True)
class Case:
    """One eval case; `settings` is its `case.yaml`."""

    folder: Path
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        return self.settings["name"]

    @property
    def skill(self) -> str:
        return self.folder.parent.name

    @property
    def prompt(self) -> str:
        return self.settings["execution"]["prompt"]


@dataclass(frozen=True)
class Row:
    """One run of an agent on a case, as the record holds it."""

    case: str
    skill: str
    agent: str
    arm: str
    run: int
    status: int | None  # None: it was ended at the time limit of the case
    seconds: float
    tool_calls: int | None  # None: the agent printed none in a form that is known
    tokens: int | None
    score: float
    points: list[dict[str, Any]]
    transcript: str


def cases() -> list[Case]:
    """List the cases of all skills by name."""
    found = ROOT.glob("evals/*/*/case.yaml")
    read = [Case(path.parent, yaml.safe_load(path.read_text())) for path in found]
    return sorted(read, key=lambda case: case.name)


# Arms


def build_arm(arm: str, target: Path) -> Path:
    """Write the plugin that an agent of this arm gets, and return its folder."""
    target.mkdir(parents=True)
    paths = [path.relative_to(ROOT) for path in files(ROOT)]
    # No agent may see the cases, their graders or their solutions.
    shown = [path for path in paths if path.parts[0] not in HIDDEN]
    copied = MANIFESTS if arm == "none" else shown
    if arm == "index":
        copied = [path for path in copied if Path(path).parts[0] != "skills"]
    copy_files(copied, target)
    if arm == "gutted":
        for page in target.glob("skills/*/SKILL.md"):
            parts = page.read_text().split("---\n", 2)
            page.write_text(f"{parts[0]}---\n{parts[1]}---\n")
        pages = [*target.glob("skills/*/references/*.md"), target / "AGENTS.md"]
        for page in [*pages, target / "README.md"]:
            page.write_text("")
    return target


# Agents


def run_agent(command: str, case: Case, arm: str, place: Path) -> tuple[int | None, float, str]:
    """Run an agent in a copy of the fixture; return its status, seconds and transcript."""
    plugin = build_arm(arm, place / "plugin")
    shutil.copytree(case.folder / "fixture", place / "work")
    home = str(place / "home")
    Path(home).mkdir()
    path = os.pathsep.join((str(place / "bin"), os.environ.get("PATH", os.defpath)))
    if arm == "index":
        name_commands(plugin, place)
    filled = {"{prompt}": case.prompt, "{plugin}": str(plugin), "{case}": case.name}
    words = [
        re.sub(r"\{(?:prompt|plugin|case)\}", lambda found: filled[found[0]], word)
        for word in shlex.split(command)
    ]
    started = time.monotonic()
    status, transcript = run_group(
        words,
        seconds=case.settings["execution"]["timeout_seconds"],
        cwd=place / "work",
        env=_environment(HOME=home, XDG_CONFIG_HOME=home, PATH=path),
    )
    return status, round(time.monotonic() - started, 3), transcript


def name_commands(plugin: Path, place: Path) -> None:
    """Put the command on the agent's PATH, and its lines into the files that agents read first."""
    command = place / "bin/curry-train"
    command.parent.mkdir()
    script = shlex.quote(str(plugin / "scripts/curry_train.py"))
    command.write_text(f'#!/bin/sh\nexec python3 {script} "$@"\n')
    command.chmod(0o755)
    for name in ("AGENTS.md", "CLAUDE.md"):
        words = [str(command), "agents-md", str(place / "work" / name)]
        subprocess.run(words, check=True, capture_output=True)


def _environment(**given: str) -> dict[str, str]:
    """Return the environment of an agent, without a path to this package."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | given


def has_the_package() -> bool:
    """Return whether the python that agents find has curry-train without any plugin."""
    words = ["python3", "-c", "import curry_train"]
    return subprocess.run(words, env=_environment(), cwd="/", capture_output=True).returncode == 0


def count_tools(transcript: str) -> int | None:
    """Count the tool calls of a transcript of JSON lines; None where it has no such lines."""
    events = list(_events(transcript))
    calls = ['"tool_use"' in json.dumps(one.get("message", {})) for one in events]
    return sum(calls) if events else None


def count_tokens(transcript: str) -> int | None:
    """Return the tokens that the last event with a usage names; None where none does."""
    usages = [one["usage"] for one in _events(transcript) if isinstance(one.get("usage"), dict)]
    if not usages:
        return None
    return sum(
        number
        for name, number in usages[-1].items()
        if name.endswith("_tokens") and isinstance(number, int)
    )


def _events(transcript: str) -> Iterator[dict[str, Any]]:
    for line in transcript.splitlines():
        if line.startswith("{"):
            with suppress(json.JSONDecodeError):
                yield json.loads(line)


def one_run(case: Case, agent: str, command: str, arm: str, number: int) -> Row:
    """Run an agent once on a case, and grade the folder that it leaves."""
    with tempfile.TemporaryDirectory(prefix="eval", ignore_cleanup_errors=True) as folder:
        status, seconds, transcript = run_agent(command, case, arm, Path(folder))
        grades = grade(case.folder, Path(folder) / "work")
    return Row(
        case.name,
        case.skill,
        agent,
        arm,
        number,
        status,
        seconds,
        count_tools(transcript),
        count_tokens(transcript),
        round(score(grades), 4),
        [asdict(one) for one in grades],
        transcript,
    )


def dry_run(found: Sequence[Case]) -> Iterator[Row]:
    """Run the scripted agents on each case."""
    for case in found:
        for agent in [IDLE, *solutions(case.name)]:
            yield one_run(case, agent, f"{SCRIPTED} {agent} {{case}}", "none", 1)


def real_runs(found: Sequence[Case], command: str, arms: Sequence[str], runs: int) -> Iterator[Row]:
    """Run an agent on each case in each arm; arms take turns, so that drift affects all alike."""
    for case in found:
        for number in range(1, runs + 1):
            for arm in arms:
                yield one_run(case, command, command, arm, number)


# Records


def intervals(rows: Sequence[Row]) -> dict[str, dict[str, list[float]]]:
    """Return mean, low and high of each figure of each arm, and of its gain in points over none.

    A mean is that of the cases' means, and between low and high lie two standard errors of it.
    """
    found = defaultdict[str, dict[str, list[float]]](dict)
    for figure in FIGURES:
        means = means_of_cases(rows, figure)
        for arm, of_cases in means.items():
            found[arm][figure] = _interval([*of_cases.values()])
            if figure == "score" and arm != "none" and "none" in means:
                both = [of_cases[case] - plain for case, plain in means["none"].items()]
                found[arm]["gain"] = _interval(both)
    return found


def means_of_cases(rows: Sequence[Row], figure: str) -> dict[str, dict[str, float]]:
    """Return the mean of a figure over the runs of each case in each arm."""
    values = defaultdict[str, defaultdict[str, list[float]]](lambda: defaultdict(list))
    for row in rows:
        if getattr(row, figure) is not None:
            values[row.arm][row.case].append(getattr(row, figure))
    return {
        arm: {case: statistics.fmean(runs) for case, runs in of_cases.items()}
        for arm, of_cases in values.items()
    }


def _interval(values: Sequence[float]) -> list[float]:
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return [round(mean + width * error, 4) for width in (0, -2, 2)]


def described(found: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Format the intervals of each arm, a line each."""
    return "\n".join(
        f"{arm:8}{name:12}{mean:>10,.4g}   {low:,.4g} to {high:,.4g}"
        for arm, figures in found.items()
        for name, (mean, low, high) in figures.items()
    )


# Command


def main(words: Sequence[str] = tuple(sys.argv[1:])) -> int:
    """Status: 0 done and, in a dry run, as expected; 1 a point was missed."""
    parser = record_parser(__doc__)
    parser.add_argument("--agent", metavar="COMMAND", help="with {prompt}, {plugin} or {case}")
    parser.add_argument("--arm", action="append", choices=ARMS, help="all four if not given")
    parser.add_argument("--runs", type=int, default=3, help="of each case in each arm")
    parser.add_argument("--case", default="*", metavar="GLOB")
    parser.add_argument("--dry-run", action="store_true", help="run the scripted agents")
    parser.add_argument("--grade", metavar="CASE", help="grade --folder instead of running agents")
    parser.add_argument("--folder", type=Path, help="what an agent left, for --grade")
    options = parser.parse_args(words)
    pattern = options.grade or options.case
    found = [case for case in cases() if fnmatch.fnmatch(case.name, pattern)]
    if not found or (options.grade and not options.folder):
        parser.error("no case has that name; --grade also needs --folder")
    if options.grade:
        grades = grade(found[0].folder, options.folder)
        for one in grades:
            word = "reached" if one.passed else "missed"
            print(f"{word:8} {one.weight} {one.name} {one.reason}")
        print(f"score {score(grades):.2f}")
        return int(not all(one.passed for one in grades))
    if options.dry_run:
        runs = dry_run(found)
    elif not options.agent:
        parser.error("give --agent COMMAND, --dry-run or --grade CASE")
    elif has_the_package():
        parser.error(
            "python3 on PATH has curry-train, so no arm would be without it: put an environment "
            "with torch, and without curry-train, first on PATH"
        )
    else:
        runs = real_runs(found, options.agent, options.arm or ARMS, options.runs)
    rows = []
    for row in runs:
        rows.append(row)
        print(
            f"{row.score:.2f}  {row.seconds:7.1f} s  {row.arm:6}  {row.case}  {row.agent}",
            flush=True,
        )
    figures = {"intervals": intervals(rows), "rows": [asdict(row) for row in rows]}
    write_record(options.json, {"curry_train": __version__} | figures)
    if not options.dry_run:
        print(described(figures["intervals"]))
        return 0
    return int(any((row.score == 1) != (row.agent == "reference") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
