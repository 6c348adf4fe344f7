"""Pages keep what they promise: commands and code run, figures are recorded, names exist.

Run: `python -m pytest tests/skills/test_pages.py`.
"""

import json
import os
import pkgutil
import re
import shlex
import sys
import types

import pytest
import torch
import yaml

from clients import copy_bundle
from curry_train.cli import scaffold

from ..command_runs import finished, ran, read_json
from ..tree import ROOT, skills
from ..warm_python import start_warm, warm_python
from .pages import RECORD_KEYS, fenced_blocks, pages, quoted_figures, wrong_figures

TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in pages()}
NAMES = [skill.name for skill in skills(ROOT)]
MODULE_LINK = "https://github.com/curry-train/curry-train/blob/main/template/"

# Commands and code.

# Blocks that take longest and have tests of their own: `make long` alone runs them.
LONG_BLOCKS = (
    "# my_trainer.py",
    "# my_accelerate.py",
    "# my_lightning.py",
    "python my_trainer.py",
    "python my_accelerate.py",
    "python my_lightning.py",
    "curry-train memory --trainer my_trainer:make_trainer",
    "curry-train plan --model my_llama.py:build",
    "curry-train runs spike-check",
    "curry-train runs resume-check",
    "curry-train plan --model transformer --budget 16MiB --global-batch 8 --target cpu "
    "--explain --plot",
    "curry-train savings --out savings --model transformer",
)
# Commands with one of these words run the user's program, or trust the process with signals.
OTHER_PROCESS = {"--script", "--trainer", "train", "&&", "|", ">"}
# Replaces the script that pip writes for the entry point, with the python of the test.
INSTALLED_COMMAND = """\
#!/bin/sh
exec python -c 'from curry_train.cli.main import main; main(prog_name="curry-train")' "$@"
"""


def shortened(text):
    """Return commands or code with the smallest model and few steps; `make long` runs all of it.

    Tests of gates run each gate; here a command with `--gate` shows that the gate exists.
    """
    lines = []
    for line in text.splitlines():
        if line.startswith("curry-train validate"):
            line += " --list" if "--gate" in line else " --gate grad-accum/equal"
        if line.startswith("curry-train plan --model my_model.py"):
            line += " --without sac --without offload"
        if line.startswith("curry-train savings") and "--strategy" not in line:
            line += " --strategy full"
        line = line.replace("--model transformer", "--model mlp")
        line = line.replace("--batch-size 32", "--batch-size 4").replace(" steps=20 ", " steps=2 ")
        line = re.sub(r"\btransformer\(\)", "transformer(depth=2, dim=32)", line)
        line = line.replace("layers[3]", "layers[1]").replace("(1.0, 0.5)", "(0.5,)")
        line = line.replace('without=["sac"]', 'without=["sac", "offload"], chunked_loss=False')
        lines.append(re.sub(r"\b(train\.py .*steps=\d)0\b", r"\1", f"{line}\n"))
    return "".join(lines)


def commands_of_pages():
    """Yield those of each page together: some need what others have written."""
    for page, text in TEXTS.items():
        blocks = [block.text for block in fenced_blocks(text, language="bash")]
        short = [shortened(one) for one in blocks if not one.startswith(LONG_BLOCKS)]
        if short:
            yield pytest.param("".join(short), id=page)
        if short != blocks:
            yield pytest.param("".join(blocks), id=f"{page}-whole", marks=pytest.mark.long)


def python_blocks():
    for page, text in TEXTS.items():
        for block in fenced_blocks(text, language="python"):
            name, short = f"{page}:{block.line}", shortened(block.text)
            long = block.text.startswith(LONG_BLOCKS)
            if not long:
                yield pytest.param(page, short, id=name)
            if long or short != block.text:
                yield pytest.param(page, block.text, id=f"{name}-whole", marks=pytest.mark.long)


