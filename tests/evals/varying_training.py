"""Write the snapshots of three cases: rows of other lengths, evaluations between, a large file.

    PYTHONPATH=template:benchmarks:. python -m tests.evals.varying_training

It prints the MiB that the same runs reserve with each change.
"""

import functools
import pickle
import zipfile
from dataclasses import dataclass, field

from .. import snapshot_files
from ..snapshot_files import MIB, Recorder, Training, native, python
from ..tree import ROOT

CASES = ROOT / "evals/memory-plan"
LENGTHS = (1130, 905, 1420, 1015, 1610, 1290, 1777)
NUM_BLOCKS = 10
ROW_BYTES = 4 * 1024 * 2  # of four rows of one token, in half precision
VOCABULARY_BYTES = 4 * 12_000
# Evaluations have more rows, all of one length, and follow some of the steps.
EVALUATED_ROWS, EVALUATED_TOKENS, NUM_BATCHES, EVALUATED_STEPS = 5, 1536, 4, (1, 3)


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

    def block(self):
        """Return what a block holds for its backward, and its output."""
        width = self.tokens * ROW_BYTES
        temporary = self.make("temporaries of forward", 2 * width, self.in_forward("forward", 71))
        held = [self.activation(width, "forward", 72)]
        self.drop(temporary)
        held += [
            self.activation(3 * width, "attend", 88),
            self.activation(4 * self.tokens**2, "reach", 103),
            self.activation(8 * self.tokens**2, "attend", 91),
            self.activation(4 * width, "forward", 118),
        ]
        return held, self.activation(width, "forward", 119)

    def forward(self):
        frames = self.stack(python("collate", self.code, 47))
        self.head = [self.make("buffers and batch", 32 * self.tokens, frames)]
        self.first_workspace(self.in_forward("attend", 88))
        self.blocks = []
        for _ in range(NUM_BLOCKS):
            held, output = self.block()
            if self.checkpointed:
                self.drop(*held)
                held = []
            self.blocks.append([*held, output])
        self.head += self.loss(self.tokens * VOCABULARY_BYTES, self.in_forward("forward", 131))
        return []

    def backward(self, saved, **_):
        self.first_workspace(self.in_backward())
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


@dataclass
class Evaluated(Varying):
    """The same training, with an evaluation after some steps that keeps its results to its end."""

    code: str = "/home/mia/answers/train.py"
    num_steps: int = 0

    def step(self):
        super().step()
        if self.num_steps in EVALUATED_STEPS:
            self.evaluate()
        self.num_steps += 1

    def evaluate(self):
        rows = EVALUATED_ROWS * EVALUATED_TOKENS
        results = []
        for _ in range(NUM_BATCHES):
            x = self.activation(rows * ROW_BYTES, "forward", 66)
            for _ in range(NUM_BLOCKS):
                scores = self.activation(8 * rows * EVALUATED_TOKENS, "attend", 91)
                wide = self.activation(4 * rows * ROW_BYTES, "forward", 118)
                self.drop(scores)
                y = self.activation(rows * ROW_BYTES, "forward", 119)
                self.drop(wide, x)
                x = y
            results.append(self.activation(rows * VOCABULARY_BYTES // 4, "evaluate", 142))
            self.drop(x)
        self.drop(*results)


# The trainings by the names of their cases.
TRAININGS = {"which-change-fits": Varying, "evaluation-between": Evaluated}


def trained(name, *, expandable=False, checkpointed=False):
    """Return the recorder of a run with these changes."""
    training = TRAININGS[name](Recorder(expandable=expandable), checkpointed=checkpointed)
    training.build()
    for tokens in LENGTHS:
        training.tokens = tokens
        training.step()
    return training.recorder


def reserved_mib(name):
    """Return what the run reserves with each change, in MiB."""
    runs = {
        "expandable_segments": trained(name, expandable=True),
        "checkpoint": trained(name, checkpointed=True),
    }
    return {change: run.allocator.reserved / MIB for change, run in runs.items()}


def file_of(name):
    """Return the path of the snapshot."""
    return CASES / name / "fixture/oom.pickle"


@dataclass
class Keeping(Training):
    """Steps that keep a tensor each for an epoch; stacks are deep and, as in files, not shared."""

    code: str = "/home/ana/ranker/rank.py"
    kept: list = field(default_factory=list)

    def stack(self, *frames, op="empty"):
        found = super().stack(*frames, op=op)
        deep = [native(f"torch::call_{number}", f"/build/{number}.cpp") for number in range(140)]
        return [dict(one) for one in (*found[:2], *deep, *found[2:], *deep)]

    def step(self, **options):
        super().step(**options)
        self.kept.append(self.activation(4 * MIB, "scores", 83))
        if len(self.kept) == 50:
            self.drop(*self.kept)
            self.kept = []


def keeping():
    """Return the large training after 80 steps."""
    training = Keeping()
    training.build()
    for _ in range(80):
        training.step()
    return training


LARGE_FILE = CASES / "large-snapshot/fixture/oom.zip"


def main():
    LARGE_FILE.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(LARGE_FILE, "w", zipfile.ZIP_LZMA) as file:
        file.writestr("oom.pickle", pickle.dumps(keeping().recorder.snapshot(), protocol=4))
    # Equal frames are written once.
    for name in ("python", "native"):
        setattr(snapshot_files, name, functools.cache(getattr(snapshot_files, name)))
    for name in TRAININGS:
        snapshot_files.write(file_of(name), trained(name).snapshot())
        print(name, reserved_mib(name))


if __name__ == "__main__":
    main()
