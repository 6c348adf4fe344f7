"""PyTorch training in less memory, with a gate that checks every technique.

`python -m curry_train validate` measures every claim that this copy makes.
"""

__version__ = "0.1.0"
