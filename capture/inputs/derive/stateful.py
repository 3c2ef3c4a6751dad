"""Inputs that carry the state of a module."""

from collections.abc import Sequence

import torch
from torch import Tensor

from enginecast.capture.inputs.specs import DimSpec, InputSpec, captured_dtype
from enginecast.capture.sources.stateful import StatefulSource


def state_inputs(source: StatefulSource) -> tuple[InputSpec, ...]:
    """An input of fixed shape for each buffer; integers range over the values seen in consecutive
    calls.
    """
    return tuple(
        _spec(name, [start, *(call[name] for call in source.calls)])
        for name, start in source.start.items()
    )


def _spec(name: str, values: Sequence[Tensor]) -> InputSpec:
    start, low, high = values[0], None, None
    is_number = start.is_floating_point() or start.is_complex() or start.dtype is torch.bool
    if not is_number and start.numel():
        low = min(int(value.min()) for value in values)
        high = max(int(value.max()) for value in values)
    dims = tuple(map(DimSpec.static, start.shape))
    origin = "known" if low is None else "example"
    return InputSpec(name, "tensor", captured_dtype(start), dims, low, high, origin=origin)  # type: ignore[arg-type]
