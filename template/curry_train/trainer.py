"""Train a model by a configuration: recompute, ranks, optimizer, saving, and the loop.

    task = TrainingTask("mine", module, summed_loss, count=num_tokens, dataset=samples)
    with open_run(load_config("config.yaml"), lambda device: task) as run:
        report = train_run(run)

It stands on the calls that any loop can use: `saving` saves, resumes, writes the journal and rolls
back from loss spikes, `run_training_steps` trains, `apply_config` recomputes. Ranks are started by
torchrun, with DDP or FSDP2; a wrong launch is an error with the command to use:

    with start_ranks(parallel="fsdp2", device="auto") as (ranks, device):
        model = share(module, device, parallel="fsdp2", precision=torch.bfloat16)

Proof: `python -m pytest tests/trainer`.
"""

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from .config import Config, OptimizerConfig
from .core.blocks import blocks_if_any
from .core.generators import seed_generators
from .core.measure import Loss, untouched
from .core.timing import find_device
from .data import Dataset, Stream
from .loop import LoadedPlan, RunReport, StepReport, mean_loss, run_training_steps
from .primitives import apply_config
from .primitives.grad_accum import GradientAccumulation
from .runs.attach import AttachedRun, saving
from .runs.files import making
from .runs.layout import CHECKPOINT_KINDS, find_run, split_request
from .runs.ranks import Ranks

# The ranks of a run: started by torchrun with DDP or FSDP2, or a single process.


class WrongLaunch(ValueError):
    """The started processes do not fit the configuration."""


@contextlib.contextmanager
def start_ranks(
    *, parallel: str = "none", device: str = "auto", ranks: int | None = None
) -> Iterator[tuple[Ranks, torch.device]]:
    """Join the other ranks, if `parallel` uses several, and choose this rank's device.

    `ranks` is the required number of ranks.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    place = find_device(device)
    _check_launch(parallel, size, ranks)
    if parallel == "none":
        yield Ranks(), place
        return
    local = int(os.environ["LOCAL_RANK"])
    if place.type == "cuda":
        if local >= torch.cuda.device_count():
            raise WrongLaunch(
                f"this machine has {torch.cuda.device_count()} GPUs and torchrun started local "
                f"rank {local}, but NCCL needs a GPU for each rank: use --nproc-per-node with at "
                "most that number, or device=cpu"
            )
        place = torch.device("cuda", local)
        torch.cuda.set_device(place)
    joined = not dist.is_initialized()
    if joined:
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield Ranks(), place
    finally:
        if joined:
            dist.destroy_process_group()


def share(
    module: nn.Module, device: torch.device, *, parallel: str, precision: torch.dtype
) -> nn.Module:
    """Wrap the module for training on several ranks.

    With FSDP2 weights are gathered in `precision` and gradients are reduced in float32.
    """
    if parallel == "none":
        return module
    if parallel == "ddp":
        return DistributedDataParallel(
            module, device_ids=[device] if device.type == "cuda" else None
        )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    half = precision != torch.float32
    policy = MixedPrecisionPolicy(precision, torch.float32) if half else MixedPrecisionPolicy()
    # Without blocks the whole model is one unit.
    for one in (*blocks_if_any(module).values(), module):
        fully_shard(one, mesh=mesh, mp_policy=policy)  # in place
    return module


def _check_launch(parallel: str, size: int, ranks: int | None) -> None:
    launched = "RANK" in os.environ
    count = ranks or (size if size > 1 else 2)
    how = f"torchrun --nproc-per-node {count} train.py parallel={parallel}"
    if parallel == "none" and size > 1:
        raise WrongLaunch(
            f"{size} ranks were started and parallel is none, so each would train the same model "
            "by itself: add parallel=ddp or parallel=fsdp2, or start one process with python"
        )
    if parallel != "none" and not launched:
        raise WrongLaunch(
            f"parallel={parallel} needs ranks, and this is a single process: start it with {how}"
        )
    if ranks is not None and ranks != size:
        raise WrongLaunch(
            f"the configuration is for ranks={ranks} and {size} {'were' if size > 1 else 'was'} "
            f"started: use --nproc-per-node {ranks}, or set ranks={size} (batch_size counts the "
            "samples of all ranks together)"
        )


def leave(status: int) -> NoReturn:
    """Exit the process; with several ranks at once, without Python's clean-up.

    On gloo, torch 2.13 aborts in about one of four exits of a process that used DDP.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


# What is trained: a model, its loss and its data, which no configuration file holds.

