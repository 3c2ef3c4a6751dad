"""An LSTM whose products are of integers.

    %r = enginecast.quantized_lstm(%x, %h, %c, %w8, %ws, %u8, %us, %b)
    %y: f32[7, 2, 64] = operator.getitem(%r, 0)

One layer, in both directions or one.  The scale of what is multiplied is computed from it, one for
all of x and one for the state of all rows at each step, as com.microsoft DynamicQuantizeLSTM does:
rows of a batch change one another within the rounding.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from enginecast.ops.quantized_conv import LARGEST
from enginecast.ops.traits import Trait, operator


def _fake(
    x: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor, *_: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    size = weight.shape[0] * hidden.shape[2]
    return x.new_empty((*x.shape[:2], size)), torch.empty_like(hidden), torch.empty_like(cell)


def steps_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x on 256 steps from its least element, or 0, to its largest, or 0: the numbers of the steps,
    that of 0, and their size, all fp32.
    """
    low, high = x.amin().clamp(max=0.0), x.amax().clamp(min=0.0)
    step = (high - low) / LARGEST
    step = torch.where(step == 0, torch.ones_like(step), step)
    zero = (-low / step).round().clamp(0, LARGEST)
    return (x / step + zero).round().clamp(0, LARGEST), zero, step


Product = Callable[[Tensor, Tensor], Callable[[Tensor], Tensor]]
"""From a weight [K, N] and its scale [N] to what multiplies x [..., K], fp32, with it."""


def product(weight: Tensor, scale: Tensor) -> Callable[[Tensor], Tensor]:
    """The product of x on its steps; of a weight in floats, of x as it is."""
    wide, rounds = weight.float() * scale, weight.dtype == torch.int8

    def multiply(x: Tensor) -> Tensor:
        if rounds:
            values, zero, step = steps_of(x)
            x = (values - zero) * step
        return x @ wide

    return multiply


@operator(Trait.HEAVY | Trait.UNFOLDABLE, fake=_fake)
def quantized_lstm(
    x: Tensor,
    hidden: Tensor,
    cell: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    recurrence: Tensor,
    recurrence_scale: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer of an LSTM over a sequence.

    Gates come in the order of ONNX: input, output, forget, cell.

    Args:
        x: [S, B, I], fp32.
        hidden: [D, B, H], fp32; D is 2 where the second one runs backward.
        cell: [D, B, H], fp32.
        weight: [D, I, 4H], int8; of floats nothing is rounded.
        weight_scale: fp32, [D, 4H].
        recurrence: [D, H, 4H], int8.
        recurrence_scale: fp32, [D, 4H].
        bias: fp32, [D, 8H]: of the input, then of the state.

    Returns:
        [S, B, D * H]; the last state and cell, [D, B, H] both; fp32.
    """
    return lstm_by(
        product, x, hidden, cell, weight, weight_scale, recurrence, recurrence_scale, bias
    )


def lstm_by(
    product: Product,
    x: Tensor,
    hidden: Tensor,
    cell: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    recurrence: Tensor,
    recurrence_scale: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`quantized_lstm` with this product."""
    size = hidden.shape[2]
    outputs, states, cells = [], [], []
    for at in range(weight.shape[0]):
        given = product(weight[at], weight_scale[at])(x)
        if bias is not None:
            given = given + bias[at, : 4 * size] + bias[at, 4 * size :]
        keep = product(recurrence[at], recurrence_scale[at])
        state, memory, found = hidden[at], cell[at], []
        for step in given.unbind(0) if at == 0 else given.flip(0).unbind(0):
            gates = step + keep(state)
            enters, leaves, forgets, new = gates.split(size, -1)
            memory = forgets.sigmoid() * memory + enters.sigmoid() * new.tanh()
            state = leaves.sigmoid() * memory.tanh()
            found.append(state)
        outputs.append(torch.stack(found if at == 0 else found[::-1]))
        states.append(state)
        cells.append(memory)
    return torch.cat(outputs, -1), torch.stack(states), torch.stack(cells)
