"""Copies techniques out of the bundle into a project that its user then owns.

`scripts/scaffold.py` is the command over it. Every function takes the bundle's root, so that it works on any copy.
Proof: `python -m pytest tests/cli/test_scaffold.py tests/cli/test_scaffold_add.py tests/cli/test_scaffold_commands.py`.
"""
