"""Rewrite a program into the forms that the ops of ONNX's readers take.

    before:  %y = aten.linear(%x, %w, %b)               after:  %t = aten.t(%w)
                                                                %m = aten.matmul(%x, %t)
                                                                %y = aten.add(%m, %b)
             %g = aten.group_norm(%x, 8, %w)                    %r = aten.reshape(%x, [n, 8, -1])
                                                                %l = aten.layer_norm(%r, ...)
                                                           (for CPUs means, one dim after the other)
             %a = enginecast.attention(%q, %k, %v, %b)          %e = aten.expand(%b, ...)
                                                                %a = enginecast.attention(..., %e)

A `scaled_dot_product_attention` that broadcasts, or has other than four dims, is spelled out.

ONNX Runtime's Sigmoid on CPUs is off by up to 1e-7, which is all of sigmoid(-18): what reaches an
output, or anything but a layer with weights, is 1 / (1 + exp(-x)), as in torch's kernels.

ONNX Runtime's MaxPool gives the lowest number for a window of -inf, and passes NaN by; torch's
decomposition of `multilabel_margin_loss` is another loss: both are said otherwise. So is a
`repeat_interleave` whose count is a size, and a cross entropy of probabilities, with smoothed
labels or without a batch: torch.onnx drops the smoothing, and takes each target for a class. A
`grid_sample` of the nearest values with reflection is a gather: ONNX Runtime takes another neighbor
halfway between two. Other places of a `grid_sample` are held near the picture: beyond 1e12 ONNX
Runtime reads any pixel.

A padding that crops at one end is one without, then a crop: ONNX Runtime crops constant ones alone.
A transposed convolution whose output grows by its stride or more, which ONNX Runtime refuses, is
one without margins that is cropped and filled up.

The cells of an RNN are products and sums: torch's decomposition asks for the batch of the trace.

ONNX Runtime takes 1 + erf(x / 1.41421) for that of a gelu, whose constant has more digits: it is
1 - erf(x / -1.41421).

A bias that is the lowest number stays above it, for ONNX Runtime's Attention takes that for -inf: a
row whose keys are all masked so would be zeros, where torch averages the values.

Promises `reordered`: every value is computed by the same steps, but a product and its bias are
rounded one after the other now, and a group norm sums its rows in another order.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import permutations
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from enginecast.exporters.onnx.passes.complex_forms import complex_rules
from enginecast.exporters.onnx.passes.integer_forms import FORMS
from enginecast.exporters.onnx.passes.integer_windows import (
    OF_INT64,
    RANKS,
    WITH_INDICES,
    is_of_int64,
    max_pool_with_indices,
)
from enginecast.exporters.onnx.passes.linear_forms import (
    LINEAR,
    SEVERAL,
    VANDER,
    is_small_matrix,
    is_vandermonde,
)
from enginecast.exporters.onnx.passes.pools import (
    adaptive_max,
    adaptive_mean,
    is_adaptive,
    reaches_beyond,
    sum_by_divisor,
)
from enginecast.exporters.onnx.passes.row_counts import captured_rows
from enginecast.exporters.onnx.passes.special_forms import SPECIAL
from enginecast.exporters.onnx.readers import Reader
from enginecast.passes.ir.base import GraphPass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.edit import (
    arguments,
    aten,
    dtype_of,
    fake_mode,
    first_input,
    insert,
    same_shape,
    same_size,
    shape_of,
    value,
)
from enginecast.passes.ir.match import is_call
from enginecast.passes.ir.pattern import DIGITS
from enginecast.passes.ir.rules import Rewrite, apply_rules, insert_traced
from enginecast.passes.ir.varying_sizes import may_be_zero


@dataclass(frozen=True)
class LegalizeOnnx(GraphPass):
    """Say everything in ops that the reader of an ONNX graph has, and runs well."""

    reader: Reader = "onnxruntime-cpu"

    name: ClassVar[str] = "legalize-onnx"
    after: ClassVar[frozenset[str]] = frozenset({"legalize-quantized"})
    promise: ClassVar[Promise] = "reordered"

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        rules, conditions = dict(_RULES), dict(_UNFIT)
        if self.reader == "tensorrt":
            rules[_attention], conditions[_attention] = _tensorrt_attention, _is_unfit_for_tensorrt
        elif self.reader != "openvino":  # whose Attention is that of ONNX, rows without keys too
            rules[_attention] = _onnxruntime_attention
            conditions[_attention] = _is_unfit_for_onnxruntime
        if self.reader == "onnxruntime-cpu":
            rules |= {op: _exact_sigmoid for op in _SIGMOIDS}
            conditions |= dict.fromkeys(_SIGMOIDS, _needs_small_values)
            rules[aten.linear.default] = _linear_on_cpu
            rules[aten.group_norm.default] = _group_norm_on_cpu
        complex_sites = apply_rules(program, context, *complex_rules())
        integer_sites = apply_rules(program, context, *_integer_rules())
        return [*complex_sites, *integer_sites, *apply_rules(program, context, rules, conditions)]


def _linear_to_matmul(program: ProgramView, node: Node) -> Node:
    """The transposed weight is a weight expression, so it is stored transposed and costs nothing at
    run time.
    """
    graph = program.graph
    source, weight = node.args[:2]
    bias = node.args[2] if len(node.args) > 2 else None
    transposed = insert(graph, aten.t.default, (weight,), like=node)
    # Both give the shape and dtype of the linear.
    result = insert(graph, aten.matmul.default, (source, transposed), like=node, replaces=True)
    if bias is None:
        return result
    return insert(graph, aten.add.Tensor, (result, bias), like=node, replaces=True)


def _linear_on_cpu(program: ProgramView, node: Node) -> Node:
    """As one product with its bias, where that was measured to be faster: ONNX Runtime's Add takes
    a step for each row, which costs as much as the product of narrow ones.
    """
    source, bias = first_input(node), (*node.args, None)[2]
    is_narrow = shape_of(node)[-1] <= _NARROW and (captured_rows(source) or 0) >= _MANY_ROWS
    if bias is None or dtype_of(node) != torch.float32 or not is_narrow:
        return _linear_to_matmul(program, node)
    graph, sizes = program.graph, shape_of(source)
    flat = insert(graph, aten.reshape.default, (source, [-1, sizes[-1]]), like=node)
    transposed = insert(graph, aten.t.default, (node.args[1],), like=node)
    product = insert(graph, aten.addmm.default, (bias, flat, transposed), like=node)
    shape = [_size_of(program, source, dim, node) for dim in range(len(sizes) - 1)]
    args = (product, [*shape, shape_of(node)[-1]])
    return insert(graph, aten.reshape.default, args, like=node, replaces=True)


def _of_other_dtypes(node: Node) -> list[int]:
    """Which of an RMS norm's operands have another dtype than the program says of the result."""
    given = enumerate(node.args)
    return [i for i, s in given if i in (0, 2) and s and dtype_of(s) != dtype_of(node)]


