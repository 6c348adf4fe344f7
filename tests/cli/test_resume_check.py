"""`runs resume-check` compares a program's own resume, and finds each part that it lacks.

Run: `python -m pytest tests/cli/test_resume_check.py`.
"""

import copy
import signal
from types import SimpleNamespace

import pytest
import torch

from curry_train.cli.resume_check import began_after, differences
from curry_train.cli.resume_watch import PARTS, StateWatch

from ..command_runs import call, read_json
from ..warm_python import start_warm
from .resumed_programs import ACCELERATE, HUGGING_FACE, LIGHTNING, PLAIN

pytestmark = pytest.mark.timeout(1200)


def step(number, **changed):
    """Return the notes of a step of a sound run."""
    notes = {
        "data order": [[f"batch {number}"]],
        "model": {"0.weight": f"weight {number}", "0.bias": f"bias {number}"},
        "optimizer": {"exp_avg of 0.weight": f"average {number}"},
        "scheduler": {"last_epoch": number},
        "scaler": {"scale": 2.0**number, "_growth_tracker": 1},
        "generators": {"torch": f"state {number}"},
        "rates": [3e-4 * 0.9**number],
        "after": {"0.weight": f"weight {number + 1}"},
    }
    return notes | changed


STRAIGHT = [step(number) for number in range(8)]
LACKING = {
    "data order": ({"data order": [["batch 2"]]}, "batch 3 came again (step 6)"),
    "model": ({"model": {"0.weight": "new", "0.bias": "new"}}, "0.weight and 1 more (step 6)"),
    "scheduler": ({"scheduler": {"last_epoch": 0}}, "last_epoch 0, not 5 (step 6)"),
    "scaler": ({"scaler": {"scale": 1.0, "_growth_tracker": 1}}, "scale 1.0, not 32.0 (step 6)"),
}


@pytest.mark.parametrize("part", LACKING)
def test_a_part_that_is_not_restored_is_named_alone(part):
    changed, text = LACKING[part]
    resumed = [step(5, **changed), *STRAIGHT[6:]]
    assert differences(STRAIGHT, resumed, 5) == {part: text}
    assert began_after(STRAIGHT, resumed, 6) == 5


def test_a_resume_from_the_weights_alone_is_one():
    resumed = [step(number, model=STRAIGHT[number + 4]["model"]) for number in range(3)]
    assert began_after(STRAIGHT, resumed, 6) == 4
    assert differences(STRAIGHT, resumed, 4).keys() == {*PARTS} - {"model"}


def test_a_value_that_no_part_holds_and_other_data_are_named():
    unknown = [step(5, after={"0.weight": "another"})]
    assert differences(STRAIGHT, unknown, 5)["result"].endswith("is not restored (step 6)")
    between = [STRAIGHT[5], step(6, model={"0.weight": "averaged", "0.bias": "bias 6"})]
    assert differences(STRAIGHT, between, 5)["result"].endswith("is not restored (step 7)")
    rate = [step(5, rates=[0.1], after={})]
    assert differences(STRAIGHT, rate, 5) == {"learning rate": "rate 0.1, not 0.000177 (step 6)"}
    other = [step(5, **{"data order": [["a batch of no step"]]})]
    assert differences(STRAIGHT, other, 5) == {"data order": "another batch (step 6)"}


