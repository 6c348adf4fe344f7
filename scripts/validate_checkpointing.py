# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11", "numpy>=1.26", "safetensors>=0.4.3", "xxhash>=3.4", "filelock>=3.32",
#     "click>=8.1", "rich>=13",
# ]
# ///
"""Measure every gate on the built-in workloads, or on your own model.

python scripts/validate_checkpointing.py --model my_package.models:build
"""

import environment

environment.require(__file__)

from curry_train.cli.validate import validate_command

if __name__ == "__main__":
    validate_command(prog_name="validate_checkpointing.py")
