"""Small tensors that the code writes out as numbers, whose values a trace knows.

`torch.tensor([(height, width)])` is the same in every call, and so is what is computed from it.
torch remembers that of tensors with one element alone, so that a size that is read out of the grid
of an image would be data.  What is written to with data is forgotten, by torch, as it is there.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch._subclasses import fake_tensor

from enginecast.capture.python.recompile import replaced

MOST_ELEMENTS = 1024
"""Of a tensor that is remembered: a grid, or lengths, and not a table."""
_LIMIT = "CONSTANT_NUMEL_LIMIT"


@contextmanager
def knowing_constants(_: nn.Module) -> Iterator[None]:
    """Within the block, fake tensors remember the values of small constants."""
    if not hasattr(fake_tensor, _LIMIT):  # torch has moved it
        yield
        return
    with replaced(fake_tensor, _LIMIT, MOST_ELEMENTS):
        yield
