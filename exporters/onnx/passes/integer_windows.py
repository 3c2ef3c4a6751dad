"""Convolutions and pools of int64, for which ONNX has no ops: their windows are gathered.

Windows that reach beyond the end, which `ceil_mode` allows, are filled up; means are cut to whole
numbers, as in torch's kernels.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn.functional import pad

from enginecast.exporters.onnx.passes.pools import in_windows
from enginecast.passes.ir.edit import aten, dtype_of, first_input, shape_of

_DEFAULTS = (None, None, (), 0, 1, False)
"""Of the arguments of a max pool."""
_LEAST = torch.iinfo(torch.int64).min


def is_of_int64(node: Node) -> bool:
    """Whether a convolution or a pool is of int64, and the sizes that it is over are known."""
    target: Any = node.target
    sizes = shape_of(first_input(node))[-RANKS[target] :]
    known = all(isinstance(size, int) for size in sizes)
    return known and dtype_of(first_input(node)) == torch.int64


def _each(given: Any, rank: int) -> list[int]:
    """An option, for each dimension."""
    listed = [given] if isinstance(given, int) else list(given)
    return listed * (rank // len(listed))


def _places(count: int, width: int, step: int, gap: int = 1) -> Tensor:
    """The elements of each window [windows, elements]."""
    return torch.arange(count)[:, None] * step + torch.arange(width) * gap


def _widths(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """As `pad` wants them: the last dimension first."""
    return [width for pair in reversed(list(zip(before, after, strict=True))) for width in pair]


def _convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Of an input with its margins [batch, channels, ...]."""
    rank = weight.dim() - 2
    tables = [
        _places((size - gap * (width - 1) - 1) // step + 1, width, step, gap)
        for size, width, step, gap in zip(
            x.shape[2:], weight.shape[2:], stride, dilation, strict=True
        )
    ]
    windows = in_windows(x, tables)  # [batch, channels, ...places, ...elements]
    split = windows.unflatten(1, (groups, -1))
    order = [0, *range(3, 3 + rank), 1, 2, *range(3 + rank, 3 + 2 * rank)]
    rows = split.permute(order).flatten(2 + rank).unsqueeze(-2)  # [batch, ...places, groups, 1, n]
    factors = weight.flatten(1).unflatten(0, (groups, -1)).mT  # [groups, n, channels]
    found = (rows @ factors).flatten(-3)
    found = found if bias is None else found + bias
    moved: Tensor = found.movedim(-1, 1)
    return moved


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    rank = weight.dim() - 2
    stride, margins, dilation = (_each(given, rank) for given in (stride, padding, dilation))
    batch = x if x.dim() == rank + 2 else x.unsqueeze(0)
    found = _convolved(
        pad(batch, _widths(margins, margins)), weight, bias, stride, dilation, groups
    )
    return found if x.dim() == rank + 2 else found.squeeze(0)


def _conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    """A convolution with the kernel turned around, of an input with zeros between its elements."""
    rank = weight.dim() - 2
    stride, margins = _each(stride, rank), _each(padding, rank)
    more, dilation = _each(output_padding, rank), _each(dilation, rank)
    spread = x if x.dim() == rank + 2 else x.unsqueeze(0)
    for dim, step in enumerate(stride, 2):
        wide = pad(spread.unsqueeze(dim + 1), [0, 0] * (rank + 1 - dim) + [0, step - 1])
        spread = wide.flatten(dim, dim + 1)
        spread = spread.narrow(dim, 0, spread.size(dim) - step + 1)
    ends = [
        gap * (width - 1) - margin
        for gap, width, margin in zip(dilation, weight.shape[2:], margins, strict=True)
    ]
    after = [end + extra for end, extra in zip(ends, more, strict=True)]
    kernel = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    kernel = kernel.flip(list(range(2, rank + 2)))
    found = _convolved(
        pad(spread, _widths(ends, after)), kernel, bias, [1] * rank, dilation, groups
    )
    return found if x.dim() == rank + 2 else found.squeeze(0)


def _pooled(size: int, width: int, step: int, margin: int, gap: int, ceil_mode: bool) -> int:
    """How many windows a pool has along a dimension; each starts in the input or before it."""
    rest = size + 2 * margin - gap * (width - 1) - 1
    count = (-(-rest // step) if ceil_mode else rest // step) + 1
    return count - (ceil_mode and (count - 1) * step >= size + margin)


def _pool_windows(
    x: Tensor,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    rank: int,
    filled: int,
) -> tuple[Tensor, list[Tensor]]:
    """The windows of a pool, one after the other in the last dimension, and where the elements of
    each lie along each dimension, the margin before it less than 0.
    """
    widths, margins, gaps = (_each(given, rank) for given in (kernel, padding, dilation))
    steps = _each(stride, rank) if stride else widths
    tables = []
    for at, size in enumerate(x.shape[-rank:]):
        count = _pooled(size, widths[at], steps[at], margins[at], gaps[at], ceil_mode)
        tables.append(_places(count, widths[at], steps[at], gaps[at]))
    after = [
        max(
            (table.size(0) - 1) * steps[at] + (widths[at] - 1) * gaps[at] + 1 - size - margins[at],
            0,
        )
        for at, (table, size) in enumerate(zip(tables, x.shape[-rank:], strict=True))
    ]
    filled_up = pad(x, _widths(margins, after), value=filled)
    windows = in_windows(filled_up, tables).flatten(-rank)
    return windows, [table - margin for table, margin in zip(tables, margins, strict=True)]


def _avg_pool(
    x: Tensor,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
    *,
    rank: int,
) -> Tensor:
    windows, tables = _pool_windows(x, kernel, stride, padding, 1, ceil_mode, rank, 0)
    # ONNX Runtime (1.31) adds integers up in fp64, and multiplies them as they are.
    total = windows @ torch.ones(windows.size(-1), dtype=torch.int64)
    if divisor is not None:
        return torch.div(total, divisor, rounding_mode="trunc")
    counts: Any = 1
    for at, (table, size, margin) in enumerate(
        zip(tables, x.shape[-rank:], _each(padding, rank), strict=True)
    ):
        least, most = (-margin, size + margin) if count_include_pad else (0, size)
        counted = ((table >= least) & (table < most)).to(torch.int64).sum(-1)
        counts = counts * counted.reshape(-1, *[1] * (rank - 1 - at))
    return torch.div(total, counts, rounding_mode="trunc")


def _max_pool(
    x: Tensor,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    *,
    rank: int,
) -> Tensor:
    windows, _ = _pool_windows(x, kernel, stride, padding, dilation, ceil_mode, rank, _LEAST)
    return windows.amax(-1)


def max_pool_with_indices(*given: Any, rank: int) -> tuple[Tensor, Tensor]:
    """The largest element of each window, and where the first such one lies among all."""
    options: list[Any] = [*given, *_DEFAULTS[len(given) :]]
    x, kernel, stride, padding, dilation, ceil_mode = options
    windows, tables = _pool_windows(x, kernel, stride, padding, dilation, ceil_mode, rank, _LEAST)
    sizes = x.shape[-rank:]
    flat: Any = 0
    is_inside: Any = None
    for at, (table, size) in enumerate(zip(tables, sizes, strict=True)):
        shape = [1] * 2 * rank
        shape[at], shape[rank + at] = table.shape
        along = table.reshape(shape)
        flat = flat * size + along
        inside = (along >= 0) & (along < size)
        is_inside = inside if is_inside is None else is_inside & inside
    largest = windows.amax(-1, keepdim=True)
    is_place = (windows == largest) & is_inside.flatten(-rank)
    width = windows.size(-1)
    order = torch.where(is_place, torch.arange(width), width).amin(-1, keepdim=True)
    places = flat.flatten(-rank).expand(windows.shape).gather(-1, order)
    return largest.squeeze(-1), places.squeeze(-1)


RANKS: Mapping[Any, int] = {
    aten.conv1d.default: 1,
    aten.conv2d.default: 2,
    aten.conv3d.default: 3,
    aten.conv_transpose1d.default: 1,
    aten.conv_transpose2d.input: 2,
    aten.conv_transpose3d.input: 3,
    aten.avg_pool1d.default: 1,
    aten.avg_pool2d.default: 2,
    aten.avg_pool3d.default: 3,
    aten.max_pool1d.default: 1,
    aten.max_pool2d.default: 2,
    aten.max_pool3d.default: 3,
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
}
WITH_INDICES = (aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
OF_INT64: Mapping[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((aten.conv1d.default, aten.conv2d.default, aten.conv3d.default), _conv),
    **dict.fromkeys(
        (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input),
        _conv_transpose,
    ),
    **{op: partial(_avg_pool, rank=RANKS[op]) for op in RANKS if "avg_pool" in str(op)},
    **{
        op: partial(_max_pool, rank=RANKS[op])
        for op in (aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default)
    },
}
"""Op -> what it is of int64."""
