"""Train model.py on data.py, as config.yaml says: `build_training`, `open_run`, `train`.

python train.py steps=1000 optimizer.learning_rate=1e-3
python train.py --resume latest steps=2000
torchrun --nproc-per-node 8 train.py parallel=fsdp2 precision=bfloat16
"""

import argparse
import importlib
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curry_train import trainer
from curry_train.config import Config, load_config
from curry_train.core.generators import seed_generators, seeded
from curry_train.core.measure import Loss
from curry_train.core.timing import NoSuchDevice
from curry_train.data import Dataset, Stream
from curry_train.loop import mean_loss
from curry_train.primitives import GradientAccumulation, NonFiniteWindow, train_window
from curry_train.runs import RunError, saving
from curry_train.runs.attach import AttachedRun
from curry_train.runs.ranks import Ranks
from curry_train.trainer import leave, share, start_ranks
from data import open_data
from model import build, num_tokens, summed_loss


@dataclass
class Training:
    """The model, its optimizer and its data, on this rank."""

    config: Config
    ranks: Ranks
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    stream: Stream
    dev: Dataset | None
    loss: Loss

    def dev_loss(self) -> float:
        """Return the mean loss of the same dev samples each time."""
        assert self.dev is not None
        return mean_loss(
            self.model,
            self.dev,
            self.loss,
            num_tokens,
            samples=self.config.evaluate.samples,
            microbatch=self.config.microbatch,
            rank=self.ranks.rank,
            ranks=self.ranks.size,
        )


