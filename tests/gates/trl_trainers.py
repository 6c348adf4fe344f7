"""Trainers of TRL with tiny models, right and wrong ones, for `curry-train preflight --trainer`."""

import tempfile

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

WORDS = {"<pad>": 0, "<eos>": 1} | {str(word): word for word in range(2, 64)}
FOLDER = tempfile.mkdtemp()


def tokenizer():
    made = Tokenizer(models.WordLevel(WORDS, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def texts():
    """Return 32 texts of unequal length."""
    lengths = torch.randint(4, 16, (32,)).tolist()
    return [" ".join(map(str, torch.randint(2, 64, (one,)).tolist())) for one in lengths]


def trainer(kind, arguments, columns, model=LlamaForCausalLM, dropout=0.0, **more):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_labels=1,
        num_attention_heads=2, pad_token_id=0, eos_token_id=1, attention_dropout=dropout,
    )  # fmt: skip
    # Trainers with a reference load it from there.
    model(config).save_pretrained(FOLDER)
    return kind(
        model.from_pretrained(FOLDER),
        args=arguments(
            "output", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=9,
            save_steps=2, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({column: texts() for column in columns}),
        processing_class=tokenizer(),
        **more,
    )  # fmt: skip


def tuned(columns=("prompt", "completion"), **more):
    return trainer(trl.SFTTrainer, trl.SFTConfig, columns, **more)


PREFERENCES = ("prompt", "chosen", "rejected")


def preferring(kind=trl.DPOTrainer):
    return trainer(kind, trl.DPOConfig, PREFERENCES)


def rewarding():
    return trainer(trl.RewardTrainer, trl.RewardConfig, PREFERENCES, LlamaForSequenceClassification)


def num_words(completions, **_):
    return [float(len({*one.split()})) for one in completions]


def group_relative():
    def arguments(*args, **options):
        return trl.GRPOConfig(*args, num_generations=2, max_completion_length=8, **options)

    return trainer(trl.GRPOTrainer, arguments, ("prompt",), reward_funcs=num_words)


def with_padding(rows):
    rows = [torch.tensor(row["input_ids"]) for row in rows]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([one.bool() for one in rows], batch_first=True)
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": tokens.clone()}


def padding_counts():
    return tuned(columns=("text",), data_collator=with_padding)


class TrainsItsReference(trl.DPOTrainer):
    def create_optimizer(self, *args, **options):
        self.ref_model.requires_grad_(True)
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), *self.ref_model.parameters()])
        return self.optimizer


def trains_its_reference():
    return preferring(TrainsItsReference)
