"""How many threads torch uses within an operator: one number for the whole process."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Set the number of torch threads within the block; None leaves it unchanged.

    Not around a compiler: Inductor writes the number of threads into the code.
    """
    import torch

    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
