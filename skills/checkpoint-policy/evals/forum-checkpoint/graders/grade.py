"""Judge how a stranger's checkpoint is loaded."""

import os
from pathlib import Path

from evals_grading import Broken, Work, point

VALUES = [round(0.25 * number - 1, 2) for number in range(4)]


def loaded(name):
    """Return a few weights of the model that load() gives."""
    from app import load

    return load(name)[0].weight[0].tolist()


def write(folder, name, hostile=False, missing=False):
    """Write a checkpoint with the author's settings, and with a call where it is hostile."""
    import torch
    from app import Settings, build

    class Call:
        def __reduce__(self):
            return os.system, ("touch it-ran",)

    weights = build().state_dict()
    weights["0.weight"][0] = torch.tensor(VALUES)
    if missing:
        del weights["2.bias"]
    saved = {"weights": weights, "settings": Settings(lr=0.1, name="forum")}
    torch.save(saved | ({"extra": Call()} if hostile else {}), Path(folder) / name)


def refused(work: Work, there: Work, name: str) -> str:
    try:
        there.call(loaded, name)
    except Broken as error:
        return str(error)
    return ""


@point(3)
def weights_arrive(work: Work) -> None:
    """load("model.pt") gives the weights of the file."""
    assert work.call(loaded, "model.pt") == VALUES, "the weights are not those of the file"


@point(4)
def no_code_runs(work: Work) -> None:
    """model.pt loads, and a file with a call in it runs nothing when it is loaded."""
    weights_arrive(work)
    there = work.copy()
    work.original(write, str(there.folder), "next.pt", True)
    refused(work, there, "next.pt")
    assert not (there.folder / "it-ran").exists(), "code of the file ran"


@point(2)
def missing_tensor_is_an_error(work: Work) -> None:
    """model.pt loads, and a file without one tensor is refused by the name of that tensor."""
    weights_arrive(work)
    there = work.copy()
    work.original(write, str(there.folder), "short.pt", False, True)
    message = refused(work, there, "short.pt")
    assert message, "it was loaded"
