"""Fine-tuning steps are predicted to the byte; `make finetune` measures all of them.

python -m pytest tests/benchmarks/test_finetune.py
"""

import finetune
from finetune_models import OPTIMIZERS


def test_a_step_of_adafactor_is_predicted_to_the_byte():
    row = finetune.compare(finetune.mlp(depth=2, width=32), optimizer=OPTIMIZERS["Adafactor"])
    assert row["equal"]
    assert row["predicted"]["peak_bytes"] > row["predicted"]["parameter_bytes"] > 0


def test_a_perturbed_router_changes_torchs_gradients_and_none_of_ours():
    found = finetune.perturbed_runs(5)
    assert found["equal"] == 5
    assert found["torch_checkpoint_differs"] + found["torch_checkpoint_raises"] >= 3
