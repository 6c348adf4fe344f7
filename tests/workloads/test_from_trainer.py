"""A workload read off a Trainer or an Accelerator trains as that does.

python -m pytest tests/workloads/test_from_trainer.py
"""

import runpy
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from curry_train.plan import plan
from curry_train.primitives import GradientAccumulation, train_window
from curry_train.workloads import Case, WorkloadError, load_workload
from curry_train.workloads.from_trainer import Autocast, is_sum_over_samples
from curry_train.workloads.optimizers import OptimizerLike

from ..command_runs import flat, ran, read_json, results
from ..plan_models import measured

pytestmark = pytest.mark.filterwarnings("ignore")

# Tests of the whole: real trainers of a small training, in a module as a user would write it.
THEIRS = """
import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

PLAIN = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)], nn.Linear(16, 4)
    )


def loader():
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(16, 16, generator=generator)
    return DataLoader(
        TensorDataset(samples, torch.randint(4, (16,), generator=generator)), batch_size=4
    )


def hugging_face(**options):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    tokens = torch.randint(64, (16, 17), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        "never-written",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        weight_decay=0.1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_steps=1,
        max_grad_norm=0,
        **PLAIN,
        **options,
    )
    masks = [torch.arange(17) < place % 5 for place in range(16)]
    labels = [row.masked_fill(mask, -100) for row, mask in zip(tokens, masks)]
    rows = [{"input_ids": row, "labels": target} for row, target in zip(tokens, labels)]
    return Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)


def hugging_face_bf16():
    return hugging_face(bf16=True)


def lightning(precision="32-true"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pytorch_lightning

    class Classifier(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model()

        def prepare_data(self):
            self.scale = 2

        def forward(self, samples):
            return self.model(samples) * self.scale

        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss)
            assert self.trainer.max_steps == 1
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def on_before_batch_transfer(self, batch, dataloader_idx):
            return [3 * batch[0], batch[1]]

    class Data(pytorch_lightning.LightningDataModule):
        def train_dataloader(self):
            return loader()

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [batch[0] - 1, batch[1]]

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pytorch_lightning.Trainer(
        max_steps=1,
        accumulate_grad_batches=2,
        accelerator="cpu",
        precision=precision,
        enable_model_summary=False,
        **quiet,
    )
    return trainer, Classifier(), loader() if precision == "32-true" else Data()


def lightning_bf16():
    return lightning("bf16-mixed")


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def accelerator(mixed_precision="no"):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    made = Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed_precision
    )
    net = model()
    made.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), loader())
    return made, loss_of


def accelerator_bf16():
    return accelerator("bf16")
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Write the user's module into the current folder, and return it."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "their_trainers.py").write_text(THEIRS)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        import their_trainers

        yield their_trainers
        files = [one.name for one in folder.rglob("*") if one.is_file()]
        assert [name for name in files if not name.startswith("their_trainers.")] == []
        sys.modules.pop("their_trainers")


def trained_by_hugging_face(trainer):
    seen = []
    step = trainer.training_step

    def training_step(model, inputs, *arguments):
        seen.append({name: value.clone() for name, value in inputs.items()})
        return step(model, inputs, *arguments)

    trainer.training_step = training_step
    trainer.train()
    return trainer.model, seen


def trained_by_lightning(made):
    trainer, module, data = made
    trainer.fit(module, data)
    loader = data.train_dataloader() if hasattr(data, "train_dataloader") else data
    batches = [module.on_before_batch_transfer(one, 0) for one in loader]
    if hasattr(data, "on_after_batch_transfer"):
        batches = [data.on_after_batch_transfer(one, 0) for one in batches]
    return module, batches[:2]


def trained_by_accelerate(made):
    accelerator, loss = made
    model, optimizer, data = (
        getattr(accelerator, f"_{name}s")[0] for name in ("model", "optimizer", "dataloader")
    )
    batches = list(data)[:2]
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        # Steps after two batches, as a loop over them all would.
        accelerator.step = 1
    return model, batches


OTHER_OPTIONS = ("full", "offload", "sac", "regions")  # than the plain step
TRAIN = {
    "hugging_face": trained_by_hugging_face,
    "lightning": trained_by_lightning,
    "accelerator": trained_by_accelerate,
}


@pytest.mark.parametrize("precision", ["_bf16", ""])
@pytest.mark.parametrize("library", TRAIN)
def test_a_step_of_what_is_read_is_the_trainers_own_first_step(theirs, library, precision):
    """Model, batch, loss, optimizer, precision and accumulation are the Trainer's, to the bit."""
    workload = load_workload(f"trainer=their_trainers:{library}{precision}")
    assert workload.accumulation == 2
    assert (workload.output_until == "loss") == (library != "accelerator")
    assert ("autocast to bfloat16" in workload.notes[0]) == bool(precision)
    case = Case(workload, batch_size=workload.own_batch)
    module = case.build()

    trained, batches = TRAIN[library](getattr(theirs, library + precision)())
    assert torch.equal(first_tensor(case.batch()), first_tensor(batches[0]))
    optimizer = workload.optimizer(module)
    window = next(GradientAccumulation(2).windows(iter(batches), count=workload.count))
    train_window(module, window, workload.loss, optimizer)
    names = dict(trained.named_parameters())
    assert [name for name, p in module.named_parameters() if not torch.equal(p, names[name])] == []


