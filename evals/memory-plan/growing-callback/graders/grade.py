"""Judge the line at which a callback keeps memory in each step, and how much; and the repair.

The epoch that the Trainer passes is a number with a fraction, so a table by it grows in each step.
"""

from evals_grading import Work, assert_figures, guard, point

IMPORTS = ("transformers",)
LINES = {"train.py:54", "train.py:56"}  # where the tensor is made, and where it is kept


def trained(epochs: int):
    """Return the bytes of tensors that are alive after training, and sums of the weights."""
    import gc

    import torch

    import train

    trainer = train.make_trainer()
    trainer.args.num_train_epochs = epochs
    trainer.train()
    gc.collect()
    found = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    found += [one.grad for one in found if one.grad is not None]
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in found}
    weights = [one.double().sum().item() for one in trainer.model.parameters()]
    return sum(storages.values()), weights


def callbacks():
    """Return the names of the callbacks' classes."""
    import train

    return [type(one).__name__ for one in train.make_trainer().callback_handler.callbacks]


@point(3)
def line_and_bytes(work: Work) -> None:
    """The line is right, and what it keeps in each step."""
    given = work.answer()
    assert str(given["line"]) in LINES, f"it is {given['line']!r}"
    assert_figures(given, {"bytes_each_step": 4 * 4585}, within=0.01)


@point(3)
def memory_stays(work: Work) -> None:
    """Six epochs hold no more memory than three."""
    sizes = [work.call(trained, epochs)[0] for epochs in (3, 6)]
    assert sizes[1] - sizes[0] < 20_000, f"{sizes[1] - sizes[0]:,} bytes more after six epochs"


@guard(1)
def training_stays(work: Work) -> None:
    """The trained weights are those of the untouched script, and all callbacks are still there."""
    import ast

    assert work.call(trained, 3)[1] == work.original(trained, 3)[1], "the weights changed"
    names = [
        {
            one.name
            for one in ast.parse((folder / "train.py").read_text()).body
            if hasattr(one, "bases")
        }
        for folder in (work.folder, work.fixture)
    ]
    assert names[0] >= names[1], f"{names[1] - names[0]} is gone"