def python_files_of(page):
    """Return the Python blocks that open with `# name.py`: files that the commands use."""
    sources = [block.text for block in fenced_blocks(TEXTS[page], language="python")]
    return {found[1]: source for source in sources if (found := re.match(r"# (\w+\.py)\n", source))}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Copy the bundle, with a `python` that has torch, and a user's package to add to."""
    root = copy_bundle(tmp_path_factory.mktemp("bundle") / "bundle")
    for page in TEXTS:
        for name, source in python_files_of(page).items():
            (root / name).write_text(source)
    (root / "my_package").mkdir()
    (root / "my_package/__init__.py").touch()
    (root / "bin").mkdir()
    (root / "bin/python").symlink_to(warm_python())
    (root / "bin/curry-train").write_text(INSTALLED_COMMAND)
    (root / "bin/curry-train").chmod(0o755)
    return root


@pytest.fixture(scope="module")
def lines_run():
    """Lines that have run: pages share some, and what these wrote is still there."""
    return set()


@pytest.fixture
def in_this_process(copy, monkeypatch):
    """Run commands in the folder of the bundle, and forget the modules that they import there."""
    monkeypatch.chdir(copy)
    start_warm(monkeypatch)
    # Building it takes seconds, and `tests/cli` installs one.
    monkeypatch.setattr(scaffold, "build_wheel", lambda bundle: b"a wheel")
    yield
    forget_modules_of(copy)


def forget_modules_of(folder):
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("commands", list(commands_of_pages()))
def test_command_runs(commands, copy, lines_run):
    environment = {
        "PATH": f"{copy / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(copy / "template"),
    }
    makefile = (ROOT / "Makefile").read_text()
    for line in commands.splitlines():
        if line in lines_run:
            continue
        lines_run.add(line)
        words = shlex.split(line, comments=True)
        if words[0] == "make" and len(words) == 2:  # CI runs these themselves
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), f"no target {words[1]}"
            continue
        # In brackets, because the next line is typed in the same folder.
        assert words[0] in ("python", "make", "curry-train", "(cd")
        if words[0] == "curry-train" and not OTHER_PROCESS & {*words}:
            ran(shlex.join(words[1:]))
            continue
        # Use the packages that are installed already.
        command = f"{line} PYTHON=python" if words[0] == "make" else line
        finished("sh", "-c", command, cwd=copy, **environment)


@pytest.mark.usefixtures("in_this_process")
def test_the_failed_gate_that_the_readme_shows_fails_so():
    line = "curry-train validate --model my_model.py:build --impl my_window.py:train_window"
    assert f"`{line}`" in TEXTS["README.md"]
    ended = ran(line.removeprefix("curry-train "), status=1)
    (shown,) = [
        block.text
        for block in fenced_blocks(TEXTS["README.md"], language="text")
        if "FAILED" in block.text
    ]
    # The first line names the machine; errors depend on its threads.
    found, expected = (
        [re.sub(r"\d\.\de-\d+", "ERROR", line).rstrip() for line in text.split("\n")[1:]]
        for text in (ended.stdout, shown)
    )
    assert found == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("page", "block"), list(python_blocks()))
def test_python_runs(page, block, tmp_path, monkeypatch):
    for name, source in python_files_of("README.md").items():
        (tmp_path / name).write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["-c"])
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    threads = torch.get_num_threads()
    try:
        exec(compile(block, page, "exec"), vars(module))  # noqa: S102
    finally:
        torch.set_num_threads(threads)
        forget_modules_of(tmp_path)


# Figures.


@pytest.mark.parametrize("page", TEXTS)
def test_quoted_figures_are_the_recorded_ones(page):
    assert list(wrong_figures(TEXTS[page])) == []


def test_records_have_their_origin_and_pages_quote_them():
    records = sorted(ROOT.glob("evidence/**/*.json"))
    assert len(records) >= 10
    for path in records:
        lacking = RECORD_KEYS - set(read_json(path))
        assert not lacking, f"{path.name} lacks {lacking}: record it with the run"
    assert sum(len(quoted_figures(text)) for text in TEXTS.values()) >= 50


