"""Tokens and their targets as the batch that a model takes: read off a batch of its own.

Proof: `python -m pytest tests/test_data_tokens.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.adapt import IGNORED

Layout = Callable[
    [Tensor, Tensor, Tensor], Any
]  # from tokens, targets and which tokens are there at all


def layout_of(example: Any) -> tuple[Layout, int]:
    """How to lay out tokens like `example`, and the length of its sequences.

    Batches of `tokens` and `targets`, and Hugging Face's `input_ids` and `labels`, which the model shifts itself.
    """
    keys = set(example) if isinstance(example, Mapping) else set()
    if {"tokens", "targets"} <= keys:
        return lambda tokens, targets, there: {"tokens": tokens, "targets": targets}, example[
            "tokens"
        ].shape[1]
    if not {"input_ids", "labels"} <= keys:
        found = (
            f"a mapping of {', '.join(map(str, example))}"
            if keys
            else f"a {type(example).__name__}"
        )
        raise ValueError(
            f"text goes to models whose batches hold tokens and targets, or input_ids and labels; this one takes "
            f"{found}: use data.source=workload, or your own data with data.source=pkg.module:factory"
        )
    settings = {key: value for key, value in example.items() if not isinstance(value, Tensor)}

    def hugging_face(tokens: Tensor, targets: Tensor, there: Tensor) -> dict[str, Any]:
        labels = torch.cat([torch.full_like(targets[:, :1], IGNORED), targets[:, :-1]], dim=1)
        mask = {"attention_mask": there.long()} if "attention_mask" in keys else {}
        return settings | {"input_ids": tokens, "labels": labels} | mask

    return hugging_face, example["input_ids"].shape[1]