def _one_dtype(program: ProgramView, node: Node) -> None:
    """torch multiplies an fp16 value by an fp32 weight; ONNX wants both in one dtype."""
    for index in _of_other_dtypes(node):
        args = (node.args[index], dtype_of(node))
        node.update_arg(index, insert(program.graph, aten.to.dtype, args, like=node))


def _group_norm(program: ProgramView, node: Node) -> Node:
    """ONNX defines GroupNormalization by mean(x^2) - mean(x)^2, and ONNX Runtime's CPU provider
    runs that definition: where a group's mean is large it loses most digits.  LayerNormalization
    subtracts the mean first, so each group becomes a row of it.
    """
    graph, source, groups = program.graph, first_input(node), node.args[1]
    weight, bias, epsilon = (*node.args[2:5], *(None, None, 1e-5)[len(node.args) - 2 :])[:3]
    sizes = shape_of(source)
    shape = [_size_of(program, source, dim, node) for dim in range(len(sizes))]
    elements: Node | int = -1
    if may_be_zero(sizes[0]):
        each = sizes[1] // groups
        elements = reduce(lambda one, other: _times(program, one, other, node), shape[2:], each)
    rows = insert(graph, aten.reshape.default, (source, [shape[0], groups, elements]), like=node)
    width = _size_of(program, rows, 2, node)
    args = (rows, [width], None, None, epsilon)
    normed = insert(graph, aten.layer_norm.default, args, like=node)
    result = insert(graph, aten.reshape.default, (normed, shape), like=node)
    for op, factor in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
        if factor is not None:
            channels = [sizes[1], *[1] * (len(sizes) - 2)]
            wide = insert(graph, aten.reshape.default, (factor, channels), like=node)
            result = insert(graph, op, (result, wide), like=node)
    return result


