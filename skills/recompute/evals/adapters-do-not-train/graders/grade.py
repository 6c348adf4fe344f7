"""Judge a fine-tuning of adapters under checkpointing."""

import warnings

from evals_grading import Work, guard, peak_bytes, point


def losses(checkpointing):
    from lora import finetune

    warnings.simplefilter("ignore")
    return finetune(checkpointing=checkpointing)[0]


def peak(checkpointing):
    from lora import finetune

    warnings.simplefilter("ignore")
    return peak_bytes(lambda: finetune(checkpointing=checkpointing, steps=1))


def changes():
    """Return which parameters four steps of training change."""
    from lora import build, finetune

    warnings.simplefilter("ignore")
    before, after = build().state_dict(), finetune()[1].state_dict()
    return {name: not value.equal(after[name]) for name, value in before.items()}


@point(3)
def adapters_train(work: Work) -> None:
    """Four steps change every adapter."""
    still = [
        name
        for name, moved in work.call(changes).items()
        if name[-2:] in (".a", ".b") and not moved
    ]
    assert not still, f"unchanged: {', '.join(still)}"


@point(3)
def less_memory(work: Work) -> None:
    """All adapters train, and a step needs less than 60% of the memory without checkpointing."""
    adapters_train(work)
    share = work.call(peak, True) / work.original(peak, False)
    assert share < 0.6, f"the peak is {share:.0%}"


@point(2)
def same_losses(work: Work) -> None:
    """The losses are those without checkpointing to the last bit."""
    assert work.call(losses, True) == work.original(losses, False), "the losses differ"


@guard(1)
def base_stays_frozen(work: Work) -> None:
    """No parameter of the base changes."""
    base = {name: one for name, one in work.call(changes).items() if name[-2:] not in (".a", ".b")}
    moved = [name for name, one in base.items() if one]
    assert not moved, f"changed: {', '.join(moved)}"
