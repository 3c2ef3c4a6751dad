"""A few values of a model's weights: enough to tell it from another model of its class."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

VALUES = 64
HALVES = {torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Dtypes that weights may have been rounded to, and how far that moves them."""


def sketch_of(weights: Mapping[str, Tensor]) -> dict[str, float]:
    """The middle element of some matrices, by name."""
    names = [n for n, t in sorted(weights.items()) if t.is_floating_point() and t.ndim > 1]
    full = [name for name in names if weights[name].numel() and not weights[name].is_meta]
    chosen = full[:: max(1, len(full) // VALUES)][:VALUES]
    found = {name: _middle(weights[name]) for name in chosen}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def unlike(weights: Mapping[str, Tensor], sketch: Mapping[str, float]) -> str | None:
    """A weight that is not the sketched one, whatever dtype it was rounded to; None: there is
    none.
    """
    for name, value in sketch.items():
        tensor = weights.get(name)
        if tensor is None or tensor.is_meta or tensor.ndim < 2 or not tensor.numel():
            continue
        own = _middle(tensor)
        near = abs(own - value) <= HALVES.get(tensor.dtype, 0.0) * max(abs(own), 2**-14)
        one = torch.tensor(own)
        if not near and value not in {one.item(), *(one.to(half).item() for half in HALVES)}:
            return name
    return None


def _middle(tensor: Tensor) -> float:
    return float(tensor[tuple(size // 2 for size in tensor.shape)])
