"""Match the tensors of a checkpoint with those of the model by name, shape, dtype and ties.

Proof: `python -m pytest tests/test_state.py`.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from .snapshot import MODEL, Contents, LoadReport


def match(
    targets: Mapping[str, Tensor],
    contents: Contents,
    ties: Mapping[str, str],
    report: LoadReport,
    *,
    optional: Sequence[str],
) -> dict[str, Tensor]:
    """Return the targets that match a saved tensor, and add all mismatches to `report`.

    Saved tensors whose names begin with one of `optional` are ignored.
    """
    fitting = {}
    saved = {
        name: facts
        for name, facts in contents.tensors.items()
        if not name.startswith(tuple(optional))
    }

    for name, target in targets.items():
        facts = saved.get(name)
        if facts is None:
            # A parameter may have had no gradient at the save.
            if not name.startswith("gradient."):
                report.missing.append(name)
        elif tuple(target.shape) != facts.shape:
            report.different.append(f"{name} was {list(facts.shape)} and is {list(target.shape)}")
        elif target.dtype != facts.dtype:
            report.different.append(f"{name} was {facts.dtype} and is {target.dtype}")
        else:
            fitting[name] = target

    for name in saved:
        if name in targets or name in ties or name.startswith("gradient."):
            continue
        if name.startswith(MODEL) or not contents.model_only:
            report.extra.append(name)

    report.different += _different_ties(contents.ties, ties)
    report.missing = sorted(name for name in report.missing if name not in contents.ties)
    report.extra.sort()
    report.matched += len(fitting)
    report.wanted += len({*saved, *targets})
    return fitting


def _different_ties(saved: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    return [
        f"{name} was {_tie(saved.get(name))} and is {_tie(current.get(name))}"
        for name in sorted({*current, *saved})
        if saved.get(name) != current.get(name)
    ]


def _tie(first: str | None) -> str:
    return f"one tensor with {first}" if first else "a tensor of its own"
