"""Ops of complex values that torch.onnx, which holds them as pairs of real ones, has no form for.

    before:  %y = aten.select(%x, 1, 0)       after:  %p = aten.view_as_real(%x)
                                                      %r = aten.select(%p, -1, 0)
                                                      %i = aten.select(%p, -1, 1)
                                                      %a = aten.select(%r, 1, 0)
                                                      %b = aten.select(%i, 1, 0)
                                                      %s = aten.stack([%a, %b], -1)
                                                      %y = aten.view_as_complex(%s)

What moves elements moves both parts; a product of several is the sum of those of all parts.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from enginecast.passes.ir.base import ProgramView
from enginecast.passes.ir.edit import aten, fake_mode, value
from enginecast.passes.ir.rules import Rewrite, insert_traced

Form = Callable[..., Tensor]


def complex_rules() -> tuple[Mapping[Any, Rewrite], Mapping[Any, Callable[[Node], bool]]]:
    """The rules, and which calls they are for."""
    rules: dict[Any, Rewrite] = {
        **dict.fromkeys((*_FORMS, *_MOVES), _spelled_out),
        **dict.fromkeys(_SPLITS, _split),
    }
    conditions = dict.fromkeys(rules, _reads_complex)
    conditions |= dict.fromkeys(_BY_NUMBER, _has_complex_number)
    conditions |= dict.fromkeys(_FILLED, _gives_complex)
    conditions[aten.pow.Tensor_Scalar] = _is_power
    return rules, {**conditions, aten.linalg_norm.default: _is_of_vectors}


def _reads_complex(node: Node) -> bool:
    found = (value(source) for source in node.all_input_nodes)
    return any(isinstance(one, Tensor) and one.is_complex() for one in found)


def _gives_complex(node: Node) -> bool:
    return bool(value(node).is_complex())


def _is_of_vectors(node: Node) -> bool:
    """Whether a norm is that of all elements, or along one dimension."""
    _, order, dims = (*node.args, None, None)[:3]
    return _reads_complex(node) and (order is None or (isinstance(dims, list) and len(dims) == 1))


def _has_complex_number(node: Node) -> bool:
    return any(isinstance(one, complex) for one in (*node.args, *node.kwargs.values()))


def _is_power(node: Node) -> bool:
    """Whether a number is taken to a small whole power."""
    exponent: Any = node.args[1]
    return exponent in range(_MOST_POWER + 1) and _reads_complex(node)


def _split(program: ProgramView, node: Node) -> None:
    """Its results, in the places of their items."""
    target: Any = node.target

    def form(x: Tensor, *args: Any) -> list[Tensor]:
        return [
            _joined(*parts) for parts in zip(*(target(p, *args) for p in _parts(x)), strict=True)
        ]

    results = insert_traced(program, node, form)
    for item in list(node.users):
        item.replace_all_uses_with(results[item.args[1]])
        program.graph.erase_node(item)
    program.graph.erase_node(node)


def _spelled_out(program: ProgramView, node: Node) -> Node:
    target: Any = node.target
    form = _FORMS.get(target)

    def by_parts(*args: Any, **kwargs: Any) -> Tensor:
        real, imaginary = (
            target(*pytree.tree_map(part, args), **kwargs) for part in (_real, _imaginary)
        )
        return _joined(real, imaginary)

    def made(*args: Any, **kwargs: Any) -> Tensor:
        with fake_mode(program):
            return (form or by_parts)(*args, **kwargs)

    found: Node = insert_traced(program, node, made)
    return found


def _parts(x: Any) -> tuple[Tensor, ...]:
    """The real part, and the imaginary one of what has some."""
    return torch.view_as_real(x).unbind(-1) if x.is_complex() else (x,)


def _real(x: Any) -> Any:
    return _parts(x)[0] if isinstance(x, Tensor) else x


def _imaginary(x: Any) -> Any:
    """Indices and masks stay as they are."""
    return _parts(x)[-1] if isinstance(x, Tensor) else x


def _both(x: Tensor | complex, like: Tensor) -> tuple[Tensor, Tensor]:
    """Both parts of a tensor or a number, in the dtype of the parts of `like`."""
    dtype = like.real.dtype if like.is_complex() else like.dtype
    if not isinstance(x, Tensor):
        one = torch.ones([], dtype=dtype)
        return one * complex(x).real, one * complex(x).imag
    parts = [part.to(dtype) for part in _parts(x)]
    return parts[0], parts[1] if len(parts) == 2 else torch.zeros_like(parts[0])


def _joined(real: Tensor, imaginary: Tensor) -> Tensor:
    return torch.view_as_complex(torch.stack(torch.broadcast_tensors(real, imaginary), -1))


def _where(condition: Tensor, x: Any, y: Any) -> Tensor:
    like = next(one for one in (x, y) if isinstance(one, Tensor) and one.is_complex())
    pairs = zip(_both(x, like), _both(y, like), strict=True)
    return _joined(*(torch.where(condition, *pair) for pair in pairs))


def _masked_fill(x: Tensor, mask: Tensor, filled: Any) -> Tensor:
    pairs = zip(_both(filled, x), _parts(x), strict=True)
    return _joined(*(torch.where(mask, *pair) for pair in pairs))


def _pad(x: Tensor, widths: Sequence[Any], mode: str = "constant", value: Any = None) -> Tensor:
    filled = complex(value or 0)
    real, imaginary = _parts(x)
    if mode != "constant":
        return _joined(*(torch.nn.functional.pad(x, widths, mode) for x in (real, imaginary)))
    return _joined(
        torch.nn.functional.pad(real, widths, value=filled.real),
        torch.nn.functional.pad(imaginary, widths, value=filled.imag),
    )


def _einsum(equation: str, operands: Sequence[Tensor], **_: Any) -> Tensor:
    real: Any = None
    imaginary: Any = None
    for chosen in itertools.product(*(list(enumerate(_parts(x))) for x in operands)):
        turns = sum(index for index, _ in chosen) % 4  # powers of i
        term = torch.einsum(equation, *(part for _, part in chosen))
        term = -term if turns > 1 else term
        if turns % 2:
            imaginary = term if imaginary is None else imaginary + term
        else:
            real = term if real is None else real + term
    return _joined(real, imaginary)


def _product(product: Callable[[Any, Any], Tensor], x: Any, y: Any) -> Tensor:
    like = x if isinstance(x, Tensor) and (x.is_complex() or not isinstance(y, Tensor)) else y
    (a, b), (c, d) = _both(x, like), _both(y, like)
    return _joined(product(a, c) - product(b, d), product(a, d) + product(b, c))


def _mul(x: Any, y: Any) -> Tensor:
    return _product(torch.mul, x, y)


def _bmm(x: Tensor, y: Tensor) -> Tensor:
    return _product(torch.matmul, x, y)


def _times(x: Any, number: complex) -> Any:
    return _mul(x, number) if isinstance(x, Tensor) else x * number


def _add(x: Any, y: Any, *, alpha: Any = 1) -> Tensor:
    like = x if isinstance(x, Tensor) else y
    added = y if isinstance(y, Tensor) and alpha == 1 else _times(y, alpha)
    pairs = zip(_both(x, like), _both(added, like), strict=True)
    return _joined(*(one + other for one, other in pairs))


def _sub(x: Any, y: Any, *, alpha: Any = 1) -> Tensor:
    return _add(x, y, alpha=-alpha)


def _conj(x: Tensor) -> Tensor:
    real, imaginary = _parts(x)
    return _joined(real, -imaginary)


def _pow(x: Tensor, exponent: float) -> Tensor:
    """By squares."""
    exponent = int(exponent)
    result = None
    while exponent:
        if exponent & 1:
            result = x if result is None else _mul(result, x)
        exponent >>= 1
        x = _mul(x, x) if exponent else x
    if result is None:
        real, imaginary = _parts(x)
        return _joined(torch.ones_like(real), torch.zeros_like(imaginary))
    return result


def _square(x: Tensor) -> Tensor:
    return _mul(x, x)


def _addcmul(x: Tensor, one: Tensor, other: Tensor, *, value: Any = 1) -> Tensor:
    return _add(x, _mul(one, other), alpha=value)


def _addcdiv(x: Tensor, one: Tensor, other: Tensor, *, value: Any = 1) -> Tensor:
    return _add(x, _div(_product(torch.mul, one, complex(value)), other))


def _div(x: Any, y: Any) -> Tensor:
    """As torch divides, by the larger part first: squares would leave the range."""
    like = x if isinstance(x, Tensor) and x.is_complex() else y
    (a, b), (c, d) = _both(x, like), _both(y, like)
    is_wide = c.abs() >= d.abs()
    large, small = torch.where(is_wide, c, d), torch.where(is_wide, d, c)
    ratio = small / large
    scale = torch.reciprocal(large + small * ratio)
    real = torch.where(is_wide, a + b * ratio, a * ratio + b) * scale
    imaginary = torch.where(is_wide, b - a * ratio, b * ratio - a) * scale
    is_zero = (c == 0) & (d == 0)
    real = torch.where(is_zero, a / c.abs(), real)
    return _joined(real, torch.where(is_zero, b / d.abs(), imaginary))


def _reciprocal(x: Tensor) -> Tensor:
    return _div(1, x)


def _sum_with(product: Callable[[Tensor, Tensor], Tensor]) -> Form:
    """A product that is added to something, each times a number; nothing of what is times 0."""

    def added(x: Tensor, one: Tensor, other: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        found = product(one, other)
        found = found if alpha == 1 else _mul(found, alpha)
        if beta == 0:
            return found
        return _add(found, x if beta == 1 else _mul(x, beta))

    return added


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return _product(lambda one, other: one.unsqueeze(1) * other, x, y)


def _sum_of_products(x: Tensor, y: Tensor) -> Tensor:
    """Of all of a batch."""
    return _product(lambda one, other: torch.matmul(one, other).sum(0), x, y)


def _exp2(x: Tensor) -> Tensor:
    return _exp(_mul(x, math.log(2)))


def _expm1(x: Tensor) -> Tensor:
    """exp(a) cos(b) - 1, without the difference of numbers near 1."""
    real, imaginary = _parts(x)
    half = (imaginary / 2).sin()
    shrunk = torch.expm1(real) * imaginary.cos() - 2 * half * half
    return _joined(shrunk, real.exp() * imaginary.sin())


def _as_real(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A conversion to what has no imaginary part drops it."""
    wanted = kwargs.get("dtype") or next(one for one in args if isinstance(one, torch.dtype))
    real, imaginary = _parts(x)
    if not wanted.is_complex:
        return real.to(wanted)
    dtype = torch.float64 if wanted == torch.complex128 else torch.float32
    return _joined(real.to(dtype), imaginary.to(dtype))


