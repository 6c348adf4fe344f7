# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11",
#     "numpy>=1.26",
#     "safetensors>=0.4.3", "xxhash>=3.4", "filelock>=3.32",
#     "click>=8.1",
#     "rich>=13",
#     "jinja2>=3.1",
#     "pyyaml>=6",
# ]
# ///
"""Run the command `curry-train` from a clone that is not installed, in any folder.

python scripts/curry_train.py validate --model my_package.models:build
"""

import environment

environment.require(__file__)

import sys
from pathlib import Path

# Python puts the folder of a script first on its path, where this file has the name of the package.
# Last it harms nothing, and a worker process, which imports this file again, finds `environment`.
FOLDER = Path(__file__).resolve().parent
others = [entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER]
sys.path[:] = [*others, str(FOLDER)]

from curry_train.cli.main import main

if __name__ == "__main__":
    main(prog_name=f"python {sys.argv[0]}")