def test_a_step_that_calls_its_own_module_runs_inside_of_a_wrapper(theirs):
    workload = load_workload("trainer=their_trainers:lightning")
    module, batch = workload.build(), workload.batch(4)
    loss = workload.loss(nn.DataParallel(module), batch)
    assert torch.equal(loss, workload.loss(module, batch))


def first_tensor(batch):
    return next(iter(batch.values())) if hasattr(batch, "values") else batch[0]


@pytest.mark.parametrize("library", [f"{one}_bf16" for one in TRAIN])
def test_a_plan_of_it_predicts_the_measured_peak(theirs, library):
    """The precision is part of the estimate, which runs on shapes after the trainer was read."""
    spec = f"trainer=their_trainers:{library}"
    workload = load_workload(spec)
    timeline = measured(workload, 4, optimizer=workload.optimizer)
    found = plan(
        spec, 2**30, global_batch=4, microbatch=4, chunked_loss=False, without=OTHER_OPTIONS
    )
    assert found.peak_bytes == timeline.peak.bytes_alive
    assert found.settings["optimizer"].startswith("torch.optim.")


def test_parts_in_eval_mode_stay_so_while_a_loss_is_tried():
    model = nn.Sequential(nn.BatchNorm1d(8).eval(), nn.Linear(8, 1))
    assert not is_sum_over_samples(model, torch.randn(4, 8), lambda one, rows: one(rows).mean())
    assert [part.training for part in model.modules()] == [True, False, True]


def test_commands_take_a_trainer_in_place_of_a_model(theirs):
    source = "--trainer their_trainers:hugging_face_bf16"
    output = flat(ran("memory", source).output)
    assert "batch size 4," in output
    assert "2 batches a step" in output
    ran("validate", source, "--gate recompute/parity-full")


def test_commands_use_the_trainers_optimizer_and_step(theirs, tmp_path):
    source = "--trainer their_trainers:accelerator"
    ended = ran("bench", source, "--steps 1 --warmup 0")
    assert "float32, SGD, on cpu" in ended.output
    ended = ran("plan", source, "--budget 1MiB")
    assert "as it is, 8 samples" in ended.output
    ran("savings", source, "--strategy full --repeats 1 --out", tmp_path)
    assert [row["batch_size"] for row in read_json(tmp_path / "savings.json")["rows"]] == [4, 4]
    # That of the SGD that the Accelerator has prepared.
    assert results("grad-flow", source, "--steps 1")["learning_rate"] == 0.1


