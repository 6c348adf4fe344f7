"""Judge BatchNorm under checkpointing."""

from evals_grading import Work, guard, peak_bytes, point


def outcome(checkpointing):
    from net import train

    losses, model = train(checkpointing=checkpointing)
    state = {name: one.flatten().tolist() for name, one in model.state_dict().items()}
    momenta = [one.momentum for one in model.modules() if hasattr(one, "momentum")]
    return {"losses": losses, "state": state, "momenta": momenta, "training": model.training}


def peak(checkpointing):
    from net import train

    return peak_bytes(lambda: train(checkpointing=checkpointing, steps=1))


@point(4)
def same_statistics(work: Work) -> None:
    """Running means, variances and counters are bit-equal to those without checkpointing."""
    measured, required = work.call(outcome, True), work.original(outcome, False)
    assert measured["state"].keys() == required["state"].keys(), "the names changed"
    wrong = [
        name
        for name, one in required["state"].items()
        if ".norm." in name and measured["state"][name] != one
    ]
    assert not wrong, f"{len(wrong)} differ, the first is {wrong[0]}"


@guard(3)
def less_memory(work: Work) -> None:
    """The peak is below 70% of that without checkpointing."""
    share = work.call(peak, True) / work.original(peak, False)
    assert share < 0.7, f"the peak is {share:.0%}"


@guard(2)
def same_training(work: Work) -> None:
    """Losses, weights and settings of the norms are those without checkpointing."""
    assert work.call(outcome, True) == work.original(outcome, False), "the training differs"