def _group_norm_on_cpu(program: ProgramView, node: Node) -> Node:
    """A large group is reduced dimension by dimension: ONNX Runtime's kernels add the elements of a
    row one after the other, which loses digits with their number, and most where they are equal (an
    image of one color: 1000 times what torch loses).
    """
    sizes, groups = shape_of(first_input(node)), node.args[1]
    group = [sizes[1] // groups, *sizes[2:]]
    is_small = all(isinstance(size, int) for size in group) and math.prod(group) <= _FEW_ELEMENTS
    if is_small or dtype_of(node) != torch.float32 or any(map(may_be_zero, sizes)):
        return _group_norm(program, node)
    found: Node = insert_traced(program, node, _normed_by_stages)
    return found


def _normed_by_stages(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    _: bool = True,
) -> Tensor:
    batch, channels, *sizes = x.shape
    inner = [math.prod(sizes)] if _are_few(sizes) else sizes
    ones = [1] * len(inner)

    def mean(values: Tensor) -> Tensor:
        for dim in reversed(range(2, values.dim())):
            values = values.mean(dim, keepdim=True)
        return values

    split = x.reshape(batch, groups, channels // groups, *inner)
    centered = split - mean(split)
    scale = torch.rsqrt(mean(centered * centered) + eps)
    if weight is not None:
        scale = scale * weight.reshape(groups, channels // groups, *ones)
    normed = centered * scale
    if bias is not None:
        normed = normed + bias.reshape(groups, channels // groups, *ones)
    return normed.reshape(x.shape)


def _are_few(sizes: Sequence[Any]) -> bool:
    return all(isinstance(s, int) for s in sizes) and math.prod(sizes) <= _FEW_PIXELS


def _promoted(program: ProgramView, node: Node) -> None:
    """1.0 - mask of integers: torch.onnx looks for a subtraction of both dtypes and finds none."""
    args = (first_input(node), value(node).dtype)
    node.update_arg(0, insert(program.graph, aten.to.dtype, args, like=node))


def _is_of_other_dtype(node: Node) -> bool:
    """Whether a softmax is of values that it converts first, which torch.onnx leaves out."""
    return bool(dtype_of(first_input(node)) != value(node).dtype)


def _is_cropped(node: Node) -> bool:
    """Whether a part of a tensor is reshaped whose size varies, as a table of positions is cropped
    to an image, or one that is repeated so: torch.onnx takes it for a view, which it is not.
    """
    source = first_input(node)
    is_spread = is_call(source, aten.slice.Tensor, aten.expand.default)
    is_part = is_spread and not source.meta["val"].is_contiguous()
    return is_part and any(isinstance(size, torch.SymInt) for size in shape_of(source))


def _as_copy(program: ProgramView, node: Node) -> None:
    kept = {"memory_format": torch.contiguous_format}
    copied = insert(program.graph, aten.clone.default, (first_input(node),), kept, like=node)
    node.update_arg(0, copied)


def _is_of_bools(node: Node) -> bool:
    """Whether a choice is among booleans, for which ONNX Runtime has no kernel of Where."""
    return dtype_of(node) == torch.bool


def _made_of(program: ProgramView, node: Node, *, form: Callable[..., Tensor]) -> Node:
    """What a function makes of an op's arguments, tables of its own included."""

    def made(*args: Any, **kwargs: Any) -> Tensor:
        with fake_mode(program):
            return form(*args, **kwargs)

    found: Node = insert_traced(program, node, made)
    return found


def _bools_where(program: ProgramView, node: Node) -> Node:
    graph, (condition, first, second) = program.graph, node.args
    negated = insert(graph, aten.logical_not.default, (condition,), like=node)
    taken = insert(graph, aten.logical_and.default, (condition, first), like=node)
    other = insert(graph, aten.logical_and.default, (negated, second), like=node)
    return insert(graph, aten.logical_or.default, (taken, other), like=node)


def _added(program: ProgramView, node: Node) -> Node:
    """Of booleans, for which ONNX has no Add; else what `_is_nearly_gelu` says."""
    if not _is_of_bools(node):
        return _one_minus_erf(program, node)
    return insert(program.graph, aten.logical_or.default, node.args[:2], like=node)


def _has_int32(node: Node) -> bool:
    """Whether elements are found by int32, of which ONNX takes no indices."""
    indices: Any = node.args[1]
    return any(index is not None and dtype_of(index) is torch.int32 for index in indices)


def _int64_indices(program: ProgramView, node: Node) -> None:
    found: Any = node.args[1]
    wide = [
        insert(program.graph, aten.to.dtype, (index, torch.int64), like=node)
        if index is not None and dtype_of(index) is torch.int32
        else index
        for index in found
    ]
    node.update_arg(1, wide)


def _bools_filled(program: ProgramView, node: Node) -> Node:
    graph, (source, mask, fill) = program.graph, node.args
    if fill:
        return insert(graph, aten.logical_or.default, (source, mask), like=node)
    kept = insert(graph, aten.logical_not.default, (mask,), like=node)
    return insert(graph, aten.logical_and.default, (source, kept), like=node)


def _is_low_by_number(node: Node) -> bool:
    """Whether a quotient that is cut to a whole number is that of 16 bits and a number, which torch
    does not round to 16 bits: 0.3 and 0.30005 give another whole number.
    """
    low = dtype_of(node) in (torch.float16, torch.bfloat16)
    return low and isinstance(node.args[1], float)


def _quotient_in_fp32(program: ProgramView, node: Node) -> Node:
    graph, dtype = program.graph, dtype_of(node)
    wide = insert(graph, aten.to.dtype, (node.args[0], torch.float32), like=node)
    assert callable(node.target)
    found = insert(graph, node.target, (wide, *node.args[1:]), node.kwargs, like=node)
    return insert(graph, aten.to.dtype, (found, dtype), like=node)


def _memory_order(x: Tensor) -> tuple[int, ...] | None:
    """The order of dimensions in which a value fills its memory; None where it leaves gaps."""
    for order in permutations(range(x.dim())) if x.dim() <= MOST_ORDERED else ():
        step: Any = 1
        for dim in reversed(order):
            if not (same_size(x.stride()[dim], step) or same_size(x.shape[dim], 1)):
                break
            step = step * x.shape[dim]
        else:
            return order
    return None


def _lies_otherwise(node: Node) -> bool:
    """Whether memory is read whose order is not that of the dimensions."""
    x = value(first_input(node))
    is_whole = len(node.args) < 4 or node.args[3] is None or same_size(x.storage_offset(), 0)
    order = _memory_order(x)
    return is_whole and order is not None and order != tuple(range(x.dim()))


def _in_memory_order(program: ProgramView, node: Node) -> None:
    """ONNX has no memory: torch.onnx counts the strides in the order of the dimensions."""
    source = first_input(node)
    order = _memory_order(value(source))
    node.update_arg(0, insert(program.graph, aten.permute.default, (source, order), like=node))


def _mixes_bounds(node: Node) -> bool:
    """Whether a clamp to floats has a whole number for a bound, or one of its bounds is a size."""
    dtype = dtype_of(node)
    if dtype is None or not dtype.is_floating_point:
        return False
    return any(map(_whole, node.args[1:3])) or _has_one_size(node)


def _has_one_size(node: Node) -> bool:
    bounds = [bound for bound in node.args[1:3] if bound is not None]
    return len(bounds) == 2 and sum(isinstance(bound, Node) for bound in bounds) == 1


def _whole(bound: object) -> bool:
    return isinstance(bound, int) and not isinstance(bound, bool)


def _float_bounds(program: ProgramView, node: Node) -> None:
    """torch.onnx makes a tensor of one bound, and finds no clamp by a tensor and a number."""
    for index, bound in enumerate(arguments(node)[1:3], 1):
        if _whole(bound):
            node.update_arg(index, float(bound))
    if _has_one_size(node):  # the upper bound counts where it is below the lower one
        source, least, _ = arguments(node)
        above = insert(program.graph, aten.clamp.default, (source, least), like=node)
        node.update_arg(0, above)
        node.update_arg(1, None)


def _repeats_by_size_or_nothing(node: Node) -> bool:
    sizes = shape_of(first_input(node))
    return isinstance(node.args[1], Node) or any(map(may_be_zero, sizes))


def _repeated(program: ProgramView, node: Node) -> Node:
    """Rows so often as a size says: torch.onnx expands the dimension before the one it added.
    Where there may be none, their number is not -1.
    """
    graph, source, dim = program.graph, first_input(node), (*node.args, None)[2]
    if dim is None:
        source, dim = insert(graph, aten.reshape.default, (source, [-1]), like=node), 0
    rank = len(shape_of(source))
    assert isinstance(dim, int)
    axis = dim % rank
    sizes = [_size_of(program, source, place, node) for place in range(rank)]
    column = insert(graph, aten.unsqueeze.default, (source, axis + 1), like=node)
    wide = [*sizes[: axis + 1], node.args[1], *sizes[axis + 1 :]]
    repeated = insert(graph, aten.expand.default, (column, wide), like=node)
    count = node.kwargs.get("output_size")
    if count is None:
        count = _times(program, sizes[axis], node.args[1], node)
    shape = [*sizes[:axis], count, *sizes[axis + 1 :]]
    return insert(graph, aten.reshape.default, (repeated, shape), like=node)


def _uncounted(program: ProgramView, node: Node) -> Node:
    """Rows so often as a tensor says: torch.onnx does not take their number, which is the sum."""
    kwargs = {name: value for name, value in node.kwargs.items() if name != "output_size"}
    op = aten.repeat_interleave.self_Tensor
    return insert(program.graph, op, node.args, kwargs, like=node, replaces=True)


def _broadcasts(node: Node) -> bool:
    """Whether a call of attention has other dims than batch, heads, tokens and size in common; one
    with dropout is refused later.
    """
    if node.args[4:5] not in ((), (0.0,)):
        return False
    query, key, value = (shape_of(found) for found in arguments(node)[:3])
    if {len(query), len(key), len(value)} != {4}:
        return True
    heads = key[1] if node.kwargs.get("enable_gqa") else query[1]
    wanted = [query[0], heads, *key[2:3]]
    return not (same_shape(wanted, key[:3]) and same_shape(wanted, value[:3]))


def _spelled_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as torch defines it: a row without keys is zero."""
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    factor = query.size(-1) ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1) * factor
    if causal:
        mask = torch.ones_like(scores, dtype=torch.bool).tril()
    if mask is None:
        return scores.softmax(-1) @ value
    is_bool = mask.dtype == torch.bool
    scores = scores.masked_fill(~mask, -math.inf) if is_bool else scores + mask
    hidden = scores.amax(-1, keepdim=True) == -math.inf
    return scores.softmax(-1).masked_fill(hidden, 0.0) @ value


def _multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """As in torch's kernel; torch's decomposition also counts what comes after the first -1."""
    is_given = (target < 0).to(torch.int64).cumsum(-1) == 0
    places = torch.where(is_given, target, 0)
    classes = torch.arange(x.size(-1), device=x.device)
    is_target = ((places.unsqueeze(-1) == classes) & is_given.unsqueeze(-1)).any(-2)
    margins = 1 - x.gather(-1, places).unsqueeze(-1) + x.unsqueeze(-2)
    counts = is_given.unsqueeze(-1) & ~is_target.unsqueeze(-2)
    loss = torch.where(counts, margins.clamp_min(0), 0).sum((-2, -1)) / x.size(-1)
    return (loss, loss.mean(), loss.sum())[reduction]


def _all_of_them(x: Tensor, *_: float) -> Tensor:
    """The histogram of one bin over all values."""
    count = torch.ones_like(x, dtype=torch.int64).sum()
    return count.to(x.dtype).reshape(1)


def _is_of_whole_numbers(node: Node) -> bool:
    """Whether numbers are moved for which ONNX Runtime has no kernel of DepthToSpace."""
    return dtype_of(node) in (torch.int64, torch.int32, torch.int16, torch.int8, torch.bool)


def _shuffled(x: Tensor, factor: int) -> Tensor:
    """Channels as pixels, moved by a transposition."""
    squares = x.unflatten(-3, (-1, factor, factor))
    before = list(range(x.dim() - 3))
    c, a, b, h, w = range(len(before), len(before) + 5)
    moved: Tensor = squares.permute(*before, c, h, a, w, b)
    return moved.flatten(-2).flatten(-3, -2)


def _crops(node: Node) -> bool:
    """Whether a padding with values of the input has a negative width."""
    widths: Any = node.args[1]
    is_constant = node.target is aten.pad.default and (*node.args, "constant")[2] == "constant"
    known = all(isinstance(width, int) for width in widths)
    return known and not is_constant and any(width < 0 for width in widths)


def _padded_and_cropped(program: ProgramView, node: Node) -> Node:
    def form(x: Tensor, widths: Sequence[int], *mode: Any) -> Tensor:
        assert callable(node.target)
        found: Tensor = node.target(x, [max(width, 0) for width in widths], *mode)
        for at in range(0, len(widths), 2):
            start, end = (max(-width, 0) for width in widths[at : at + 2])
            dim = x.dim() - 1 - at // 2
            if start or end:
                found = found.narrow(dim, start, found.size(dim) - start - end)
        return found

    result: Node = insert_traced(program, node, form)
    return result


def _grows_by_a_stride(node: Node) -> bool:
    """Whether a transposed convolution adds as many elements at the end as it moves by, or more."""
    stride, _, more = (_of_each(node, at) for at in (3, 4, 5))
    return any(one >= step for one, step in zip(more, stride, strict=True))


def _of_each(node: Node, at: int) -> list[int]:
    """An option of a convolution, for each dimension."""
    rank = _TRANSPOSED[node.target]
    given: Any = node.args[at] if len(node.args) > at else [1 if at in (3, 7) else 0]
    return list(given) * (rank // len(given))


def _grown(program: ProgramView, node: Node) -> Node:
    rank = _TRANSPOSED[node.target]
    stride, margins, more, dilation = (_of_each(node, at) for at in (3, 4, 5, 7))

    def form(x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any) -> Tensor:
        groups = rest[3] if len(rest) > 3 else 1
        assert callable(node.target)
        found: Tensor = node.target(
            x, weight, None, stride, [0] * rank, [0] * rank, groups, dilation
        )
        for at, (margin, extra) in enumerate(zip(margins, more, strict=True)):
            dim = found.dim() - rank + at
            end = max(margin - extra, 0)
            found = found.narrow(dim, margin, found.size(dim) - margin - end)
        widths = [(0, max(extra - margin, 0)) for margin, extra in zip(margins, more, strict=True)]
        found = torch.nn.functional.pad(found, [width for pair in widths[::-1] for width in pair])
        return found if bias is None else found + bias.reshape(-1, *[1] * rank)

    result: Node = insert_traced(program, node, form)
    return result


def _has_one_bin(node: Node) -> bool:
    """Whether a histogram has one bin and takes its bounds from the values: all are in it."""
    given: tuple[Any, ...] = (*node.args[1:], *(100, 0, 0)[len(node.args) - 1 :])
    bins, low, high = given
    return bool(bins == 1 and low == high)


def _lstm_cell(
    x: Tensor, state: list[Tensor], w: Tensor, u: Tensor, b: Any = None, c: Any = None
) -> tuple[Tensor, Tensor]:
    enters, forgets, new, leaves = (_part(state[0], u, c) + _part(x, w, b)).chunk(4, -1)
    cell = _sigmoid(forgets) * state[1] + _sigmoid(enters) * new.tanh()
    return _sigmoid(leaves) * cell.tanh(), cell


def _gru_cell(x: Tensor, hidden: Tensor, w: Tensor, u: Tensor, b: Any = None, c: Any = None) -> Any:
    given, kept = _part(x, w, b).chunk(3, -1), _part(hidden, u, c).chunk(3, -1)
    resets, updates = _sigmoid(kept[0] + given[0]), _sigmoid(kept[1] + given[1])
    new = (given[2] + kept[2] * resets).tanh()
    return (hidden - new) * updates + new


def _part(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x @ weight.t()
    return product if bias is None else product + bias


def _sigmoid(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        x = x.to(torch.get_default_dtype())  # torch does so, and a negated uint8 wraps around
    return torch.reciprocal(1 + torch.exp(-x))


def _cell(program: ProgramView, node: Node, *, activation: Callable[[Tensor], Tensor]) -> Node:
    def computed(
        x: Tensor, hidden: Tensor, w: Tensor, u: Tensor, b: Any = None, c: Any = None
    ) -> Tensor:
        return activation(_part(hidden, u, c) + _part(x, w, b))

    result: Node = insert_traced(program, node, computed)
    return result


def _in_places_of_items(
    program: ProgramView, node: Node, *, form: Callable[..., tuple[Tensor, ...]]
) -> None:
    """The results of a form, in the places of the items of an op that gives several."""

    def made(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        with fake_mode(program):
            return form(*args, **kwargs)

    results = insert_traced(program, node, made)
    for item in list(node.users):
        item.replace_all_uses_with(results[item.args[1]])
        program.graph.erase_node(item)
    program.graph.erase_node(node)


def _integer_rules() -> tuple[dict[Any, Rewrite], dict[Any, Callable[[Node], bool]]]:
    """The rules of what ONNX has not of integers, and which calls they are for."""
    rules: dict[Any, Rewrite] = {
        **{op: partial(_made_of, form=form) for op, form in OF_INT64.items()},
        **{op: partial(_made_of, form=form) for op, (_, form) in FORMS.items()},
    }
    for op in WITH_INDICES:
        form = partial(max_pool_with_indices, rank=RANKS[op])
        rules[op] = partial(_in_places_of_items, form=form)
    conditions = dict.fromkeys((*OF_INT64, *WITH_INDICES), is_of_int64)
    return rules, {**conditions, **{op: is_for for op, (is_for, _) in FORMS.items()}}


def _is_sampled_otherwise(node: Node) -> bool:
    is_kernel = node.target is not aten.grid_sampler.default
    return is_kernel or _is_reflected(node) or _reaches_far(node)


def _reaches_far(node: Node) -> bool:
    """Whether places may lie anywhere, and those far off mean the same as those just outside."""
    _, grid, _, padding = arguments(node)[:4]
    is_held = grid.target is aten.clamp.default and tuple(grid.args[1:]) == (-FAR, FAR)
    return padding in (0, 1) and not is_held


def _sampled(program: ProgramView, node: Node) -> Any:
    if _is_reflected(node):
        return insert_traced(program, node, _nearest_reflected)
    return insert_traced(program, node, _sampled_near)


def _sampled_near(x: Tensor, grid: Tensor, mode: int, padding: int, aligned: bool) -> Tensor:
    """With zeros or the border around a picture, as far off as `FAR` all places are alike."""
    near = grid.clamp(-FAR, FAR) if padding in (0, 1) else grid
    found: Tensor = aten.grid_sampler.default(x, near, mode, padding, aligned)
    return found


def _is_reflected(node: Node) -> bool:
    """Whether it takes the nearest values of a picture, with reflection, at full precision."""
    picture, _, mode, padding = arguments(node)[:4]
    sizes = shape_of(picture)[2:]
    is_fit = len(sizes) == 2 and all(isinstance(size, int) for size in sizes)
    is_wide = dtype_of(node) in (torch.float32, torch.float64)
    return (mode, padding) == (1, 2) and is_fit and is_wide


def _nearest_reflected(x: Tensor, grid: Tensor, _: int, __: int, aligned: bool) -> Tensor:
    """As in torch's kernel, step by step, so that halves fall to the same side."""
    height, width = x.shape[2:]
    columns = _reflected(grid[..., 0], width, aligned)
    places = (_reflected(grid[..., 1], height, aligned) * width + columns).flatten(1)
    taken = x.flatten(2).gather(2, places.unsqueeze(1).expand(-1, x.size(1), -1))
    found: Tensor = taken.unflatten(2, grid.shape[1:3])
    return found


def _reflected(grid: Tensor, size: int, aligned: bool) -> Tensor:
    """The element of a dimension that is nearest to each place between -1 and 1, and beyond."""
    scale, shift, low = ((size - 1) / 2, 0.0, 0.0) if aligned else (size / 2, -0.5, -0.5)
    period = 2 * (size - 1 if aligned else size)
    if not period:
        return torch.zeros_like(grid, dtype=torch.int64)
    away = ((grid + 1) * scale + shift - low).abs()
    beyond = away - (away / period).trunc() * period
    inside = torch.minimum(beyond, period - beyond) + low
    return inside.clamp(0, size - 1).round().to(torch.int64)


def _cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """As in torch's kernel, where the mean over classes is weighted and that over
    probabilities is not.
    """
    axis = min(x.dim() - 1, 1)
    share = label_smoothing / x.size(axis)
    log = x.log_softmax(axis)
    wide = None if weight is None else weight.reshape(-1, *[1] * (x.dim() - axis - 1))
    weighted = log if wide is None else log * wide
    if target.is_floating_point():
        loss = -(weighted * (target * (1 - label_smoothing) + share)).sum(axis)
        return (loss, loss.mean(), loss.sum())[reduction]
    counts = target != ignore_index
    place = torch.where(counts, target, 0).unsqueeze(axis)
    loss = -(1 - label_smoothing) * weighted.gather(axis, place) - share * weighted.sum(axis, True)
    loss = torch.where(counts, loss.squeeze(axis), 0)
    if reduction != 1:
        return loss.sum() if reduction else loss
    if wide is None:
        return loss.sum() / counts.sum()
    each = wide.expand_as(x).gather(axis, place).squeeze(axis)
    return loss.sum() / torch.where(counts, each, 0).sum()


def _is_other_cross_entropy(node: Node) -> bool:
    x, target, *rest = arguments(node)
    is_smoothed = len(rest) == 4 and rest[-1] != 0
    return is_smoothed or value(target).is_floating_point() or len(shape_of(x)) == 1


def _max_pool(program: ProgramView, node: Node) -> Node:
    def form(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert callable(node.target)
        largest = node.target(x, *args, **kwargs)
        some = node.target((x != -math.inf).to(x.dtype), *args, **kwargs)
        holes = node.target(x.isnan().to(x.dtype), *args, **kwargs)
        found = torch.where(some > 0, largest, -math.inf)
        return torch.where(holes > 0, math.nan, found)

    found: Node = insert_traced(program, node, form)
    return found


def _may_hold_infinity(node: Node) -> bool:
    """Whether a max pool may read -inf, of which ONNX Runtime's gives the lowest number, or NaN,
    which it passes by: where an infinity, a logarithm or a division stands before it, up to the
    next layer with weights.
    """
    if dtype_of(node) not in (torch.float32, torch.float64):
        return False
    waiting, seen = [node], {node}
    while waiting:
        here = waiting.pop()
        is_divided = here.target in _QUOTIENTS and isinstance(here.args[-1], Node)
        is_infinite = any(a in (math.inf, -math.inf) for a in here.args)
        if is_divided or is_infinite or here.target in _LOGARITHMS:
            return True
        sources = set(here.all_input_nodes) - seen if here.target not in _LAYERS else set()
        seen |= sources
        waiting += sources
    return False


def _exact_sigmoid(program: ProgramView, node: Node) -> Node:
    found: Node = insert_traced(program, node, _SIGMOIDS[node.target])
    return found


def _is_nearly_gelu(node: Node) -> bool:
    """Whether 1 + erf(x / 1.41421) is in the dtype whose gelu ONNX Runtime makes of it."""
    erf, one = node.args[:2]
    if one != 1 or not is_call(erf, aten.erf.default) or dtype_of(node) != torch.float32:
        return False
    assert isinstance(erf, Node)
    scaled = erf.args[0]
    if not is_call(scaled, aten.div.Tensor, aten.mul.Tensor):
        return False
    assert isinstance(scaled, Node)
    factor = scaled.args[1]
    if not isinstance(factor, float) or not factor:
        return False
    wanted = 2**0.5 if scaled.target is aten.div.Tensor else 0.5**0.5
    return DIGITS < abs(factor / wanted - 1) < _ABOUT


def _one_minus_erf(program: ProgramView, node: Node) -> Node:
    """The same numbers: erf is odd, in every kernel."""
    graph, scaled = program.graph, first_input(first_input(node))
    assert callable(scaled.target)
    args = (scaled.args[0], -scaled.args[1])  # type: ignore[operator]
    turned = insert(graph, scaled.target, args, like=scaled)
    erf = insert(graph, aten.erf.default, (turned,), like=node)
    return insert(graph, aten.rsub.Scalar, (erf, 1.0), like=node)


def _needs_small_values(node: Node) -> bool:
    """Whether something else than layers with weights, and norms, reads a sigmoid in fp32."""
    if dtype_of(node) != torch.float32:
        return False
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if user.target in _LAYERS or user in seen:
                continue
            if user.op == "output":
                return True
            seen.add(user)
            waiting.append(user)
    return False


def _is_of_all_dims(node: Node) -> bool:
    return len(node.args) == 1 and bool(shape_of(first_input(node)))


def _all_dims(program: ProgramView, node: Node) -> None:
    """The largest of all elements: torch.onnx wants the dimensions named."""
    node.args = (first_input(node), list(range(len(shape_of(first_input(node))))))


def _select_by_index(program: ProgramView, node: Node) -> None:
    """masked_select has no ONNX form, and a mask as an index has; the new size keeps its name."""
    source, mask = arguments(node)[:2]
    if not same_shape(shape_of(source), shape_of(mask)):
        source, mask = _broadcast(program, (source, mask), node)
    node.target, node.args = aten.index.Tensor, (source, [mask])


def _broadcast(program: ProgramView, sources: Sequence[Node], like: Node) -> list[Node]:
    """Values in one shape, by expanding them."""
    rank = max(len(shape_of(source)) for source in sources)
    sizes: list[Node | int] = [1] * rank
    for source in sources:
        for dim, size in enumerate(shape_of(source), rank - len(shape_of(source))):
            if not same_size(size, 1):
                sizes[dim] = _size_of(program, source, dim - rank, like)
    return [
        insert(program.graph, aten.expand.default, (source, sizes), like=like) for source in sources
    ]


def _lacks_full_bias(node: Node) -> bool:
    """Whether an attention has a bias, and not one of four dims with full rows and columns."""
    bias = arguments(node)[3]
    if bias is None:
        return False
    return len(shape_of(bias)) < 4 or not same_shape(shape_of(bias)[2:], _tokens(node))


def _full_bias(program: ProgramView, node: Node) -> None:
    """ONNX Runtime's attention ops want a 4-D bias with full [tokens, key tokens]; anything less is
    refused at run time.
    """
    bias = arguments(node)[3]
    while len(shape_of(bias)) < 4:
        bias = insert(program.graph, aten.unsqueeze.default, (bias, 0), like=node)
    if not same_shape(shape_of(bias)[2:], _tokens(node)):
        sizes = [-1, -1, *_token_sizes(program, node)]
        bias = insert(program.graph, aten.expand.default, (bias, sizes), like=node)
    node.update_arg(3, bias)


def _is_unfit_for_onnxruntime(node: Node) -> bool:
    return (
        _lacks_full_bias(node) or _may_be_lowest(arguments(node)[3]) or _may_be_among_nothing(node)
    )


def _may_be_among_nothing(node: Node) -> bool:
    """Whether ONNX Runtime's Attention (1.31) may refuse a call: with no rows, queries or keys.
    MultiHeadAttention, which stands for calls without a bias, does not.
    """
    query, key, _, bias = arguments(node)[:4]
    if bias is None and len(shape_of(query)) == 3:
        return False
    return any(may_be_zero(size) for given in (query, key) for size in shape_of(given)[:-1])


def _attention_of_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    heads: int,
    kv_heads: int,
    scale: float,
    causal: bool,
) -> Tensor:
    def heads_first(x: Tensor, count: int) -> Tensor:
        return x if x.dim() == 4 else x.unflatten(-1, (count, -1)).transpose(1, 2)

    found = _spelled_out(
        heads_first(query, heads),
        heads_first(key, kv_heads),
        heads_first(value, kv_heads),
        bias,
        causal=causal,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return found if query.dim() == 4 else found.transpose(1, 2).flatten(2)


def _onnxruntime_attention(program: ProgramView, node: Node) -> Node | None:
    if _may_be_among_nothing(node):
        found: Node = insert_traced(program, node, _attention_of_heads)
        return found
    bias = arguments(node)[3]
    if _may_be_lowest(bias):
        node.update_arg(3, _above_lowest(program, bias, node))
    _full_bias(program, node)
    return None


def _may_be_lowest(bias: Node | None) -> bool:
    """Whether some element may be the lowest number of fp32; weights are none that mask."""
    return dtype_of(bias) == torch.float32 and bias is not None and bias.op != "placeholder"


def _above_lowest(program: ProgramView, bias: Node, node: Node) -> Node:
    """Half the lowest number for anything lower but -inf: a score that is added leaves both as they
    are.
    """
    graph = program.graph
    least = torch.finfo(torch.float32).min / 2
    clamped = insert(graph, aten.clamp_min.default, (bias, least), like=node)
    hidden = insert(graph, aten.eq.Scalar, (bias, -math.inf), like=node)
    return insert(graph, aten.where.self, (hidden, bias, clamped), like=node)


def _is_unfit_for_tensorrt(node: Node) -> bool:
    bias, scale, causal = arguments(node)[3], arguments(node)[6], arguments(node)[7]
    return (
        scale < 0
        or (bias is not None and dtype_of(bias) != dtype_of(node))
        or _lacks_full_bias(node)
        or bool(causal and (bias is not None or not _attends_to_itself(node)))
    )


def _attends_to_itself(node: Node) -> bool:
    """Whether there are as many keys as queries."""
    return same_size(*_tokens(node))


def _tensorrt_attention(program: ProgramView, node: Node) -> None:
    """What TensorRT's IAttention takes (its API reference, and the parser's AttentionHelpers.cpp):

    * a mask or `causal`, never both; and `causal` says nothing of keys of another length, so both
      become a bias then;
    * a bias in the dtype of the query, or bool.  A row of the latter that is all False has no
      result by ONNX's definition (a softmax of -inf), and NaN in a row of padding spreads to all
      that read its key; so a bool becomes a bias that is finite;
    * a scale that the parser takes the root of.
    """
    query, bias, scale, causal = (arguments(node)[index] for index in (0, 3, 6, 7))
    if scale < 0:
        node.update_arg(0, insert(program.graph, aten.neg.default, (query,), like=node))
        node.update_arg(6, -scale)
    if causal and (bias is not None or not _attends_to_itself(node)):
        bias = _with_causal(program, node, bias)
        node.update_arg(7, False)
    if bias is not None:
        node.update_arg(3, _additive(program, bias, node))
        _full_bias(program, node)


def _with_causal(program: ProgramView, node: Node, bias: Node | None) -> Node:
    """A bias that also keeps each token from later ones."""
    graph = program.graph
    args = (first_input(node), _token_sizes(program, node))
    every = insert(graph, aten.new_ones.default, args, {"dtype": torch.bool}, like=node)
    seen = insert(graph, aten.tril.default, (every,), like=node)
    if bias is None:
        return seen
    if dtype_of(bias) == torch.bool:
        return insert(graph, aten.logical_and.default, (bias, seen), like=node)
    allowed = _additive(program, seen, node)
    bias = _additive(program, bias, node)
    return insert(graph, aten.add.Tensor, (bias, allowed), like=node)


def _additive(program: ProgramView, bias: Node, node: Node) -> Node:
    """Half the lowest number stands for False: what is added to it stays finite."""
    graph = program.graph
    wanted = dtype_of(node)
    assert wanted is not None
    if dtype_of(bias) == wanted:
        return bias
    if dtype_of(bias) != torch.bool:
        return insert(graph, aten.to.dtype, (bias, wanted), like=node)
    hidden = insert(graph, aten.logical_not.default, (bias,), like=node)
    wide = insert(graph, aten.to.dtype, (hidden, wanted), like=node)
    lowest = torch.finfo(wanted).min / 2
    return insert(graph, aten.mul.Tensor, (wide, lowest), like=node)


def _tokens(node: Node) -> tuple[Any, Any]:
    """How many tokens of the query and of the key an attention has."""
    query, key = map(shape_of, arguments(node)[:2])
    return query[_token_dim(query)], key[_token_dim(query)]


def _token_sizes(program: ProgramView, node: Node) -> list[Node | int]:
    """The same as arguments."""
    query, key = arguments(node)[:2]
    dim = _token_dim(shape_of(query))
    return [_size_of(program, source, dim, node) for source in (query, key)]


def _token_dim(query: tuple[Any, ...]) -> int:
    """Where the tokens are in a query: [batch, tokens, width] or [batch, heads, tokens, size]."""
    return 1 if len(query) == 3 else 2


def _times(program: ProgramView, one: Node | int, other: Any, like: Node) -> Node | int:
    """The product of two sizes."""
    if isinstance(one, int) and isinstance(other, int):
        return one * other
    return insert(program.graph, operator.mul, (one, other), like=like)


def _size_of(program: ProgramView, source: Node, dim: int, like: Node) -> Node | int:
    """A size as an argument: a number, or a node that gives it."""
    size = shape_of(source)[dim]
    if isinstance(size, int):
        return size
    return insert(program.graph, aten.sym_size.int, (source, dim), like=like)


_attention = torch.ops.enginecast.attention.default
_SIGMOIDS: dict[Any, Callable[..., Tensor]] = {
    aten.sigmoid.default: _sigmoid,
    aten.silu.default: lambda x: x / (1 + torch.exp(-x)),
    aten.glu.default: lambda x, dim=-1: x.chunk(2, dim)[0] / (1 + torch.exp(-x.chunk(2, dim)[1])),
}
_FEW_ELEMENTS, _FEW_PIXELS = 1024, 256
"""Elements that a kernel adds up one after the other without losing more than torch does."""
_NARROW, _MANY_ROWS = 32, 1024
"""Columns, and rows, with which a product and its bias are faster in one."""
MOST_ORDERED = 6
"""Dimensions of a value whose order in memory is looked for."""
_ABOUT = 2e-5
"""How far ONNX Runtime lets a constant be off, relatively, and somewhat more."""
_LOGARITHMS = frozenset({aten.log.default, aten.log2.default, aten.log10.default})
_QUOTIENTS = frozenset({aten.div.Tensor, aten.reciprocal.default, aten.rsqrt.default})
_SOFTMAXES = (aten.softmax.int, aten.log_softmax.int)
_MAXIMA = (
    aten.adaptive_max_pool1d.default,
    *(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default),
)
_MEANS = (aten.adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d.default)
_AVERAGES = {aten.avg_pool2d.default: 2, aten.avg_pool3d.default: 3}
_SAMPLERS = (aten.grid_sampler.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
FAR = 16384.0
"""A place, with -1 and 1 at the edges of a picture, that lies outside one of any size, and that
fp16 holds."""
_MAX_POOLS = (aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default)
_INDEXED = (aten.index.Tensor, aten.index_put.default)
_LAYERS = frozenset(
    {
        *(aten.linear.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default),
        *(aten.layer_norm.default, aten.rms_norm.default, aten.group_norm.default),
        aten.batch_norm.default,
    }
)
"""What loses a small value among others, or is of their size; infinities become NaN in them."""
_TRANSPOSED: dict[Any, int] = {
    aten.conv_transpose1d.default: 1,
    aten.conv_transpose2d.input: 2,
    aten.conv_transpose3d.input: 3,
}
_PADS = (
    aten.pad.default,
    *(aten.replication_pad1d.default, aten.replication_pad2d.default),
    *(aten.replication_pad3d.default, aten.reflection_pad1d.default),
    *(aten.reflection_pad2d.default, aten.reflection_pad3d.default),
)
_RULES: dict[Any, Rewrite] = {
    **dict.fromkeys(_PADS, _padded_and_cropped),
    aten.pixel_shuffle.default: lambda program, node: insert_traced(program, node, _shuffled),
    **dict.fromkeys(_TRANSPOSED, _grown),
    aten.linear.default: _linear_to_matmul,
    aten.rms_norm.default: _one_dtype,
    aten.group_norm.default: _group_norm,
    aten.rsub.Scalar: _promoted,
    **dict.fromkeys(_SOFTMAXES, _promoted),
    aten.add.Tensor: _added,
    **dict.fromkeys(_INDEXED, _int64_indices),
    aten.scaled_dot_product_attention.default: lambda program, node: insert_traced(
        program, node, _spelled_out
    ),
    aten.multilabel_margin_loss.default: lambda program, node: insert_traced(
        program, node, _multilabel_margin_loss
    ),
    aten.cross_entropy_loss.default: lambda program, node: insert_traced(
        program, node, _cross_entropy
    ),
    **dict.fromkeys(_SAMPLERS, _sampled),
    aten.histc.default: lambda program, node: insert_traced(program, node, _all_of_them),
    **dict.fromkeys(_MAX_POOLS, _max_pool),
    aten.as_strided.default: _in_memory_order,
    aten.clamp.default: _float_bounds,
    aten.floor_divide.default: _quotient_in_fp32,
    aten.div.Tensor_mode: _quotient_in_fp32,
    aten.reshape.default: _as_copy,
    aten.where.self: _bools_where,
    aten.masked_fill.Scalar: _bools_filled,
    aten.amax.default: _all_dims,
    aten.amin.default: _all_dims,
    aten.masked_select.default: _select_by_index,
    aten.repeat_interleave.self_int: _repeated,
    aten.repeat_interleave.self_Tensor: _uncounted,
    aten.lstm_cell.default: partial(_in_places_of_items, form=_lstm_cell),
    **dict.fromkeys(_MAXIMA, partial(_in_places_of_items, form=adaptive_max)),
    **dict.fromkeys(_MEANS, partial(_made_of, form=adaptive_mean)),
    **{
        op: partial(_made_of, form=form) for op, form in (*SPECIAL.items(), *LINEAR.items(), VANDER)
    },
    **{op: partial(_in_places_of_items, form=form) for op, form in SEVERAL.items()},
    **{
        op: partial(_made_of, form=partial(sum_by_divisor, rank=rank))
        for op, rank in _AVERAGES.items()
    },
    aten.gru_cell.default: lambda program, node: insert_traced(program, node, _gru_cell),
    **{
        op: partial(_cell, activation=activation)
        for op, activation in (
            (aten.rnn_tanh_cell.default, torch.tanh),
            (aten.rnn_relu_cell.default, torch.relu),
        )
    },
}
_UNFIT: dict[Any, Callable[[Node], bool]] = {
    **dict.fromkeys(_PADS, _crops),
    aten.pixel_shuffle.default: _is_of_whole_numbers,
    **dict.fromkeys(_TRANSPOSED, _grows_by_a_stride),
    aten.add.Tensor: lambda node: _is_of_bools(node) or _is_nearly_gelu(node),
    **dict.fromkeys(_INDEXED, _has_int32),
    aten.rms_norm.default: lambda node: bool(_of_other_dtypes(node)),
    aten.rsub.Scalar: lambda node: dtype_of(first_input(node)) != dtype_of(node),
    **dict.fromkeys(_SOFTMAXES, _is_of_other_dtype),
    aten.scaled_dot_product_attention.default: _broadcasts,
    aten.cross_entropy_loss.default: _is_other_cross_entropy,
    **dict.fromkeys(_SAMPLERS, _is_sampled_otherwise),
    aten.histc.default: _has_one_bin,
    **dict.fromkeys(_MAX_POOLS, _may_hold_infinity),
    aten.as_strided.default: _lies_otherwise,
    aten.clamp.default: _mixes_bounds,
    aten.floor_divide.default: _is_low_by_number,
    aten.div.Tensor_mode: _is_low_by_number,
    aten.reshape.default: _is_cropped,
    aten.where.self: _is_of_bools,
    **dict.fromkeys((*_MAXIMA, *_MEANS), is_adaptive),
    **dict.fromkeys(_AVERAGES, reaches_beyond),
    **dict.fromkeys((*LINEAR, *SEVERAL), is_small_matrix),
    VANDER[0]: is_vandermonde,
    aten.masked_fill.Scalar: _is_of_bools,
    aten.amax.default: _is_of_all_dims,
    aten.amin.default: _is_of_all_dims,
    aten.repeat_interleave.self_int: _repeats_by_size_or_nothing,
    aten.repeat_interleave.self_Tensor: lambda node: "output_size" in node.kwargs,
}
