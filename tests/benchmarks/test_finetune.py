"""Fine-tuning steps are predicted to the byte; `make finetune` measures all of them.

python -m pytest tests/benchmarks/test_finetune.py
"""

import finetune
from finetune_models import OPTIMIZERS


def test_a_step_of_adafactor_is_predicted_to_the_byte():
    row = finetune.compare(finetune.mlp(depth=2, width=32), 4, optimizer=OPTIMIZERS["Adafactor"])
    assert row["equal"]
    assert row["predicted"]["peak_bytes"] > row["predicted"]["parameter_bytes"] > 0
