"""The command `curry-train`: pages of help, examples that run, ways to start it.

Run: `python -m pytest tests/cli/test_command_line.py`.
"""

import runpy
import sys
from pathlib import Path

import click
import pytest
import torch

from curry_train.cli.main import main
from curry_train.cli.options import UnusableInput
from curry_train.cli.screen import LONG_COMMANDS, screen_command
from curry_train.core.wording import provenance

from ..command_runs import finished, in_python, ran, require_narrow
from ..runs.recorded_training import recorded
from ..tree import ROOT
from ..warm_python import start_warm

SCREEN_COLUMNS = 80
SHARED_OPTIONS = (
    "device",
    "dtype",
    "batch_size",
    "seed",
    "blocks",
    "json_path",
    "trainer",
    "script",
)


def pages(group=main, path=()):
    """Yield the words that lead to every command, groups included."""
    yield path
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.commands[name].load()
        if isinstance(command, click.Group):
            yield from pages(command, (*path, name))
        else:
            yield (*path, name)


def command_at(path):
    command = main
    for name in path:
        command = command.commands[name].load()
    return command


def help_of(*path):
    return ran(*path, "--help").output


ALL_PAGES = list(pages())
assert len(ALL_PAGES) >= 30


def faults_of_page(path, text):
    """Return what is wrong with a page: its width, its example, and options without a line."""
    lines = text.splitlines()
    faults = []
    if max(map(len, lines)) > SCREEN_COLUMNS:
        faults.append(f"{max(map(len, lines))} columns")
    if not lines[-1].startswith("Example: curry-train"):
        faults.append("no example at the end")
    for option in command_at(path).params:
        if isinstance(option, click.Argument):
            continue
        # Its own line, and a text after it or below.
        found = [
            number
            for number, line in enumerate(lines)
            if f"{line} ".startswith(f"  {', '.join(option.opts)} ")
        ]
        described = (
            found
            and option.help
            and option.help.split()[0] in " ".join(lines[found[0] : found[0] + 2])
        )
        if option.hidden or not described:
            faults.append(f"no line for {option.opts[0]}")
    return faults


@pytest.mark.parametrize("path", ALL_PAGES, ids=" ".join)
def test_each_page_has_a_line_for_each_option_and_ends_with_an_example(path):
    assert not faults_of_page(path, help_of(*path))


@pytest.mark.parametrize(("name", "text"), LONG_COMMANDS.items())
def test_a_long_command_tells_first_what_it_does(name, text, monkeypatch, capsys):
    (words,) = [words for words in ALL_PAGES if words[-1:] == (name,)]
    for more, expected in ((["--no-such"], f"{name} {text}\n"), (["--help"], "")):
        monkeypatch.setattr(sys, "argv", ["curry-train", *words, *more])
        monkeypatch.setattr("curry_train.cli.screen.supervise", lambda: None)
        with pytest.raises(SystemExit):
            main()
        printed = capsys.readouterr().err
        assert printed.startswith(expected) if expected else not printed


def test_the_list_of_commands_has_the_summary_of_each_command():
    for name, listed in main.commands.items():
        first = (command_at([name]).help or "").split("\n\n")[0]
        assert listed.short_help == " ".join(first.split()), name


def test_the_lists_of_commands_and_of_techniques_are_shown_without_torch():
    code = (
        "import sys\nfrom curry_train.cli.main import main\n"
        "main(['list'], standalone_mode=False)\n"
        "main(['--help'], prog_name='curry-train', standalone_mode=False)\n"
        "print('torch' in sys.modules, 'rich' in sys.modules)"
    )
    ended = finished(sys.executable, "-c", code)
    assert ended.stdout.splitlines()[-1] == "False False", ended.stderr
    assert all(f"  {name} " in ended.stdout for name in main.commands)


def test_the_version_is_an_option_before_the_command():
    assert ran("--version").output.startswith("curry-train, version ")


# `estimate` has dtypes of saved state; `savings` takes several batch sizes in one option.
OTHER_MEANING = {("runs", "estimate"): "dtype", ("savings",): "batch_size"}


def test_options_mean_the_same_in_every_command():
    """Their names and the values that they take are the same."""
    seen = {}
    for path in ALL_PAGES:
        for option in command_at(path).params:
            is_shared = option.name in SHARED_OPTIONS and isinstance(option, click.Option)
            if is_shared and OTHER_MEANING.get(path) != option.name:
                facts = (option.opts, option.type.to_info_dict())
                seen.setdefault(option.name, {}).setdefault(str(facts), []).append(path)
    assert seen.keys() == {*SHARED_OPTIONS}
    assert {name: places for name, places in seen.items() if len(places) > 1} == {}


# Examples.


@pytest.fixture(scope="module")
def folder_with_runs(tmp_path_factory):
    """Make a folder with a project and the runs run-001 and run-002."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "src/mylib").mkdir(parents=True)
    (folder / "src/mylib/__init__.py").touch()
    (folder / "train.py").write_text(SCRIPT)
    trained = "train name=run steps=2 model=mlp data.source=workload evaluate.every=null"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # Tests of the wheel build it.
        patch.setattr("curry_train.cli.scaffold.build_wheel", lambda bundle: b"wheel")
        for line in (trained, trained, "new my-run"):
            ran(line)
        (folder / "night.py").write_text(NIGHT)
        runpy.run_path("night.py")
    for name in "AB":
        recorded(folder / name)
    return folder


SCRIPT = """\
import torch

