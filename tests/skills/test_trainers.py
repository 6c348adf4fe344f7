"""Check claims of the page `trainers` on other trainers, and our blocks under them.

python -m pytest tests/skills/test_trainers.py
"""

import functools
import importlib
import inspect

import accelerate
import pytest
import torch
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from curry_train.primitives import GradientAccumulation, apply_chunked_loss, recompute_blocks

from ..language_models import language_model
from ..library_trainers import hugging_face, weights
from ..tree import ROOT


def llama():
    torch.manual_seed(0)
    return language_model("Llama", num_hidden_layers=3, use_cache=False)


# The names on the page.

NAMES = {
    "transformers": """
        Trainer.save_model
        TrainingArguments.gradient_accumulation_steps
        TrainingArguments.max_grad_norm
        TrainingArguments.average_tokens_across_devices
        TrainingArguments.ignore_data_skip
        TrainingArguments.logging_nan_inf_filter
        TrainingArguments.gradient_checkpointing
    """,
    "accelerate": """
        Accelerator.accumulate
        Accelerator.backward
        Accelerator.clip_grad_norm_
        Accelerator.sync_gradients
        Accelerator.no_sync
        Accelerator.prepare
        skip_first_batches
        utils.GradientAccumulationPlugin.sync_each_batch
        utils.FullyShardedDataParallelPlugin.activation_checkpointing
        utils.FullyShardedDataParallelPlugin.transformer_cls_names_to_wrap
    """,
    "pytorch_lightning": """
        Trainer.accumulate_grad_batches
        Trainer.gradient_clip_val
        LightningModule.configure_model
        strategies.FSDPStrategy.activation_checkpointing_policy
        strategies.ModelParallelStrategy
    """,
}


@pytest.mark.parametrize("owner", NAMES)
def test_every_name_of_the_page_exists(owner):
    page = (ROOT / "skills/recompute/references/trainers.md").read_text()
    for name in NAMES[owner].split():
        *path, last = name.split(".")
        parent = functools.reduce(getattr, path, importlib.import_module(owner))
        assert hasattr(parent, last) or last in inspect.signature(parent).parameters, name
        assert last in page


# Hugging Face.


def rows(tokens=(4, 16, 9, 12, 3, 15)):
    generator = torch.Generator().manual_seed(3)
    for valid in tokens:
        ids = torch.randint(64, (16,), generator=generator)
        yield {"input_ids": ids, "labels": torch.where(torch.arange(16) < valid, ids, -100)}


def change_of_weights(model, tmp_path):
    """Train with Hugging Face's trainer; return by how much the weights changed, in a row."""
    trainer = hugging_face(
        tmp_path,
        list(rows()),
        model,
        num_train_epochs=1,
        learning_rate=0.01,
        optim="sgd",
        lr_scheduler_type="constant",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=3,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer.train()
    return weights(model) - weights(llama())


def test_chunked_loss_keeps_the_trainers_token_count(tmp_path):
    model = llama()
    apply_chunked_loss(model)
    plain = change_of_weights(llama(), tmp_path)
    assert (change_of_weights(model, tmp_path) - plain).norm() < 1e-5 * plain.norm()


# Accelerate.

ONES = DataLoader(TensorDataset(torch.ones(6, 4)), batch_size=1)


def test_our_windows_under_accelerate_divide_by_their_own_terms():
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.gradient_accumulation_steps = 1
    layer = nn.Linear(4, 1, bias=False)
    layer, optimizer, loader = accelerator.prepare(
        layer, torch.optim.SGD(layer.parameters(), lr=0.0), ONES
    )
    gradients = []
    for window in GradientAccumulation(steps=4).windows(loader, count=lambda batch: len(batch[0])):
        for index, (batch,) in enumerate(window):
            decided = window.train_step_kwargs(index)
            accelerator.backward(layer(batch).sum() / decided["loss_divisor"])
            if decided["step_optimizer"]:
                gradients.append(float(layer.weight.grad[0, 0]))
                optimizer.step()
                optimizer.zero_grad()
    assert gradients == [1.0, 1.0]


def test_accelerate_finds_recomputed_blocks_by_the_name_of_their_class():
    def found(model, names):
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=names,
        )
        plugin.set_auto_wrap_policy(model)
        policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
        return [name for name, module in model.named_modules() if policy(module)]

    blocks = ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert found(llama(), None) == blocks
    model = llama()
    recompute_blocks(model)
    with pytest.raises(ValueError, match="Could not find the transformer layer class"):
        found(model, None)
    assert found(model, ["RecomputeLlamaDecoderLayer"]) == blocks
