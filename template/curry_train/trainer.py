"""Train a model from a configuration: parts, steps, evaluation, saving, resume.

Proof: `python -m pytest tests/trainer`.
"""

import contextlib
import functools
import logging
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from .config import Config, OptimizerConfig
from .core.measure import peak_bytes
from .core.random import buffers_kept, generators_kept, untouched
from .data import Dataset, Stream, open_datasets
from .distribute import TrainingRanks, share, start_ranks
from .loop import RunReport, StepReport, Stop, run_training_steps, save_checkpoint, stop_on_signals
from .primitives.grad_accum import GradientAccumulation, NonFiniteWindow
from .runs.background import BackgroundSaver
from .runs.comparison import run_facts
from .runs.journal import Journal
from .runs.layout import BEST_KIND, CHECKPOINT_KINDS, SavedCheckpoint, step_of, what_runs_there_are
from .runs.policy import SavingPolicy
from .runs.resume import Resumed
from .runs.spike import Recovered, Recoveries, Spike, SpikeWatchdog, recover
from .runs.state import TrainingState
from .runs.store import Store
from .workloads.load import load_workload
from .workloads.workload import Batch, Case

# ------------------------------------------------------------------------------
# Mean loss over dev samples, the same samples for any number of ranks.
# ------------------------------------------------------------------------------


def mean_loss(
    model: nn.Module,
    dataset: Dataset,
    loss: Callable[[nn.Module, Any], Tensor],
    count: Callable[[Any], int],
    *,
    samples: int,
    microbatch: int,
    rank: int = 0,
    ranks: int = 1,
) -> float:
    """Return the mean loss over the first `samples` samples, in eval mode.

    The model and every random generator are left unchanged. A rank without samples left evaluates
    the last sample with no weight, because FSDP2 needs every rank in each forward.
    """
    samples = min(samples, len(dataset))
    sums = torch.zeros(2, dtype=torch.float64)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), generators_kept(), buffers_kept(model):
            for start in range(0, samples, microbatch * ranks):
                mine = range(
                    start + rank * microbatch, min(samples, start + (rank + 1) * microbatch)
                )
                batch = dataset.batch(mine or [samples - 1])
                value = loss(model, batch)
                if mine:
                    sums += torch.tensor([value.item(), count(batch)], dtype=torch.float64)
    finally:
        model.train(was_training)
    if ranks > 1:
        sums = sums.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(sums)
    total, terms = sums.tolist()
    return total / terms if terms else float("nan")


# ------------------------------------------------------------------------------
# Build the parts of a run: model, recompute, ranks, optimizer and data.
# ------------------------------------------------------------------------------

