"""Compare predicted and measured peaks of training steps, by model, dtype and technique.

    python benchmarks/plan_accuracy.py --json evidence/estimates.json

Proof: `python -m pytest tests/plan/test_estimate.py`.
"""

import itertools

import torch

from curry_train.primitives import apply_chunked_loss, apply_regions, apply_sac, recompute_blocks
from curry_train.workloads.models import resnet, transformer
from finetune import compare, leave
from recording import record_parser, write_record

DTYPES = ("float32", "bfloat16")
MODELS = {
    "transformer": transformer,
    "transformer, 8 of 256": lambda: transformer(depth=8, dim=256, vocabulary=4096, length=128),
    "resnet": resnet,
}
TECHNIQUES = {
    "none": leave,
    "full": recompute_blocks,
    "regions": apply_regions,
    "sac": apply_sac,
    "chunked loss": lambda module: apply_chunked_loss(module, chunk_tokens=64),
}


def main() -> None:
    """Compare predicted with measured peaks of training steps."""
    options = record_parser(__doc__).parse_args()
    rows = []
    for model, dtype, size, technique in itertools.product(MODELS, DTYPES, (2, 8), TECHNIQUES):
        if model == "resnet" and technique == "chunked loss":
            continue  # its head is no wider than its input
        change = TECHNIQUES[technique]
        found = compare(MODELS[model](), size, dtype=getattr(torch, dtype), change=change)
        peaks = {name: found[name]["peak_bytes"] for name in ("predicted", "measured")}
        row = {"model": model, "dtype": dtype, "batch_size": size, "technique": technique}
        rows.append(row | peaks)
        print(*rows[-1].values(), sep=", ", flush=True)
    figures = {
        "num_rows": len(rows),
        "equal": sum(row["predicted"] == row["measured"] for row in rows),
    }
    print(figures)
    write_record(options.json, {"rows": rows} | figures)


if __name__ == "__main__":
    main()
