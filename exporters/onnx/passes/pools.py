"""Pools that ONNX has not, as ops of torch that it has: adaptive ones whose windows differ in size,
and averages over windows that reach beyond the input.

Each window of an adaptive pool is gathered, as long as the longest one: what is too much repeats
its last element, which changes no maximum, and counts nothing in a mean.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn.functional import pad

from enginecast.passes.ir.edit import arguments, aten, dtype_of, first_input, shape_of, value

_RANKS = {
    aten._adaptive_avg_pool3d.default: 3,
    aten.adaptive_avg_pool3d.default: 3,
    aten.adaptive_max_pool1d.default: 1,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
    aten.avg_pool2d.default: 2,
    aten.avg_pool3d.default: 3,
}
_DEFAULTS = (None, None, (), 0, False, True, None)
"""Of the arguments of an average."""


def is_adaptive(node: Node) -> bool:
    """Whether an adaptive pool is of known sizes, and none that is a pool of ONNX's own."""
    sizes = _pooled(node)
    wanted: Any = node.args[1]
    if not all(isinstance(size, int) for size in (*sizes, *wanted)):
        return False
    if isinstance(value(node), tuple | list):
        return True  # the largest, and where they are, which ONNX gives for no such pool
    return len(sizes) == 3 or any(map(operator.mod, sizes, wanted))


def _pooled(node: Node) -> Sequence[Any]:
    """The sizes of the dimensions that a pool is over."""
    target: Any = node.target
    return shape_of(first_input(node))[-_RANKS[target] :]


def adaptive_mean(x: Tensor, counts: Sequence[int]) -> Tensor:
    """The mean of each window."""
    rank, inside = len(counts), None
    for at, (size, count) in enumerate(zip(x.shape[-rank:], counts, strict=True)):
        own = _among(_is_inside(size, count), at, rank)
        inside = own if inside is None else inside & own
    assert inside is not None
    windows = torch.where(inside, _windows(x, counts), 0.0)
    return windows.flatten(-rank).sum(-1) / inside.flatten(-rank).sum(-1)


def adaptive_max(x: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The largest element of each window, and where it lies among all; of NaN, the last one."""
    rank, sizes = len(counts), x.shape[-len(counts) :]
    windows = _windows(x, counts).flatten(-rank)
    place = windows.argmax(-1, keepdim=True)
    if x.is_floating_point():
        holes = windows.isnan()
        last = windows.shape[-1] - 1 - holes.flip(-1).to(torch.int64).argmax(-1, keepdim=True)
        place = torch.where(holes.any(-1, keepdim=True), last, place)
    flat: Any = 0
    for at, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        along = _among(_elements(size, count), at, rank)
        flat = flat + along * math.prod(sizes[at + 1 :])
    among_all = flat.flatten(-rank).expand(windows.shape)
    results = (windows.gather(-1, place), among_all.gather(-1, place))
    return results[0].squeeze(-1), results[1].squeeze(-1)


def _among(table: Tensor, at: int, rank: int) -> Tensor:
    """A table [windows, elements] of one of `rank` dimensions, as wide as those of all."""
    sizes = [1] * 2 * rank
    sizes[at], sizes[rank + at] = table.shape
    return table.reshape(sizes)


def _windows(x: Tensor, counts: Sequence[int]) -> Tensor:
    """[..., windows of each dimension, elements of each dimension]."""
    sizes = x.shape[x.dim() - len(counts) :]
    return in_windows(x, [_elements(*each) for each in zip(sizes, counts, strict=True)])


def in_windows(x: Tensor, tables: Sequence[Tensor]) -> Tensor:
    """The elements of the last dimensions at the places that tables [windows, elements] give:
    [..., windows of each dimension, elements of each dimension].
    """
    before = x.dim() - len(tables)
    for at, places in reversed(list(enumerate(tables))):
        x = x.index_select(before + at, places.flatten()).unflatten(before + at, places.shape)
    order = [*range(before), *range(before, x.dim(), 2), *range(before + 1, x.dim(), 2)]
    return x.permute(order)


def _starts(size: int, count: int) -> Tensor:
    return torch.arange(count) * size // count


def _ends(size: int, count: int) -> Tensor:
    return ((torch.arange(count) + 1) * size + count - 1) // count


def _longest(size: int, count: int) -> int:
    starts = (at * size // count for at in range(count))
    ends = (-(-(at + 1) * size // count) for at in range(count))
    return max(end - start for start, end in zip(starts, ends, strict=True))


def _elements(size: int, count: int) -> Tensor:
    """The elements of each window [windows, elements]; those of shorter ones end in the last."""
    along = _starts(size, count)[:, None] + torch.arange(_longest(size, count))
    return torch.minimum(along, _ends(size, count)[:, None] - 1)


def _is_inside(size: int, count: int) -> Tensor:
    """Which elements of each window are its own [windows, elements]."""
    along = _starts(size, count)[:, None] + torch.arange(_longest(size, count))
    return along < _ends(size, count)[:, None]


def reaches_beyond(node: Node) -> bool:
    """Whether an average with a divisor of its own has windows that reach beyond the input."""
    given: list[Any] = [*arguments(node), *_DEFAULTS[len(node.args) :]]
    ceil_mode, divisor = given[4], given[6]
    known = all(isinstance(size, int) for size in _pooled(node))
    is_real = getattr(dtype_of(node), "is_floating_point", False)
    return bool(ceil_mode and divisor and known and is_real)


def sum_by_divisor(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
    *,
    rank: int,
) -> Tensor:
    """The input is filled up with zeros to the end of the last window."""
    kernel, padding = (list(each) * (rank // len(each)) for each in (kernel, padding))
    stride = list(stride or kernel) * (rank // len(stride or kernel))
    widths: list[int] = []
    for size, width, step, margin in zip(x.shape[-rank:], kernel, stride, padding, strict=True):
        count = -(-(size + 2 * margin - width) // step) + 1
        if (count - 1) * step >= size + margin:  # a window must start in the input
            count -= 1
        end = (count - 1) * step + width - size - margin
        widths = [margin, max(end, 0), *widths]
        if end < 0:
            widths[1] = 0
    pool = aten.avg_pool2d if rank == 2 else aten.avg_pool3d
    found: Tensor = pool(pad(x, widths), kernel, stride, [0] * rank, False, True, divisor)
    return found
