"""Learning rate schedule: warm-up, then a cosine or linear decay.

    factor = Schedule(steps=1000, warmup_steps=100, least=0.1)
    factor(0), factor(99), factor(999)     # 0.01, 1.0, 0.1

The learning rate is a pure function of the step, so a run can be resumed anywhere.
Proof: `python -m pytest tests/test_schedule.py`.
"""

import math
from dataclasses import dataclass

SHAPES = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class Schedule:
    """Factor on the peak learning rate for each step.

    Steps count from 0. The factor decays to `least` in the last step and stays there.
    """

    steps: int
    warmup_steps: int = 0
    least: float = 0.1
    shape: str = "cosine"

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}; got {self.shape!r}")
        if self.steps < 1 or not 0 <= self.warmup_steps <= self.steps:
            raise ValueError(
                f"warmup_steps must be from 0 to the {self.steps} steps of the run; "
                f"got {self.warmup_steps}"
            )
        if not 0 <= self.least <= 1:
            raise ValueError(
                f"least must be from 0 to 1, a part of the learning rate; got {self.least}"
            )

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, self.steps - 1 - self.warmup_steps))
        falling = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.least + (1 - self.least) * falling
