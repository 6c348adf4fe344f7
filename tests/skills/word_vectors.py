"""Words of a text as stems, and as vectors that are made here: no model is downloaded.

The vectors come from the documentation of installed packages: co-occurrence as positive
pointwise mutual information, then a randomised SVD with a fixed seed. A text is the mean of its
words; common words weigh less. Proof: `python -m pytest tests/skills/test_triggers.py`.
"""

import importlib.util
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy

COMMON = """
a across after again all am an and another any anything are as at be before between but by can
cant do does doesn doesnt don dont e each every find finds first for from g get gets give go goes
going got had has have help here how i if in into is it its just know last like ll m made make
makes many me more most much my need no not nothing now of on once one only or other our over per
please pls re really s said same say see should show so some something still t tell than that the
their them then there they thing this three to too try two u us use used using ve via vs want was
way we went what when where which while why will with would you your
"""
STOP = set(COMMON.split())
SAME = {  # abbreviations, and words written as one
    "accum": "accumulation",
    "attn": "attention",
    "auto": "automatic",
    "backprop": "backpropagation",
    "bs": "batch size",
    "bwd": "backward",
    "ckpt": "checkpoint",
    "ckpts": "checkpoints",
    "config": "configuration",
    "configs": "configurations",
    "dataloader": "data loader",
    "dir": "directory",
    "fwd": "forward",
    "gib": "gb",
    "grad": "gradient",
    "grads": "gradient",
    "iter": "iteration",
    "iters": "iterations",
    "lr": "learning rate",
    "mem": "memory",
    "microbatch": "micro batch",
    "microbatches": "micro batches",
    "microbatching": "micro batches",
    "oom": "out memory",
    "op": "operation",
    "ops": "operations",
    "optim": "optimizer",
    "param": "parameter",
    "params": "parameters",
    "perf": "performance",
    "rollback": "roll back",
    "sec": "second",
    "seq": "sequence",
    "speedup": "speed up",
    "stats": "statistics",
    "sync": "synchronize",
    "timestep": "time step",
    "timesteps": "time steps",
    "vram": "gpu memory",
}
CUT = "ization ations ation ingly ence edly ings ally ent ing ied ies ers ed er es ly s e y"
ENDINGS = CUT.split()  # longest first
READ = {  # modules whose documentation is read
    "torch": [
        "nn",
        "optim",
        "utils",
        "distributed",
        "autograd",
        "amp",
        "cuda",
        "_dynamo",
        "_functorch",
        "*.py",
    ],
    "transformers": ["*.py", "integrations", "utils", "generation", "models/llama", "models/bert"],
    "numpy": ["random", "lib", "linalg", "ma"],
    "snntorch": [
        "*.py",
        "_neurons",
        "functional",
    ],  # the only one on spiking neurons
}
PROSE = re.compile(r'"""(.*?)"""|((?:^ *# .*\n)+)', re.DOTALL | re.MULTILINE)
VOCABULARY, DIMENSIONS, WINDOW, SEEN_ENOUGH = 4000, 300, 10, 5
COMMON_SHARE = 1e-3  # a word with this share of all words has half weight in the vector of a text


@cache
def stem(word: str) -> str:
    """Return the stem of a word: "save", "saves", "saved" and "saving" have the same.

    Cut the plural, then the longest ending that leaves four letters (three before -ing and -ed),
    the doubled letter before it, and a last e.
    """
    if (
        len(word) > 2
        and word[-1] == "s"
        and word[-2] not in "si"
        and not (word[-2] == "u" and len(word) > 5)
    ):
        word = word[:-1]
    for ending in ENDINGS:
        left = len(word) - len(ending)
        if word.endswith(ending) and (
            left >= 4 or (left == 3 and ending in ("ing", "ed") and _syllable(word[:3]))
        ):
            word = word[:left]
            if left > 3 and word[-1] == word[-2] and word[-1] not in "sl":
                word = word[:-1]
            break
    return word[:-1] if len(word) > 3 and word[-1] == "e" else word


def _syllable(start: str) -> bool:
    """Return whether three letters can be a stem, as "sav" of "saving", not "str" of "string"."""
    return start[-1] not in "aeiou" and any(letter in "aeiouy" for letter in start)