def test_generated_gates_load_the_trainer(theirs, tmp_path, monkeypatch):
    out = tmp_path / "test_gates.py"
    line = "gen-tests --trainer their_trainers:accelerator --gate recompute"
    monkeypatch.setattr(sys, "orig_argv", f"python curry-train {line}".split())
    ran(line, "--out", out)
    found = runpy.run_path(out)
    assert found["MODEL"] == "trainer=their_trainers:accelerator"
    assert load_workload(found["MODEL"]).own_batch == 4
    assert "--trainer their_trainers:accelerator" in out.read_text()


REFUSED = {
    "def make(): return 5": "it returned int: return a Trainer of transformers",
    "def make(): return ()": "it returned tuple: return a Trainer of transformers",
    "from transformers import GPT2Config, GPT2Model\n"
    "def make(): return GPT2Model(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9))": (
        "it returned GPT2Model: return a Trainer of transformers"
    ),
    "from accelerate import Accelerator\n"
    "class Theirs(Accelerator):\n"
    "    def unwrap_model(self, *args): raise ImportError('install galore')\n"
    "def make():\n"
    "    made = Theirs(cpu=True)\n"
    "    made._models = made._optimizers = made._dataloaders = [5]\n"
    "    return made": "it raised ImportError: install galore",
    "from accelerate import Accelerator\n"
    "def make(): return Accelerator(cpu=True)": "has prepared no model and no optimizer",
}


@pytest.mark.parametrize("source", REFUSED)
def test_what_can_not_be_read_is_said(tmp_path, source):
    file = tmp_path / f"theirs_{abs(hash(source))}.py"
    file.write_text(source)
    with pytest.raises(WorkloadError, match=REFUSED[source]):
        load_workload(f"trainer={file}:make")


def test_autocast_runs_the_forward_that_a_trainer_has_put_into_the_module():
    module = nn.Linear(2, 2)
    own = module.forward
    module.forward = lambda inputs: {"doubled": own(inputs) * 2}
    replaced = module.forward
    with Autocast(torch.bfloat16, lambda output: output)(module):
        assert module(torch.ones(1, 2))["doubled"].dtype is torch.bfloat16
    assert module.forward is replaced


def test_an_optimizer_like_another_steps_its_own_module_alone():
    first, second, other = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(3, 3)
    optimizer = torch.optim.Adagrad(
        [{"params": first.parameters()}, {"params": other.parameters()}]
    )
    made = OptimizerLike([optimizer], first)
    assert made.num_others == 2
    like = made(second)
    assert [group["params"] for group in like.param_groups] == [[second.weight, second.bias]]
    second(torch.ones(1, 2)).sum().backward()
    like.step()
    assert like.state[second.weight]["sum"].any()
    assert not optimizer.state[first.weight]["sum"].any()
    with pytest.raises(WorkloadError, match="holds no parameter of Linear"):
        OptimizerLike([optimizer], second)


class InBits(torch.optim.Optimizer):
    """Keep what decides the size of its state in attributes, as bitsandbytes does."""

    def __init__(self, params, model, bits=32):
        super().__init__(params, {"lr": 0.1})
        self.args = SimpleNamespace(bits=bits)
        self.mng = SimpleNamespace(index2config={})
        self.model = model

    def check_overrides(self):
        for place, parameter in enumerate(self.param_groups[0]["params"]):
            if parameter is self.model.bias:
                self.mng.index2config[0, place] = 32

    def step(self):
        for place, parameter in enumerate(self.param_groups[0]["params"]):
            bits = self.mng.index2config.get((0, place), self.args.bits)
            self.state[parameter]["moment"] = torch.zeros(parameter.numel() * bits // 8)


def test_an_optimizer_like_another_keeps_what_its_constructor_took_beside_the_groups():
    """Without it, a state of 8 bits would be counted as 32."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    like = OptimizerLike([InBits(first.parameters(), first, bits=8)], first)(second)
    like.step()
    assert like.state[second.weight]["moment"].numel() == 16
    assert like.state[second.bias]["moment"].numel() == 4 * 4