def build_training(config: Config, ranks: Ranks, device: torch.device) -> Training:
    """Build the data, the model with its recompute, and the optimizer."""
    if config.model != "model.py:example":
        raise ValueError(f"model={config.model}: this loop trains what model.py builds, edit that")
    dataset, dev = open_data(config.data)
    precision = trainer.TRAINING_DTYPES[config.precision]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss summed over the tokens of a microbatch, in the configured precision."""
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            return summed_loss(model, batch)

    # The same weights on every rank. Recompute comes before DDP or FSDP2.
    with seeded(config.seed):
        module = build().to(device, trainer.TRAINING_DTYPES[config.dtype])
    task = trainer.TrainingTask("the model", module, loss, num_tokens, dataset)
    changed = trainer.apply_recompute(config, task, load_plan=load_plan)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    if ranks.first:
        print(
            f"{num_parameters / 1e6:.2f}M parameters, {len(dataset):,} samples, "
            f"{config.precision} on {device.type} x {ranks.size}, {len(changed)} modules recompute"
        )

    model = share(module, device, parallel=config.parallel, precision=precision)
    optimizer = trainer.training_optimizer(config.optimizer, model)  # only matrices decay
    scaler = torch.amp.GradScaler(device.type) if config.precision == "float16" else None
    stream = trainer.training_stream(config, dataset, ranks)
    seed_generators(config.seed + 1 + ranks.rank)  # dropout differs from rank to rank
    return Training(config, ranks, device, model, optimizer, scaler, stream, dev, loss)


def open_run(training: Training, resume: str | None) -> tuple[Path, AttachedRun]:
    """Open the folder of a new run, or of the run to resume, with everything that is saved."""
    config = training.config
    folder, state = training.ranks.agree(lambda: trainer.run_folder(config, resume))
    run = saving(
        training.model,
        training.optimizer,
        scaler=training.scaler,
        runs=folder,
        stream=training.stream,
        resume=state,
        keep_settings=True,  # the learning rate is that of config.yaml, also after a resume
        in_background=True,
        journal=True,
        config=asdict(config),
        spike=config.spike,
        box=config.box,  # keeps a bad step, for curry-train runs replay
        **asdict(config.checkpoint),
    )
    if run.resumed is not None and training.ranks.first:
        left = "" if run.steps < config.steps else ": nothing is left to train"
        print(f"resuming {folder.name} at step {run.steps}{left}\n{run.resumed.words}")
    return folder, run


def is_due(step: int, every: int | None, steps: int) -> bool:
    return every is not None and (step % every == 0 or step == steps)


class Log:
    """Lines on the terminal, and figures for TensorBoard where log.tensorboard is true."""

    def __init__(self, folder: Path, config: Config, ranks: Ranks) -> None:
        self.config = config
        self.first = ranks.first
        self.writer: Any = None
        if config.log.tensorboard and ranks.first:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ValueError("log.tensorboard needs: pip install tensorboard") from error
            self.writer = SummaryWriter(folder / "tensorboard")

    def add(self, step: int, figures: dict[str, float]) -> None:
        """Show a step, every `log.every` steps and where the dev loss was measured."""
        if self.writer is not None:
            for name, value in figures.items():
                self.writer.add_scalar(name, value, step)
        due = step == 1 or is_due(step, self.config.log.every, self.config.steps)
        if self.first and (due or "dev_loss" in figures):
            dev = f"  dev {figures['dev_loss']:.4f}" if "dev_loss" in figures else ""
            speed = figures["terms"] / figures["seconds"]
            print(
                f"step {step}/{self.config.steps}  loss {figures['loss']:.4f}{dev}  "
                f"{speed:,.0f} tokens/s",
                flush=True,
            )


def train(training: Training, run: AttachedRun, log: Log) -> None:
    """Train until the last step or a signal. This is the loop."""
    config = training.config
    schedule = config.learning_rates()
    accumulation = GradientAccumulation(training.stream.microbatches_per_window)
    windows = accumulation.windows(training.stream, count=num_tokens)

    while run.continues(until=config.steps):
        began = time.perf_counter()
        factor = schedule(run.steps)
        for group in training.optimizer.param_groups:
            group["lr"] = config.optimizer.learning_rate * factor

        try:
            result = train_window(
                training.model,
                next(windows),
                training.loss,
                training.optimizer,
                clip_norm=config.clip_norm,
                scaler=training.scaler,
            )
        except NonFiniteWindow as error:
            run.not_finite(error)  # rolls back, or raises the error again
            continue

        step = run.steps + 1
        figures = {
            "grad_norm": result.grad_norm,
            "terms": result.num_terms,
            "learning_rate": config.optimizer.learning_rate * factor,
            "seconds": time.perf_counter() - began,
        }
        metrics = {}
        if training.dev is not None and is_due(step, config.evaluate.every, config.steps):
            metrics["dev_loss"] = training.dev_loss()

        # Saves what is due and writes the journal. After a loss spike it rolls back instead: the
        # next step is then an earlier one, without the samples of the spike.
        run.step(loss=result.loss, stepped=result.stepped, figures=figures, **metrics)
        log.add(step, {"loss": result.loss} | metrics | figures)


def load_plan(path: str) -> Any:
    """Read a plan file with the package's planner, which an owned copy of its rooms leaves out."""
    try:
        planner = importlib.import_module("curry_train.plan")
    except ImportError as error:
        raise ValueError("a plan file needs the package: this copy has no planner") from error
    return planner.Plan.load(path)


def main(arguments: list[str] | None = None) -> int:
    """Read the configuration, join the ranks and train; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="over config.yaml")
    parser.add_argument("--config", default="config.yaml", help="default: config.yaml")
    parser.add_argument("--resume", help="latest, RUN, RUN@STEP, RUN@before-STEP or RUN@best")
    parser.add_argument("--show-config", action="store_true", help="print every key and exit")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = load_config(options.config, options.words)
        if options.show_config:
            print(config.to_yaml(), end="")
            return 0
        started = start_ranks(parallel=config.parallel, device=config.device, ranks=config.ranks)
        with started as (ranks, device):
            training = build_training(config, ranks, device)
            folder, run = open_run(training, options.resume)
            with run:
                train(training, run, Log(folder, config, ranks))
            if ranks.first:
                print(f"ended after step {run.steps} ({run.ended_by}), saved in {folder}")
                print(trainer.how_to_continue(run, folder, options.config, options.words))
            return run.exit_status
    except (ValueError, NoSuchDevice, NonFiniteWindow, RunError, torch.OutOfMemoryError) as error:
        print(f"Error: {error}", file=sys.stderr)
        if isinstance(error, NoSuchDevice):
            return 3
        return 2 if isinstance(error, ValueError) else 1


if __name__ == "__main__":
    leave(main())
