"""Trace `tensor.data`: torch.export, when not strict, sees neither reads nor writes of it.

What is read shares its memory with the tensor, and so does `detach()`.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from enginecast.capture.python.locations import calling_place
from enginecast.capture.python.recompile import replaced
from enginecast.errors import CaptureError


@contextmanager
def data_detached(module: nn.Module) -> Iterator[None]:
    """Let `module.forward` read `tensor.data` as `tensor.detach()`."""
    forward = module.forward

    @functools.wraps(forward)  # torch.export asks for its signature
    def detaching(*args: Any, **kwargs: Any) -> Any:
        with _Detaching():
            return forward(*args, **kwargs)

    with replaced(module, "forward", detaching):
        yield


class _Detaching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is not Tensor.data:
            return func(*args, **(kwargs or {}))
        if func.__name__ == "__get__":
            return args[0].detach()
        place = calling_place()
        raise CaptureError(
            f"forward sets the data of a tensor{f' at {place}' if place else ''}, which "
            "torch.export does not see",
            hint="Write into the tensor, `y.copy_(z)`, or use the new one, `y = z`.",
        )
