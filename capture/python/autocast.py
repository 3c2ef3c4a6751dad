"""Regions of `torch.autocast` in a model's code: they say what is computed in 16 bits, and for an
engine `--precision` does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import torch

from enginecast.capture.python.locations import calling_place
from enginecast.capture.python.recompile import replaced


@contextmanager
def autocast_off() -> Iterator[set[str]]:
    """Within the block, the regions that model code enters cast nothing.

    Yields:
        A set that gets the dtype and line of each: "bfloat16 at model.py:12".
    """
    found: set[str] = set()
    plain: Any = torch.autocast.__enter__

    def enter(self: Any) -> Any:
        if not (self._enabled and self.fast_dtype in (torch.float16, torch.bfloat16)):
            return plain(self)
        place, dtype = calling_place(), str(self.fast_dtype).removeprefix("torch.")
        found.add(f"{dtype} at {PurePath(place.file).name}:{place.line}" if place else dtype)
        self._enabled = False
        try:
            return plain(self)
        finally:
            self._enabled = True

    with replaced(torch.autocast, "__enter__", enter):
        yield found