model = torch.nn.Linear(8, 5)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

NIGHT = """\
import torch
from curry_train.runs import saving

torch.manual_seed(0)
model = torch.nn.Linear(8, 5)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.randn(4, 4, 8)  # before a resume restores the generators
with saving(model, optimizer, runs="run", rollback_every=1, box=True) as run:
    for batch in run.batches(data):
        # NaN in the third step and the one after it.
        loss = model(batch).square().mean() * torch.tensor(1.5 - run.steps).sqrt()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss)
"""


EXAMPLES = [path for path in ALL_PAGES if not isinstance(command_at(path), click.Group)]


@pytest.mark.parametrize("path", EXAMPLES, ids=" ".join)
def test_the_example_of_each_page_runs(path, folder_with_runs, tmp_path, monkeypatch):
    # The project of the other examples is there already.
    monkeypatch.chdir(tmp_path if path == ("new",) else folder_with_runs)
    start_warm(monkeypatch)
    monkeypatch.setattr("curry_train.cli.scaffold.build_wheel", lambda bundle: b"wheel")
    prefix, line = help_of(*path).splitlines()[-1].split("curry-train ", 1)
    assert prefix == "Example: "
    ran(line)


# Ways to start it.


CLONED = str(ROOT / "scripts/curry_train.py")


def test_a_bare_clone_runs_it_from_any_folder_whatever_the_path_holds():
    ended = finished(sys.executable, CLONED, "list", PYTHONPATH=f"{ROOT}/scripts:{ROOT}/template")
    assert "grad-accum" in ended.stdout


def test_a_bare_clone_names_itself_in_usage_so_that_the_line_can_be_typed():
    unknown = finished(sys.executable, CLONED, "valdate", status=2, PYTHONPATH="")
    assert "No such command 'valdate'" in unknown.stderr
    assert f"Try 'python {CLONED} --help'" in unknown.stderr


STARTS = ([CLONED], ["-m", "curry_train"])


@pytest.mark.parametrize("started", STARTS, ids=str)
def test_the_main_module_can_be_imported_by_worker_processes(started):
    """Import it as `multiprocessing` does in a process that it spawns, on the path of this one."""
    *module, name = started
    path, run = str(Path(name).parent), f"run_path({name!r}"
    if module:
        path, run = "", "run_module('curry_train.__main__'"
    code = (
        f"import runpy, sys\nsys.path.insert(0, {path!r})\n"
        f"for name in ('first', '__mp_main__'):\n    runpy.{run}, run_name=name)\n"
        "    sys.modules.pop('environment', None)\nprint('imported')"
    )
    ended = in_python("-c", code)
    assert ended.stdout == "imported\n", ended.stderr


def test_python_m_is_the_same_command():
    ended = finished(sys.executable, "-m", "curry_train", "--help")
    assert ended.stdout == help_of().replace("curry-train", "python -m curry_train")


@pytest.mark.parametrize(
    ("started", "recorded"),
    [
        ("python ENV/bin/curry-train bench --steps 3", "curry-train bench --steps 3"),
        ("python -m curry_train bench --steps 3", "python -m curry_train bench --steps 3"),
    ],
)
def test_recorded_figures_name_the_command_as_it_is_typed(monkeypatch, started, recorded):
    monkeypatch.setattr(sys, "orig_argv", started.split())
    assert provenance(torch.device("cpu"))["command"] == recorded


# Completion in a shell.


def test_a_shell_completes_commands_without_importing_torch():
    code = (
        "import sys\nfrom curry_train.cli.main import main\ntry: main(prog_name='curry-train')\n"
        "finally: sys.stderr.write(str('torch' in sys.modules))"
    )
    typed = {"COMP_WORDS": "curry-train va", "COMP_CWORD": "1"}
    ended = finished(sys.executable, "-c", code, _CURRY_TRAIN_COMPLETE="bash_complete", **typed)
    assert ended.stdout.split() == ["plain,validate"]
    assert ended.stderr == "False"


def test_an_error_breaks_between_words_and_keeps_its_lines():
    words = ["--reshard-after-forward"] * 5 + ["/runs/" + "long-" * 20 + "name"]

    @screen_command("fails", example="")
    def fails():
        raise UnusableInput(f"{' '.join(words)}\n  pip install it")

    *lines, last = ran(command=fails, status=2).stderr.splitlines()
    assert last == "  pip install it"
    assert " ".join(lines).split() == ["Error:", *words]
    assert all(len(line) <= 80 for line in lines if " " in line)


def test_what_click_refuses_fits_too():
    require_narrow(ran("plan --dtype float31", status=2).stderr)
    # No word of an error, but the page of help.
    assert "Error" not in ran("runs", status=2).stderr