TRAINING_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class TrainingTask:
    """A model with its loss and its data.

    Build the module with the same weights on every rank, on the rank's device.
    """

    name: str
    module: nn.Module
    # The loss summed over the terms of a batch.
    loss: Loss
    # The number of terms of a batch, such as its tokens.
    count: Callable[[Any], int]
    dataset: Dataset
    dev: Dataset | None = None
    # Moves a batch to the device of the module.
    place: Callable[[Any], Any] = lambda batch: batch


def training_stream(config: Config, dataset: Dataset, ranks: Ranks) -> Stream:
    """Build the stream of this rank's microbatches."""
    return Stream(
        dataset,
        batch_size=config.batch_size,
        microbatch=config.microbatch,
        seed=config.seed,
        shuffle=config.data.shuffle,
        rank=ranks.rank,
        ranks=ranks.size,
        skipped=config.data.skip,
    )


def training_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Build AdamW or SGD, with weight decay for matrices only."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.beta1)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2))


def apply_recompute(
    config: Config,
    task: TrainingTask,
    *,
    load_plan: Callable[[str], LoadedPlan] | None = None,
) -> list[str]:
    """Apply the configured recompute and return the names of the changed modules.

    Strategies measure on the first microbatch. `load_plan` reads the file of strategy `plan`.
    """
    wanted = config.recomputation()
    if not wanted.enabled:
        return []

    apply_plan = None
    if wanted.plan is not None and load_plan is not None:
        planned = load_plan(wanted.plan)
        apply_plan = planned.apply
        if planned.microbatch < config.microbatch:
            raise ValueError(
                f"{wanted.plan} is for a microbatch of {planned.microbatch}, and "
                f"{config.microbatch} samples take more memory than was planned: set "
                f"microbatch={planned.microbatch}, or plan again with --microbatch"
            )

    def mean(module: nn.Module, batch: Any) -> Tensor:
        return task.loss(module, batch) / task.count(batch)

    batch = task.place(task.dataset.batch(range(config.microbatch)))
    changed = apply_config(task.module, wanted, batch=batch, loss=mean, apply_plan=apply_plan)
    # A plan may change nothing, where everything fits without recompute.
    if not changed and wanted.strategy not in ("none", "plan"):
        raise ValueError(
            f"recompute.strategy={wanted.strategy} changes no layer of {task.name}: lower "
            "recompute.memory_threshold_mb, name layers with recompute.include_patterns, or use "
            "another strategy"
        )
    return list(changed)


def _check_length(task: TrainingTask, length: int) -> None:
    """Run one sample to find out whether the model accepts its length."""
    batch = task.place(task.dataset.batch([0]))
    try:
        with untouched(task.module), torch.no_grad():
            task.loss(task.module, batch)
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"data.length={length}: {task.name} can't take such a sample "
            f"({str(error).splitlines()[0]}); use shorter ones, data.length=null for the length of "
            "its own batch, or a model that is built for it"
        ) from error


# Folder of a run, such as `runs/<name>-001`, with its configuration.


