"""Judge how weights with wrappers in their names are loaded."""

from pathlib import Path

from evals_grading import Broken, Work, point

PREFIXES = ("_orig_mod.module.", "module._orig_mod.", "module.", "_orig_mod.", "")
NAMES = ("body.0.weight", "body.0.bias", "head.weight", "head.bias")


def write(folder, name, prefix, without=None, surplus=None):
    import torch
    from serve import Classifier

    torch.manual_seed(7)
    weights = {f"{prefix}{key}": value for key, value in Classifier().state_dict().items()}
    if without:
        del weights[prefix + without]
    if surplus:
        weights[prefix + surplus] = torch.zeros(3)
    torch.save(weights, Path(folder) / name)


def loaded(name):
    from serve import load

    return load(name).head.weight.flatten().tolist()


def trained():
    """Return what the head of the files that `write` makes holds."""
    import torch
    from serve import Classifier

    torch.manual_seed(7)
    return Classifier().head.weight.flatten().tolist()


def message(work: Work, name: str, *words) -> str:
    there = work.copy()
    work.original(write, str(there.folder), name, *words)
    try:
        there.call(loaded, name)
    except Broken as error:
        return str(error)
    return ""


@point(2)
def weights_arrive(work: Work) -> None:
    """weights.pt gives the trained model."""
    assert work.call(loaded, "weights.pt") == work.original(trained), "not the trained weights"


@point(2)
def any_wrapper(work: Work) -> None:
    """The same for names with each of five combinations of wrappers."""
    required = work.original(trained)
    for number, prefix in enumerate(PREFIXES):
        there, name = work.copy(), f"new-{number}.pt"
        work.original(write, str(there.folder), name, prefix)
        assert there.call(loaded, name) == required, f"not with the prefix {prefix!r}"


@point(2)
def missing_weight_is_named(work: Work) -> None:
    """weights.pt loads, and a file without head.bias is refused with an error that names it."""
    weights_arrive(work)
    said = message(work, "short.pt", "_orig_mod.module.", "head.bias")
    assert "head.bias" in said, said or "it was loaded"


@point(2)
def unknown_weight_is_named(work: Work) -> None:
    """weights.pt loads, and a file with tail.bias is refused with an error that names it."""
    weights_arrive(work)
    said = message(work, "long.pt", "module.", None, "tail.bias")
    assert "tail.bias" in said, said or "it was loaded"
