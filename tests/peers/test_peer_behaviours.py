"""Each lever takes each behaviour of torch's checkpoint as the table states.

python -m pytest tests/peers
"""

import logging
import re

import pytest

from ..compiled_models import TRACING
from ..rank_calls import run_on_ranks
from ..tree import ROOT
from . import (  # noqa: F401 - each adds its behaviours to the table
    peer_arguments,
    peer_autograd,
    peer_ranks,
    peer_state,
    peer_surroundings,
)
from .peer_table import (
    BEHAVIOURS,
    LEVERS,
    TORCHS_OWN,
    error_of,
    rendered,
    torch_checkpoints,
)

# Of the compiler, of torch's own rules of derivatives, which are scripted, of its anomaly mode, and
# of hooks around a policy, as torch 2.14 will let them see what the policy saves.
FORESEEN = "ignore:Anomaly Detection|.torch.jit.script|A saved_tensors_hooks context"
pytestmark = [*TRACING, pytest.mark.filterwarnings(FORESEEN)]
PAGE = ROOT / "skills/recompute/references/torch-checkpoint.md"
IN_ONE_PROCESS = [pytest.param(one, id=one.name) for one in BEHAVIOURS if not one.on_ranks]


def is_ours(error):
    """Return whether an error passed through a frame of this package."""
    trace = error.__traceback__
    while trace is not None:
        if "/curry_train/" in trace.tb_frame.f_code.co_filename:
            return True
        trace = trace.tb_next
    return False


def wrong_cell(behaviour, lever):
    """Describe how a lever differs from what the table states, or return None."""
    outcome = behaviour.outcomes[lever]
    change = torch_checkpoints if lever == "torch" else LEVERS[lever]
    error = error_of(behaviour, change)
    if outcome.kind == "holds":
        return None if error is None else f"{lever}: {type(error).__name__}: {error}"
    if error is None or not re.search(outcome.words, str(error), re.DOTALL):
        return f"{lever}: {error!r} in place of {outcome.words!r}"
    if outcome.kind == "refused":
        return None if is_ours(error) else f"{lever}: {error!r} is not raised by this package"
    own = None if lever == "torch" else error_of(behaviour, TORCHS_OWN[lever])
    if lever != "torch" and (own is None or not re.search(outcome.words, str(own), re.DOTALL)):
        return f"{lever}: torch's own form gives {own!r}, so this is no limit of torch"
    return None


@pytest.mark.parametrize("behaviour", IN_ONE_PROCESS)
def test_each_lever_takes_it_as_the_table_states(behaviour, monkeypatch):
    # Torch's debug mode ends propagation for good, and pytest would then format its records.
    monkeypatch.setattr(logging.getLogger("LoggingTensor"), "propagate", True)
    wrong = [wrong_cell(behaviour, lever) for lever in behaviour.outcomes]
    assert [cell for cell in wrong if cell is not None] == []


def test_on_two_ranks_the_same_holds():
    for found in run_on_ranks(f"{peer_ranks.__file__}:errors_on_ranks"):
        assert len(found) == 3
        assert {error for errors in found.values() for error in errors.values()} == {"None"}


def test_the_table_has_enough_behaviours():
    assert len({one.name for one in BEHAVIOURS}) == len(BEHAVIOURS) >= 50


def test_the_page_shows_the_table():
    lines = rendered().splitlines()
    page = PAGE.read_text().splitlines()
    start = page.index(lines[0])
    # Which module of behaviours was imported first depends on the tests that run.
    assert sorted(page[start : page.index("", start)]) == sorted(lines)