def test_an_average_that_no_step_reads_is_compared():
    model = torch.nn.Linear(2, 1)
    average = copy.deepcopy(model)
    model.register_forward_pre_hook(lambda _, given: given[0].values)
    watch = StateWatch(3, str, "", "resumed")
    with watch.watching():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for change in (0, 0, 1):
            average.bias.data += change
            optimizer.param_groups[0]["momentum"] = change
            model(SimpleNamespace(values=torch.ones(2))).backward()
            optimizer.step()
    assert watch.steps[0]["data order"] != [[]]
    before, equal, other = (step["after"] for step in watch.steps)
    assert before == equal != other
    assert "momentum 1, not 0" in differences(watch.steps, watch.steps[2:], 0)["optimizer"]


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Return a function that runs the command on a program."""
    start_warm(monkeypatch)

    def check(program, *words, given="--script program.py", status=0):
        """Return the lines of the command and its results."""
        (tmp_path / "program.py").write_text(program)
        options = "--steps 8 --kill-at 5 --json found.json"
        output = call("resume-check", options, given, *words, status=status)
        path = tmp_path / "found.json"
        found = read_json(path) if path.exists() else {}
        names = {one.name for one in tmp_path.iterdir() if one.suffix != ".json"}
        assert names - {"__pycache__"} == {"program.py"}
        # Behind the line on what the command does.
        return output.splitlines(), found

    return check


def test_the_whole_resume_of_a_script_is_equal_and_each_of_six_parts_is_missed(checked):
    lines, found = checked(PLAIN, "all")
    assert lines[:2] == [
        "8 steps, killed in step 5, resumed after step 3",
        "equal to the bit: 5 steps",
    ]
    assert {part for part in PARTS if part in found["withheld"][part]} == set(PARTS)
    assert "  data order: batch 1 came again (step 4)" in lines
    assert lines[-1] == "not compared: values that no step reads, such as the best loss so far"
    assert any(line.startswith("  scheduler: rate 0.000291, not 0.00026") for line in lines)


@pytest.mark.parametrize("part", PARTS)
def test_a_script_that_does_not_restore_a_part_fails_by_its_name(part, checked):
    lines, found = checked(PLAIN, repr(part), status=1)
    assert set(found["differences"]) == {part}
    assert lines[1].startswith(f"NOT equal, {part}: ")
    if part == "generators":
        assert lines[2] == "the weights differ from step 4 on"


def test_a_script_resumes_by_environment_variables(checked):
    by_variables = PLAIN.replace("os.path.exists", "os.environ.get('RESUME') == '1' and str")
    lines, _ = checked(by_variables, "all", given="--script program.py --resume-with RESUME=1")
    assert lines[1] == "equal to the bit: 5 steps"


def test_a_resume_that_fails_is_not_equal(checked):
    lines, _ = checked(PLAIN.replace('torch.load("save.pt")', "{}"), "all", status=1)
    assert "NOT equal, the resume fails: KeyError: 'step'" in " ".join(lines)


def test_numbers_that_nothing_depends_on_are_said_to_change_no_weight(checked):
    program = PLAIN.replace("nn.Dropout(0.2)", "nn.Identity()")
    lines, _ = checked(
        program.replace("    rows", "    torch.rand(1)\n    rows"), "generators", status=1
    )
    assert lines[2] == "the weights after each step are equal all the same"


@pytest.mark.parametrize(
    ("program", "given", "lacks"),
    [
        (HUGGING_FACE, "--trainer program.py:make", set()),
        (LIGHTNING, "--trainer program.py:make", {"data order", "generators"}),
        (ACCELERATE, "--script program.py", {"generators"}),
    ],
    ids=["transformers", "lightning", "accelerate"],
)
def test_each_part_of_a_library_is_missed_when_it_is_withheld(program, given, lacks, checked):
    lines, found = checked(program, given=given, status=1 if lacks else 0)
    assert set(found["differences"]) == lacks
    # None of these has a gradient scaler on a CPU.
    assert set(found["withheld"]) == set(PARTS) - {"scaler"}
    assert all(part in named for part, named in found["withheld"].items())
    assert "  scaler: proves nothing: there is none in this run" in lines


def test_a_program_whose_starts_differ_is_told_to_be_seeded(checked):
    lines, _ = checked(PLAIN.replace("torch.manual_seed(0)", "torch.seed()"), "all", status=2)
    assert "two starts differ already, data order: another batch (step 1)" in " ".join(lines)


SEEDED_IN_TORCH_ALONE = """\
import copy
import torch
from curry_train.runs import saving

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
optimizer = torch.optim.AdamW(model.parameters())
batches = torch.rand(20, 4, 4)
with saving(model, optimizer, runs="run", rollback_every=2) as run:
    for batch in run.batches(batches):
        def closure():
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        run.step(loss=optimizer.step(closure))
        best = copy.deepcopy(optimizer)
"""


def test_generators_that_are_left_alone_need_no_seed_in_a_closure(checked, capfd):
    _, found = checked(SEEDED_IN_TORCH_ALONE)
    assert found["withheld"]["generators"]["generators"].startswith("torch")
    # The link to the newest state is put back as a link.
    assert "was a folder" not in "".join(capfd.readouterr())


def test_a_signal_between_two_runs_leaves_no_checkpoint(checked, monkeypatch):
    between = "curry_train.cli.resume_check.archived_changes"
    monkeypatch.setattr(between, lambda _: signal.raise_signal(15))
    checked(PLAIN, "all", status=143)


def test_a_program_that_saves_nothing_is_told_how_to(checked):
    lines, _ = checked(PLAIN, "everything", status=2)
    assert "Let the program save within 4 steps" in " ".join(lines)
