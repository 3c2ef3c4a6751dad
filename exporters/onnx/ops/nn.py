"""Layers of torch.nn: products, norms, activations, losses, experts."""

import math
from collections.abc import Sequence
from functools import partial
from string import ascii_lowercase
from typing import Any

import onnx
import torch
from onnx_ir.tensor_adapters import to_torch_dtype
from onnxscript import opset23 as op
from torch import Tensor
from torch.fx import Node

from enginecast.exporters.onnx.ops.graph import captured_rows, size_of
from enginecast.exporters.onnx.ops.microsoft import skip_norm
from enginecast.exporters.onnx.ops.registry import (
    NOT_ON_CPU,
    ON_CPU,
    ONNXRUNTIME,
    PLAIN,
    form,
    refuse,
    rewrite,
    torch_form,
)
from enginecast.exporters.onnx.ops.special import expm1, softplus
from enginecast.exporters.onnx.ops.values import REALS, in_fp32, ints, like, value
from enginecast.passes.ir.base import ProgramView
from enginecast.passes.ir.edit import arguments, dtype_of, first_input, insert, shape_of
from enginecast.passes.ir.effects import aten, own
from enginecast.passes.ir.match import is_call
from enginecast.passes.ir.pattern import DIGITS
from enginecast.passes.ir.varying_sizes import may_be_zero

# Products


@rewrite(aten.linear.default, readers=NOT_ON_CPU)
def _linear(program: ProgramView, node: Node) -> Node:
    """The transposed weight is a weight expression: it is stored so, and costs nothing."""
    graph = program.graph
    source, weight = node.args[:2]
    bias = node.args[2] if len(node.args) > 2 else None
    transposed = insert(graph, aten.t.default, (weight,), like=node)
    # Both give the shape and dtype of the linear.
    result = insert(graph, aten.matmul.default, (source, transposed), like=node, replaces=True)
    if bias is None:
        return result
    return insert(graph, aten.add.Tensor, (result, bias), like=node, replaces=True)


_NARROW, _MANY_ROWS = 32, 1024
"""Columns, and rows, with which a product and its bias are faster in one."""


@rewrite(aten.linear.default, readers=ON_CPU)
def _linear_on_cpu(program: ProgramView, node: Node) -> Node:
    """As one product with its bias, where that was measured to be faster: ONNX Runtime's Add takes
    a step for each row, which costs as much as the product of narrow ones.
    """
    source, bias = first_input(node), (*node.args, None)[2]
    is_narrow = shape_of(node)[-1] <= _NARROW and (captured_rows(source) or 0) >= _MANY_ROWS
    if bias is None or dtype_of(node) != torch.float32 or not is_narrow:
        return _linear(program, node)
    graph, sizes = program.graph, shape_of(source)
    flat = insert(graph, aten.reshape.default, (source, [-1, sizes[-1]]), like=node)
    transposed = insert(graph, aten.t.default, (node.args[1],), like=node)
    product = insert(graph, aten.addmm.default, (bias, flat, transposed), like=node)
    shape = [size_of(program, source, dim, node) for dim in range(len(sizes) - 1)]
    args = (product, [*shape, shape_of(node)[-1]])
    return insert(graph, aten.reshape.default, args, like=node, replaces=True)


