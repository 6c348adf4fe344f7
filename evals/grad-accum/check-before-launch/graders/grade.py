"""Judge a check of training loops by loops that it has not seen, 18 faulty and 12 sound ones.

They were drawn by chance from the loops of `tests/gates`, where a comment marks the wrong line.
"""

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[4]))

from tests.gates import faulty_loops, healthy_loops, loops

from evals_grading import Broken, Work, point

FAULTY = {
    loops: (
        "never_zeroed",
        "zeroed_before_the_step",
        "no_learning_rate",
        "detached_loss",
        "scheduled_first",
        "clipped_nothing",
        "clipped_while_scaled",
        "left_in_eval_mode",
        "first_batch_for_ever",
    ),
    faulty_loops: (
        "mean_divided_by_the_batch_size",
        "mean_over_ignored_targets",
        "mean_over_padding",
        "two_optimizers_for_one_layer",
        "one_parameter_twice",
        "eval_after_the_first_epoch",
        "seeded_in_each_epoch",
        "callback_that_keeps_activations",
        "cache_of_outputs",
    ),
}
SOUND = {
    loops: (
        "averaged",
        "penalized",
        "scaled",
        "steps_in_hooks",
    ),
    healthy_loops: (
        "last_window_short",
        "sparse_embedding",
        "momentum_contrast",
        "adam_then_lbfgs",
        "tied_weights",
        "unfrozen_step_by_step",
        "sharpness_aware",
        "reset_between_tasks",
    ),
}
LEAST_FOUND, LEAST_LINES = 15, 13


def texts(module: str, name: str) -> list[str]:
    import torch
    from check import faults

    torch.manual_seed(0)
    return [str(one) for one in faults(getattr(sys.modules[module], name))]


@cache
def found(folder: Path, faulty: bool) -> list[tuple[str, list[str]]]:
    """Return the wrong place of each loop, and the texts on it; none where the check fails."""
    work = Work(folder, folder)
    judged = []
    for module, names in (FAULTY if faulty else SOUND).items():
        for name in names:
            place = loops.wrong_line(vars(module)[name]) if faulty else name
            try:
                judged.append((place, work.call(texts, module.__name__, name, seconds=20)))
            except Broken as error:
                judged.append((place, [] if faulty else [str(error)]))
    return judged


def accused(folder: Path) -> Iterator[str]:
    return (f"{name}: {given[0]}" for name, given in found(folder, faulty=False) if given)


def num_found(folder: Path) -> int:
    return sum(bool(given) for _, given in found(folder, faulty=True))


@point(4)
def finds_faults(work: Work) -> None:
    """It finds 15 of 18 faults, and accuses at most 3 of 12 sound loops."""
    number, wrong = num_found(work.folder), list(accused(work.folder))
    assert number >= LEAST_FOUND, f"it finds {number}"
    assert len(wrong) <= 3, f"it accuses {len(wrong)} sound loops"


@point(3)
def names_their_lines(work: Work) -> None:
    """Of 18 faults it names 13 at their line."""
    right = [
        place
        for place, given in found(work.folder, faulty=True)
        if any(one == place or one.startswith(f"{place}:") for one in given)
    ]
    assert len(right) >= LEAST_LINES, f"it names {len(right)}"


@point(3)
def accuses_no_sound_loop(work: Work) -> None:
    """It finds half of the faults and accuses no sound loop."""
    number, wrong = num_found(work.folder), list(accused(work.folder))
    assert number >= 9, f"it finds {number}"
    assert not wrong, f"it accuses {len(wrong)}, such as {wrong[0]}"