TRAINING_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class TrainingParts:
    """Model, optimizer, data and settings of a run.

    `changed` names the modules that recompute; `dev` is None without dev samples.
    """

    config: Config
    ranks: TrainingRanks
    case: Case
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    stream: Stream
    dev: Dataset | None
    num_parameters: int
    changed: Sequence[str]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss summed over the terms of a microbatch, in the configured precision."""
        precision = TRAINING_DTYPES[self.config.precision]
        with torch.autocast(self.case.device.type, precision, enabled=precision != torch.float32):
            return self.case.workload.loss(model, self.case.place(batch))

    def dev_loss(self) -> float:
        assert self.dev is not None
        measure = functools.partial(mean_loss, rank=self.ranks.rank, ranks=self.ranks.size)
        sizes = {"samples": self.config.evaluate.samples, "microbatch": self.config.microbatch}
        return measure(self.model, self.dev, self.loss, self.case.workload.count, **sizes)


def build_parts(config: Config, ranks: TrainingRanks) -> TrainingParts:
    """Build the parts with the same weights on every rank.

    Recompute is applied before the model is wrapped for several ranks.
    """
    workload = load_workload(config.model)
    dtype = TRAINING_DTYPES[config.dtype]
    case = Case(workload, ranks.device, dtype, batch_size=config.microbatch, seed=config.seed)
    module = case.build()
    data, dev = open_datasets(config.data, case, vocabulary=_vocabulary(module))
    stream = Stream(
        data,
        batch_size=config.batch_size,
        microbatch=config.microbatch,
        seed=config.seed,
        shuffle=config.data.shuffle,
        rank=ranks.rank,
        ranks=ranks.size,
        skipped=[(start, stop) for start, stop in config.data.skip],
    )
    if config.data.length is not None:
        _check_length(module, data, case, config.data.length)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    changed = _recompute(module, config, case, data)
    model = share(
        module, ranks, parallel=config.parallel, precision=TRAINING_DTYPES[config.precision]
    )
    optimizer = training_optimizer(config.optimizer, model)
    scaler = torch.amp.GradScaler(ranks.device.type) if config.precision == "float16" else None
    return TrainingParts(
        config, ranks, case, model, optimizer, scaler, stream, dev, num_parameters, changed
    )


def training_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group | {"initial_lr": config.learning_rate} for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.beta1)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2))


def _recompute(module: nn.Module, config: Config, case: Case, data: Dataset) -> Sequence[str]:
    """Apply the configured recompute and return the names of the changed modules.

    Other techniques are imported on demand, because a project may not have them.
    """
    wanted = config.recomputation()
    if not wanted.enabled:
        return []
    from . import plan

    if (
        wanted.plan is not None
        and (planned := plan.Plan.load(wanted.plan)).microbatch < config.microbatch
    ):
        raise ValueError(
            f"{wanted.plan} is for a microbatch of {planned.microbatch}, and {config.microbatch} "
            "samples take more memory than was planned: set "
            f"microbatch={planned.microbatch}, or plan again with --microbatch"
        )
    chooser = plan.SelectiveCheckpointer(wanted)
    chooser.apply(
        module, batch=case.place(data.batch(range(config.microbatch))), loss=case.workload.mean_loss
    )
    changed = chooser.get_checkpointed_layers()
    # A plan may change nothing, where everything fits without recompute.
    if not changed and wanted.strategy not in ("none", "plan"):
        raise ValueError(
            f"recompute.strategy={wanted.strategy} changes no layer of {case.workload.name}: lower "
            "recompute.memory_threshold_mb, name layers with recompute.include_patterns, or use "
            "another strategy"
        )
    return changed


def _check_length(module: nn.Module, data: Dataset, case: Case, length: int) -> None:
    """Run one sample to find out whether the model accepts its length."""
    batch = case.place(data.batch([0]))
    try:
        with untouched(module), torch.no_grad():
            case.workload.loss(module, batch)
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"data.length={length}: {case.workload.name} can't take such a sample "
            f"({str(error).splitlines()[0]}); use shorter ones, data.length=null for the length of "
            "its own batch, or a model that is built for it"
        ) from error


def _vocabulary(module: nn.Module) -> int | None:
    """Return the vocabulary size of the model's first embedding, None without one."""
    tables = (layer.num_embeddings for layer in module.modules() if isinstance(layer, nn.Embedding))
    return next(tables, None)


# ------------------------------------------------------------------------------
# Folder of a run, such as `runs/<name>-001`, with its configuration.
# ------------------------------------------------------------------------------