@form(aten.addmm.default)
def _addmm(c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Gemm has no kernel for integers."""
    if c.dtype in REALS:
        return op.Gemm(a, b, c, alpha=float(alpha), beta=float(beta))
    product, bias = op.MatMul(a, b), c
    product = product if alpha == 1 else op.Mul(product, value(alpha, c))
    return op.Add(product, bias if beta == 1 else op.Mul(bias, value(beta, c)))


@form(aten.einsum.default, readers=("tensorrt",))
def _einsum(equation: str, operands: Sequence[Any], **_: Any) -> Any:
    """TensorRT's parser knows no capital letters."""
    letters = dict.fromkeys(filter(str.isalpha, equation))
    free = iter(sorted(set(ascii_lowercase) - set(letters)))
    other = {letter: letter if letter.islower() else next(free, letter) for letter in letters}
    return op.Einsum(*operands, equation="".join(other.get(sign, sign) for sign in equation))


@form(aten.conv3d.default)
def _conv3d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Sequence[int] = (1, 1, 1),
    padding: Sequence[int] = (0, 0, 0),
    dilation: Sequence[int] = (1, 1, 1),
    groups: int = 1,
) -> Any:
    """torchlib's gives a convolution without bias one of two dims, and one without a batch none."""
    if x.shape is not None and len(x.shape) == 4:
        found: Any = _conv3d(
            op.Unsqueeze(x, ints(0)), weight, bias, stride, padding, dilation, groups
        )
        return op.Squeeze(found, ints(0))
    strides, pads, dilations = ([*each] * (3 // len(each)) for each in (stride, padding, dilation))
    return op.Conv(
        *((x, weight) if bias is None else (x, weight, bias)),
        strides=strides,
        pads=[*pads, *pads],
        dilations=dilations,
        group=groups,
    )


@form("transformers::grouped_mm_fallback")
def _grouped_mm(rows: Any, weight: Any, offs: Any) -> Any:
    """A mixture of experts: rows that are sorted by expert, times the weights of their expert.

    transformers computes it with one grouped product, and ONNX has none.  The number of experts is
    known, so it is one product for each over the rows that were routed to it, which may be none.

    Args:
        rows: [rows, in].
        weight: [experts, in, out].
        offs: [experts]: where the rows of each expert end.
    """
    experts = weight.shape[0]
    zero = op.Constant(value_ints=[0])
    ends = op.Cast(offs, to=7)
    weights = op.Split(weight, axis=0, num_outputs=experts) if experts > 1 else [weight]
    stops = op.Split(ends, axis=0, num_outputs=experts) if experts > 1 else [ends]
    starts = [zero, *stops[: experts - 1]]
    products = [
        op.MatMul(op.Slice(rows, starts[i], stops[i], zero), op.Squeeze(weights[i], zero))
        for i in range(experts)
    ]
    return op.Concat(*products, axis=0)


# Norms


@form(own.skip_rms_norm.default, readers=ONNXRUNTIME)
def _skip_rms_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> tuple[Any, Any]:
    results = skip_norm(x, residual, weight, epsilon=epsilon)
    return results[0], results[3]


@form(own.skip_rms_norm.default, readers=PLAIN)
def _add_and_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> tuple[Any, Any]:
    """The same in ops of ONNX's own."""
    total = op.Add(x, residual)
    return op.RMSNormalization(total, weight, axis=-1, epsilon=epsilon), total


@form(aten.rms_norm.default)
def _rms_norm(
    input: Any,
    normalized_shape: list[int],
    weight: Any = None,
    eps: float | None = None,
) -> Any:
    if weight is None:
        one = onnx.helper.make_tensor("one", input.dtype, [1], [1.0])
        weight = op.ConstantOfShape(op.Constant(value_ints=list(normalized_shape)), value=one)
    if eps is None:
        eps = torch.finfo(to_torch_dtype(input.dtype)).eps
    return op.RMSNormalization(input, weight, axis=-len(normalized_shape), epsilon=eps)


def _of_other_dtypes(node: Node) -> list[int]:
    """Which of an RMS norm's operands have another dtype than the program says of the result."""
    given = enumerate(node.args)
    return [i for i, s in given if i in (0, 2) and s and dtype_of(s) != dtype_of(node)]


@rewrite(aten.rms_norm.default, when=lambda node: bool(_of_other_dtypes(node)))
def _one_dtype(program: ProgramView, node: Node) -> None:
    """torch multiplies an fp16 value by an fp32 weight; ONNX wants both in one dtype."""
    for index in _of_other_dtypes(node):
        args = (node.args[index], dtype_of(node))
        node.update_arg(index, insert(program.graph, aten.to.dtype, args, like=node))


@torch_form(aten.group_norm.default, readers=NOT_ON_CPU)
def _group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    _: bool = True,
) -> Tensor:
    """ONNX defines GroupNormalization by mean(x^2) - mean(x)^2, and ONNX Runtime's CPU provider
    runs that definition: where a group's mean is large it loses most digits.  LayerNormalization
    subtracts the mean first, so each group becomes a row of it.
    """
    batch, channels, *sizes = x.shape
    elements = channels // groups * math.prod(sizes) if may_be_zero(batch) else -1
    rows = x.reshape(batch, groups, elements)
    normed = torch.nn.functional.layer_norm(rows, rows.shape[2:], eps=eps).reshape(x.shape)
    wide = [channels, *[1] * len(sizes)]
    normed = normed if weight is None else normed * weight.reshape(wide)
    return normed if bias is None else normed + bias.reshape(wide)


_FEW_ELEMENTS, _FEW_PIXELS = 1024, 256
"""Elements that a kernel adds up one after the other without losing more than torch does."""


@torch_form(aten.group_norm.default, readers=ON_CPU)
def _group_norm_on_cpu(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    _: bool = True,
) -> Tensor:
    """A large group is reduced dimension by dimension: ONNX Runtime's kernels (1.31) add the
    elements of a row one after the other, which loses digits with their number, and most where they
    are equal (an image of one color: 1000 times what torch loses).
    """
    batch, channels, *sizes = x.shape
    each = channels // groups
    is_small = _are_few([each, *sizes], _FEW_ELEMENTS)
    if is_small or x.dtype != torch.float32 or any(map(may_be_zero, x.shape)):
        return _group_norm(x, groups, weight, bias, eps)
    inner = [math.prod(sizes)] if _are_few(sizes, _FEW_PIXELS) else sizes
    ones = [1] * len(inner)

    def mean(values: Tensor) -> Tensor:
        for dim in reversed(range(2, values.dim())):
            values = values.mean(dim, keepdim=True)
        return values

    split = x.reshape(batch, groups, each, *inner)
    centered = split - mean(split)
    scale = torch.rsqrt(mean(centered * centered) + eps)
    scale = scale if weight is None else scale * weight.reshape(groups, each, *ones)
    normed = centered * scale
    normed = normed if bias is None else normed + bias.reshape(groups, each, *ones)
    return normed.reshape(x.shape)


def _are_few(sizes: Sequence[Any], most: int) -> bool:
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) <= most


