"""Data-dependent sizes, including 0.

Fake kernels of custom operators that give as many rows as data says, such as the boxes that a
suppression keeps, may use an older function of torch's, by which there are two rows or more: a
branch on whether there are any would be decided in the trace, and one row would fail.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import SymInt

from enginecast.capture.python.recompile import replaced
from enginecast.library_names import private_or_none

_OLDER = "create_unbacked_symint"


@contextmanager
def sizes_from_none() -> Iterator[None]:
    """Within the block, a size of which a fake kernel says nothing may be 0 or 1."""
    kernels = private_or_none("torch._library.fake_impl.FakeImplCtx")
    if not hasattr(kernels, _OLDER):  # torch has deprecated it
        yield
        return
    with replaced(kernels, _OLDER, _from_none):
        yield


def _from_none(self: Any, *, min: int = 0, max: int | None = None) -> SymInt:
    found: SymInt = self.new_dynamic_size(min=min, max=max)
    return found
