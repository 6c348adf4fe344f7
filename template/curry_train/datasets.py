"""The data that a configuration names, cut into what is trained on and what is only measured.

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

BYTES = 256  # a byte is a token
MADE = 1 << 20  # samples of a workload that makes its own batches


@dataclass(frozen=True)
class MadeSamples:
    """Batches that a workload draws itself, the same one for the same first sample."""

    case: Case

    def __len__(self) -> int:
        return MADE

    def batch(self, samples: Any) -> Batch:
        first = int(samples[0])
        return replace(self.case, seed=self.case.seed + first).batch(len(samples))


def open_datasets(
    config: DataConfig, case: Case, *, vocabulary: int | None = None
) -> tuple[Dataset, Dataset | None]:
    """Samples to train on, and the dev samples at the end, None if there are to be none."""
    whole = _open(config, case, vocabulary)
    dev = round(len(whole) * config.dev_fraction)
    if config.dev_fraction and not 0 < dev < len(whole):
        raise ValueError(
            f"data.dev_fraction={config.dev_fraction} of {len(whole)} samples leaves none to train on or to measure: "
            "use more data, shorter samples (data.length), or data.dev_fraction=0"
        )
    return Part(whole, 0, len(whole) - dev), Part(
        whole, len(whole) - dev, len(whole)
    ) if dev else None


def _open(config: DataConfig, case: Case, vocabulary: int | None) -> Dataset:
    if config.source == "workload":
        return MadeSamples(case)
    if ":" in config.source:
        made = load_object(config.source)
        return made if hasattr(made, "batch") else Samples(made)
    with seeded(case.seed):
        layout, length = layout_of(case.workload.batch(1))
    length = config.length or length
    if config.source == "tokens":
        assert config.path is not None
        beside = {"documents": config.documents, "mask": config.mask}
        return open_tokens(
            config.path, length=length, layout=layout, vocabulary=vocabulary, **beside
        )
    if vocabulary is not None and vocabulary < BYTES:
        raise WorkloadError(
            f"text is {BYTES} different bytes, and {case.workload.name} knows {vocabulary} tokens"
        )
    text: numpy.ndarray[Any, Any] = read_library_text()
    return Tokens([text], length=length, layout=layout, names=["the library's text"])
