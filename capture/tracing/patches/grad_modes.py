"""Switches of autograd modes, which change no value: a trace runs them, but does not record them.

torch.export would put them into the program, and then split it at each into subgraphs.  It does not
find its way in a program that has branches besides.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from enginecast.capture.python.recompile import replaced
from enginecast.library_names import private_or_none

_SWITCH = private_or_none("torch._C._set_grad_enabled")


class _Unrecorded(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _SWITCH:
            with torch._C.DisableTorchFunction():  # else the modes below record it
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def grad_modes_unrecorded(module: nn.Module) -> Iterator[None]:
    """Let `module.forward` call `torch.no_grad` and the like without a trace of it."""
    forward = module.forward

    @functools.wraps(forward)  # torch.export asks for its signature
    def unrecorded(*args: Any, **kwargs: Any) -> Any:
        with _Unrecorded():
            return forward(*args, **kwargs)

    with replaced(module, "forward", unrecorded):
        yield
