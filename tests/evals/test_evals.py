"""Every eval case is passed by its reference solution and failed by each wrong one.

The scripted agents of a dry run are commands, as real agents are. One case runs here, and all of
them by `make long`.
Run: `python -m pytest tests/evals/test_evals.py`.
"""

import json
import os
import pickle
import shlex
import shutil
import sys
import zipfile

import pytest
import yaml

import evals
import evals_grading
import evals_scripted
from curry_train.cli.main import main

from ..command_runs import finished, read_json
from ..tree import ROOT, skills
from . import varying_training

CASES = {case.name: case for case in evals.cases()}
SHORT, SMOKE, HARD = (
    [name for name, case in CASES.items() if tag in case.settings["tags"]]
    for tag in (evals.SHORT, "smoke", "hard")
)
QUICK = SHORT[0]
MOST_COMMANDS = 6  # that solve a hard case
TIMES_ALONE = 3  # as many commands as with curry-train show a case to be hard, if solved without it
SKILLS = [skill.name for skill in skills(ROOT)]
RECORD_KEYS = {"command", "date", "torch", "python", "curry_train", "intervals", "rows"}
# What `claude plugin eval` 2.1.330 takes in a case; its graders refuse any other key.
EVERY_KEYS = {"type", "name", "weight", "arm"}
GRADER_KEYS = {
    "regex": {"target", "pattern", "flags", "match"},
    "tool_used": {"tool", "input_match", "min", "max"},
    "file_exists": {"path", "exists"},
}
EXECUTION_KEYS = {"prompt", "max_turns", "timeout_seconds", "allowed_tools"}


def dry_run(folder, *words):
    """Return the rows of a dry run by case and agent."""
    path = folder / "record.json"
    program = [sys.executable, ROOT / "benchmarks/evals.py", "--dry-run", "--json", path]
    ended = finished(*program, *words, status=None)
    assert path.exists(), ended.stdout + ended.stderr
    record = read_json(path)
    return ended.returncode, record, {(row["case"], row["agent"]): row for row in record["rows"]}


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return dry_run(tmp_path_factory.mktemp("all"))


def assert_graders_judge(name, rows):
    """Raise unless the reference passes all points and every other agent misses its own."""
    solutions = evals_scripted.solutions(name)
    assert next(iter(solutions)) == "reference"
    wrong = [agent for agent in solutions if agent.startswith("wrong-")]
    assert len(wrong) >= 2
    assert set(solutions) == {"reference", *wrong}
    assert rows[name, "reference"]["score"] == 1, missed(rows[name, "reference"])
    assert rows[name, evals_scripted.IDLE]["score"] < 1
    graded = [agent for agent in wrong if (name, agent) in rows]
    assert len(graded) >= 2
    for agent in graded:
        assert list(missed(rows[name, agent])) == solutions[agent]["fails"], agent
    assert all(row["status"] == 0 for (case, _), row in rows.items() if case == name)


def missed(row):
    return {one["name"]: one["reason"] for one in row["points"] if not one["passed"]}


def test_a_dry_run_of_one_case_ends_with_0_and_its_graders_pass_and_fail(tmp_path):
    status, record, rows = dry_run(tmp_path, "--case", QUICK)
    assert status == 0
    assert set(record) >= RECORD_KEYS
    assert_graders_judge(QUICK, rows)


@pytest.mark.timeout(1800)  # the first of them waits for all gradings
@pytest.mark.parametrize("name", CASES)
def test_graders_of_all_cases_pass_and_fail(name, record):
    assert_graders_judge(name, record[2])


def runs_of(arm, scores, tools):
    """Return the runs of an arm: for each case, the score of each of its runs."""
    return [
        evals.Row(f"case {case}", "", "agent", arm, run, 0, 2.0, tools, None, one, [], "")
        for case, runs in enumerate(scores)
        for run, one in enumerate(runs)
    ]


def test_the_interval_of_an_arm_is_that_of_the_means_of_its_cases():
    none = runs_of("none", [[0, 0, 0], [1, 1, 1], [0, 1, 0.5]], 30)
    whole = runs_of("whole", [[0.5, 0.5], [1, 1], [1, 1]], 10)
    found = evals.intervals([*none, *whole])
    # 0, 1 and 0.5, whose standard deviation is 0.5, and gains of 0.5, 0 and 0.5.
    assert found["none"]["score"] == pytest.approx([0.5, 0.5 - 3**-0.5, 0.5 + 3**-0.5], abs=1e-4)
    assert found["whole"]["gain"] == pytest.approx([1 / 3, 0, 2 / 3], abs=1e-4)
    assert found["none"]["tool_calls"] == [30, 30, 30]
    assert "whole   tool_calls          10   10 to 10" in evals.described(found).splitlines()


