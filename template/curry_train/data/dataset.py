"""The dataset interface: a length, and batches of chosen samples.

Proof: `python -m pytest tests/test_data_tokens.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import default_collate


class Dataset(Protocol):
    """A number of samples, and batches of any of them."""

    def __len__(self) -> int: ...

    def batch(self, samples: Sequence[int]) -> Any: ...


@dataclass(frozen=True)
class Samples:
    """A map-style dataset, such as one of torch's, whose samples `default_collate` stacks."""

    source: Any

    def __len__(self) -> int:
        return len(self.source)

    def batch(self, samples: Sequence[int]) -> Any:
        return default_collate([self.source[int(sample)] for sample in samples])


@dataclass(frozen=True)
class Part:
    """The samples from `start` up to `stop` of a dataset, for a train and test split."""

    dataset: Dataset
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= len(self.dataset):
            raise ValueError(
                f"samples {self.start} to {self.stop} are not a range of a dataset of "
                f"{len(self.dataset)}: start must be at least 0, below stop, and stop at most "
                f"{len(self.dataset)}"
            )

    def __len__(self) -> int:
        return self.stop - self.start

    def batch(self, samples: Sequence[int]) -> Any:
        return self.dataset.batch([self.start + int(sample) for sample in samples])
