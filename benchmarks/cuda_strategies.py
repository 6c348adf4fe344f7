"""Compare strategies, plans and what people use today: peaks, and times in turns.

All run on a CUDA device.

A plan is made for the peak that was measured of each peer. The least peak at equal time is read
off the table: that of the plans which take no longer than a peer.

Proof: `python -m pytest tests/benchmarks/test_evidence_cuda.py`.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from cuda_setting import (
    Figures,
    Row,
    Setting,
    Timed,
    attention_kernel,
    case_of,
    cuda,
    on_device,
    recorded,
    timed_in_turns,
)
from curry_train.bench.steps import Lever, TrainingStep, find_lever
from curry_train.core.measure import peak_of_step
from curry_train.core.timing import paired_ratio, spread_of
from curry_train.plan.planner import Planner
from curry_train.primitives.cross_entropy import IGNORED_TARGET
from curry_train.primitives.recompute import recompute_blocks
from curry_train.primitives.strategies import Sample
from curry_train.workloads.models import transformer
from curry_train.workloads.workload import Case, Workload, token_loss

PLAN_PREFIX = "plan at the peak of "
PER_BLOCK_PREFIX = "none or full per block at the peak of "
SPARE_BYTES = 2**30
WARMUP_ROUNDS = 1
# The steps for whose peak a plan is made; the others have the peak of one of these.
PLANNED_FOR = (
    "full",
    "full for every second block",
    "sac, attention and every second product",
    "sac, attention and all products",
    "regions",
    "offload",
)


def strategies(setting: Setting) -> Iterator[Row]:
    """Peak and time of each strategy and peer, and of a plan at the peak of each."""
    for timed in setting.timed:
        yield Row(timed.key, partial(_strategies, setting, timed), seconds=300)


def compiled(setting: Setting) -> Iterator[Row]:
    """The compiler's memory budget, and a plan at its peak."""
    timed = setting.timed[0]
    yield Row(timed.key, partial(_compiled, setting, timed), seconds=240)


def hugging_face(setting: Setting) -> Iterator[Row]:
    """A Llama of transformers with its own checkpointing, and plans for it."""
    timed = setting.timed[0]
    yield Row(timed.key, partial(_hugging_face, setting, timed), seconds=150)


# Strategies: those of torch, torchtitan and Hugging Face, and our own.


def _whole(model: nn.Module, sample: Sample, **options: Any) -> list[str]:
    return recompute_blocks(model, **options)


def checkpoint_each(model: nn.Module, sample: Sample, *, use_reentrant: bool) -> list[str]:
    """Call every layer through torch's checkpoint, as the models of Hugging Face do."""
    layers = model.get_submodule("layers")
    for layer in layers.children():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=use_reentrant)
    return [f"layers.{name}" for name, _ in layers.named_children()]


def _peers(blocks: Sequence[str]) -> dict[str, Lever]:
    half = partial(_whole, blocks=list(blocks[::2]))
    own = partial(checkpoint_each, use_reentrant=True)
    return {
        "none": Lever("none"),
        "full": find_lever("full"),
        "full, without early stop": Lever("full", (partial(_whole, early_stop=False),)),
        "full, by a reentrant checkpoint of each layer": Lever("reentrant", (own,)),
        "full for every second block": Lever("half", (half,)),
        "sac, attention and every second product": find_lever("sac_every_second"),
        "sac, attention and all products": find_lever("sac:save_matmuls_and_attention"),
        "regions": find_lever("regions"),
        "offload": find_lever("offload"),
    }


def _strategies(setting: Setting, timed: Timed) -> Figures:
    case = case_of(setting, timed.model, timed.length, timed.samples)
    depth = setting.models[timed.model].depth
    planned = setting.models[timed.model].workload(timed.length)
    table = Comparison(setting, case, planned)
    table.add(_peers([f"layers.{index}" for index in range(depth)]))
    table.add_plans(PLANNED_FOR)
    table.add_plans(["full"], spare_bytes=SPARE_BYTES)
    table.add_plans(["full for every second block"], only=("none", "full"))
    kernel = attention_kernel(setting, timed.model, timed.length)
    return {**asdict(timed), "attention": kernel, **table.figures(timed.rounds)}


def _compiled(setting: Setting, timed: Timed) -> Figures:
    case = case_of(setting, timed.model, timed.length, timed.samples)
    table = Comparison(setting, case, setting.models[timed.model].workload(timed.length))
    peers = {"none": Lever("none"), "full": find_lever("full")}
    table.add(peers | {"compile, budget 0.5": find_lever("memory_budget")})
    table.add_plans(["compile, budget 0.5"])
    return {**asdict(timed), **table.figures(timed.rounds)}


# A model of Hugging Face.