def new_run(config: Config) -> Path:
    """Make the folder for the next run of this name and write the configuration into it."""
    root = Path(config.runs)
    root.mkdir(parents=True, exist_ok=True)
    numbers = [
        int(match[1])
        for path in root.iterdir()
        if (match := _numbered(config.name).fullmatch(path.name))
    ]
    number = max(numbers, default=0)
    while True:
        number += 1
        folder = root / f"{config.name}-{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue  # another run took this number at the same moment
        (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
        return folder


def note_resumed(folder: Path, config: Config, *, step: int) -> None:
    """Write the configuration of a resumed run beside the first one, if they differ."""
    text = config.to_yaml()
    first = folder / "config.yaml"
    if not first.is_file() or first.read_text(encoding="utf-8") != text:
        (folder / f"config-from-step-{step:08d}.yaml").write_text(text, encoding="utf-8")


def run_to_resume(config: Config, resume: str) -> tuple[Path | None, str]:
    """Return the folder of the run to resume, and which of its states to load.

    `resume` is `latest` of the runs of this name, a run by name or path, a step of it as RUN@500,
    or the path of a checkpoint. RUN@best holds parameters only and starts a new run: the folder is
    None.
    """
    root = Path(config.runs)
    path = Path(resume)
    if (
        path.parent.name in CHECKPOINT_KINDS
        and (step := step_of(path.parent.name, path.name)) is not None
    ):
        return (None, resume) if path.parent.name == BEST_KIND else (path.parent.parent, str(step))
    place, _, inside = resume.partition("@")
    runs = [root / place, Path(place)] if place != "latest" else _newest_first(root, config.name)
    for folder in runs:
        if _is_run(folder):
            return (None, f"{folder}@best") if inside == "best" else (folder, inside or "latest")

    # A path is searched for in its own parent folder.
    searched = root
    if place != "latest" and Path(place).parent.name:
        searched = Path(place).parent
    names = [folder.name for folder in searched.glob("*/") if _is_run(folder)]
    wanted = config.name if place == "latest" else Path(place).name
    known = f"no run in {searched} has one"
    if names:
        known = what_runs_there_are(wanted, names, root=searched)
    raise ValueError(f"there is no saved state to resume from for {resume!r}: {known}")


def _is_run(folder: Path) -> bool:
    return any(True for kind in CHECKPOINT_KINDS for _ in (folder / kind).glob("*.dcp"))


def _newest_first(root: Path, name: str) -> list[Path]:
    found = [
        (int(match[1]), path)
        for path in root.glob("*/")
        if (match := _numbered(name).fullmatch(path.name))
    ]
    return [path for _, path in sorted(found, reverse=True)]


def _numbered(name: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(name)}-(\d{{3,}})")


# ------------------------------------------------------------------------------
# Journal of a training run, written by a hook of the training loop.
# ------------------------------------------------------------------------------


class RunJournal:
    """Write the journal; call it after each step.

    Other events, such as saves, prunes, spikes and rollbacks, are written to `journal`.
    """

    def __init__(self, journal: Journal, run: "TrainingRun") -> None:
        self.journal = journal
        self.step = run.first_step
        self.ended_by: str | None = None
        self._run = run
        self._steps = run.parts.config.steps

    def __call__(self, report: StepReport) -> None:
        self.step = report.step
        self.journal.step(
            report.step,
            loss=report.loss,
            learning_rate=report.learning_rate,
            grad_norm=report.grad_norm,
            terms=report.num_terms,
            seconds=report.seconds,
            peak_bytes=peak_bytes(self._run.parts.ranks.device),
            epoch=self._run.parts.stream.epoch,
        )
        if not report.stepped:
            self.journal.write(
                "skip",
                step=report.step,
                reason="a gradient was not finite, and the scale is lowered",
            )
        if report.dev_loss is not None:
            self.journal.write("eval", step=report.step, metric="dev_loss", value=report.dev_loss)

    def saved(self, saved: SavedCheckpoint) -> None:
        """Record that a state was committed, with its size."""
        self.journal.write(
            "save", step=saved.step, checkpoint=saved.folder, num_bytes=saved.num_bytes
        )

    def pruned(self, step: int, checkpoint: str, **facts: Any) -> None:
        """Record that the saved state of `step` was removed by the retention."""
        self.journal.write("prune", step=self.step, checkpoint=checkpoint, of_step=step, **facts)

    def ended(self, reason: str) -> None:
        """Set the reason of the last event, as in `RunReport.ended_by`."""
        self.ended_by = reason

    def reason(self) -> str:
        return self.ended_by or ("steps" if self.step >= self._steps else "before its last step")


@contextlib.contextmanager
def write_journal(run: "TrainingRun") -> Iterator[RunJournal]:
    """Write an event for each step to journal.jsonl at once; the first has the run's facts."""
    parts = run.parts
    with Journal(run.folder, rank=parts.ranks.rank) as journal:
        facts = run_facts(
            asdict(parts.config), device=parts.ranks.device, world_size=parts.ranks.size
        )
        if run.first_step or not journal.empty:
            resumed = run.resumed.saved.folder if run.resumed else None
            journal.resume(run.first_step, facts=facts, checkpoint=resumed)
        else:
            journal.start(facts=facts)
        hook = RunJournal(journal, run)
        try:
            yield hook
        except BaseException as error:
            journal.write("stop", step=hook.step, reason=f"{type(error).__name__}: {error}"[:1000])
            raise
        journal.write("stop", step=hook.step, reason=hook.reason())


# ------------------------------------------------------------------------------
# Spike watchdog of a training run: roll back, skip the samples, and train on.
# ------------------------------------------------------------------------------

MOST_LISTED = 4096  # the journal lists skipped samples up to this number
SPIKE_STOP_REASON = "spike"
logger = logging.getLogger(__name__)


class SpikeWatch:
    """Judge the loss after each step; stop the loop at a spike, and recover from it.

    `found` is the spike that stopped the loop, until `recover` has rolled back from it.
    """

    def __init__(self, run: "TrainingRun", journal: RunJournal, stop: Stop) -> None:
        self.found: Spike | None = None
        self.config = run.parts.config.spike
        self._run = run
        self._journal = journal
        self._stop = stop
        self._schedule = run.parts.config.learning_rates()

    def factor(self, done: int) -> float:
        """Return the factor on the peak learning rate for the step after `done` steps."""
        return self._schedule(done) * self._run.recoveries.factor(done)

    def __call__(self, report: StepReport) -> None:
        if self.config.action != "none" and report.stepped:
            self._judge(report.step, report.loss)

    def not_finite(self, error: NonFiniteWindow) -> None:
        """Treat a step with a loss or gradient that is not finite as a spike.

        Raises the error again if the settings do not roll back.
        """
        if not self.config.rolls_back:
            raise error
        self._judge(self._run.state.step + 1, math.nan, why=str(error))

    def recover(self) -> None:
        """Roll back to before the spike and skip its samples. Raises SpikeNotRecovered."""
        spike = self.found
        run = self._run
        stream = run.parts.stream
        assert spike is not None
        for saved in run.policy.finish():
            self._journal.saved(saved)
        done = recover(
            spike,
            self.config,
            state=run.state,
            load=run.load,
            after=lambda position, windows: stream.after(position, windows=windows),
            recoveries=run.recoveries,
            write=run.parts.ranks.first,
            go_on=f"--resume {run.folder.name}@{{}}",
        )
        samples = stream.samples_between(done.recovery.start, done.recovery.stop)
        stream.skip(done.recovery.start, done.recovery.stop)
        self._tell(spike, done, samples)
        self.found = None
        if (
            self._stop.reason == SPIKE_STOP_REASON
        ):  # a signal that came meanwhile still ends the run
            self._stop.reason = None

    def _judge(self, step: int, loss: float, *, why: str = "") -> None:
        spike = self._run.watchdog.observe(step, loss)
        if spike is None:
            return
        words = why or spike.words
        seen = {
            "loss": None if why else loss,
            "first": spike.first,
            "baseline": spike.baseline,
            "limit": spike.limit,
        }
        self._journal.journal.write("spike", step=step, reason=words, **seen)
        if self.config.rolls_back:
            self.found = spike
            self._stop.ask(SPIKE_STOP_REASON)
            self._say("spike: %s", words)
        else:
            self._say(
                "spike: %s; with spike.action=rollback the run rolls back and skips its samples",
                words,
            )

    def _tell(self, spike: Spike, done: Recovered, samples: list[int]) -> None:
        journal = self._journal.journal
        recovery = done.recovery
        folder = done.resumed.saved.folder
        start = recovery.start
        stop = recovery.stop
        journal.rollback(
            recovery.back_to,
            from_step=spike.step,
            reason=spike.words,
            checkpoint=folder,
            number=recovery.attempt,
        )
        words = (
            f"positions {start} to {stop - 1} of the data, around the spike of step {spike.step}"
        )
        listed = {"samples": samples} if len(samples) <= MOST_LISTED else {}
        journal.write(
            "skip",
            step=recovery.back_to,
            reason=words,
            start=start,
            stop=stop,
            num_samples=len(samples),
            **listed,
        )
        slower = ""
        if recovery.slower_until:
            slower = (
                f", at {recovery.learning_rate:g} of the learning rate until step "
                f"{recovery.slower_until}"
            )
        self._say(
            "back at %s, without the %d samples at positions %d to %d%s (attempt %d of %d)",
            folder,
            len(samples),
            start,
            stop - 1,
            slower,
            recovery.attempt,
            self.config.attempts,
        )

    def _say(self, words: str, *figures: object) -> None:
        if self._run.parts.ranks.first:
            logger.warning(words, *figures)


# ------------------------------------------------------------------------------
# Run of a training from its configuration: folder, saved state, resume and hooks.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingRun:
    """An open run that continues from `state.step`, in its folder.

    `resumed` names the loaded checkpoint and the damaged ones that were skipped.
    """

    folder: Path
    parts: TrainingParts
    state: TrainingState
    policy: SavingPolicy
    watchdog: SpikeWatchdog
    recoveries: Recoveries
    resumed: Resumed | None

    @property
    def first_step(self) -> int:
        return self.state.step

    def load(self, what: str) -> Resumed | None:
        """Load a saved state of this run into model, optimizer and data stream."""
        return _load(self.policy, self.state, self.parts, what)


@dataclass(frozen=True)
class Trained:
    """How a run ended, its folder, and the newest state in it."""

    report: RunReport
    folder: Path
    saved: SavedCheckpoint | None


Hook = Callable[[StepReport], Any]
Watch = Callable[[TrainingRun], contextlib.AbstractContextManager[Hook]]


def train(config: Config, *, resume: str | None = None, watch: Sequence[Watch] = ()) -> Trained:
    """Train on this rank, from a new run or a resumed one."""
    with open_run(config, resume=resume) as run:
        return train_run(run, watch=watch)


@contextlib.contextmanager
def open_run(config: Config, *, resume: str | None = None) -> Iterator[TrainingRun]:
    """Join the ranks and build a new run, or resume one.

    `resume` is `latest`, the name of a run, or a saved state.
    """
    with start_ranks(parallel=config.parallel, device=config.device, ranks=config.ranks) as ranks:
        parts = build_parts(config, ranks)
        watchdog = SpikeWatchdog(config.spike)
        state = TrainingState(
            parts.model,
            parts.optimizer,
            scaler=parts.scaler,
            config=asdict(config),
            extra={"spike": watchdog},
        )
        _seed(config.seed + 1 + ranks.rank)  # dropout draws differ from rank to rank
        folder, what = (None, None) if resume is None else run_to_resume(config, resume)
        if folder is None:
            folder = ranks.agree(new_run(config) if ranks.first else None)
        with contextlib.ExitStack() as opened:
            store = opened.enter_context(Store(folder))
            saver = opened.enter_context(BackgroundSaver(store))
            policy = opened.enter_context(SavingPolicy(store, config.checkpoint, saver=saver))
            resumed = None if what is None else _load(policy, state, parts, what)
            if resumed is not None and ranks.first:
                note_resumed(folder, config, step=state.step)
            recoveries = Recoveries(store.files)
            for recovery in recoveries.done:
                parts.stream.skip(recovery.start, recovery.stop)
            yield TrainingRun(folder, parts, state, policy, watchdog, recoveries, resumed)


def train_run(run: TrainingRun, *, watch: Sequence[Watch] = ()) -> Trained:
    """Train an open run to its end.

    Each context of `watch` is opened on the first rank when the run begins; its hook is called
    after every step.
    """
    parts = run.parts
    config = parts.config
    state = run.state

    def keep(report: StepReport) -> None:
        state.step = report.step
        state.position = parts.stream.position
        measured_dev = {} if report.dev_loss is None else {"dev_loss": report.dev_loss}
        metrics = {"loss": report.loss} | measured_dev
        if spikes.found is None:
            for saved in run.policy.after_step(report.step, state, metrics):
                journal.saved(saved)

    def save_last(step: int) -> None:
        if spikes.found is None:
            for saved in save_checkpoint(run.policy, state):
                journal.saved(saved)

    def train_on() -> RunReport | None:
        """Train until the end or a spike; None if a loss or gradient was not finite."""
        try:
            return run_training_steps(
                parts.model,
                parts.optimizer,
                parts.stream,
                parts.loss,
                steps=config.steps,
                first_step=state.step,
                accumulation=GradientAccumulation(parts.stream.microbatches_per_window),
                count=parts.case.workload.count,
                clip_norm=config.clip_norm,
                schedule=spikes.factor,
                scaler=parts.scaler,
                evaluate=parts.dev_loss if measured else None,
                evaluate_every=config.evaluate.every if measured else None,
                save=save_last,
                after_step=[journal, *hooks, spikes, keep],
                stop=stop,
            )
        except NonFiniteWindow as error:
            spikes.not_finite(error)
            return None

    measured = parts.dev is not None and config.evaluate.every is not None
    watched = _watching(watch if parts.ranks.first else (), run)
    with write_journal(run) as journal, watched as hooks, stop_on_signals() as stop:
        spikes = SpikeWatch(run, journal, stop)
        while (report := train_on()) is None or spikes.found is not None:
            spikes.recover()
        journal.ended(report.ended_by)
    return Trained(report, run.folder, run.policy.store.latest())


@contextlib.contextmanager
def _watching(watch: Sequence[Watch], run: TrainingRun) -> Iterator[list[Hook]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(each(run)) for each in watch]


def _load(
    policy: SavingPolicy, state: TrainingState, parts: TrainingParts, what: str
) -> Resumed | None:
    """Load a saved state, but keep the optimizer settings of the configuration."""
    settings = []
    for group in _groups(parts):
        settings.append({key: value for key, value in group.items() if key != "params"})
    resumed = policy.resume(state, what)
    for group, configured in zip(_groups(parts), settings, strict=True):
        group.update(configured)
    parts.stream.position = state.position
    return resumed


def _groups(parts: TrainingParts) -> list[dict[str, Any]]:
    return parts.optimizer.param_groups


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