def _sgn(x: Tensor) -> Tensor:
    real, imaginary = _parts(x)
    size = torch.hypot(real, imaginary)
    by = torch.where(size == 0, 1.0, size)
    return _joined(real / by, imaginary / by)


def _filled(op: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A tensor of one number."""
    wanted = op(*args, **kwargs)
    dtype = torch.float64 if wanted.dtype == torch.complex128 else torch.float32
    number = complex(args[1] if op is aten.full.default else op is aten.ones.default)
    parts = (torch.full(wanted.shape, part, dtype=dtype) for part in (number.real, number.imag))
    return _joined(*parts)


def _vector_norm(
    x: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, **_: Any
) -> Tensor:
    return _norm(x, 2 if ord is None else ord, dim, keepdim)


def _norm(x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(torch.hypot(*_parts(x)), ord, dim, keepdim)
    return found


def _index_put(x: Tensor, places: Any, values: Any, accumulate: bool = False) -> Tensor:
    pairs = zip(_parts(x), _both(values, x), strict=True)
    return _joined(*(aten.index_put(one, places, other, accumulate) for one, other in pairs))


def _slice_scatter(x: Tensor, source: Tensor, *where: Any) -> Tensor:
    pairs = zip(_parts(x), _both(source, x), strict=True)
    return _joined(*(aten.slice_scatter(one, other, *where) for one, other in pairs))


def _select_scatter(x: Tensor, source: Tensor, *where: Any) -> Tensor:
    pairs = zip(_parts(x), _both(source, x), strict=True)
    return _joined(*(aten.select_scatter(one, other, *where) for one, other in pairs))


def _exp(x: Tensor) -> Tensor:
    real, imaginary = _parts(x)
    size = real.exp()
    return _joined(size * imaginary.cos(), size * imaginary.sin())


def _eq(x: Tensor, y: Any) -> Tensor:
    like = x if x.is_complex() else y
    (a, b), (c, d) = _both(x, like), _both(y, like)
    return (a == c) & (b == d)


def _ne(x: Tensor, y: Any) -> Tensor:
    return ~_eq(x, y)


def _unsqueeze(x: Tensor, dim: int) -> Tensor:
    """The pair stays the last dimension."""
    return torch.view_as_complex(
        torch.view_as_real(x).unsqueeze(dim if dim >= 0 else dim - 1).contiguous()
    )


_MOST_POWER = 8
_MOVES = (
    *(aten.select.int, aten.expand.default, aten.expand_as.default, aten.expand_copy.default),
    *(aten.flip.default, aten.roll.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
    *(aten.squeeze_copy.default, aten.squeeze_copy.dim, aten.squeeze_copy.dims),
    *(aten.unfold.default, aten.unfold_copy.default),
    *(aten.index_select.default, aten.gather.default, aten.index.Tensor, aten.repeat.default),
    aten.cumsum.default,
)
"""They give the parts of what they give, from parts."""
_SPLITS = (
    *(aten.split_with_sizes.default, aten.split.Tensor),
    *(aten.split_with_sizes_copy.default, aten.split_copy.Tensor, aten.unbind_copy.int),
    *(aten.chunk.default, aten.unbind.int),
)
_FILLED = (aten.zeros.default, aten.ones.default, aten.full.default)
_BY_NUMBER = (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor)
_FORMS: Mapping[Any, Form] = {
    aten.where.self: _where,
    aten.where.ScalarOther: _where,
    aten.where.ScalarSelf: _where,
    aten.where.Scalar: _where,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.pad.default: _pad,
    aten.einsum.default: _einsum,
    aten.exp.default: _exp,
    aten.eq.Tensor: _eq,
    aten.eq.Scalar: _eq,
    aten.ne.Tensor: _ne,
    aten.ne.Scalar: _ne,
    aten.unsqueeze.default: _unsqueeze,
    aten.unsqueeze_copy.default: _unsqueeze,
    aten.mul.Tensor: _mul,
    aten.add.Tensor: _add,
    aten.sub.Tensor: _sub,
    aten.div.Tensor: _div,
    aten.reciprocal.default: _reciprocal,
    aten.bmm.default: _bmm,
    aten.mm.default: _bmm,
    aten.addmm.default: _sum_with(_bmm),
    aten.addmv.default: _sum_with(_bmm),
    aten.baddbmm.default: _sum_with(_bmm),
    aten.addbmm.default: _sum_with(_sum_of_products),
    aten.addr.default: _sum_with(_outer),
    aten.addcdiv.default: _addcdiv,
    aten.exp2.default: _exp2,
    aten.expm1.default: _expm1,
    **{getattr(aten.to, overload): _as_real for overload in ("dtype", "dtype_layout", "device")},
    aten._to_copy.default: _as_real,
    aten.sgn.default: _sgn,
    aten.angle.default: lambda x: torch.atan2(*reversed(_parts(x))),
    aten.conj_physical.default: _conj,
    aten._conj_physical.default: _conj,
    aten.square.default: _square,
    aten.pow.Tensor_Scalar: _pow,
    aten.addcmul.default: _addcmul,
    aten.linalg_vector_norm.default: _norm,
    aten.linalg_norm.default: _vector_norm,
    **{op: partial(_filled, op) for op in _FILLED},
    aten.index_put.default: _index_put,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
}
