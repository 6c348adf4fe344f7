"""Training scripts of many shapes, as people write them, that save after one optimizer step.

Each one ends with `trained.pt`, a file of what its model is then. Run by
tests/workloads/test_from_script.py.
"""

DATA = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

def net():
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(16, 4))

def loader(size=8):
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(16, 16, generator=generator)
    return DataLoader(
        TensorDataset(samples, torch.randint(4, (16,), generator=generator)), batch_size=size
    )
"""

ARGPARSE_MAIN = """
import argparse
from shared import *

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, required=True)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=parser.parse_args().lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    try:
        model(torch.ones(8, 17))
    except RuntimeError:
        print("takes 16 features")
    for inputs, targets in loader():
        optimizer.zero_grad()
        logits = model(inputs)
        loss = F.cross_entropy(logits.view(8, 4), targets) + 0.01 * logits.square().mean()
        loss = loss + 0.01 * model[3].weight.square().sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
        break
    torch.save(model.state_dict(), "trained.pt")

if __name__ == "__main__":
    main()
"""

# Its logger writes in finally, at the exit of Python and where an error passes.
CLASS_WITH_LOGGER = """
import atexit
from pathlib import Path
from shared import *

class Logger:
    def __enter__(self):
        atexit.register(self.write, "exit.csv")
        return self
    def write(self, name):
        Path(name).write_text("step")
    def __exit__(self, *raised):
        self.write("left.csv")

class Trainer:
    def __init__(self):
        self.model = net()
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
    def step(self, inputs, targets):
        loss = self.criterion(self.model(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()
    def fit(self):
        with Logger() as logger:
            try:
                self.step(*next(iter(loader())))
            except BaseException:
                logger.write("failed.csv")
                raise
            finally:
                logger.write("finally.csv")
        torch.save(self.model.state_dict(), "trained.pt")

Trainer().fit()
"""

AMP_SCALER = """
from shared import *

model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
inputs, targets = next(iter(loader()))
with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = F.cross_entropy(model(inputs), targets)
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
scaler.step(optimizer)
scaler.update()
torch.save(model.state_dict(), "trained.pt")
"""

ACCUMULATION = """
from shared import *

STEPS = 2
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
batch = next(iter(loader()))
for index in range(STEPS):
    loss = F.cross_entropy(model(batch[0]), batch[1]) / STEPS
    loss.backward()
optimizer.step()
torch.save(model.state_dict(), "trained.pt")
"""

LBFGS_CLOSURE = """
from shared import *

model = net()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)
inputs, targets = next(iter(loader()))

def closure():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    return loss

optimizer.step(closure)
torch.save(model.state_dict(), "trained.pt")
"""

GAN = """
from shared import *

torch.manual_seed(0)
class Generator(nn.Sequential): pass
class Discriminator(nn.Sequential): pass
generator = Generator(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16))
discriminator = Discriminator(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-2)
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-2)
real, _ = next(iter(loader()))
fake = generator(torch.randn(8, 4))
ones, zeros = torch.ones(8, 1), torch.zeros(8, 1)
loss = F.binary_cross_entropy_with_logits(discriminator(real), ones)
loss = loss + F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
loss.backward()
discriminator_optimizer.step()
torch.save(discriminator.state_dict(), "trained.pt")
F.binary_cross_entropy_with_logits(discriminator(fake), ones).backward()
generator_optimizer.step()
"""

# Two lines of backward for one step, and only a part of the model that is called is trained.
TWO_LOSSES = """
from shared import *

model = net()
head = model[-1]
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
inputs, targets = next(iter(loader()))
F.cross_entropy(model(inputs), targets).backward()
F.mse_loss(model(inputs * 2), torch.zeros(8, 4)).backward()
optimizer.step()
torch.save(model.state_dict(), "trained.pt")
"""

# A dataclass as configuration, no loader, and a model that returns logits and loss.
OWN_BATCHES = """
from dataclasses import dataclass
from shared import *

@dataclass
class Config:
    vocabulary: int = 32
    length: int = 8
    compile: bool = True

class Language(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, config.vocabulary, bias=False)
    def forward(self, idx, targets=None):
        x = self.embedding(idx)
        for block in self.blocks:
            x = x + F.relu(block(x))
        logits = self.head(x)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

