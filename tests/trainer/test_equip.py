"""One line adds techniques to a trainer of another library, and the training stays the same.

python -m pytest tests/trainer/test_equip.py
"""

import pytest
import torch
from torch.utils.data import DataLoader

from curry_train.core import memory_recorder
from curry_train.loop import equip
from curry_train.primitives import recompute_blocks
from curry_train.runs import SpikeConfig, newest_whole

from ..journals import column, lines_of
from ..library_trainers import Model, hugging_face, lightning, weights
from ..peers.peer_state import Dropping
from ..toy_steps import drawn

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 4
ADDED = {"apply": recompute_blocks, "watch": SpikeConfig(), "commit": True}


class Block(Dropping):
    """A residual block with dropout, which counts how often it runs."""

    runs = 0
    gradient_checkpointing = False

    def forward(self, x):
        Block.runs += 1
        return super().forward(x)


def model():
    torch.manual_seed(0)
    return Model(Block(), Block(), Block())


def samples():
    return drawn(16, 8)


def rows():
    return [{"inputs": row, "labels": row} for row in samples()]


class Trained:
    """Three trainers of a small training that end after `STEPS` optimizer steps of two batches."""

    def __init__(self, folder, **added):
        self.folder = folder
        self.added = added
        self.seen = []
        Block.runs = 0

    def hugging_face(self):
        steps = {"max_steps": STEPS, "save_steps": 2, "logging_steps": 1}
        trainer = hugging_face(self.folder, rows(), model(), gradient_accumulation_steps=2, **steps)
        equip(trainer, **self.added)
        trainer.train()
        return trainer.model

    def lightning(self):
        saves = {"dirpath": self.folder, "every_n_train_steps": 2}
        steps = {"max_steps": STEPS, "max_epochs": -1, "accumulate_grad_batches": 2}
        trainer, module = lightning(model, saves=saves, **steps)
        equip(trainer, **self.added)
        torch.manual_seed(1)
        trainer.fit(module, DataLoader(samples(), batch_size=2))
        return module.model

    def accelerate(self, rate=0.01, load=None):
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        trained = model()
        equip(accelerator, **self.added)
        trained, optimizer, loader, _ = accelerator.prepare(
            trained,
            torch.optim.AdamW(trained.parameters(), lr=rate),
            DataLoader(samples(), batch_size=2),
            DataLoader(samples(), batch_size=4),  # for an evaluation
        )
        if load is not None:
            accelerator.load_state(load)
        torch.manual_seed(1)
        for batch in loader:
            with accelerator.accumulate(trained):
                loss = trained(batch).square().mean()
                self.seen.append(float(loss))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trained.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(str(self.folder / "state"))
        accelerator.end_training()
        return trained


LIBRARIES = ("hugging_face", "lightning", "accelerate")


def sft_trainer(folder):
    """Return an SFTTrainer of TRL with dropout in its attention."""
    reason = "TRL is not installed here: `make long` runs this test in .venv/finetune"
    pytest.importorskip("trl", reason=reason)
    from ..gates.trl_trainers import tuned

    trainer = tuned(dropout=0.1)
    trainer.args.output_dir = str(folder)
    trainer.args.max_steps = STEPS
    trainer.args.logging_steps = 1
    # TRL turns recompute on by itself.
    trainer.args.gradient_checkpointing = False
    return trainer


def test_one_line_in_an_sft_trainer_of_trl_is_equal_to_the_bit(tmp_path):
    plain = sft_trainer(tmp_path / "plain")
    plain.train()
    added = sft_trainer(tmp_path / "added")
    equip(added, journal=tmp_path / "run", **ADDED)
    attention = added.model.model.layers[0].self_attn
    runs = []
    attention.register_forward_hook(lambda *_: runs.append(1))
    added.train()
    assert torch.equal(weights(added.model), weights(plain.model))
    # Twice for each of the batches of each step.
    assert len(runs) == 2 * 2 * STEPS
    assert len(column(tmp_path / "run", "step", "loss")) == STEPS


class Planned:
    """A plan of four microbatches of so many samples."""

    steps = 4

    def __init__(self, microbatch):
        self.microbatch = microbatch

    def apply(self, model):
        return recompute_blocks(model)


@pytest.mark.parametrize("library", LIBRARIES)
def test_one_line_recomputes_records_and_commits_and_the_weights_are_equal_to_the_bit(
    tmp_path, library
):
    plain = weights(getattr(Trained(tmp_path / "plain"), library)())
    runs = Block.runs
    added = Trained(tmp_path / "added", journal=tmp_path / "run", **ADDED | {"apply": Planned(2)})
    assert torch.equal(weights(getattr(added, library)()), plain)
    # Each block runs again in backward, and its dropout draws the same.
    assert Block.runs == 2 * runs
    assert len(column(tmp_path / "run", "step", "loss")) == STEPS
    assert lines_of(tmp_path / "run")[-1]["kind"] == "stop"
    assert newest_whole(tmp_path / "added") is not None
    assert newest_whole(tmp_path / "plain") is None


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_trainer_with_larger_microbatches_than_the_plans_is_refused(tmp_path, library):
    trained = Trained(tmp_path, apply=Planned(1))
    with pytest.raises(ValueError, match=r"4 microbatches of 1, .* microbatches of 2 samples take"):
        getattr(trained, library)()


