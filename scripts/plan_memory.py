# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "numpy>=1.26", "click>=8.1", "rich>=13", "jinja2>=3.1"]
# ///
"""Find the fastest way to train a model within a memory budget, before any device runs.

python scripts/plan_memory.py --model my_package.models:build --budget 24GiB --target h100
"""

import environment

environment.require(__file__)

from curry_train.cli.plan import plan_command

if __name__ == "__main__":
    plan_command(prog_name="plan_memory.py")
