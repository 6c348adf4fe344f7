"""Judge settings for a budget: they fit, and waste little."""

import json

from evals_grading import Work, assert_close, flops, guard, peak_bytes, point

BUDGET = 9_000_000


def peak():
    from train import train

    return peak_bytes(train)


def products():
    from train import train

    return flops(lambda: train(steps=1))


def losses():
    from train import train

    return train()


@point(3)
def fits(work: Work) -> None:
    """Two steps need at most 9,000,000 bytes."""
    measured = work.call(peak)
    assert measured <= BUDGET, f"{measured:,} bytes"


@point(3)
def little_is_recomputed(work: Work) -> None:
    """It fits, and a step has at most 12% more FLOPs than without checkpointing."""
    fits(work)
    share = work.call(products) / work.original(products)
    assert share <= 1.12, f"{share:.2f} times the FLOPs"


@guard(1)
def microbatch_fills_the_card(work: Work) -> None:
    """The microbatch is at least 8."""
    microbatch = json.loads((work.folder / "settings.json").read_text())["microbatch"]
    assert microbatch >= 8, f"the microbatch is {microbatch}"


@guard(2)
def same_training(work: Work) -> None:
    """The losses are the same up to rounding, and train.py is untouched."""
    work.assert_unchanged("train.py")
    assert_close(work.call(losses), work.original(losses), within=1e-5)
