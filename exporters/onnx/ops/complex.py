"""Ops of complex values that torch.onnx, which holds them as pairs of real ones, has no form for.

    before:  %y = aten.select(%x, 1, 0)       after:  %p = aten.view_as_real(%x)
                                                      %r = aten.select(%p, -1, 0)
                                                      %i = aten.select(%p, -1, 1)
                                                      %a = aten.select(%r, 1, 0)
                                                      %b = aten.select(%i, 1, 0)
                                                      %s = aten.stack([%a, %b], -1)
                                                      %y = aten.view_as_complex(%s)

What moves elements moves both parts; a product of several is the sum of those of all parts.  These
are the ops of rotary embeddings and of what is computed between Fourier transforms; torch.onnx
refuses others.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from enginecast.exporters.onnx.ops.registry import torch_form
from enginecast.passes.ir.edit import aten, value


def _reads_complex(node: Node) -> bool:
    found = (value(source) for source in node.all_input_nodes)
    return any(isinstance(one, Tensor) and one.is_complex() for one in found)


_complex = partial(torch_form, when=_reads_complex, step="complex")


def _gives_complex(node: Node) -> bool:
    return bool(value(node).is_complex())


def _has_complex_number(node: Node) -> bool:
    return any(isinstance(one, complex) for one in (*node.args, *node.kwargs.values()))


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


_MOVES = (
    *(aten.select.int, aten.expand.default, aten.expand_as.default),
    *(aten.flip.default, aten.roll.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
    aten.unfold.default,
    *(aten.index_select.default, aten.gather.default, aten.index.Tensor, aten.repeat.default),
    aten.cumsum.default,
)
"""They give the parts of what they give, from parts."""

_SPLITS = (
    *(aten.split_with_sizes.default, aten.split.Tensor),
    *(aten.chunk.default, aten.unbind.int),
)


def _by_parts(op: Any) -> Callable[..., Tensor]:
    def moved(*args: Any, **kwargs: Any) -> Tensor:
        real, imaginary = (
            op(*pytree.tree_map(part, args), **kwargs) for part in (_real, _imaginary)
        )
        return _joined(real, imaginary)

    return moved


def _split(op: Any) -> Callable[..., list[Tensor]]:
    def split(x: Tensor, *args: Any) -> list[Tensor]:
        return [_joined(*parts) for parts in zip(*(op(p, *args) for p in _parts(x)), strict=True)]

    return split


for _op in _MOVES:
    _complex(_op)(_by_parts(_op))
for _op in _SPLITS:
    _complex(_op)(_split(_op))


@_complex(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def _where(condition: Tensor, x: Any, y: Any) -> Tensor:
    like = next(one for one in (x, y) if isinstance(one, Tensor) and one.is_complex())
    pairs = zip(_both(x, like), _both(y, like), strict=True)
    return _joined(*(torch.where(condition, *pair) for pair in pairs))


@_complex(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(x: Tensor, mask: Tensor, filled: Any) -> Tensor:
    pairs = zip(_both(filled, x), _parts(x), strict=True)
    return _joined(*(torch.where(mask, *pair) for pair in pairs))


@_complex(aten.pad.default)
def _pad(x: Tensor, widths: Sequence[Any], mode: str = "constant", value: Any = None) -> Tensor:
    filled = complex(value or 0)
    real, imaginary = _parts(x)
    if mode != "constant":
        return _joined(*(torch.nn.functional.pad(x, widths, mode) for x in (real, imaginary)))
    return _joined(
        torch.nn.functional.pad(real, widths, value=filled.real),
        torch.nn.functional.pad(imaginary, widths, value=filled.imag),
    )


@_complex(aten.einsum.default)
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


@torch_form(aten.mul.Tensor, when=_has_complex_number, step="complex")
def _mul(x: Any, y: Any) -> Tensor:
    return _product(torch.mul, x, y)


@_complex(aten.bmm.default, aten.mm.default)
def _bmm(x: Tensor, y: Tensor) -> Tensor:
    return _product(torch.matmul, x, y)


def _times(x: Any, number: complex) -> Any:
    return _mul(x, number) if isinstance(x, Tensor) else x * number


@torch_form(aten.add.Tensor, when=_has_complex_number, step="complex")
def _add(x: Any, y: Any, *, alpha: Any = 1) -> Tensor:
    like = x if isinstance(x, Tensor) else y
    added = y if isinstance(y, Tensor) and alpha == 1 else _times(y, alpha)
    pairs = zip(_both(x, like), _both(added, like), strict=True)
    return _joined(*(one + other for one, other in pairs))


@torch_form(aten.sub.Tensor, when=_has_complex_number, step="complex")
def _sub(x: Any, y: Any, *, alpha: Any = 1) -> Tensor:
    return _add(x, y, alpha=-alpha)


@_complex(aten.conj_physical.default, aten._conj_physical.default)
def _conj(x: Tensor) -> Tensor:
    real, imaginary = _parts(x)
    return _joined(real, -imaginary)


@_complex(*(aten.to.dtype, aten.to.dtype_layout, aten.to.device), aten._to_copy.default)
def _as_real(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A conversion to what has no imaginary part drops it."""
    wanted = kwargs.get("dtype") or next(one for one in args if isinstance(one, torch.dtype))
    real, imaginary = _parts(x)
    if not wanted.is_complex:
        return real.to(wanted)
    dtype = torch.float64 if wanted == torch.complex128 else torch.float32
    return _joined(real.to(dtype), imaginary.to(dtype))


