"""A GRU whose products are of integers.

    %r = enginecast.quantized_gru(%x, %h, %w8, %ws, %u8, %us, %b, %c, False)
    %y: f32[7, 2, 512] = operator.getitem(%r, 0)

One direction of one layer.  As in an LSTM, the scale of what is multiplied is computed from it, one
for all of x and one for the state of all rows at each step: rows of a batch change one another
within the rounding.
"""

import torch
from torch import Tensor

from enginecast.ops.quantized_lstm import Product, product
from enginecast.ops.traits import Trait, operator


def _fake(x: Tensor, hidden: Tensor, *_: Tensor | bool | None) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:2], hidden.shape[1])), torch.empty_like(hidden)


@operator(Trait.HEAVY | Trait.UNFOLDABLE, fake=_fake)
def quantized_gru(
    x: Tensor,
    hidden: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    recurrence: Tensor,
    recurrence_scale: Tensor,
    bias: Tensor | None,
    recurrence_bias: Tensor | None,
    backward: bool,
) -> tuple[Tensor, Tensor]:
    """One direction of a GRU over a sequence.

    Gates come in the order of torch: reset, update, new.

    Args:
        x: [S, B, I], fp32.
        hidden: [B, H], fp32.
        weight: [I, 3H], int8; of floats nothing is rounded.
        weight_scale: fp32, [3H].
        recurrence: [H, 3H], int8.
        recurrence_scale: fp32, [3H].
        bias: fp32, [3H].
        recurrence_bias: fp32, [3H]; the reset gate takes its part of the new one, too.
        backward: from the last step to the first.

    Returns:
        [S, B, H]; the last state, [B, H]; both fp32.
    """
    return gru_by(
        *(product, x, hidden, weight, weight_scale, recurrence, recurrence_scale),
        *(bias, recurrence_bias, backward),
    )


def gru_by(
    product: Product,
    x: Tensor,
    hidden: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    recurrence: Tensor,
    recurrence_scale: Tensor,
    bias: Tensor | None,
    recurrence_bias: Tensor | None,
    backward: bool,
) -> tuple[Tensor, Tensor]:
    """`quantized_gru` with this product."""
    given, keep = product(weight, weight_scale)(x), product(recurrence, recurrence_scale)
    if bias is not None:
        given = given + bias
    state, found = hidden, []
    for step in given.flip(0).unbind(0) if backward else given.unbind(0):
        held = keep(state)
        if recurrence_bias is not None:
            held = held + recurrence_bias
        resets, updates, new = step.chunk(3, -1)
        held_resets, held_updates, held_new = held.chunk(3, -1)
        fresh = (new + (resets + held_resets).sigmoid() * held_new).tanh()
        state = fresh + (updates + held_updates).sigmoid() * (state - fresh)
        found.append(state)
    return torch.stack(found[::-1] if backward else found), state.clone()
