"""Trainers of other libraries for a small training: quiet, and on the CPU.

Proof: `python -m pytest tests/trainer/test_equip.py tests/runs/test_trainers.py`.
"""

import torch
from torch import nn


class Model(nn.Sequential):
    """A model that returns its loss where it gets labels, as Hugging Face's Trainer wants it."""

    def forward(self, inputs, labels=None):
        output = super().forward(inputs)
        return output if labels is None else {"loss": (output - labels).square().mean()}


def weights(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def hugging_face(folder, rows, model=None, *, model_init=None, **options):
    from transformers import Trainer, TrainingArguments

    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    quiet["per_device_train_batch_size"] = 2
    arguments = TrainingArguments(str(folder), **quiet | options)
    return Trainer(model, arguments, train_dataset=rows, model_init=model_init)


def lightning(build, *, late=False, saves=None, **options):
    """Return a trainer with a module that builds its model; `saves` are settings of its saver."""
    import pytorch_lightning

    class Module(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            if not late:
                self.configure_model()

        def configure_model(self):
            if not hasattr(self, "model"):
                self.model = build()

        def training_step(self, batch):
            return self.model(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    off = ["logger", "enable_progress_bar", "enable_model_summary"]
    if saves is None:
        off.append("enable_checkpointing")
    else:
        options["callbacks"] = [pytorch_lightning.callbacks.ModelCheckpoint(**saves)]
    trainer = pytorch_lightning.Trainer(accelerator="cpu", **dict.fromkeys(off, False), **options)
    return trainer, Module()
