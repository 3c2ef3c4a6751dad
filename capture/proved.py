"""Where a trace itself decided by a number that stands for a value: torch proved the answer."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from enginecast.capture.places import Place, real_path


@contextmanager
def noting_proofs(is_user: Callable[[str], bool]) -> Iterator[set[Place]]:
    """Within the block, note the lines of user code that ask for the truth of a symbolic number.

    torch answers from what `torch._check` told it, or raises an error; so such a line has one way.
    """
    proved: set[Place] = set()
    is_user = functools.cache(is_user)
    plain: Callable[[torch.SymBool], bool] = torch.SymBool.__bool__

    def noted(self: torch.SymBool) -> bool:
        answer = plain(self)
        frame = sys._getframe(1)
        if is_user(frame.f_code.co_filename):
            proved.add((real_path(frame.f_code.co_filename), frame.f_lineno))
        return answer

    torch.SymBool.__bool__ = noted  # type: ignore[method-assign]
    try:
        yield proved
    finally:
        torch.SymBool.__bool__ = plain  # type: ignore[method-assign]
