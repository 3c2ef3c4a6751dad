"""Record which values a pass has scaled by powers of two, to compare them at their original scale.

The exponents are in the node's metadata. `edit.take_place` copies them, so that a node which a
later pass puts in place of another keeps them.
"""

import torch
from torch import Tensor
from torch.fx import Node

from enginecast.passes.ir.edit import SCALE, same_size, value

Exponents = int | Tensor
"""An exponent for the whole value, or an int64 tensor that broadcasts to its shape, one per
channel."""


def scale_of(node: Node) -> Exponents:
    """The e of a value that is 2^e times the captured one; 0 if none that fits is inherited."""
    exponents: Exponents = node.meta.get(SCALE, 0)
    if isinstance(exponents, int):
        return exponents
    fake = value(node)
    if not isinstance(fake, Tensor) or fake.dim() < exponents.dim():
        return 0
    pairs = zip(exponents.shape, fake.shape[fake.dim() - exponents.dim() :], strict=True)
    return exponents if all(own == 1 or same_size(own, size) for own, size in pairs) else 0


def mark_scaled(node: Node, exponents: Exponents) -> None:
    """Record that the value of `node` is 2^exponents times what it was."""
    total = scale_of(node) + exponents
    if bool(total.any()) if isinstance(total, Tensor) else total:
        node.meta[SCALE] = total
    else:
        node.meta.pop(SCALE, None)


def factors(exponents: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^exponents, exactly: torch's `pow` may be off by one ulp.

    Args:
        exponents: integers of any shape.
    """
    powers = [2.0 ** int(exponent) for exponent in exponents.flatten()]
    return torch.tensor(powers, dtype=dtype).reshape(exponents.shape)


def without_scale(tensor: Tensor, exponents: Exponents) -> Tensor:
    """A scaled value as it was before, in fp32 or wider: fp16 may not hold what it was."""
    if isinstance(exponents, int) and not exponents:
        return tensor
    wide = tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
    if isinstance(exponents, int):
        return wide * 2.0**-exponents
    return wide * factors(-exponents, wide.dtype)
