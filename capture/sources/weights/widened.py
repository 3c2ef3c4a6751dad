"""Run eager in fp32 from weights that are stored in 16 bits, without a second copy in memory.

Widening a model of five billion parameters takes 19 GB, which is more than many a machine has that
holds the model itself.  A `WidenedWeight` says of itself that it is float32, and hands the function
that reads it a widened copy that lives as long as the call: each layer sees what it would see after
`from_pretrained(dtype=torch.float32)`, bit for bit.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from enginecast.errors import SourceError
from enginecast.library_names import aten

NARROW = (torch.float16, torch.bfloat16)

_KEEPS_TYPE = (Tensor.detach, Tensor.requires_grad_)
"""What `nn.Parameter` does to the tensor that it is made of."""


class WidenedWeight(Tensor):
    """A float32 weight, of any shape, whose values are stored in float16 or bfloat16."""

    stored: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor) -> "WidenedWeight":
        made: WidenedWeight = Tensor._make_wrapper_subclass(
            cls, stored.shape, strides=stored.stride(), dtype=torch.float32, device=stored.device
        )
        made.stored = stored
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch prints the values
        return f"WidenedWeight({list(self.shape)}, stored={self.stored.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding and kwargs.get("max_norm") is None:
            return _embed(*args, **kwargs)
        if func in _KEEPS_TYPE or getattr(func, "__name__", "") == "__get__":  # shape, dtype, ...
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = tree_map_only(WidenedWeight, _widen, (args, dict(kwargs)))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a function of its own here
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is aten.detach.default:
            return WidenedWeight(args[0].stored)
        args, kwargs = tree_map_only(WidenedWeight, _widen, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def fill_widened(module: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Give `module` its parameters and persistent buffers, in place.

    Args:
        module: an fp32 module whose stored tensors have no data.
        weights: a tensor for each name in its state dict; 16-bit floats are widened when they are
            read, others are taken as they are.

    Raises:
        SourceError: a name has no tensor.
    """
    for path, owner in module.named_modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                full = f"{path}.{name}" if path else name
                if full not in weights:
                    raise SourceError(f"the weights hold no tensor for {full}")
                stored = weights[full].detach()
                found = WidenedWeight(stored) if stored.dtype in NARROW else stored
                is_parameter = isinstance(tensor, nn.Parameter)
                tensors[name] = nn.Parameter(found, False) if is_parameter else found
    return module


def widen(module: nn.Module) -> nn.Module:
    """Widen the weights of a module for good, in place: what a user's own fp32 model has."""
    wide: dict[tuple[Any, ...], Tensor] = {}  # tied weights stay tied
    for owner in module.modules():
        held: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for tensors in held:
            for name, weight in tensors.items():
                if not isinstance(weight, WidenedWeight):
                    continue
                stored = weight.stored
                key = stored.data_ptr(), stored.shape, stored.stride()
                found = wide.setdefault(key, _widen(weight))
                is_parameter = isinstance(weight, nn.Parameter)
                tensors[name] = nn.Parameter(found, False) if is_parameter else found
    return module


def _widen(weight: WidenedWeight) -> Tensor:
    return weight.stored.float()


def _embed(ids: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Look up, then widen: the same values, and no gigabyte of a table is widened for ten rows."""
    table = weight.stored if isinstance(weight, WidenedWeight) else weight
    return F.embedding(ids, table, *args, **kwargs).float()
