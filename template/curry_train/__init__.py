"""PyTorch training that fits into memory, stays the same training, and survives.

`python -m curry_train gates` measures every claim that this copy makes.
"""

__version__ = "0.1.0"
