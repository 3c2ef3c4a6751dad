"""How many threads torch takes for the steps of an export.

What is run of a small model is short: waking a second thread for each op cost T5-base a quarter of
its CPU time, and wall time, too (two cores, 2026).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 300_000_000
"""Parameters up to which a model is run by one thread, unless its inputs are large."""


@contextmanager
def one_thread(where: bool = True) -> Iterator[None]:
    """Let torch take one thread within the block, where that is said.

    Not around a compiler: Inductor writes the number of threads into the code.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1 if where else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