def test_each_skill_has_a_short_case_and_no_more_than_twelve_are_easy():
    assert sorted(CASES[name].skill for name in SHORT) == SKILLS
    assert set(SHORT) <= set(SMOKE)
    assert len(SMOKE) <= 12
    assert sorted([*SMOKE, *HARD]) == sorted(CASES)


@pytest.mark.parametrize("name", HARD)
def test_a_hard_case_notes_its_commands_and_what_happened_without_them(name):
    notes = evals_scripted.notes(name)
    assert 1 <= len(notes["commands"]) <= MOST_COMMANDS
    for command in notes["commands"]:
        program, first, *_ = command.split()
        is_ours = program == "curry-train" and first in main.commands
        assert is_ours or command.startswith("python -m ")
    assert set(notes["alone"]) == {"solved", "commands", "says"}
    assert len(evals_scripted.solutions(name)) >= 4


def test_attempts_show_twelve_of_twenty_cases_to_be_hard():
    shown = 0
    for notes in map(evals_scripted.notes, HARD):
        alone = notes["alone"]
        fewest = TIMES_ALONE * len(notes["commands"])
        shown += not alone["solved"] or alone["commands"] >= fewest
    assert len(HARD) >= 20
    assert shown >= 12


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", HARD)
def test_the_commands_of_a_hard_case_solve_it(name, tmp_path):
    notes = evals_scripted.notes(name)
    shutil.copytree(CASES[name].folder / "fixture", tmp_path, dirs_exist_ok=True)
    evals_scripted.apply(notes, tmp_path)
    programs = {"curry-train": ["-m", "curry_train"], "python": []}
    lines = [shlex.split(line) for line in notes["commands"]]
    commands = [[*programs[program], *words] for program, *words in lines]
    # The answer is written from what the commands recorded, by no more than a few lines.
    for words in [*commands, ["-c", notes["finish"]]]:
        ended = finished(sys.executable, *words, cwd=tmp_path, status=None)
        # Checks end with 1 where they find something.
        assert ended.returncode < 2, ended.stdout + ended.stderr
    grades = evals_grading.grade(CASES[name].folder, tmp_path)
    assert evals_grading.score(grades) == 1, grades


def test_the_figures_of_the_card_that_is_not_here_are_recorded_ones():
    recorded = {
        str(step["length"]): step["recorded"]["reserved"] / 2**20
        for step in read_json(ROOT / "evidence/cuda_traces.json")["steps"]
        if step["model"] == "2.7B"
    }
    assert constants("memory-plan-card-not-here")["RESERVED_MIB"] == recorded


def constants(name):
    """Return the names of a case's grader."""
    (check, *_) = evals_grading.checks(CASES[name].folder).values()
    return check.__globals__


@pytest.mark.parametrize("name", varying_training.TRAININGS)
def test_the_figures_of_a_snapshot_are_those_of_the_program_that_wrote_it(name):
    assert varying_training.reserved_mib(name) == constants(f"memory-plan-{name}")["RESERVED_MIB"]
    written = pickle.loads(varying_training.file_of(name).read_bytes())
    assert written == varying_training.trained(name).snapshot()


def test_the_large_snapshot_is_the_one_of_the_program_that_wrote_it():
    training = varying_training.keeping()
    required = constants("memory-plan-large-snapshot")
    assert required["OWNERS"]["parameter_bytes"] == sum(training.parameter_sizes())
    assert required["OWNERS"]["optimizer_bytes"] == 2 * sum(training.parameter_sizes())
    with zipfile.ZipFile(varying_training.LARGE_FILE) as file:
        assert pickle.loads(file.read("oom.pickle")) == training.recorder.snapshot()


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_in_the_format_that_clients_run(name):
    case = CASES[name]
    settings = case.settings
    assert settings["schema_version"] == "1.0"
    assert name == f"{case.skill}-{case.folder.name}"
    assert set(settings["execution"]) == EXECUTION_KEYS
    assert settings["context"] == {"scaffold_script": "scaffold.sh"}
    assert (case.folder / "scaffold.sh").is_file()
    for grader in settings["graders"]:
        assert set(grader) <= EVERY_KEYS | GRADER_KEYS[grader["type"]]
    names = [grader["name"] for grader in settings["graders"]]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_is_a_users_and_names_no_skill(name):
    words = CASES[name].prompt.lower()
    assert "curry" not in words
    assert "skill" not in words
    assert not any(skill in words for skill in SKILLS if "-" in skill)