def new_run(config: Config) -> Path:
    """Make the folder for the next run of this name and write the configuration into it."""
    root = Path(config.runs)
    with making(root):
        root.mkdir(parents=True, exist_ok=True)
        number = max((number for number, _ in _runs_of(root, config.name)), default=0)
        while True:
            number += 1
            folder = root / f"{config.name}-{number:03d}"
            try:
                folder.mkdir()
            except FileExistsError:
                continue  # another run took this number at the same moment
            (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
            return folder


def how_to_continue(run: AttachedRun, folder: Path, config: str, words: Sequence[str]) -> str:
    """Return the command that resumes a project's run with the words of its start."""
    size = Ranks().size
    start = f"torchrun --nproc-per-node {size}" if size > 1 else "python"
    when = "to continue"
    if run.ended_by == "steps":
        when = "to train longer"
        longer = f"steps={2 * run.steps}"
        words = [longer if word.startswith("steps=") else word for word in words]
        words += [] if longer in words else [longer]
    file = [] if config == "config.yaml" else ["--config", config]
    return f"{when}: {start} train.py {shlex.join(['--resume', folder.name, *words, *file])}"


def run_folder(config: Config, resume: str | None) -> tuple[Path, str | None]:
    """Return the folder of a run, and which state to load.

    `resume` is `latest` of the runs of this name, a run by name or path, a step of it as RUN@500,
    or the path of a checkpoint. Without it the run is new, and with RUN@best too, which holds
    parameters only.
    """
    if resume is None:
        return new_run(config), None
    root = Path(config.runs)
    place, inside = split_request(resume, root=root)
    if place == "latest":
        runs = [path for _, path in sorted(_runs_of(root, config.name)) if _is_run(path)]
        if not runs:
            raise ValueError(f"no run of {config.name} in {root} has a saved state to resume from")
        folder = runs[-1]
    else:
        folder = find_run(place, root=root, is_run=_is_run)
    if inside.startswith("best"):
        return new_run(config), resume if "/" in inside else f"{folder}@best"
    return folder, inside or "latest"


def _is_run(folder: Path) -> bool:
    return any(True for kind in CHECKPOINT_KINDS for _ in (folder / kind).glob("*.dcp"))


def _runs_of(root: Path, name: str) -> list[tuple[int, Path]]:
    """Return the folders of the runs of this name, with their numbers."""
    pattern = re.compile(rf"{re.escape(name)}-(\d{{3,}})")
    matches = [(pattern.fullmatch(path.name), path) for path in root.glob("*/")]
    return [(int(match[1]), path) for match, path in matches if match is not None]


# A run of a training: built from its configuration, resumed, trained to its end.


@dataclass(frozen=True)
class TrainingRun:
    """An open run, in its folder, that continues from `attached.steps`.

    `changed` names the modules that recompute. `attached` is the result of `saving`.
    """

    folder: Path
    config: Config
    task: TrainingTask
    ranks: Ranks
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    stream: Stream
    changed: Sequence[str]
    attached: AttachedRun

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss summed over the terms of a microbatch, in the configured precision."""
        precision = TRAINING_DTYPES[self.config.precision]
        with torch.autocast(self.device.type, precision, enabled=precision != torch.float32):
            return self.task.loss(model, self.task.place(batch))

    def dev_loss(self) -> float:
        """Return the mean loss over the dev samples, the same ones each time."""
        assert self.task.dev is not None
        return mean_loss(
            self.model,
            self.task.dev,
            self.loss,
            self.task.count,
            samples=self.config.evaluate.samples,
            microbatch=self.config.microbatch,
            rank=self.ranks.rank,
            ranks=self.ranks.size,
        )


Hook = Callable[[StepReport], Any]
Watch = Callable[[TrainingRun], contextlib.AbstractContextManager[Hook]]


@contextlib.contextmanager
def open_run(
    config: Config,
    make_task: Callable[[torch.device], TrainingTask],
    *,
    resume: str | None = None,
    load_plan: Callable[[str], LoadedPlan] | None = None,
) -> Iterator[TrainingRun]:
    """Join the ranks, and build a new run or resume one; `make_task` gets this rank's device.

    `resume` is `latest`, the name of a run, or a saved state. Recompute is applied before the model
    is wrapped for several ranks; `load_plan` reads the file of strategy `plan`.
    """
    started = start_ranks(parallel=config.parallel, device=config.device, ranks=config.ranks)
    with started as (ranks, device):
        task = make_task(device)
        stream = training_stream(config, task.dataset, ranks)
        if config.data.length is not None:
            _check_length(task, config.data.length)
        changed = apply_recompute(config, task, load_plan=load_plan)
        precision = TRAINING_DTYPES[config.precision]
        model = share(task.module, device, parallel=config.parallel, precision=precision)
        optimizer = training_optimizer(config.optimizer, model)
        scaler = torch.amp.GradScaler(device.type) if config.precision == "float16" else None
        seed_generators(config.seed + 1 + ranks.rank)  # dropout differs from rank to rank

        folder, state = ranks.agree(lambda: run_folder(config, resume))
        attached = saving(
            model,
            optimizer,
            scaler=scaler,
            stream=stream,
            resume=state,
            runs=folder,
            # The learning rate is that of the configuration, also after a resume.
            keep_settings=True,
            in_background=True,
            journal=True,
            config=asdict(config),
            spike=config.spike,
            box=config.box,
            **asdict(config.checkpoint),
        )
        with attached:
            yield TrainingRun(
                folder,
                config,
                task,
                ranks,
                device,
                model,
                optimizer,
                scaler,
                stream,
                changed,
                attached,
            )


def train_run(run: TrainingRun, *, watch: Sequence[Watch] = ()) -> RunReport:
    """Train an open run to its end.

    Each context of `watch` is opened on the first rank when the run begins; its hook is called
    after every step.
    """
    config = run.config
    measured = run.task.dev is not None and config.evaluate.every is not None
    with contextlib.ExitStack() as opened:
        watched = watch if run.ranks.first else ()
        report = run_training_steps(
            run.model,
            run.optimizer,
            run.stream,
            run.loss,
            steps=config.steps,
            accumulation=GradientAccumulation(run.stream.microbatches_per_window),
            count=run.task.count,
            clip_norm=config.clip_norm,
            schedule=config.learning_rates(),
            scaler=run.scaler,
            evaluate=run.dev_loss if measured else None,
            evaluate_every=config.evaluate.every if measured else None,
            after_step=[opened.enter_context(each(run)) for each in watched],
            run=run.attached,
        )
    run.attached.close()
    return report
