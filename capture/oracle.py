"""Answer reads of tensors during a trace with what a run on the real weights found.

A predicate that depends on weights alone has one answer for every input, so it can be told to the
trace, which has no weights.  `EomtForUniversalSegmentation` asks `self.attn_mask_probs[i] > 0`.
"""

import functools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from enginecast.capture.recorder import READERS, Read, place_of_reader

Place = tuple[str, int]


def baked_places(runs: Sequence[Sequence[Read]]) -> dict[Place, str]:
    """The lines at which only weights are read, and their code.

    Args:
        runs: of the module, at different sizes (see `record`).
    """
    decided: dict[Place, set[str]] = {}
    codes: dict[Place, str] = {}
    for run in runs:
        for read in run:
            decided.setdefault(read.place, set()).add(read.decides)
            codes[read.place] = read.code
    return {place: codes[place] for place, by in decided.items() if by == {"weights"}}


@contextmanager
def answering(
    module: nn.Module, reads: Sequence[Read], places: Collection[Place]
) -> Iterator[None]:
    """Let `module.forward` read recorded values at `places`, in the order in which they were read.

    Args:
        module: without weights; its forward is called once or more.
        reads: of one run at the sizes of the trace.
        places: where reads are answered; all others are left to the trace.
    """
    forward = module.forward

    @functools.wraps(forward)  # torch.export asks for its signature
    def answered(*args: Any, **kwargs: Any) -> Any:
        with _Answers([read for read in reads if read.place in places]):
            return forward(*args, **kwargs)

    module.forward = answered
    try:
        yield
    finally:
        module.forward = forward


class _Answers(TorchFunctionMode):
    def __init__(self, reads: Sequence[Read]) -> None:
        super().__init__()
        self._left: dict[Place, deque[Read]] = {}
        for read in reads:
            self._left.setdefault(read.place, deque()).append(read)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = READERS.get(getattr(func, "__name__", ""))
        if kind is not None and args and isinstance(args[0], Tensor):
            left = self._left.get(place_of_reader())
            if left and left[0].kind == kind:
                return left.popleft().value
        return func(*args, **(kwargs or {}))
