"""Train the model of model.py on the data of data.py, as config.yaml says.

    python train.py steps=1000 optimizer.learning_rate=1e-3
    python train.py --resume latest steps=2000
    torchrun --nproc-per-node 8 train.py parallel=fsdp2 precision=bfloat16

Read it from top to bottom; `train` is the whole training.
"""

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curry_train.config import Config, load_config
from curry_train.core.random import seeded
from curry_train.core.timing import NoSuchDevice
from curry_train.data import Stream
from curry_train.distribute import leave, share, start_ranks
from curry_train.loop import mean_loss
from curry_train.primitives import GradientAccumulation, NonFiniteWindow, apply_config, train_window
from curry_train.runs import RunError, saving
from curry_train.runs.ranks import Ranks
from curry_train.trainer import (
    new_run,
    note_resumed,
    run_to_resume,
    seed_generators,
    training_optimizer,
)
from data import open_data
from model import build, num_tokens, summed_loss

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def train(config: Config, ranks: Ranks, device: torch.device, *, resume: str | None = None) -> int:
    """Train to the last step, or until a signal; return the exit status."""
    dataset, dev = open_data(config.data)
    stream = Stream(
        dataset,
        batch_size=config.batch_size,
        microbatch=config.microbatch,
        seed=config.seed,
        shuffle=config.data.shuffle,
        rank=ranks.rank,
        ranks=ranks.size,
        skipped=[(start, stop) for start, stop in config.data.skip],
    )

    # The loss of a microbatch, summed over its tokens, in the configured precision.
    precision = DTYPES[config.precision]

    def batch_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            return summed_loss(model, batch)

    # The model, with the same weights on every rank. Recompute comes before DDP or FSDP2.
    with seeded(config.seed):
        module = build().to(device, DTYPES[config.dtype])
    changed = recompute(module, config, dataset.batch(range(config.microbatch)), batch_loss)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    model = share(module, device, parallel=config.parallel, precision=precision)
    optimizer = training_optimizer(config.optimizer, model)  # weight decay for matrices only
    scaler = torch.amp.GradScaler(device.type) if config.precision == "float16" else None
    seed_generators(config.seed + 1 + ranks.rank)  # dropout differs from rank to rank

    # The folder of the run: a new one, or that of the run to resume.
    folder, state = (None, None) if resume is None else run_to_resume(config, resume)
    if folder is None:
        folder = ranks.agree(lambda: new_run(config))
    run = saving(
        model,
        optimizer,
        scaler=scaler,
        runs=folder,
        stream=stream,
        resume=state,
        keep_settings=True,  # the learning rate is that of config.yaml, also after a resume
        resume_hint=f"--resume {folder.name}@{{}}",
        in_background=True,
        journal=True,
        config=asdict(config),
        spike=config.spike,
        **asdict(config.checkpoint),
    )
    show = print if ranks.first else lambda *_: None
    show(
        f"{folder}: {num_parameters / 1e6:.2f}M parameters, {len(dataset):,} samples, "
        f"{config.precision} on {device.type} x {ranks.size}, {len(changed)} modules recompute"
    )

    schedule = config.learning_rates()
    accumulation = GradientAccumulation(stream.microbatches_per_window)
    windows = accumulation.windows(stream, count=num_tokens)
    with run, Figures(folder, enabled=config.log.tensorboard and ranks.first) as figures:
        if run.resumed is not None:
            show(run.resumed.words)
            if ranks.first:
                note_resumed(folder, config, step=run.steps)

        while run.continues(until=config.steps):
            began = time.perf_counter()
            factor = schedule(run.steps) * run.learning_rate_factor()
            for group in optimizer.param_groups:
                group["lr"] = config.optimizer.learning_rate * factor
            try:
                result = train_window(
                    model,
                    next(windows),
                    batch_loss,
                    optimizer,
                    clip_norm=config.clip_norm,
                    scaler=scaler,
                )
            except NonFiniteWindow as error:
                run.not_finite(error)  # rolls back, or raises the error again
                continue

            step = run.steps + 1
            measured = {
                "grad_norm": result.grad_norm,
                "terms": result.num_terms,
                "learning_rate": optimizer.param_groups[0]["lr"],
                "seconds": time.perf_counter() - began,
            }
            metrics = {}
            every = config.evaluate.every
            if dev is not None and every and (step % every == 0 or step == config.steps):
                metrics["dev_loss"] = mean_loss(
                    model,
                    dev,
                    batch_loss,
                    num_tokens,
                    samples=config.evaluate.samples,
                    microbatch=config.microbatch,
                    rank=ranks.rank,
                    ranks=ranks.size,
                )

            # Saves what is due and writes the journal. After a loss spike it rolls back instead:
            # the next step is then an earlier one, without the samples of the spike.
            run.step(loss=result.loss, stepped=result.stepped, figures=measured, **metrics)

            figures.add(step, {"loss": result.loss} | measured | metrics)
            if step in (1, config.steps) or step % config.log.every == 0 or metrics:
                dev_text = "".join(f"  dev {value:.4f}" for value in metrics.values())
                speed = result.num_terms / measured["seconds"]
                show(
                    f"step {step}/{config.steps}  loss {result.loss:.4f}{dev_text}  "
                    f"{speed:,.0f} tokens/s"
                )

    show(f"step {run.steps} is saved in {folder}")
    if run.ended_by != "steps":
        show(f"ended by {run.ended_by}: go on with python train.py --resume {folder.name}")
    return run.exit_status


def recompute(module: nn.Module, config: Config, batch: Any, batch_loss: Any) -> list[str]:
    """Apply the recompute of the configuration, and return the names of the changed modules."""

    def mean(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return batch_loss(module, batch) / num_tokens(batch)

    wanted = config.recomputation()
    apply_plan = None
    if wanted.enabled and wanted.plan is not None:
        from curry_train.plan import Plan

        plan = Plan.load(wanted.plan)
        if plan.microbatch < config.microbatch:
            raise ValueError(f"{wanted.plan} is for microbatch={plan.microbatch}: set that")
        apply_plan = plan.apply
    changed = apply_config(module, wanted, batch=batch, loss=mean, apply_plan=apply_plan)
    if not changed and wanted.enabled and wanted.strategy not in ("none", "plan"):
        raise ValueError(f"recompute.strategy={wanted.strategy} changes no layer: use another one")
    return changed


class Figures:
    """Figures of each step for TensorBoard, where log.tensorboard is true."""

    def __init__(self, folder: Path, *, enabled: bool) -> None:
        self.writer: Any = None
        if enabled:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(folder / "tensorboard")

    def __enter__(self) -> "Figures":
        return self

    def __exit__(self, *raised: object) -> None:
        if self.writer is not None:
            self.writer.close()

    def add(self, step: int, figures: dict[str, Any]) -> None:
        if self.writer is not None:
            for name, value in figures.items():
                self.writer.add_scalar(name, value, step)


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
            return train(config, ranks, device, resume=options.resume)
    except (ValueError, NoSuchDevice, NonFiniteWindow, RunError) as error:
        print(f"Error: {error}", file=sys.stderr)
        if isinstance(error, NoSuchDevice):
            return 3
        return 2 if isinstance(error, ValueError) else 1


if __name__ == "__main__":
    leave(main())
