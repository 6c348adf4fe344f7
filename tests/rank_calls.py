"""Call a function of a test on two ranks.

The ranks are processes that gloo connects, and have this process's import path.
"""

import contextlib

from curry_train.gates.two_ranks import RankProcesses


def run_on_ranks(target, *, timeout=180.0, **arguments):
    """Call a function, named as `import_callable` takes it, and return the result of each rank."""
    with contextlib.closing(RankProcesses(2)) as ranks:
        return ranks.call(target, arguments, timeout=timeout)
