"""Strategies that offload the activations of blocks to host memory.

Proof: `python -m pytest tests/test_offload.py`.
"""

from torch import nn

from ..core.blocks import find_blocks
from ..primitives.offload import NothingToMove, offload_blocks, offload_report
from .strategy import Sample, Strategy


def offload(model: nn.Module, sample: Sample) -> list[str]:
    """Offload all blocks but the last; a single block is offloaded itself."""
    several = len(find_blocks(model, sample.blocks)) > 1
    return offload_blocks(
        model,
        blocks=sample.blocks,
        keep_last=1 if several else 0,
        batch=sample.batch,
        loss=sample.loss,
    )


def offload_one(model: nn.Module, sample: Sample) -> list[str]:
    """Offload all blocks, the last one too; return no names if they hold nothing to move."""
    try:
        return offload_blocks(
            model, blocks=sample.blocks, keep_last=0, batch=sample.batch, loss=sample.loss
        )
    except NothingToMove:
        return []


def moved(model: nn.Module) -> dict[str, float]:
    """Report the bytes that the last step moved, next to what `save_on_cpu` would have copied.

    `save_on_cpu` copies every tensor that autograd saves in the blocks.
    """
    report = offload_report(model)
    everything = report.moved_bytes + sum(nbytes for _, nbytes in report.skipped.values())
    return {
        "moved_bytes": report.moved_bytes,
        "brought_back_bytes": report.brought_back_bytes,
        "host_bytes": report.reserved_bytes,
        "save_on_cpu_bytes": everything,
        "of_save_on_cpu": report.moved_bytes / everything if everything else 0.0,
    }


FOUND = (Strategy("offload", "move what the blocks hold to CPU memory", offload, moved),)
