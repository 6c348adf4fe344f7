# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11", "numpy>=1.26", "safetensors>=0.4.3", "xxhash>=3.4", "filelock>=3.32",
#     "click>=8.1", "rich>=13", "jinja2>=3.1",
# ]
# ///
"""Write a pytest file that runs every gate on your model.

python scripts/gen_checkpoint_tests.py --model my_package.models:build --out tests/test_gates.py
"""

import environment

environment.require(__file__)

from curry_train.cli.testgen import gen_tests_command

if __name__ == "__main__":
    gen_tests_command(prog_name="gen_checkpoint_tests.py")