def llama_of_transformers(setting: Setting, timed: Timed) -> Workload:
    """Make a workload of transformers' Llama in the sizes of a built-in one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = setting.models[timed.model]
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.dim,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=timed.length,
        use_cache=False,
    )
    return Workload(
        "llama of transformers",
        build=lambda: LlamaForCausalLM(config),
        batch=transformer(vocabulary=shape.vocabulary, length=timed.length).batch,
        loss=lambda model, batch: token_loss(model(batch["tokens"]).logits, batch["targets"]),
        count=lambda batch: int((batch["targets"] != IGNORED_TARGET).sum()),
    )


def _own_checkpointing(model: nn.Module, sample: Sample) -> list[str]:
    newer: Any = getattr(model, "activation_checkpointing_enable", None)
    older: Any = model.gradient_checkpointing_enable
    (newer or older)()
    return [""]


def _hugging_face(setting: Setting, timed: Timed) -> Figures:
    if importlib.util.find_spec("transformers") is None:
        return {"not_measured": {"all": "transformers is not installed"}, "rows": []}
    workload = llama_of_transformers(setting, timed)
    case = Case(
        on_device(workload, setting), setting.device, setting.dtype, batch_size=timed.samples
    )
    table = Comparison(setting, case, workload)
    own = Lever("own", (_own_checkpointing,))
    table.add({"none": Lever("none"), "own checkpointing": own, "regions": find_lever("regions")})
    table.add_plans(["own checkpointing"])
    table.add_plans(["own checkpointing"], spare_bytes=SPARE_BYTES)
    return {**asdict(timed), **table.figures(timed.rounds)}


# A table of steps that share weights and optimizer state, timed in turns.


class Comparison:
    """Training steps of one case by name, with their peaks and what could not be measured."""

    def __init__(self, setting: Setting, case: Case, planned: Workload) -> None:
        self.setting = setting
        self.case = case
        self.planned = planned
        self.peaks: dict[str, int] = {}
        self.errors: dict[str, str] = {}
        self.plans: dict[str, Figures] = {}
        self._steps: dict[str, TrainingStep] = {}
        # Its first step makes the optimizer state that all steps share.
        self._plain = TrainingStep(case)
        self._plain()
        self._plain.drop_gradients()

    def add(self, levers: Mapping[str, Lever]) -> None:
        """Measure the peak of a step under each lever."""
        for name, lever in levers.items():
            with recorded(self.errors, name):
                step = TrainingStep(self.case, lever, like=self._plain)
                self.peaks[name] = _peak(step)
                self._steps[name] = step

    def add_plans(
        self, peers: Sequence[str], *, spare_bytes: int = 0, only: Sequence[str] = ()
    ) -> None:
        """Plan for the peak of each peer, with one planner, and measure the plans."""
        more = " plus 1 GiB" if spare_bytes else ""
        prefix = PER_BLOCK_PREFIX if only else PLAN_PREFIX
        levers: dict[str, Lever] = {}
        with self._planner(only) as planner:
            for peer in filter(self.peaks.__contains__, peers):
                name = f"{prefix}{peer}{more}"
                with recorded(self.errors, name):
                    levers[name] = self._planned(planner, name, self.peaks[peer] + spare_bytes)
        self.add(levers)

    def _planner(self, only: Sequence[str]) -> Planner:
        return Planner(
            self.planned,
            device=self.setting.profile,
            dtype=self.setting.dtype,
            optimizer="adamw",
            by_reserved=False,
            chunked_loss=False if only else None,
            without=("offload", "sac", "regions") if only else (),
        )

    def _planned(self, planner: Planner, name: str, budget_bytes: int) -> Lever:
        size = self.case.batch_size
        plan = planner.plan(budget_bytes, global_batch=size, microbatch=size)
        self.plans[name] = {
            "plan": plan.candidates[0].summary() if plan.candidates else "",
            "predicted_peak_bytes": plan.peak_bytes,
            "predicted_seconds": plan.step_seconds,
            "predicted_plain_seconds": plan.plain_seconds,
        }
        return Lever("plan", (lambda module, sample: plan.apply(module),))

    def figures(self, rounds: int) -> Figures:
        """Time all steps in turns, and return the table."""
        ways = [partial(_step_alone, step) for step in self._steps.values()]
        seconds = timed_in_turns(ways, self.setting, rounds=rounds, warmup=WARMUP_ROUNDS)
        times = dict(zip(self._steps, seconds, strict=True))
        return {"rows": compared(times, self.peaks, self.plans), "not_measured": self.errors}


def _step_alone(step: TrainingStep) -> None:
    """Run a step, and leave no gradients beside the other steps."""
    step()
    step.drop_gradients()


def _peak(step: TrainingStep) -> int:
    """Return the peak of a second step, with all that is alive."""
    _step_alone(step)
    cuda.empty_cache()
    peak = peak_of_step(step, step._there(), step.device)
    step.drop_gradients()
    return peak


def compared(
    seconds: Mapping[str, Sequence[float]], peaks: Mapping[str, int], plans: Mapping[str, Figures]
) -> list[Figures]:
    """Return peak and time of each, as ratios to no recompute, and of plans to their peers."""
    base = "none" if "none" in seconds else next(iter(seconds), "")
    rows = []
    for name, times in seconds.items():
        row = {
            "name": name,
            "peak_bytes": peaks[name],
            "base": base,
            "peak_ratio": peaks[name] / peaks[base],
            "seconds": asdict(spread_of(times)),
            "rounds": len(times),
            "time_ratio": asdict(paired_ratio(times, seconds[base])),
            **plans.get(name, {}),
        }
        peer = peer_of(name)
        if peer is not None and peer in seconds:
            row["peer"] = peer
            row["time_of_peer"] = asdict(paired_ratio(times, seconds[peer]))
            row["peak_of_peer"] = peaks[name] / peaks[peer]
        rows.append(row)
    return rows


def peer_of(name: str) -> str | None:
    """Return the name of the step whose peak a plan was made for."""
    for prefix in (PLAN_PREFIX, PER_BLOCK_PREFIX):
        if name.startswith(prefix):
            return name.removeprefix(prefix).removesuffix(" plus 1 GiB")
    return None


PIECES: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "strategies": strategies,
    "compiled": compiled,
    "hugging_face": hugging_face,
}