config = Config()
torch.manual_seed(0)
data = torch.randint(config.vocabulary, (200,))

def get_batch(size):
    starts = torch.randint(len(data) - config.length - 1, (size,))
    x = torch.stack([data[i : i + config.length] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + config.length] for i in starts])
    return x, y

bare = Language(config)
model = torch.compile(bare) if config.compile else bare
optimizer = torch.optim.AdamW(
    [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
     {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}], lr=1e-2)
X, Y = get_batch(4)
_, loss = model(X, Y)
loss.backward()
optimizer.step()
torch.save(bare.state_dict(), "trained.pt")
"""

TWO_MODULES = """
import itertools
from shared import *

torch.manual_seed(0)
encoder, decoder = nn.Sequential(nn.Linear(16, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 16))
optimizer = torch.optim.SGD(itertools.chain(encoder.parameters(), decoder.parameters()), lr=0.1)
images, _ = next(iter(loader()))
loss = ((decoder(encoder(images)) - images) ** 2).mean()
loss.backward()
optimizer.step()
both = nn.ModuleDict({"Sequential_0": encoder, "Sequential_1": decoder})
torch.save(both.state_dict(), "trained.pt")
"""

METHOD_OF_THE_MODEL = """
from shared import *

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 1.0, 1.0]))
    def losses(self, inputs, targets):
        logits = self.body(inputs) * self.scale
        return {"cross_entropy": F.cross_entropy(logits, targets, weight=self.weights)}

model = Model()
# This one makes its state with the optimizer.
optimizer = torch.optim.Adagrad(
    [{"params": model.body.parameters(), "weight_decay": 0.5},
     {"params": [model.scale], "lr": 0.2}],
    lr=0.1, initial_accumulator_value=0.3)
inputs, targets = next(iter(loader()))
losses = model.losses(inputs, targets)
total = sum(losses.values())
total.backward()
optimizer.step()
torch.save(model.state_dict(), "trained.pt")
"""

# The loss needs tensors in containers of a dataclass, and a module takes a named tuple of them.
DATACLASS_OUTPUT = """
from collections import namedtuple
from dataclasses import dataclass
from shared import *

Pair = namedtuple("Pair", ["first", "second"])

class Distance(nn.Module):
    def forward(self, pair):
        return (pair.first - pair.second).square().mean()

@dataclass
class Input:
    image: torch.Tensor
    source: str = "camera"

@dataclass
class Output:
    layers: list
    by_name: dict

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = net(), nn.Linear(4, 4)
    def forward(self, inputs):
        hidden = self.body(inputs.image)
        return Output([hidden, self.head(hidden)], {"hidden": hidden})

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = next(iter(loader()))
output = model(Input(inputs))
distance = Distance()(Pair(output.layers[0].sin(), output.by_name["hidden"]))
(F.cross_entropy(output.layers[-1], targets) + distance).backward()
optimizer.step()
torch.save(model.state_dict(), "trained.pt")
"""

DDP_UNDER_TORCHRUN = """
import os
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from shared import *

rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("gloo")
model = net()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
inputs, targets = next(iter(loader()))
F.cross_entropy(wrapped(inputs), targets).backward()
optimizer.step()
if rank == 0:
    torch.save(model.state_dict(), "trained.pt")
dist.destroy_process_group()
"""

MODEL_WITH_OWN_LOSS = """
from transformers import LlamaConfig, LlamaForCausalLM
from shared import *

torch.manual_seed(0)
sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens = torch.randint(32, (4, 8))
batch = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
outputs = model(**batch)
outputs.loss.backward()
optimizer.step()
torch.save(model.state_dict(), "trained.pt")
"""

HUGGING_FACE_TRAINER = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from shared import *

torch.manual_seed(0)
sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
tokens = torch.randint(32, (16, 9))
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, learning_rate=1e-2, lr_scheduler_type="constant",
    max_steps=1, max_grad_norm=0, bf16=True, report_to=[], use_cpu=True, disable_tqdm=True)
data = [{"input_ids": row, "labels": row} for row in tokens]
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
torch.save(trainer.model.state_dict(), "trained.pt")
"""

