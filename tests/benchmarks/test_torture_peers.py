"""The torture of checkpoint libraries counts losses, silence and execution right.

python -m pytest tests/benchmarks/test_torture_peers.py
"""

import torch

import torture_peers
from torture_peer_savers import Peer, prepared
from torture_peers import fill_disks, flip_many, forge_many, kill_many, with_table

from ..command_runs import read_json
from ..tree import ROOT


class InPlace(Peer):
    """A file of torch.save per step, written in place: without a hash, and unpickled."""

    name = "in_place"
    place = "step-{}.ckpt"
    pickled = ("*.ckpt",)

    def save(self, path, state):
        torch.save(state, path)

    def load_one(self, path):
        return torch.load(path, weights_only=False)


def test_ours_survives_a_short_torture(tmp_path):
    peer = prepared("ours")
    kills = kill_many(peer, tmp_path, 2)
    assert kills == {**dict.fromkeys(kills, 0), "kills": 2}
    assert flip_many(peer, tmp_path, 8) == {"flips": 8, "silent": 0}


def test_what_a_careless_library_loses_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(torture_peers, "FULL_PARTS", (0.0, 0.3, 0.9))
    assert flip_many(InPlace(), tmp_path / "flips", 6)["silent"] >= 4
    disks = fill_disks(InPlace(), tmp_path / "disks")
    assert (disks["full"], disks["newest_fails"], disks["lost"]) == (3, 3, 0)
    hostile = forge_many(InPlace(), tmp_path / "hostile")
    assert (hostile["hostile"], hostile["executed"]) == (8, 8)


def test_the_page_shows_the_recorded_table():
    page = (ROOT / "skills/checkpoint-policy/references/peers.md").read_text()
    written = read_json(ROOT / "evidence/peers_torture.json")
    assert with_table(page, written) == page
    ours = written["peers"]["ours"]["counts"]
    assert ours["kills"]["kills"] >= 20
    wrong = ("newest_fails", "older", "lost", "silent", "executed", "not_reported")
    assert {part[key] for part in ours.values() for key in wrong if key in part} == {0}


class Forgetful(InPlace):
    """Reports steps as saved that it never wrote."""

    def save(self, path, state):
        if path.stem == "step-0":
            super().save(path, state)


def test_steps_that_were_only_reported_count_as_lost(tmp_path):
    kills = kill_many(Forgetful(), tmp_path, 2)
    assert kills["lost"] == kills["older"] == 2
