"""Rank the descriptions of skills for a prompt, by words and by vectors of words.

    python tests/skills/trigger_ranking.py

The two stand in for an agent, which reads all descriptions and picks one.
Proof: `python -m pytest tests/skills/test_triggers.py`.
"""

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import yaml
from tree import skills
from word_vectors import Space, space, stems

ROOT = Path(__file__).resolve().parents[2]
PAIR = 0.5  # weight of a pair of neighbouring words, relative to the two words
NEAR = 0.3  # below this cosine two words count as unrelated
WHOLE = 2.4  # weight of the direction of a whole text, relative to that of its words


def terms(text: str) -> list[str]:
    """Return stems, and pairs of neighbouring stems."""
    single = stems(text)
    return single + [f"{left} {right}" for left, right in itertools.pairwise(single)]


class Words:
    """BM25 over the terms of each text, with word frequencies of texts and documentation."""

    def __init__(
        self, texts: dict[str, str], *, saturation: float = 1.2, length: float = 0.5
    ) -> None:
        self.space = all_words()
        counted = {name: Counter(terms(text)) for name, text in texts.items()}
        mean = sum(words.total() for words in counted.values()) / len(counted)
        frequency = Counter(word for words in counted.values() for word in words)
        self.weights = {
            name: {
                word: math.log(1 + (len(counted) - frequency[word] + 0.5) / (frequency[word] + 0.5))
                * self._rarity(word)
                * number
                * (saturation + 1)
                / (number + saturation * (1 - length + length * words.total() / mean))
                for word, number in words.items()
            }
            for name, words in counted.items()
        }

    def _rarity(self, term: str) -> float:
        words = term.split()
        return (
            sum(self.space.rarity(word) for word in words)
            / len(words)
            * (1 if len(words) == 1 else PAIR)
        )

    def scores(self, prompt: str) -> dict[str, float]:
        words = sorted(set(terms(prompt)))
        return {
            name: sum(weights.get(word, 0.0) for word in words)
            for name, weights in self.weights.items()
        }


class Vectors:
    """Score a prompt by the nearest word of a text to each of its words, above the mean.

    Rare words count more, and near ones by their square. Then the direction of the whole prompt.
    """

    def __init__(self, texts: dict[str, str]) -> None:
        self.space = all_words()
        self.texts = {name: sorted(set(stems(text))) for name, text in texts.items()}
        whole = numpy.array([self.space.sentence(words) for words in self.texts.values()])
        self.middle = whole.mean(axis=0)
        self.whole = whole - self.middle
        self.whole /= numpy.linalg.norm(self.whole, axis=1, keepdims=True) + 1e-9

    def scores(self, prompt: str) -> dict[str, float]:
        words = sorted(set(stems(prompt)))
        found = numpy.zeros(len(self.texts))
        for word in words:
            near = numpy.array([self.space.nearness(word, known) for known in self.texts.values()])
            near = numpy.where(near < NEAR, 0, near) ** 2
            found += self.space.rarity(word) * numpy.maximum(near - near.mean(), 0)
        direction = self.space.sentence(words) - self.middle / 2
        found += WHOLE * (self.whole @ direction) / (numpy.linalg.norm(direction) + 1e-9)
        return dict(zip(self.texts, found.tolist(), strict=True))


@cache
def all_words() -> Space:
    """Return one space of words for all texts and prompts."""
    data = triggers()
    prompts = [
        text for part in ("prompts", "held_out") for each in data[part].values() for text in each
    ]
    texts = [*prompts, *data["near_misses"], *data["others"].values(), *descriptions().values()]
    return space({word for text in texts for word in stems(text)})


@cache
def triggers() -> dict[str, Any]:
    """Read tests/skills/triggers.yaml."""
    return yaml.safe_load((ROOT / "tests/skills/triggers.yaml").read_text(encoding="utf-8"))


def named(texts: dict[str, str]) -> dict[str, str]:
    """Return what an agent sees of each skill: its name and its description."""
    return {name: f"{name}: {texts[name]}" for name in sorted(texts)}


def descriptions() -> dict[str, str]:
    """Return the descriptions of this bundle and those proposed for new skills."""
    found = {skill.name: str(skill.frontmatter["description"]) for skill in skills(ROOT)}
    return named((triggers().get("proposed") or {}) | found)


@dataclass(frozen=True)
class Ranked:
    """The text that was ranked first, and the right one; `found` is None without a shared word."""

    prompt: str
    right: str
    found: str | None


def rank(ranker: Words | Vectors, prompts: dict[str, list[str]]) -> list[Ranked]:
    """Rank the texts for each prompt; `prompts` are listed under their right name."""
    return [
        Ranked(prompt, right, _first(ranker.scores(prompt)))
        for right, each in prompts.items()
        for prompt in each
    ]


def _first(scores: dict[str, float]) -> str | None:
    best = max(sorted(scores), key=scores.__getitem__)
    return best if scores[best] > 0 else None


def share(ranked: list[Ranked]) -> float:
    """Return the share of prompts whose first text is right."""
    return sum(each.found == each.right for each in ranked) / len(ranked)


def main() -> None:
    """Print the share of each ranker, and the prompts that it gets wrong."""
    for ranker in (Words(descriptions()), Vectors(descriptions())):
        for part in ("prompts", "held_out"):
            ranked = rank(ranker, triggers()[part])
            right = sum(each.found == each.right for each in ranked)
            if ranked:
                print(
                    f"{type(ranker).__name__}, {part}: right first {right} of {len(ranked)}, "
                    f"{share(ranked):.0%}"
                )
            for each in ranked if part == "prompts" else []:
                if each.found != each.right:
                    print(f"    {each.found} instead of {each.right}: {each.prompt}")


if __name__ == "__main__":
    main()
