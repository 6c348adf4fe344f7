"""Lay out tokens and targets as the batch that a model takes, copied from an example batch.

Proof: `python -m pytest tests/test_data_tokens.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.adapt import IGNORED

# Makes a batch from tokens, targets, and a mask of the tokens that are not padding.
Layout = Callable[[Tensor, Tensor, Tensor], Any]


def layout_of(example: Any) -> tuple[Layout, int]:
    """Return a layout for batches like `example`, and the length of its sequences.

    It supports batches of `tokens` and `targets`, and Hugging Face's `input_ids` and `labels`,
    which the model shifts itself.
    """
    keys = set(example) if isinstance(example, Mapping) else set()
    if {"tokens", "targets"} <= keys:

        def tokens_and_targets(tokens: Tensor, targets: Tensor, present: Tensor) -> dict[str, Any]:
            return {"tokens": tokens, "targets": targets}

        return tokens_and_targets, example["tokens"].shape[1]

    if not {"input_ids", "labels"} <= keys:
        batch = f"a {type(example).__name__}"
        if keys:
            batch = f"a mapping of {', '.join(map(str, example))}"
        raise ValueError(
            f"text needs a model whose batches hold tokens and targets, or input_ids and labels; "
            f"this one takes {batch}: use data.source=workload, or your own data with "
            f"data.source=pkg.module:factory"
        )

    settings = {key: value for key, value in example.items() if not isinstance(value, Tensor)}

    def hugging_face(tokens: Tensor, targets: Tensor, present: Tensor) -> dict[str, Any]:
        labels = torch.cat([torch.full_like(targets[:, :1], IGNORED), targets[:, :-1]], dim=1)
        mask = {"attention_mask": present.long()} if "attention_mask" in keys else {}
        return settings | {"input_ids": tokens, "labels": labels} | mask

    return hugging_face, example["input_ids"].shape[1]
