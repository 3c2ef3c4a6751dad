"""`module.to(dtype)` in a forward whose module already has that dtype.

Eager does nothing then.  torch's `Module.to` replaces each parameter nevertheless, and a trace,
whose parameters are fake, does not let it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from enginecast.capture.python.recompile import replaced
from enginecast.library_names import private


@contextmanager
def idle_casts() -> Iterator[None]:
    """Within the block, a cast of a module that changes nothing does nothing."""
    to, to_float = nn.Module.to, nn.Module.float

    def cast(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        parsed = private("torch._C._nn._parse_to", "a cast of a module")
        device, dtype, _, layout = parsed(*args, **kwargs)
        is_idle = layout is None and _has_all(self, device, dtype)
        return self if is_idle else to(self, *args, **kwargs)

    def cast_to_float(self: nn.Module) -> nn.Module:
        return self if _has_all(self, None, torch.float32) else to_float(self)

    with replaced(nn.Module, "to", cast), replaced(nn.Module, "float", cast_to_float):
        yield


def _has_all(module: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> bool:
    """Whether all tensors of a module are on this device, and those that are cast of this dtype."""
    return all(
        device in (None, tensor.device)
        and (
            dtype in (None, tensor.dtype) or not (tensor.is_floating_point() or tensor.is_complex())
        )
        for tensor in chain(module.parameters(), module.buffers())
    )
