"""Judge where two versions of a model part, and whether they still do after the repair."""

from evals_grading import Work, guard, point

PARTING = {"step": 1, "phase": "backward", "line": "layers.py:41"}


def losses(work: Work, version: str) -> list[str]:
    return work.run("train.py", version, "12").values("step ")


@point(3)
def place(work: Work) -> None:
    """Step, phase and line of the first difference are right."""
    given = work.answer()
    wrong = {name: given.get(name) for name, right in PARTING.items() if given.get(name) != right}
    assert not wrong, f"{wrong}"


@point(3)
def versions_agree(work: Work) -> None:
    """Both versions print the losses that the old one prints in the untouched script."""
    required = losses(Work(work.fixture, work.fixture, work.opened), "old")
    assert len(required) == 12
    for version in ("old", "new"):
        assert losses(work.copy(), version) == required, f"the losses of {version} differ"


def forms():
    """Return how often the new version makes its table, and which of its functions are its own."""
    import layers
    import torch

    made = []
    old = layers.Old.decay
    layers.Old.decay = lambda self, length: made.append(length) or old(self, length)
    forms = layers.New()
    for length in (30, 20, 30, 10):
        assert torch.equal(forms.decay(length), old(forms, length))
    return len(made), sorted(name for name in vars(layers.New) if not name.startswith("_"))


@guard(1)
def new_stays_new(work: Work) -> None:
    """The new version still keeps its table and has its own functions."""
    made, names = work.call(forms)
    required = work.original(forms)[1]
    assert made == 1, f"the table was made {made} times"
    assert set(required) - set(names) <= {"norm"}, f"it has {names} left"