# Activations


@form(aten.elu.default)
@in_fp32
def _elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    low = op.Mul(expm1(op.Mul(x, like(x, input_scale))), like(x, alpha * scale))
    return op.Where(op.Greater(x, like(x, 0.0)), op.Mul(x, like(x, scale)), low)


@form(aten.celu.default)
@in_fp32
def _celu(x: Any, alpha: float = 1.0) -> Any:
    low = op.Mul(expm1(op.Div(x, like(x, alpha))), like(x, alpha))
    return op.Where(op.Greater(x, like(x, 0.0)), x, low)


@form(aten.selu.default)
@in_fp32
def _selu(x: Any) -> Any:
    """Klambauer et al., "Self-normalizing neural networks", 2017."""
    return _elu(x, 1.6732632423543772, 1.0507009873554805)


@form(aten.log_sigmoid.default)
@in_fp32
def _log_sigmoid(x: Any) -> Any:
    return op.Neg(softplus(op.Neg(x)))


@form(aten.log_sigmoid_forward.default)
def _log_sigmoid_forward(x: Any) -> Any:
    return _log_sigmoid(x), op.Neg(op.Abs(x))


@form(aten.hardtanh.default)
def _hardtanh(x: Any, low: float = -1.0, high: float = 1.0) -> Any:
    """The bounds of integers are cut to integers."""
    number = float if x.dtype in REALS else int
    return op.Clip(x, like(x, number(low)), like(x, number(high)))