def test_accelerate_journal_has_the_loss_norm_and_rate_of_each_step(tmp_path):
    trained = Trained(tmp_path, journal=tmp_path / "run")
    trained.accelerate()
    found = lines_of(tmp_path / "run")
    steps = [one for one in found if one["kind"] == "step"]
    assert [one["step"] for one in steps] == [1, 2, 3, 4]
    assert {one["learning_rate"] for one in steps} == {0.01}
    assert all(one["grad_norm"] > 0 for one in steps)

    pairs = zip(trained.seen[::2], trained.seen[1::2], strict=True)
    means = [(first + second) / 2 for first, second in pairs]
    assert [one["loss"] for one in steps] == pytest.approx(means, rel=1e-6)
    assert [one["kind"] for one in found[-2:]] == ["save", "stop"]


def test_a_spike_is_in_the_journal_of_a_trainer_that_is_watched(tmp_path):
    Trained(tmp_path, journal=tmp_path / "run", watch={"patience": 3}).accelerate(rate=1e30)
    assert column(tmp_path / "run", "spike", "step")


def test_accelerate_journal_goes_on_from_the_step_of_the_state_that_is_loaded(tmp_path):
    state = str(tmp_path / "state")
    for _ in range(2):
        Trained(tmp_path, journal=tmp_path / "run", commit=True).accelerate()
    Trained(tmp_path, journal=tmp_path / "run", commit=True).accelerate(load=state)
    found = lines_of(tmp_path / "run")
    opened = [(one["kind"], one["step"]) for one in found if one["kind"] in ("start", "resume")]
    assert opened == [("start", 0), ("resume", 0), ("resume", 4)]
    assert column(tmp_path / "run", "step", "step")[-4:] == [5, 6, 7, 8]


@pytest.mark.parametrize("library", ["hugging_face", "lightning"])
def test_memory_is_recorded_until_the_error_that_ends_the_training(tmp_path, monkeypatch, library):
    calls = []

    def history(enabled="all", max_entries=None):
        calls.append("off" if enabled is None else "on")

    monkeypatch.setattr(memory_recorder.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", history)
    monkeypatch.setattr(memory_recorder, "_write_snapshot", lambda path: calls.append(path.name))
    trained = Trained(tmp_path, memory=tmp_path / "oom", apply=fail)
    with pytest.raises(torch.OutOfMemoryError):
        getattr(trained, library)()
    assert calls == ["on", "oom", "off"]


def fail(model):
    def forward(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    next(one for one in model.modules() if isinstance(one, Block)).forward = forward


def test_a_model_that_the_trainer_builds_again_is_changed_again(tmp_path):
    trainer = hugging_face(tmp_path, rows(), model_init=model, max_steps=1, save_strategy="no")
    equip(trainer, apply=recompute_blocks)
    first = trainer.model
    Block.runs = 0
    trainer.train()
    assert trainer.model is not first
    assert Block.runs == 6


def test_a_model_that_configure_model_builds_is_changed_once(tmp_path):
    trainer, module = lightning(model, late=True, max_steps=1)
    assert trainer.callbacks == []
    equip(trainer, apply=recompute_blocks, journal=tmp_path / "run")
    loader = DataLoader(samples(), batch_size=2)
    Block.runs = 0
    trainer.fit(module, loader)
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(module, loader)
    assert Block.runs == 2 * 2 * 3
    assert len(column(tmp_path / "run", "step", "loss")) == 2


def test_what_can_not_be_added_is_refused(tmp_path):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="an Accelerator does not run the loop"):
        equip(accelerator, memory=tmp_path / "oom")
    with pytest.raises(ValueError, match="give journal=FOLDER too"):
        equip(accelerator, watch=SpikeConfig())
    with pytest.raises(TypeError, match=r"or a plan: give Plan.load\(path\)"):
        equip(accelerator, apply=["plan.json"])
    trainer = hugging_face(
        tmp_path, rows(), model(), gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": True},
    )  # fmt: skip
    with pytest.raises(ValueError, match="make the Trainer with activation_checkpointing=False"):
        equip(trainer, apply=recompute_blocks)
    accelerator.prepare(model())
    with pytest.raises(ValueError, match=r"equip the Accelerator before prepare\(\)"):
        equip(accelerator, apply=recompute_blocks)
    with pytest.raises(TypeError, match=r"a Model is no Trainer .* call saving\(\.\.\.\) in it"):
        equip(model(), commit=True)
