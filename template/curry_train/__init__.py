"""PyTorch training in less memory, with gates that check every technique.

`curry-train validate` measures every claim.
"""

__version__ = "0.2.0"
