"""Answer reads of tensors during a trace with what a run on the real weights found.

A predicate that depends on weights alone has one answer for every input, so it can be given to the
trace, which has no weights.  `EomtForUniversalSegmentation` asks `self.attn_mask_probs[i] > 0`.

A predicate that depends on inputs can be answered, too, when a user asks for a program that takes
one path only: then the program returns, as more outputs, whether the answers were right.
"""

import functools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, handle_torch_function

from enginecast.capture.control_flow.detect.recorder import READERS, Read, place_of_reader
from enginecast.capture.python.locations import SourceLocation
from enginecast.capture.python.recompile import forward_within, replaced

GUARD = "enginecast.guard"
"""Begins the names of outputs that tell whether an answer was right."""


@dataclass(frozen=True)
class Guard:
    """An output that is true where the inputs take the program's path."""

    output: str
    read: Read
    """What was answered, and where."""


def baked_places(runs: Sequence[Sequence[Read]]) -> tuple[SourceLocation, ...]:
    """The lines at which only weights are read, in runs at different sizes."""
    decided: dict[SourceLocation, set[str]] = {}
    for run in runs:
        for read in run:
            decided.setdefault(read.place, set()).add(read.decides)
    return tuple(place for place, by in decided.items() if by == {"weights"})


@contextmanager
def answering(
    module: nn.Module, reads: Sequence[Read], places: Collection[SourceLocation]
) -> Iterator[None]:
    """Let `module.forward` read at `places` what a run at the sizes of the trace read, in order."""
    chosen = [read for read in reads if read.place in places]
    with forward_within(module, lambda: _Answers(chosen)), _asked_for_lists():
        yield


def guards_of(reads: Sequence[Read]) -> tuple[Guard, ...]:
    """The reads of one run whose answers hold for some inputs only, each as an output to add."""
    open_reads = [read for read in reads if read.decides != "weights"]
    return tuple(Guard(f"{GUARD}.{n}", read) for n, read in enumerate(open_reads))


@contextmanager
def guarding(module: nn.Module, reads: Sequence[Read]) -> Iterator[None]:
    """As `answering`, at every place; `module.forward`, which returns tensors by name, also returns
    whether each answer was right.
    """
    forward = module.forward

    @functools.wraps(forward)
    def guarded(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
        with _Answers(reads) as answers:
            outputs: dict[str, Tensor] = forward(*args, **kwargs)
        checks = [check for read, check in answers.checks if read.decides != "weights"]
        return {**outputs, **{f"{GUARD}.{n}": check for n, check in enumerate(checks)}}

    with replaced(module, "forward", guarded), _asked_for_lists():
        yield


@contextmanager
def _asked_for_lists() -> Iterator[None]:
    """Let fake tensors ask modes before they read `tolist`, as they do for all else: by themselves
    they go through their items one by one, which a size that only values decide does not allow.
    """
    plain = FakeTensor.tolist

    def tolist(tensor: FakeTensor) -> Any:
        return handle_torch_function(plain, (tensor,), tensor)

    with replaced(FakeTensor, "tolist", tolist):
        yield


class _Answers(TorchFunctionMode):
    def __init__(self, reads: Sequence[Read]) -> None:
        super().__init__()
        self.checks: list[tuple[Read, Tensor]] = []
        """What was answered, and whether the tensor has that value."""
        self._left: dict[SourceLocation, deque[Read]] = {}
        for read in reads:
            self._left.setdefault(read.place, deque()).append(read)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = READERS.get(getattr(func, "__name__", ""))
        if kind is not None and args and isinstance(args[0], Tensor):
            left = self._left.get(place_of_reader())
            if left and left[0].kind == kind:
                read = left.popleft()
                self.checks.append((read, _holds(_compared(func, args, kwargs or {}), read)))
                return read.value
        return func(*args, **(kwargs or {}))


def _compared(func: Any, args: Any, kwargs: Any) -> Tensor:
    """What is read, without reading it."""
    tensor: Tensor = args[0]
    if func.__name__ == "equal":
        return tensor.eq(args[1]).all()
    if func.__name__ == "allclose":
        return torch.isclose(*args, **kwargs).all()
    return tensor


def _holds(tensor: Tensor, read: Read) -> Tensor:
    """Whether `tensor` has the value that was answered: bool, without dimensions."""
    if read.kind in ("bool", "compare"):
        is_true = tensor.reshape(()) != 0
        return is_true.clone() if read.value else is_true.logical_not()
    wanted = torch.as_tensor(read.value)
    if read.kind == "int":
        tensor = tensor.trunc() if tensor.is_floating_point() else tensor
    return (tensor == wanted).all()
