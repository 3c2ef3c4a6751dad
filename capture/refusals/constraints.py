"""Why a dimension cannot vary: which dimension, what it would have to be, and whose line says so.

torch.export lists the guards that not all sizes satisfy, and does not say where they come from.
The guards themselves, with the place of each, are in the ShapeEnv that stands in the frames of the
error.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import FrameSummary
from types import FrameType
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from enginecast.capture.python.locations import SourceLocation, is_model_code

_GUARD = re.compile(
    r"Not all values of (?P<name>\w+) = L\['(?P<input>\w+)'\]\.size\(\)\[(?P<dim>\d+)\]"
    r".*?satisfy the generated guard (?P<guard>.+?)\.?$",
    re.MULTILINE,
)
_CONSTANT = re.compile(
    r"You marked (?P<name>\w+) as dynamic but your code specialized it to be a constant "
    r"\((?P<size>\d+)\)"
)
_SIZE = re.compile(r"L\['(?P<input>\w+)'\]\.size\(\)\[(?P<dim>\d+)\]")
_USER_FRAME = "_get_user_frame"
MOST_SIZES = 512
"""Sizes that a guard is tried on to learn whether it is one of those that fail."""


@contextmanager
def guards_at_model_code() -> Iterator[None]:
    """Let guards that operators of torch make remember the line of the model that called them."""
    original = getattr(ShapeEnv, _USER_FRAME, None)
    if original is None:  # a torch that names it otherwise: guards keep the places they have
        yield
        return

    outside = sys._getframe(2)  # whoever asks for the export, behind the context manager

    def user_frame(self: ShapeEnv) -> FrameType | None:
        return _innermost(sys._getframe(1), outside) or original(self)

    setattr(ShapeEnv, _USER_FRAME, user_frame)
    try:
        yield
    finally:
        setattr(ShapeEnv, _USER_FRAME, original)


def _innermost(frame: FrameType | None, outside: FrameType) -> FrameType | None:
    """The innermost frame of a model, unless the model is not running at all."""
    while frame is not None and frame is not outside:
        if is_model_code(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


def violations(message: str) -> str:
    """What torch.export's message says of each dimension, in few words; empty when it says none."""
    names = {(m["input"], m["dim"]): m["name"] for m in _GUARD.finditer(message)}

    def named(match: re.Match[str]) -> str:
        return names.get((match["input"], match["dim"]), f"{match['input']}.shape[{match['dim']}]")

    told = [f"{m['name']} is always {m['size']}" for m in _CONSTANT.finditer(message)]
    told += [
        f"not every {m['name']} satisfies {_SIZE.sub(named, m['guard'])}"
        for m in _GUARD.finditer(message)
    ]
    return "; ".join(dict.fromkeys(told))


def culprit(error: BaseException) -> SourceLocation | None:
    """File and line of the first guard that some size does not satisfy; None when unknown."""
    for environment in _environments(error):
        for guard in environment.guards:
            place = guard.sloc.framework_loc
            if not isinstance(place, FrameSummary) or not is_model_code(place.filename):
                continue
            if _can_fail(guard.expr, environment):
                return SourceLocation.of_summary(place)
    return None


def _environments(error: BaseException) -> Iterator[ShapeEnv]:
    trace = error.__traceback__
    while trace is not None:
        for value in list(trace.tb_frame.f_locals.values()):
            if isinstance(value, FakeTensorMode) and value.shape_env is not None:
                yield value.shape_env
        trace = trace.tb_next


def _can_fail(guard: Any, environment: ShapeEnv) -> bool:
    """Whether some size in range breaks a guard; one that cannot be tried may."""
    symbols = list(guard.free_symbols)
    if len(symbols) != 1:
        return True
    allowed = environment.var_to_range.get(symbols[0])
    low = 1 if allowed is None else max(int(allowed.lower), 1)
    try:
        return any(not guard.subs(symbols[0], low + step) for step in range(MOST_SIZES))
    except (TypeError, ValueError, ArithmeticError):
        return True