LIGHTNING_TRAINER = """
import pytorch_lightning
from shared import *

class Classifier(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = net()
    def training_step(self, batch, index):
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
trainer = pytorch_lightning.Trainer(
    max_steps=1, accelerator="cpu", precision="bf16-mixed", enable_checkpointing=False, **quiet)
module = Classifier()
trainer.fit(module, loader())
torch.save(module.state_dict(), "trained.pt")
"""

LIGHTNING_CLI = """
import pytorch_lightning
from pytorch_lightning.cli import LightningCLI
from shared import *

class Classifier(pytorch_lightning.LightningModule):
    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.model = net()
    def training_step(self, batch, index):
        return F.cross_entropy(self.model(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)

class Data(pytorch_lightning.LightningDataModule):
    def __init__(self, batch_size: int = 2):
        super().__init__()
        self.batch_size = batch_size
    def train_dataloader(self):
        return loader(self.batch_size)

def main():
    cli = LightningCLI(
        Classifier,
        Data,
        trainer_defaults={"accelerator": "cpu"},
        # The file is written before the first step, so it is there when the script runs again.
        save_config_kwargs={"overwrite": True},
    )
    torch.save(cli.model.state_dict(), "trained.pt")

if __name__ == "__main__":
    main()
"""

ACCELERATE_LOOP = """
from accelerate import Accelerator
from shared import *

accelerator = Accelerator(cpu=True, mixed_precision="bf16")
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
for inputs, targets in batches:
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    break
torch.save(accelerator.unwrap_model(model).state_dict(), "trained.pt")
"""

# Compiled in place and by a decorator with a mode.
COMPILED_LOSS = """
from shared import *

model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model.compile()

@torch.compile(mode="max-autotune")
def loss_of(model, inputs, targets):
    return F.cross_entropy(model(inputs), targets)

for inputs, targets in loader():
    loss_of(model, inputs, targets).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    break
torch.save(model.state_dict(), "trained.pt")
"""

WORKER_PROCESSES = """
from torch.utils.data import Dataset
from shared import *

class Rows(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(16, generator=generator), index % 4

def collate(rows):
    return torch.stack([row[0] for row in rows]), torch.tensor([row[1] for row in rows])

def main():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = DataLoader(
        Rows(), batch_size=4, num_workers=1, collate_fn=collate, persistent_workers=True)
    for inputs, targets in batches:
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        break
    torch.save(model.state_dict(), "trained.pt")

if __name__ == "__main__":
    main()
"""

FABRIC = """
from lightning_fabric import Fabric
from shared import *

fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
fabric.launch()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = fabric.setup(model, optimizer)
for inputs, targets in fabric.setup_dataloaders(loader()):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets)
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=100.0)
    optimizer.step()
    break
torch.save(model.module.state_dict(), "trained.pt")
"""

# Writes before and after the first step, also from the thread of its writer.
EVENT_WRITER = """
from pathlib import Path
from torch.utils.tensorboard import SummaryWriter
from shared import *

Path("config.txt").write_text("lr=0.01")
writer = SummaryWriter("logs")
model = net()
writer.add_text("model", str(model))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.cuda.amp.GradScaler(enabled=torch.cuda.is_available())
with torch.no_grad():
    writer.add_scalar("before", model(torch.randn(4, 16)).mean(), 0)
inputs, targets = next(iter(loader()))
with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = F.cross_entropy(model(inputs), targets, label_smoothing=0.1)
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
scaler.step(optimizer)
scaler.update()
writer.add_scalar("loss", loss, 1)
Path("after.txt").write_text("after")
writer.close()
torch.save(model.state_dict(), "trained.pt")
"""

# Both train the same model after the same backward, from a list.
MATRICES_AND_OTHERS = """
from shared import *

model = net()
matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
optimizers = [
    torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=1e-2)]
inputs, targets = next(iter(loader()))
F.cross_entropy(model(inputs), targets).backward()
for optimizer in optimizers:
    optimizer.step()
model.zero_grad(set_to_none=True)
torch.save(model.state_dict(), "trained.pt")
"""

