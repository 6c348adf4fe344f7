"""A policy recomputes the products that it leaves out, and no others.

Run: `python -m pytest tests/primitives/test_sac_products.py`.
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from curry_train.core.measure import count_flops, recompute_flops
from curry_train.primitives.sac import Policy, apply_sac

PRODUCT = 2 * 4 * 16 * 16
FIRST = Policy("the first product", calls=frozenset({("matmul", 0)}))


def model():
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))) for _ in range(3)))


@pytest.mark.parametrize(
    ("policy", "num_again"), [("save_expensive", 0), ("every_second_matmul", 2), (FIRST, 3)]
)
def test_products_that_are_left_out_run_again(policy, num_again):
    def loss(module, batch):
        return module(batch).square().sum()

    batch = torch.randn(4, 16)
    changed = model()
    apply_sac(changed, policy)
    with set_checkpoint_early_stop(False):
        again = recompute_flops(
            count_flops(model(), batch, loss), count_flops(changed, batch, loss)
        )
    assert again == 3 * num_again * PRODUCT
