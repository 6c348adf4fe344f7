"""Open the configured data and split it into training and dev samples.

Proof: `python -m pytest tests/test_training_data.py`.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy

from .config import DataConfig
from .core.load import load_object
from .core.untouched import seeded
from .core.workload import Batch, Case, WorkloadError
from .data.dataset import Dataset, Part, Samples
from .data.layout import layout_of
from .data.library_text import read_library_text
from .data.tokens import Tokens, open_tokens

BYTES = 256  # vocabulary of text, where each byte is a token
MADE = 1 << 20  # length of a dataset whose batches the workload draws itself


@dataclass(frozen=True)
class MadeSamples:
    """Batches drawn by a workload, the same batch for the same first sample."""

    case: Case

    def __len__(self) -> int:
        return MADE

    def batch(self, samples: Any) -> Batch:
        first = int(samples[0])
        return replace(self.case, seed=self.case.seed + first).batch(len(samples))


def open_datasets(
    config: DataConfig, case: Case, *, vocabulary: int | None = None
) -> tuple[Dataset, Dataset | None]:
    """Return the training samples, and the dev samples at the end (None without any)."""
    whole = _open(config, case, vocabulary)
    num_dev = round(len(whole) * config.dev_fraction)
    if config.dev_fraction and not 0 < num_dev < len(whole):
        raise ValueError(
            f"data.dev_fraction={config.dev_fraction} of {len(whole)} samples leaves none to train "
            "on or to measure: use more data, shorter samples (data.length), or data.dev_fraction=0"
        )
    num_trained = len(whole) - num_dev
    dev = Part(whole, num_trained, len(whole)) if num_dev else None
    return Part(whole, 0, num_trained), dev


def _open(config: DataConfig, case: Case, vocabulary: int | None) -> Dataset:
    if config.source == "workload":
        return MadeSamples(case)
    if ":" in config.source:
        dataset = load_object(config.source)
        return dataset if hasattr(dataset, "batch") else Samples(dataset)

    with seeded(case.seed):
        layout, own_length = layout_of(case.workload.batch(1))
    length = config.length or own_length
    if config.source == "tokens":
        assert config.path is not None
        return open_tokens(
            config.path,
            length=length,
            layout=layout,
            vocabulary=vocabulary,
            documents=config.documents,
            mask=config.mask,
        )
    if vocabulary is not None and vocabulary < BYTES:
        raise WorkloadError(
            f"text needs a vocabulary of {BYTES} bytes, and {case.workload.name} has {vocabulary} "
            "tokens"
        )
    text: numpy.ndarray[Any, Any] = read_library_text()
    return Tokens([text], length=length, layout=layout, names=["the library's text"])