def test_an_arm_without_guidance_has_the_same_files_and_no_arm_has_the_answers(tmp_path):
    none, gutted, whole, index = (evals.build_arm(arm, tmp_path / arm) for arm in evals.ARMS)
    assert {path.name for path in whole.iterdir()} - {path.name for path in index.iterdir()} == {
        "skills"
    }
    listed = {path.relative_to(whole) for path in whole.rglob("*") if path.is_file()}
    assert listed == {path.relative_to(gutted) for path in gutted.rglob("*") if path.is_file()}
    assert not [path for path in listed if path.parts[0] in ("evals", "tests")]
    assert (whole / "scripts/curry_train.py").is_file()
    assert not (none / "skills").exists()
    for page in whole.glob("skills/*/SKILL.md"):
        cut = (gutted / page.relative_to(whole)).read_text()
        assert page.read_text().startswith(cut)
        assert yaml.safe_load(cut.strip().strip("-"))["name"] == page.parent.name
        assert cut.count("\n") < 9


def test_an_agent_gets_the_prompt_the_plugin_and_a_home_and_is_ended_in_time(tmp_path, monkeypatch):
    case = CASES[QUICK]
    words = 'sh -c \'test -d "$1/skills" && echo "$2" && echo home $HOME\' sh {plugin} {prompt}'
    status, _, transcript = evals.run_agent(words, case, "whole", tmp_path / "first")
    assert status == 0
    assert case.prompt in transcript
    assert f"home {tmp_path / 'first/home'}" in transcript
    monkeypatch.setitem(case.settings["execution"], "timeout_seconds", 0.2)
    status, seconds, _ = evals.run_agent("sleep 20", case, "none", tmp_path / "second")
    assert status is None
    assert seconds < 10


def test_an_agent_with_the_index_has_the_lines_and_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}")
    words = "sh -c 'cmp AGENTS.md CLAUDE.md && tail -n 12 AGENTS.md && curry-train --help'"
    status, _, transcript = evals.run_agent(words, CASES[QUICK], "index", tmp_path / "run")
    assert status == 0, transcript
    assert "`curry-train plan --target h100 TRAIN`" in transcript
    assert "Check your own training loop" in transcript


def test_agents_do_not_run_where_python_has_the_package(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(evals, "real_runs", lambda *_: iter(()))
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    with pytest.raises(SystemExit, match="2"):
        evals.main(["--agent", "true {prompt}"])
    assert "without curry-train" in capsys.readouterr().err
    python.write_text("#!/bin/sh\nexit 1\n")
    assert evals.main(["--agent", "true {prompt}"]) == 0


def test_tool_calls_and_tokens_are_read_from_json_lines():
    lines = [
        {"type": "assistant", "message": {"content": [{"type": "tool_use", "name": "Bash"}]}},
        {"type": "assistant", "message": {"content": [{"type": "text", "text": "done"}]}},
        {"type": "result", "usage": {"input_tokens": 30, "output_tokens": 4, "speed": "fast"}},
    ]
    transcript = "started\n" + "\n".join(json.dumps(line) for line in lines)
    assert evals.count_tools(transcript) == 1
    assert evals.count_tokens(transcript) == 34
    assert evals.count_tools("done") is None
    assert evals.count_tokens("done") is None


def test_code_that_hangs_dies_or_raises_misses_the_point(tmp_path):
    fixture = tmp_path / "fixture"
    fixture.mkdir()
    work = evals_grading.Work(fixture, fixture)
    for body, reason in (
        (lambda: 1 / 0, "ZeroDivisionError"),
        (evals_grading.kill, "ended with status -9"),
        (lambda: sys.exit("no model"), "status 1: no model"),
    ):
        with pytest.raises(evals_grading.Broken, match=reason):
            work.call(body)
    with pytest.raises(evals_grading.Broken, match="did not end within"):
        work.call(lambda: __import__("time").sleep(20), seconds=0.1)
    (fixture / "write.py").write_text(
        "print('step 1')\n"
        "open('small', 'wb').write(b'a' * 50)\n"
        "open('big', 'wb').write(b'a' * 9000)\n"
    )
    ended = work.run("write.py", at={"step 1": evals_grading.die_writing(4096)})
    assert ended.status < 0
    assert ended.lines == ["step 1"]
    assert (fixture / "small").stat().st_size == 50
    assert (fixture / "big").stat().st_size == 4096
