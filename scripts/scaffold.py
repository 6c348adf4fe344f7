# /// script
# requires-python = ">=3.11"
# dependencies = ["click>=8.1", "jinja2>=3.1"]
# ///
"""Start a training project from this clone, or own one technique in a repository.

    python scripts/scaffold.py list
    python scripts/scaffold.py new my-run
    python scripts/scaffold.py add grad-accum --into src/mylib/training
    python scripts/scaffold.py diff my-run --patch

The same commands as `curry-train new`, `add`, `update`, `diff` and `list`, without an installation.
Proof: `python -m pytest tests/cli/test_scaffold_commands.py`.
"""

import environment

environment.require(__file__)

from curry_train.cli.scaffold import scaffold_group

if __name__ == "__main__":
    scaffold_group()
