"""The one error of the scaffold: what is wrong, where, and what to do, in words for the terminal.

Proof: `python -m pytest tests/cli/test_scaffold_commands.py`.
"""


class ScaffoldError(ValueError):
    """What was asked for can't be done, and nothing was written."""
