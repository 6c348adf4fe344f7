"""The data: text of Python's library, files of tokens, or samples of your own.

A dataset has a length, and `batch(samples)` returns a batch of the samples with these numbers.
`curry_train.data.Stream` shuffles them, divides them among ranks, and resumes from one integer.
"""

import importlib
from typing import Any

from torch import Tensor

from curry_train.config import DataConfig
from curry_train.data import Dataset, Samples, Tokens, open_tokens, read_library_text, split_dev
from model import LENGTH, VOCABULARY


def open_data(config: DataConfig) -> tuple[Dataset, Dataset | None]:
    """Return the samples to train on, and those to evaluate on (None without any)."""
    if ":" in config.source:
        module, _, function = config.source.removesuffix("()").partition(":")
        try:
            make = getattr(importlib.import_module(module.removesuffix(".py")), function)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"data.source={config.source}: {error}; give module:function of a file here"
            ) from error
        samples = make()
        dataset = samples if hasattr(samples, "batch") else Samples(samples)
        return split_dev(dataset, config.dev_fraction)

    settings: dict[str, Any] = {
        "length": config.length or LENGTH,
        "layout": layout,
        "vocabulary": VOCABULARY,
    }
    if config.source == "tokens":
        assert config.path is not None  # the configuration was checked
        dataset = open_tokens(config.path, **settings)
    elif config.source == "text":
        dataset = Tokens([read_library_text()], names=["the library's text"], **settings)
    else:
        raise ValueError(
            f"data.source={config.source} is not a source of this project: use text, tokens, or "
            "module:function with a function that returns a dataset"
        )
    return split_dev(dataset, config.dev_fraction)


def layout(tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Arrange a batch as `model.py` takes it."""
    return {"tokens": tokens, "targets": targets}