@form(aten.rrelu_with_noise_functional.default)
def _rrelu(
    x: Any, noise: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> tuple[Any, Any]:
    """The slope is the mean one where nothing is drawn."""
    if training:
        raise ValueError("it draws random numbers while it trains")
    return op.LeakyRelu(x, alpha=(lower + upper) / 2), noise


LAYERS = frozenset(
    {
        *(aten.linear.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default),
        *(aten.layer_norm.default, aten.rms_norm.default, aten.group_norm.default),
        aten.batch_norm.default,
    }
)
"""What loses a small value among others, or is of their size; infinities become NaN in them."""


def _needs_small_values(node: Node) -> bool:
    """Whether something else than layers with weights, and norms, reads a sigmoid in fp32."""
    if dtype_of(node) != torch.float32:
        return False
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if user.target in LAYERS or user in seen:
                continue
            if user.op == "output":
                return True
            seen.add(user)
            waiting.append(user)
    return False


_exact = partial(torch_form, when=_needs_small_values, readers=ON_CPU)


@_exact(aten.sigmoid.default)
def sigmoid(x: Tensor) -> Tensor:
    """ONNX Runtime's Sigmoid on CPUs (1.31) is off by up to 1e-7, which is all of sigmoid(-18):
    what reaches an output, or anything but a layer with weights, is as in torch's kernels.
    """
    if not x.is_floating_point():
        x = x.to(torch.get_default_dtype())  # torch does so, and a negated uint8 wraps around
    return torch.reciprocal(1 + torch.exp(-x))


@_exact(aten.silu.default)
def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


@_exact(aten.glu.default)
def _glu(x: Tensor, dim: int = -1) -> Tensor:
    kept, gate = x.chunk(2, dim)
    return kept / (1 + torch.exp(-gate))


_ABOUT = 2e-5
"""How far ONNX Runtime lets a constant be off, relatively, and somewhat more."""


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


@rewrite(aten.add.Tensor, when=_is_nearly_gelu)
def _one_minus_erf(program: ProgramView, node: Node) -> Node:
    """ONNX Runtime (1.31) takes 1 + erf(x / 1.41421) for that of a gelu, whose constant has more
    digits.  These are the same numbers: erf is odd, in every kernel.
    """
    graph, scaled = program.graph, first_input(first_input(node))
    assert callable(scaled.target)
    args = (scaled.args[0], -scaled.args[1])  # type: ignore[operator]
    turned = insert(graph, scaled.target, args, like=scaled)
    erf = insert(graph, aten.erf.default, (turned,), like=node)
    return insert(graph, aten.rsub.Scalar, (erf, 1.0), like=node)


# What ONNX means otherwise


def _moves_whole_numbers(node: Node) -> bool:
    return dtype_of(node) in (torch.int64, torch.int32, torch.int16, torch.int8, torch.bool)


def _crops(node: Node) -> bool:
    """Whether a padding with values of the input has a negative width."""
    widths: Any = node.args[1]
    is_constant = node.target is aten.pad.default and (*node.args, "constant")[2] == "constant"
    known = all(isinstance(width, int) for width in widths)
    return known and not is_constant and any(width < 0 for width in widths)


def _grows_by_a_stride(node: Node) -> bool:
    """Whether a transposed convolution adds as many elements at the end as it moves by, or more."""
    given: list[Any] = [*node.args, *(None, 1, 0, 0)[len(node.args) - 2 :]]
    stride, more = ([each] if isinstance(each, int) else each for each in (given[3], given[5]))
    rank = max(len(stride), len(more))
    pairs = zip([*stride] * (rank // len(stride)), [*more] * (rank // len(more)), strict=True)
    return any(one >= step for step, one in pairs)


def _reads_narrow(node: Node) -> bool:
    """Whether it reads integers of fewer than 64 bits."""
    narrow = (torch.uint8, torch.int8, torch.int16, torch.int32)
    return any(dtype_of(source) in narrow for source in node.all_input_nodes)


def _is_other_cross_entropy(node: Node) -> bool:
    x, target, *rest = arguments(node)
    is_smoothed = len(rest) == 4 and rest[-1] != 0
    is_of_shares = getattr(dtype_of(target), "is_floating_point", False)
    return is_smoothed or is_of_shares or len(shape_of(x)) == 1


refuse(
    *(aten.einsum.default, aten.bilinear.default),
    when=_reads_narrow,
    reason="ONNX Runtime has no Einsum of such integers",
)
refuse(
    aten.pixel_shuffle.default,
    when=_moves_whole_numbers,
    reason="ONNX Runtime has no DepthToSpace of whole numbers",
)
refuse(
    *(aten.pad.default, aten.replication_pad1d.default, aten.replication_pad2d.default),
    *(aten.replication_pad3d.default, aten.reflection_pad1d.default),
    *(aten.reflection_pad2d.default, aten.reflection_pad3d.default),
    when=_crops,
    reason="ONNX Runtime crops constant paddings alone; slice the input instead",
)
refuse(
    aten.conv_transpose1d.default,
    *(aten.conv_transpose2d.input, aten.conv_transpose3d.input),
    when=_grows_by_a_stride,
    reason="ONNX Runtime wants an output padding below the stride",
)
refuse(
    aten.cross_entropy_loss.default,
    when=_is_other_cross_entropy,
    reason="ONNX has that of classes alone, of a batch, without smoothing",
)
refuse(aten.multilabel_margin_loss.default, reason="torch decomposes it into another loss")