@_complex(aten.angle.default)
def _angle(x: Tensor) -> Tensor:
    return torch.atan2(*reversed(_parts(x)))


def _filled(op: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A tensor of one number."""
    wanted = op(*args, **kwargs)
    dtype = torch.float64 if wanted.dtype == torch.complex128 else torch.float32
    number = complex(args[1] if op is aten.full.default else op is aten.ones.default)
    parts = (torch.full(wanted.shape, part, dtype=dtype) for part in (number.real, number.imag))
    return _joined(*parts)


for _op in (aten.zeros.default, aten.ones.default, aten.full.default):
    torch_form(_op, when=_gives_complex, step="complex")(partial(_filled, _op))


@_complex(aten.pad_sequence.default)
def _pad_sequence(
    rows: Sequence[Tensor], first: bool = False, value: float = 0.0, side: str = "right"
) -> Tensor:
    parts = zip(*map(_parts, rows), strict=True)
    pairs = zip(parts, (value, 0.0), strict=True)
    return _joined(*(aten.pad_sequence(list(part), first, fill, side) for part, fill in pairs))


@_complex(aten.linalg_vector_norm.default)
def _norm(x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(torch.hypot(*_parts(x)), ord, dim, keepdim)
    return found


@_complex(aten.index_put.default)
def _index_put(x: Tensor, places: Any, values: Any, accumulate: bool = False) -> Tensor:
    pairs = zip(_parts(x), _both(values, x), strict=True)
    return _joined(*(aten.index_put(one, places, other, accumulate) for one, other in pairs))


@_complex(aten.slice_scatter.default)
def _slice_scatter(x: Tensor, source: Tensor, *where: Any) -> Tensor:
    pairs = zip(_parts(x), _both(source, x), strict=True)
    return _joined(*(aten.slice_scatter(one, other, *where) for one, other in pairs))


@_complex(aten.select_scatter.default)
def _select_scatter(x: Tensor, source: Tensor, *where: Any) -> Tensor:
    pairs = zip(_parts(x), _both(source, x), strict=True)
    return _joined(*(aten.select_scatter(one, other, *where) for one, other in pairs))


@_complex(aten.exp.default)
def _exp(x: Tensor) -> Tensor:
    real, imaginary = _parts(x)
    size = real.exp()
    return _joined(size * imaginary.cos(), size * imaginary.sin())


@_complex(aten.unsqueeze.default)
def _unsqueeze(x: Tensor, dim: int) -> Tensor:
    """The pair stays the last dimension."""
    return torch.view_as_complex(
        torch.view_as_real(x).unsqueeze(dim if dim >= 0 else dim - 1).contiguous()
    )