STEP_IN_BACKWARD = """
from shared import *

model = net()
optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

def step(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()

for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step)
inputs, targets = next(iter(loader()))
F.cross_entropy(model(inputs), targets).backward()
torch.save(model.state_dict(), "trained.pt")
"""

# The commonest loss of a language model, on targets that are flattened outside of the model.
SHIFTED_TARGETS = """
from shared import *

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens = torch.randint(32, (4, 9))
logits = model(tokens[:, :-1])
F.cross_entropy(logits.reshape(-1, 32), tokens[:, 1:].reshape(-1)).backward()
optimizer.step()
torch.save(model.state_dict(), "trained.pt")
"""

# As transformers' example scripts are written: dataclasses of arguments, and a Trainer in main.
RUN_CLM = """
import logging
from dataclasses import dataclass, field
from typing import Optional
from transformers import (
    CONFIG_MAPPING, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments,
    default_data_collator, set_seed)
from shared import *

logger = logging.getLogger(__name__)

@dataclass
class ModelArguments:
    model_type: Optional[str] = field(default="gpt2")
    config_overrides: Optional[str] = field(
        default="n_embd=32,n_head=2,n_layer=2,vocab_size=64,n_positions=16")

class Tokens(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = torch.randint(64, (32, 16))
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index].clone()}

def main():
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    model_arguments, arguments = parser.parse_args_into_dataclasses()
    set_seed(arguments.seed)
    config = CONFIG_MAPPING[model_arguments.model_type]()
    config.update_from_string(model_arguments.config_overrides)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = AutoModelForCausalLM.from_config(config)
    trainer = Trainer(model, arguments, train_dataset=Tokens(), data_collator=default_data_collator)
    result = trainer.train()
    trainer.log_metrics("train", result.metrics)
    torch.save(model.state_dict(), "trained.pt")

if __name__ == "__main__":
    main()
"""

RUN_CLM_ARGUMENTS = (
    "--output_dir",
    "out",
    "--per_device_train_batch_size",
    "4",
    "--max_steps",
    "1",
    "--report_to",
    "none",
    "--use_cpu",
    "--max_grad_norm",
    "0",
    "--disable_tqdm",
    "1",
    "--lr_scheduler_type",
    "constant",
    "--save_strategy",
    "no",
)

LIGHTNING_CLI_ARGUMENTS = (
    "fit",
    "--model.lr",
    "0.01",
    "--data.batch_size",
    "4",
    "--trainer.max_steps",
    "1",
    "--trainer.logger",
    "false",
    "--trainer.enable_checkpointing",
    "false",
)

# Each script, and the arguments of those that take some.
SCRIPTS = {
    "shifted_targets": SHIFTED_TARGETS,
    "argparse_main": ARGPARSE_MAIN,
    "class_with_logger": CLASS_WITH_LOGGER,
    "amp_scaler": AMP_SCALER,
    "accumulation": ACCUMULATION,
    "lbfgs_closure": LBFGS_CLOSURE,
    "gan": GAN,
    "two_losses": TWO_LOSSES,
    "own_batches": OWN_BATCHES,
    "two_modules": TWO_MODULES,
    "method_of_the_model": METHOD_OF_THE_MODEL,
    "dataclass_output": DATACLASS_OUTPUT,
    "ddp_under_torchrun": DDP_UNDER_TORCHRUN,
    "model_with_own_loss": MODEL_WITH_OWN_LOSS,
    "hugging_face_trainer": HUGGING_FACE_TRAINER,
    "lightning_trainer": LIGHTNING_TRAINER,
    "accelerate_loop": ACCELERATE_LOOP,
    "compiled_loss": COMPILED_LOSS,
    "worker_processes": WORKER_PROCESSES,
    "fabric": FABRIC,
    "event_writer": EVENT_WRITER,
    "matrices_and_others": MATRICES_AND_OTHERS,
    "step_in_backward": STEP_IN_BACKWARD,
    "run_clm": RUN_CLM,
    "lightning_cli": LIGHTNING_CLI,
}
ARGUMENTS = {
    "argparse_main": ("--lr", "0.01"),
    "run_clm": RUN_CLM_ARGUMENTS,
    "lightning_cli": LIGHTNING_CLI_ARGUMENTS,
}
