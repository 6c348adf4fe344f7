"""Pipelines of a small transformer, for predicted ranks and for real processes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from curry_train.plan.optimizers import make_optimizer
from curry_train.plan.pipeline import pipeline_peaks, running_pipeline, stepping
from curry_train.plan.rank_step import peak_of_running_rank
from curry_train.primitives import recompute_blocks
from curry_train.workloads.models import token_loss, transformer
from curry_train.workloads.workload import Case

BATCH_SIZE = 8
MICROBATCHES = 4


def small():
    return transformer(depth=4, dim=64, vocabulary=256, length=16)


class Part(nn.Module):
    """Some blocks of a transformer; the first part embeds, and the last one has the head."""

    def __init__(self, model, number, count, *, recompute=False):
        super().__init__()
        size = len(model.layers) // count
        self.embedding = model.embedding if number == 0 else None
        self.layers = nn.ModuleList(model.layers[number * size : (number + 1) * size])
        is_last = number == count - 1
        self.norm = model.norm if is_last else None
        self.head = model.head if is_last else None
        self.register_buffer("cosine", model.cosine)
        self.register_buffer("sine", model.sine)
        if recompute:
            recompute_blocks(self, blocks="layers.*")

    def forward(self, x):
        x = x if self.embedding is None else self.embedding(x)
        length = x.shape[1]
        for layer in self.layers:
            x = layer(x, self.cosine[:length], self.sine[:length])
        return x if self.head is None else self.head(self.norm(x))


def mean_loss(logits, targets):
    return token_loss(logits, targets) / targets.numel()


def stages_of(model, mesh, *, each=1, **options):
    """Make the stages of this rank, as one module and as torch's stages."""
    rank = mesh.get_local_rank()
    count = each * mesh.size()
    numbers = range(rank, count, mesh.size())
    parts = nn.ModuleList(Part(model, number, count, **options) for number in numbers)
    device = torch.device("cpu")
    stages = [
        PipelineStage(part, number, count, device, group=mesh.get_group())
        for part, number in zip(parts, numbers, strict=True)
    ]
    return parts, stages


def run(schedule, rank, world):
    """Return a step of a schedule, with what this rank has of a batch."""

    def step(batch):
        inputs = (batch["tokens"],) if rank == 0 else ()
        ends = {"target": batch["targets"], "losses": []} if rank == world - 1 else {}
        schedule.step(*inputs, **ends)

    return step


def single(schedule_type, **options):
    def pipeline(model, mesh):
        mesh = mesh["pp"]
        parts, (stage,) = stages_of(model, mesh, **options)
        schedule = schedule_type(stage, MICROBATCHES, loss_fn=mean_loss)
        return parts, run(schedule, mesh.get_local_rank(), mesh.size())

    return pipeline


def interleaved(model, mesh):
    mesh = mesh["pp"]
    parts, stages = stages_of(model, mesh, each=2)
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=mean_loss)
    return parts, run(schedule, mesh.get_local_rank(), mesh.size())


PIPELINES = {
    "1f1b": single(Schedule1F1B),
    "gpipe": single(ScheduleGPipe),
    "interleaved": interleaved,
    "1f1b, recompute": single(Schedule1F1B, recompute=True),
}


def predict_pipeline(name, world):
    return pipeline_peaks(small(), PIPELINES[name], mesh={"pp": world}, batch_size=BATCH_SIZE)


def measure_pipelines(names):
    """Measure pipelines one after the other in this rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    found = {}
    for name in names:

        def make(name=name):
            case = Case(small())
            module, step = running_pipeline(
                PIPELINES[name], case.build(), mesh, case.batch(BATCH_SIZE)
            )
            return stepping(module, step, make_optimizer("adamw", module))

        found[name] = peak_of_running_rank(make, repeats=2)
    return found
