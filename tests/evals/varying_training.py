"""Write the snapshot of the case which-change-fits: steps whose rows have other lengths.

    PYTHONPATH=template:benchmarks:tests/plan python tests/evals/varying_training.py

It prints the MiB that the same run reserves with each change.
"""

import functools
from dataclasses import dataclass, field
from pathlib import Path

import snapshot_files
from snapshot_files import MIB, Recorder, Training, python

FILE = (
    Path(__file__).resolve().parents[2] / "evals/memory-plan/which-change-fits/fixture/oom.pickle"
)
LENGTHS = (1130, 905, 1420, 1015, 1610, 1290, 1777)
NUM_BLOCKS = 10
ROW_BYTES = 4 * 1024 * 2  # of four rows of one token, in half precision
VOCABULARY_BYTES = 4 * 12_000


@dataclass
class Varying(Training):
    """Steps of a training of ten blocks, without frames of C++; each step has its own `tokens`."""

    native_frames: bool = False
    checkpointed: bool = False
    tokens: int = 0
    code: str = "/home/mia/summaries/finetune.py"
    blocks: list = field(default_factory=list)
    head: list = field(default_factory=list)

    def parameter_sizes(self):
        return [24 * MIB, *[6 * MIB, 2 * MIB, 8 * MIB, 8 * MIB, 4096, 4096] * NUM_BLOCKS]

    def activation(self, num_bytes, function, line):
        return self.make("activations", num_bytes, self.in_forward(function, line))

    def block(self):
        """Return what a block holds for its backward, and its output."""
        width = self.tokens * ROW_BYTES
        temporary = self.make("temporaries of forward", 2 * width, self.in_forward("forward", 71))
        held = [self.activation(width, "forward", 72)]
        self.drop(temporary)
        held.append(self.activation(3 * width, "attend", 88))
        held.append(self.activation(4 * self.tokens**2, "reach", 103))
        held.append(self.activation(8 * self.tokens**2, "attend", 91))
        held.append(self.activation(4 * width, "forward", 118))
        return held, self.activation(width, "forward", 119)

    def forward(self):
        frames = self.stack(python("collate", self.code, 47))
        self.head = [self.make("buffers and batch", 32 * self.tokens, frames)]
        if not self.has_workspaces:
            self.make("workspaces", 8_519_680, self.in_forward("attend", 88))
        self.blocks = []
        for _ in range(NUM_BLOCKS):
            held, output = self.block()
            if self.checkpointed:
                self.drop(*held)
                held = []
            self.blocks.append([*held, output])
        size = self.tokens * VOCABULARY_BYTES
        logits = self.make("logits and loss", size, self.in_forward("forward", 131))
        self.head.append(self.make("logits and loss", 2 * size, self.in_loss()))
        self.head.append(self.make("logits and loss", 512, self.in_loss("nll_loss")))
        self.drop(*self.logits)
        self.logits = [logits]
        return []

    def backward(self, saved, **_):
        if not self.has_workspaces:
            self.make("workspaces", 8_519_680, self.in_backward())
            self.has_workspaces = True
        flowing = self.make("temporaries of backward", 2 * self.tokens * VOCABULARY_BYTES, [])
        self.drop(*self.head)
        sizes = self.parameter_sizes()
        for number in reversed(range(NUM_BLOCKS)):
            held = self.blocks[number]
            if self.checkpointed:
                again, output = self.block()
                held = [*held, *again, output]
            for size in reversed(sizes[1 + 6 * number : 7 + 6 * number]):
                following = self.make("temporaries of backward", self.tokens * ROW_BYTES, [])
                self.gradients.append(self.make("gradients", size, []))
                self.drop(flowing)
                flowing = following
            self.drop(*held)
        self.gradients.append(self.make("gradients", sizes[0], []))
        self.drop(flowing)


def trained(*, expandable=False, checkpointed=False):
    """Return the recorder of a run with these changes."""
    training = Varying(Recorder(expandable=expandable), checkpointed=checkpointed)
    training.build()
    for tokens in LENGTHS:
        training.tokens = tokens
        training.step()
    return training.recorder


def reserved_mib():
    """Return what the run reserves with each change, in MiB."""
    runs = {
        "expandable_segments": trained(expandable=True),
        "checkpoint": trained(checkpointed=True),
    }
    return {name: run.allocator.reserved / MIB for name, run in runs.items()}


def main():
    # Equal frames are written once.
    for name in ("python", "native"):
        setattr(snapshot_files, name, functools.cache(getattr(snapshot_files, name)))
    snapshot_files.write(FILE, trained().snapshot())
    print(reserved_mib())


if __name__ == "__main__":
    main()
