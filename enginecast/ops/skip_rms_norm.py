"""A residual sum and the norm that reads it."""

import torch
from torch import Tensor

from enginecast.ops.traits import Trait, operator


@operator(Trait.SENSITIVE, fake=lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)))
def skip_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Add a residual and normalize the sum: com.microsoft SkipSimplifiedLayerNormalization.

    Args:
        x: [batch, tokens, size] or [tokens, size].
        residual: same shape and dtype as x.
        weight: [size], same dtype as x.
        epsilon: added to the mean of squares.

    Returns:
        rms_norm(x + residual) and x + residual, both of x's shape and dtype.
    """
    total = (x + residual).contiguous()  # strides that do not depend on the kernel
    normalized = torch.nn.functional.rms_norm(total, [total.shape[-1]], weight, epsilon)
    return normalized.contiguous(), total
