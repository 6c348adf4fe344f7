"""Call a function of a test on two ranks.

The ranks are processes that gloo connects, and have this process's import path.
"""

import contextlib
import functools
import os

import torch.distributed as dist

from curry_train.gates.two_ranks import RankProcesses
from curry_train.workloads.from_script import launcher_variables
from curry_train.workloads.models import import_callable


def run_on_ranks(target, *, timeout=180.0, **arguments):
    """Call a function, named as `import_callable` takes it, and return the result of each rank."""
    with contextlib.closing(RankProcesses(2)) as ranks:
        return ranks.call(functools.partial(_launched, target, arguments), timeout=timeout)


def _launched(target, arguments):
    """Call a function with the variables that torchrun sets."""
    os.environ |= launcher_variables(dist.get_rank(), dist.get_world_size())
    return import_callable(target)(**arguments)
