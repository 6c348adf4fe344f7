"""Test that the visible loop of the rendered project equals the trainer.

Run with `python -m pytest tests/trainer/test_project.py`.
"""

import shlex

import pytest

from curry_train.cli.ownership import find_bundle, project_files

from ..command_runs import finished, in_python, read_json
from ..journals import column

WORDS = (
    "device=cpu",
    "steps=4",
    "batch_size=8",
    "microbatch=2",
    "data.length=16",
    "evaluate={every: 2, samples: 6}",
)

# Train the project's model on its data with `curry_train.trainer` instead of its own loop.
BY_THE_TRAINER = """
import sys
from curry_train.config import load_config
from curry_train.core.generators import seeded
from curry_train.plan import Plan
from curry_train.trainer import TrainingTask, open_run, train_run
from data import open_data
from model import build, num_tokens, summed_loss

config = load_config("config.yaml", sys.argv[1:])
with seeded(config.seed):
    module = build()
task = TrainingTask("mine", module, summed_loss, num_tokens, *open_data(config.data))
with open_run(config, lambda device: task, load_plan=Plan.load) as run:
    train_run(run)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rendered") / "project"
    for path, file in project_files(find_bundle(), name="my_project", own=False).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(file)
    return folder


def run(project, *command):
    return in_python(*command, cwd=project).stdout


def test_threads_under_make_wait_asleep(project):
    rule = "shown: ; @echo $$OMP_WAIT_POLICY"
    line = ["env", "-u", "OMP_WAIT_POLICY", "make", "--silent", "--eval", rule, "shown"]
    assert finished(*line, cwd=project).stdout == "PASSIVE\n"


NEWER_TORCH = """
import curry_train

def test_a_newer_torch_is_a_warning(monkeypatch):
    monkeypatch.setattr(curry_train, "TESTED_TORCH", ())
    curry_train.warn_of_untested_torch()
"""


def test_the_tests_of_a_project_pass_with_a_newer_torch(project, tmp_path):
    (tmp_path / "test_torch.py").write_text(NEWER_TORCH)
    run(project, "-m", "pytest", "-c", project / "pyproject.toml", tmp_path / "test_torch.py")


def figures(runs):
    """Return the steps with their losses, norms and rates, and the dev losses, of the only run."""
    (folder,) = runs.iterdir()
    names = ("step", "loss", "grad_norm", "learning_rate")
    return [column(folder, "step", name) for name in names], column(folder, "eval", "value")


def test_the_visible_loop_is_bit_equal_to_the_trainer(project, tmp_path):
    words = [*WORDS, "recompute.strategy=sac", "precision=bfloat16"]
    run(project, "train.py", *words, f"runs={tmp_path}/own")
    run(project, "-c", BY_THE_TRAINER, *words, f"runs={tmp_path}/trainer")
    own = figures(tmp_path / "own")
    assert own[0][0] == [1, 2, 3, 4]
    assert len(own[1]) == 2
    assert own == figures(tmp_path / "trainer")
    again = ["--resume", "my_project-001", *words, f"runs={tmp_path}/own"]
    lines = run(project, "train.py", *again).splitlines()
    assert lines[1] == "resuming my_project-001 at step 4: nothing is left to train"
    assert lines[-1].endswith(shlex.join(again).replace("steps=4", "steps=8"))


def test_a_plan_file_of_the_command_is_applied(project, tmp_path):
    plan = tmp_path / "plan.json"
    words = ["--budget", "60MiB", "--global-batch", "8", "--microbatch", "2", "--out", plan]
    words += ["--whole-loss", "--without", "sac", "--without", "offload", "--without", "regions"]
    run(project, "-m", "curry_train", "plan", "--model", "model.py:example", *words)
    assert read_json(plan)["microbatch"] == 2
    recompute = f"recompute={{strategy: plan, plan: {plan}}}"
    assert "step 4/4" in run(project, "train.py", *WORDS, recompute, f"runs={tmp_path}/runs")


def test_commands_use_the_configuration_of_the_project(project, tmp_path):
    """Use the model that config.yaml names in `train` and the checks of `runs`."""
    words = [*WORDS, "steps=2", f"runs={tmp_path}"]
    out = run(project, "-m", "curry_train", "train", "--config", "config.yaml", *words)
    assert "2 steps done" in out