def stems(text: str) -> list[str]:
    """Return the words of a text without stop words; names in code are split."""
    text = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", text)
    words = " ".join(SAME.get(word, word) for word in re.findall("[a-z]+", text.lower())).split()
    return [stem(word) for word in words if word not in STOP]


@cache
def documentation() -> list[str]:
    """Return the stems of docstrings and comments in the modules of READ, in a fixed order."""
    found: list[str] = []
    for name, patterns in READ.items():
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise RuntimeError(
                f"{name} is not installed, whose documentation is read: pip install '.[dev]'"
            )
        root = Path(spec.submodule_search_locations[0])
        for path in (path for pattern in patterns for path in sorted(root.glob(pattern))):
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                for docstring, comment in PROSE.findall(
                    file.read_text(encoding="utf-8", errors="ignore")
                ):
                    found += stems(docstring or comment)
    return found


@dataclass(frozen=True)
class Space:
    """A vector of length 1 for each frequent word, and the rarity of each."""

    index: dict[str, int]
    vectors: numpy.ndarray
    frequency: Counter[str]

    def rarity(self, word: str) -> float:
        return math.log(self.frequency.total() / (self.frequency[word] + 50))

    def nearness(self, word: str, others: Iterable[str]) -> float:
        """Return the cosine to the nearest of some words; 1 for one of them."""
        if word in others:
            return 1.0
        known = [self.index[other] for other in others if other in self.index]
        if word not in self.index or not known:
            return 0.0
        return float(max(self.vectors[known] @ self.vectors[self.index[word]]))

    def sentence(self, words: Iterable[str]) -> numpy.ndarray:
        """Return the direction of a text: its words, summed with smooth inverse frequency."""
        total = self.frequency.total()
        known = sorted({word for word in words if word in self.index})
        weights = [COMMON_SHARE / (COMMON_SHARE + self.frequency[word] / total) for word in known]
        found = (
            numpy.array(weights) @ self.vectors[[self.index[word] for word in known]]
            if known
            else self.vectors[0] * 0
        )
        return found / (numpy.linalg.norm(found) + 1e-9)


def space(needed: set[str]) -> Space:
    """Return vectors of the most frequent words of the documentation, and of needed ones."""
    corpus = documentation()
    frequency = Counter(corpus)
    kept = sorted(frequency, key=lambda word: (-frequency[word], word))[:VOCABULARY]
    kept += sorted(word for word in needed - set(kept) if frequency[word] >= SEEN_ENOUGH)
    index = {word: number for number, word in enumerate(kept)}
    return Space(
        index, _vectors(numpy.array([index.get(word, -1) for word in corpus]), len(kept)), frequency
    )


def _vectors(corpus: numpy.ndarray, size: int) -> numpy.ndarray:
    """Return words as rows: co-occurrence above chance, in its main directions."""
    counts = numpy.zeros(size * size)
    for distance in range(1, WINDOW + 1):
        left, right = corpus[:-distance], corpus[distance:]
        both = (left >= 0) & (right >= 0)
        counts += numpy.bincount(left[both] * size + right[both], minlength=size * size) / distance
    near = counts.reshape(size, size).astype(numpy.float32)
    near += near.T
    rows = near.sum(axis=1)
    context = rows**0.75
    with numpy.errstate(divide="ignore", invalid="ignore"):
        excess = numpy.log(near * context.sum() / (rows[:, None] * context[None, :]))
    excess = numpy.where(numpy.isfinite(excess), numpy.maximum(excess, 0), 0).astype(numpy.float32)
    basis = excess @ numpy.random.default_rng(0).standard_normal(
        (size, DIMENSIONS + 20), dtype=numpy.float32
    )
    for _ in range(3):
        basis = excess @ (excess.T @ numpy.linalg.qr(basis)[0])
    basis = numpy.linalg.qr(basis)[0]
    left, strength, _ = numpy.linalg.svd(basis.T @ excess, full_matrices=False)
    words = (basis @ left[:, :DIMENSIONS]) * numpy.sqrt(strength[:DIMENSIONS])
    return words / (numpy.linalg.norm(words, axis=1, keepdims=True) + 1e-9)
