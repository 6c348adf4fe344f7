"""Check claims of the page `trainers` on other trainers, and our blocks under them.

python -m pytest tests/skills/test_trainers.py
"""

import functools
import inspect

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils.data import DataLoader, TensorDataset
from tree import ROOT

from curry_train.core.measure import count_flops, measure_memory
from curry_train.core.parity import compare, record_step
from curry_train.primitives import GradientAccumulation, apply_chunked_loss, recompute_blocks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))


def package(name):
    return pytest.importorskip(
        name, reason=f"{name} is not installed; pip install {name}", exc_type=ImportError
    )


def llama():
    torch.manual_seed(0)
    size = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "use_cache": False,
    }
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **size)
    )


def labelled(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def switch_on(model):
    """Turn on Hugging Face's own switch, which had another name up to 5.0."""
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()


def torch_wrapper(model):
    """Wrap blocks as FSDP strategies do."""
    layer = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, layer))


def figures(*changes):
    model = llama().train()
    for change in changes:
        change(model)
    record = record_step(model, TOKENS, labelled)
    return record, measure_memory(model, TOKENS, labelled), count_flops(model, TOKENS, labelled)


# The names on the page.

NAMES = {
    "transformers": (
        "Trainer.save_model",
        *(
            f"TrainingArguments.{field}"
            for field in (
                *(
                    "gradient_accumulation_steps",
                    "max_grad_norm",
                    "average_tokens_across_devices",
                    "ignore_data_skip",
                ),
                *("logging_nan_inf_filter", "gradient_checkpointing"),
            )
        ),
    ),
    "accelerate": (
        "Accelerator.accumulate",
        "Accelerator.backward",
        "Accelerator.clip_grad_norm_",
        "Accelerator.sync_gradients",
        "Accelerator.no_sync",
        "Accelerator.prepare",
        "skip_first_batches",
        "utils.GradientAccumulationPlugin.sync_each_batch",
        "utils.FullyShardedDataParallelPlugin.activation_checkpointing",
        "utils.FullyShardedDataParallelPlugin.transformer_cls_names_to_wrap",
    ),
    "lightning.pytorch": (
        "Trainer.accumulate_grad_batches",
        "Trainer.gradient_clip_val",
        "LightningModule.configure_model",
        "strategies.FSDPStrategy.activation_checkpointing_policy",
        "strategies.ModelParallelStrategy",
    ),
}


@pytest.mark.parametrize(("owner", "names"), NAMES.items(), ids=list(NAMES))
def test_every_name_of_the_page_exists(owner, names):
    found, page = (
        package(owner),
        (ROOT / "skills/recompute/references/trainers.md").read_text(encoding="utf-8"),
    )
    for name in names:
        *path, last = name.split(".")
        parent = functools.reduce(getattr, path, found)
        assert hasattr(parent, last) or last in inspect.signature(parent).parameters, name
        assert last in page


# Hugging Face.


def test_hugging_face_switch_is_not_reentrant_and_saves_and_costs_what_ours_does():
    plain, held, _ = figures()
    theirs, ours = figures(switch_on), figures(recompute_blocks)
    assert compare(ours[0], plain).bit_equal
    assert compare(theirs[0], plain).bit_equal
    assert ours[1:] == theirs[1:]
    assert ours[1].held_bytes < held.held_bytes / 3


@pytest.mark.parametrize("switch", [switch_on, torch_wrapper])
def test_two_switches_at_once_compute_nothing_more_and_free_nothing_more(switch):
    one, both = figures(recompute_blocks), figures(recompute_blocks, switch)
    assert both[2] == one[2]
    assert both[1].held_bytes == one[1].held_bytes
    assert both[0].loss == one[0].loss


def rows(tokens=(4, 16, 9, 12, 3, 15)):
    generator = torch.Generator().manual_seed(3)
    for valid in tokens:
        ids = torch.randint(64, (16,), generator=generator)
        yield {"input_ids": ids, "labels": torch.where(torch.arange(16) < valid, ids, -100)}


def hugging_face(model, tmp_path, *, samples, microbatches, **options):
    """Train with Hugging Face's trainer; return the losses, the weights in a row, the trainer."""
    package("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=1,
        learning_rate=0.01,
        optim="sgd",
        lr_scheduler_type="constant",
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=microbatches,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=list(rows()))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, nn.utils.parameters_to_vector(model.parameters()).detach(), trainer


def change(model, tmp_path, **options):
    return (
        hugging_face(model, tmp_path, **options)[1]
        - nn.utils.parameters_to_vector(llama().parameters()).detach()
    )


def off(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def test_trainer_has_the_same_losses_and_weights_with_its_switch_and_with_ours(tmp_path):
    setting = {"samples": 1, "microbatches": 2}
    fields = transformers.TrainingArguments.__dataclass_fields__
    switch = (
        "activation_checkpointing"
        if "activation_checkpointing" in fields
        else "gradient_checkpointing"
    )
    plain = hugging_face(llama(), tmp_path, **setting)
    theirs = hugging_face(llama(), tmp_path, **setting, **{switch: True})
    model = llama()
    recompute_blocks(model)
    ours = hugging_face(model, tmp_path, **setting)
    assert plain[0] == theirs[0] == ours[0]
    assert torch.equal(plain[1], theirs[1])
    assert torch.equal(plain[1], ours[1])

    ours[2].save_model(str(tmp_path / "saved"))
    bare = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(nn.utils.parameters_to_vector(bare.parameters()), ours[1])


def test_chunked_loss_keeps_the_trainers_token_count(tmp_path):
    model = llama()
    apply_chunked_loss(model)
    plain = change(llama(), tmp_path, samples=1, microbatches=3)
    assert off(change(model, tmp_path, samples=1, microbatches=3), plain) < 1e-5


# Accelerate.

ONES = DataLoader(TensorDataset(torch.ones(6, 4)), batch_size=1)


def test_our_windows_under_accelerate_divide_by_their_own_terms():
    accelerator = package("accelerate").Accelerator(cpu=True)
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
    utilities = package("accelerate").utils
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

    def found(model, names):
        wrap = {
            "auto_wrap_policy": "transformer_based_wrap",
            "transformer_cls_names_to_wrap": names,
        }
        plugin = utilities.FullyShardedDataParallelPlugin(fsdp_version=2, **wrap)
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
