"""Do the saved tensors and the ones at hand belong together? By name, shape, dtype and ties.

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
    """The targets that fit, with what does not in `report`. Saved names that begin as `optional` says may stay."""
    fitting = {}
    saved = {
        name: facts
        for name, facts in contents.tensors.items()
        if not name.startswith(tuple(optional))
    }
    for name, target in targets.items():
        facts = saved.get(name)
        if facts is None:
            if not name.startswith("gradient."):  # a parameter may have none
                report.missing.append(name)
        elif tuple(target.shape) != facts.shape:
            report.different.append(f"{name} was {list(facts.shape)} and is {list(target.shape)}")
        elif target.dtype != facts.dtype:
            report.different.append(f"{name} was {facts.dtype} and is {target.dtype}")
        else:
            fitting[name] = target
    report.extra += [
        name
        for name in saved
        if name not in targets
        and not name.startswith("gradient.")
        and (name.startswith(MODEL) or not contents.model_only)
        and name not in ties
    ]
    for name in sorted({*ties, *contents.ties}):
        if ties.get(name) != contents.ties.get(name):
            first, now = contents.ties.get(name), ties.get(name)
            report.different.append(f"{name} was {_tie(first)} and is {_tie(now)}")
    report.missing = sorted(name for name in report.missing if name not in contents.ties)
    report.extra.sort()
    report.matched += len(fitting)
    report.wanted += len({*saved, *targets})
    return fitting


def _tie(first: str | None) -> str:
    return f"one tensor with {first}" if first else "a tensor of its own"
