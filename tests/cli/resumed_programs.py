"""Programs that save and resume by their own means: a script, and three libraries.

Proof: `python -m pytest tests/cli/test_resume_check.py`.
"""

PLAIN = """
import os, random, sys
import numpy, torch
from torch import nn
from torch.nn import functional as F

lacks = sys.argv[1]
torch.manual_seed(0); random.seed(0); numpy.random.seed(0)
first = nn.utils.parametrizations.weight_norm(nn.Linear(8, 16))
body, head = nn.Sequential(first, nn.ReLU(), nn.Dropout(0.2)), nn.Linear(16, 5)
model = nn.ModuleList([body, head])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
scaler = torch.amp.GradScaler("cpu", growth_interval=3)
inputs, targets = torch.randn(200, 8), torch.randint(5, (200,))
parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
start = 0
if os.path.exists("save.pt"):
    saved = torch.load("save.pt")
    start = 0 if lacks == "data order" else saved["step"]
    for name, part in parts.items():
        if name != lacks:
            part.load_state_dict(saved[name])
    if lacks != "generators":
        torch.set_rng_state(saved["generators"])
for step in range(start, 30):
    rows = slice(step * 4, step * 4 + 4)
    loss = F.cross_entropy(head(body(inputs[rows])), targets[rows])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scheduler.step()
    if (step + 1) % 3 == 0 and lacks != "everything":
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save(states | {"step": step + 1, "generators": torch.get_rng_state()}, "save.pt")
"""

HUGGING_FACE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def make():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, attention_dropout=0.1,
    )
    tokens = torch.randint(64, (64, 17), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        "output", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=30,
        report_to=[], use_cpu=True, disable_tqdm=True, save_steps=3, learning_rate=3e-4,
    )
    return Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)
"""

LIGHTNING = """
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 5))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, number):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def make():
    pl.seed_everything(0, verbose=False)
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(5, (160,), generator=generator)
    data = TensorDataset(torch.randn(160, 8, generator=generator), targets)
    saves = pl.callbacks.ModelCheckpoint(dirpath="saved", every_n_train_steps=3, save_top_k=-1)
    trainer = pl.Trainer(
        max_steps=30, accelerator="cpu", logger=False, callbacks=[saves],
        enable_progress_bar=False, enable_model_summary=False,
    )
    return trainer, Module(), DataLoader(data, batch_size=4)
"""

ACCELERATE = """
import os, random
import numpy, torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0); random.seed(0); numpy.random.seed(0)
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
data = TensorDataset(torch.randn(160, 8), torch.randint(5, (160,)))
model, optimizer, schedule, loader = accelerator.prepare(
    model, optimizer, schedule, DataLoader(data, batch_size=4)
)
done = 0
if os.path.exists("state/done"):
    accelerator.load_state("state")
    done = int(open("state/done").read())
    loader = accelerator.skip_first_batches(loader, done)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step(); schedule.step(); optimizer.zero_grad()
    done += 1
    if done % 3 == 0:
        accelerator.save_state("state")
        with open("state/done", "w") as file:
            file.write(str(done))
"""
