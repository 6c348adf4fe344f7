# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11",
#     "numpy>=1.26",
#     "click>=8.1",
#     "rich>=13",
#     "matplotlib>=3.8",
# ]
# ///
"""Measure what every strategy saves on a model, and what it costs.

python scripts/memory_savings_benchmark.py --out savings --batch-size 8,32 --limit 256MiB
"""

import environment

environment.require(__file__)

from curry_train.cli.savings import savings_command

if __name__ == "__main__":
    savings_command(prog_name="memory_savings_benchmark.py")