def test_the_plan_that_the_page_shows_is_the_recorded_one():
    record = read_json(ROOT / "evidence/plan.json")
    shown = [block.text.rstrip("\n") for block in fenced_blocks(TEXTS["docs/plan.md"])]
    assert record["text"] in shown


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("(evidence/run.json: held.percent 33.8, runs.0.seconds 0.051)", None),
        ('[34%](evidence/run.json "held.percent")', None),
        ("(evidence/run.json: held.percent 33.9)", "is 33.82 and the page quotes 33.9"),
        # The zero claims a third digit.
        ("(evidence/run.json: held.percent 33.0)", "is 33.82"),
        ("(evidence/gone.json: held.percent 34)", "is not recorded"),
        ("(evidence/run.json: runs.0.name 34)", "quote a number"),
        ("(evidence/run.json: held.percent)", "no number next to it"),
        ("34% (evidence/run.json held.percent)", "can't be read"),
    ],
)
def test_a_planted_wrong_figure_is_caught(tmp_path, text, problem):
    record = {"held": {"percent": 33.82}, "runs": [{"name": "mlp", "seconds": 0.0512}]}
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence/run.json").write_text(json.dumps(record))
    found = list(wrong_figures(text, tmp_path))
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


# Skills.


@pytest.mark.parametrize("name", NAMES)
def test_a_skill_is_short_and_leads_to_its_module_and_gates(name):
    text = TEXTS[f"skills/{name}/SKILL.md"]
    module = yaml.safe_load(text.split("---\n")[1])["metadata"]["module"]
    assert len(text.split()) <= 1000
    assert f"[{module}]({MODULE_LINK}{module})" in text
    assert f"curry-train validate --gate {name} " in text
    assert "gen-tests" in text


def test_descriptions_of_all_skills_are_short_together():
    assert sum(len(skill.frontmatter["description"]) for skill in skills(ROOT)) <= 1400


@pytest.mark.parametrize("name", NAMES)
def test_a_skill_has_the_symptoms_that_users_meet(name):
    table = TEXTS[f"skills/{name}/SKILL.md"].split("## Symptoms\n")[1].split("\n## ")[0]
    assert 4 <= len([line for line in table.splitlines() if line.startswith("| ")][1:]) <= 10


SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
DOTTED = re.compile(r"\b(?:torch|aten|curry_train)(?:\.\w+)+\b(?<!\.py)(?!\.)")
CALLED = re.compile(r"(?<![\w.])([a-z]\w*_\w*|[A-Z]\w+[a-z]\w*)\(")
ABSENT = {"torch._dynamo.config.activation_memory_budget"}  # the page is about that
SOURCE = "\n".join(
    path.read_text()
    for path in [*ROOT.glob("template/curry_train/**/*.py"), *ROOT.glob("scripts/*.py")]
)
OF_TORCH = {*dir(torch), *dir(torch.Tensor), *dir(torch.nn.utils), *dir(torch.nn.functional)}


def exists(dotted):
    """Return whether a dotted name of torch, its operations or the package exists."""
    if dotted.startswith("aten."):
        return hasattr(torch.ops.aten, dotted.split(".")[1])
    try:
        pkgutil.resolve_name(dotted)
    except (AttributeError, ImportError):
        return False
    return True


def unknown_names(text):
    for span in SPAN.findall(re.sub(r"(?s)```.*?```", "", text)):
        yield from (
            name for name in DOTTED.findall(span) if name not in ABSENT and not exists(name)
        )
        for name in CALLED.findall(span):
            if name not in OF_TORCH and not re.search(rf"\b{name}\b", SOURCE):
                yield name


@pytest.mark.parametrize("page", [page for page in TEXTS if not page.endswith("trainers.md")])
def test_names_in_the_text_exist(page):
    assert list(unknown_names(TEXTS[page])) == []
