"""Fourier transforms, as products with tables of sines and cosines.

The DFT of ONNX Runtime's CPU provider (1.31) counts angles in fp32: it loses 2,000 roundings at a
size of 1,000, and 8 at 1,024.  Here angles are fp64.  A size with factors is transformed by them
(Cooley and Tukey, 1965), a large prime by a convolution (Bluestein, 1970), and a size that varies
by a table that the engine computes.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn.functional import fold, pad

from enginecast.exporters.onnx.ops.registry import torch_form
from enginecast.passes.ir.edit import aten, first_input, same_size, value

DIRECT = 32
"""A size up to which one table is used, factors or not."""

LARGEST_PRIME = 512
"""A prime up to which one table is used."""

Half = Literal["given", "wanted"]
"""Which side of a transform has half of the frequencies, since the other side is real."""

Size = Any
"""An int or a SymInt."""

Parts = list[Tensor]
"""The real part, and the imaginary one where values are not real."""


def _is_wide(node: Node) -> bool:
    if node.target is aten.istft.default and value(node).dtype.is_complex:
        return False  # complex frames cannot be folded
    found: torch.dtype = value(first_input(node)).dtype
    return found not in (torch.float16, torch.bfloat16, torch.complex32)


def _one(x: Tensor, n: Size = None, dim: int = -1, norm: str | None = None, **kind: Any) -> Tensor:
    return _transform(x, None if n is None else [n], [dim], norm, **kind)


def _two(
    x: Tensor, s: Any = None, dim: Sequence[int] = (-2, -1), norm: str | None = None, **kind: Any
) -> Tensor:
    return _transform(x, s, dim, norm, **kind)


def _several(
    x: Tensor, s: Any = None, dim: Any = None, norm: str | None = None, **kind: Any
) -> Tensor:
    last = range(x.ndim) if s is None else range(x.ndim - len(s), x.ndim)
    return _transform(x, s, last if dim is None else dim, norm, **kind)


_KINDS: dict[str, dict[str, Any]] = {
    "fft": {},
    "ifft": {"inverse": True},
    "rfft": {"half": "wanted"},
    "irfft": {"inverse": True, "half": "given"},
    "hfft": {"half": "given"},
    "ihfft": {"inverse": True, "half": "wanted"},
}

for _kind, _options in _KINDS.items():
    for _dims, _form in (("", _one), ("2", _two), ("n", _several)):
        _op = getattr(aten, f"fft_{_kind}{_dims}").default
        torch_form(_op, when=_is_wide, step="fourier")(partial(_form, **_options))


@torch_form(aten.stft.default, when=_is_wide, step="fourier")
def _stft(
    x: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Tensor:
    """The transform of each frame, frames last."""
    frames = x.unfold(-1, n_fft, hop_length or n_fft // 4)
    if window is None:
        window = x.new_ones(win_length or n_fft)
    frames = frames * _padded(window, n_fft)
    half = None if onesided is False or frames.is_complex() else "wanted"
    found = _one(frames, norm="ortho" if normalized else None, half=half).transpose(-1, -2)
    return found if return_complex else torch.view_as_real(found)


@torch_form(aten.istft.default, when=_is_wide, step="fourier")
def _istft(
    x: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: Size = None,
    _: bool = False,
) -> Tensor:
    """The frames, each at its place, by what the windows add up to there."""
    hop = hop_length or n_fft // 4
    norm = "ortho" if normalized else None
    if onesided is False:  # torch reads a half all the same
        x = x.narrow(-2, 0, n_fft // 2 + 1)
    frames = _one(x.mT, n_fft, norm=norm, inverse=True, half="given")
    batch, count = frames.shape[:-2], frames.shape[-2]
    window = _padded(frames.new_ones(win_length or n_fft) if window is None else window, n_fft)

    def placed(rows: Tensor) -> Tensor:
        sizes = (1, (count - 1) * hop + n_fft)
        return fold(rows.mT, sizes, (1, n_fft), stride=(1, hop)).flatten(1)

    rows = (frames * window).reshape(-1, count, n_fft)
    found = placed(rows) / placed((window * window).expand(1, count, n_fft))
    start = n_fft // 2 if center else 0
    end = -start if length is None else start + length
    found = found[:, start : end or None]
    if length is not None:
        found = _resized(found, length)
    return found.reshape([*batch, found.shape[-1]])


def _padded(window: Tensor, size: int) -> Tensor:
    missing = size - window.shape[0]
    return pad(window, (missing // 2, missing - missing // 2))


def _transform(
    x: Tensor,
    s: Sequence[Size] | None,
    dim: Sequence[int],
    norm: str | None,
    *,
    inverse: bool = False,
    half: Half | None = None,
) -> Tensor:
    """Any transform; those of Hermitian signals are the inverse ones the other way round."""
    dims = [each % x.ndim for each in dim]
    sizes = [x.shape[each] for each in dims]
    if half == "given":
        sizes[-1] = 2 * (sizes[-1] - 1)
    if s is not None:
        sizes = [own if size == -1 else size for own, size in zip(sizes, s, strict=True)]
    steps = list(zip(dims, sizes, strict=True))
    parts = _parts(x)
    for axis, size in steps if half == "given" else reversed(steps):
        side = half if axis == dims[-1] else None
        parts = [part.movedim(axis, -1) for part in parts]
        if side == "given":
            parts = _hermitian([_resized(part, size // 2 + 1) for part in parts], size)
        parts = _dft([_resized(part, size) for part in parts], size, 1 if inverse else -1)
        if side == "wanted":
            parts = [part[..., : size // 2 + 1] for part in parts]
        parts = [part.movedim(-1, axis) for part in parts]
    found = parts[0] if half == "given" else torch.stack(parts, -1)
    count = math.prod(map(_number, sizes))
    if norm == "ortho":
        found = found / count**0.5
    elif inverse == (norm != "forward"):
        found = found / count
    return found if half == "given" else torch.view_as_complex(found)


def _parts(x: Tensor) -> Parts:
    if x.is_complex():
        return list(torch.view_as_real(x.resolve_conj()).unbind(-1))
    return [x if x.is_floating_point() else x.to(torch.get_default_dtype())]


def _resized(x: Tensor, size: Size) -> Tensor:
    """Cut or filled up with zeros along the last dimension."""
    own = x.shape[-1]
    if same_size(own, size):
        return x
    if isinstance(own, int) and isinstance(size, int) and size < own:
        return x[..., :size]
    return pad(x, (0, size))[..., :size]


def _hermitian(parts: Parts, size: Size) -> Parts:
    """All frequencies of a real signal, from the first half of them."""
    mirrored = [part[..., 1 : size - size // 2].flip(-1) for part in parts]
    signed = zip(parts, mirrored, (1, -1), strict=False)
    return [torch.cat([part, sign * mirror], -1) for part, mirror, sign in signed]


def _dft(parts: Parts, size: Size, sign: int) -> Parts:
    """The transform along the last dimension, exp(sign * 2 pi i j k / size)."""
    if not isinstance(size, int) or size <= DIRECT:
        return _direct(parts, size, sign)
    root = next(factor for factor in range(math.isqrt(size), 0, -1) if size % factor == 0)
    if root > 1:
        found = _by_factors(parts, root, size // root, sign)
    elif size <= LARGEST_PRIME:
        return _direct(parts, size, sign)
    else:
        found = _by_convolution(parts, size, sign)
    if len(parts) == 1:  # of real values, the first and the middle frequency are real
        own = 2 * torch.arange(size) % size == 0
        found[1] = found[1].masked_fill(own, 0.0)
    return found


def _direct(parts: Parts, size: Size, sign: int) -> Parts:
    places = torch.arange(size)
    return _times(parts, _roots(places[:, None] * places, size, sign, parts[0].dtype), torch.matmul)


def _by_factors(parts: Parts, first: int, second: int, sign: int) -> Parts:
    """Cooley's and Tukey's: element j * second + k to frequency m + n * first."""
    rows = [part.reshape([*part.shape[:-1], first, second]).mT for part in parts]
    rows = _dft(rows, first, sign)
    turns = torch.arange(second)[:, None] * torch.arange(first)
    rows = _times(rows, _roots(turns, first * second, sign, rows[0].dtype), torch.mul)
    rows = _dft([row.mT for row in rows], second, sign)
    return [row.mT.flatten(-2) for row in rows]


def _by_convolution(parts: Parts, size: int, sign: int) -> Parts:
    """Bluestein's: 2 j k = j^2 + k^2 - (k - j)^2."""
    longer, dtype, places = 1 << (2 * size - 1).bit_length(), parts[0].dtype, torch.arange(size)
    chirp = _roots(places * places, 2 * size, sign, torch.float64)
    gap = chirp[0].new_zeros(longer - 2 * size + 1)
    kernel = [torch.cat([part, gap, part[1:].flip(0)]) for part in (chirp[0], -chirp[1])]
    spectrum = [part.to(dtype) for part in _dft(kernel, longer, -1)]
    narrow = [part.to(dtype) for part in chirp]
    given = [pad(part, (0, longer - size)) for part in _times(parts, narrow, torch.mul)]
    product = _times(_dft(given, longer, -1), spectrum, torch.mul)
    found = [part[..., :size] / longer for part in _dft(product, longer, 1)]
    return _times(found, narrow, torch.mul)


def _times(parts: Parts, others: Parts, product: Callable[[Tensor, Tensor], Tensor]) -> Parts:
    """The product of complex values."""
    real, imaginary = others
    found = [product(parts[0], real), product(parts[0], imaginary)]
    if len(parts) == 1:
        return found
    return [
        found[0] - product(parts[1], imaginary),
        found[1] + product(parts[1], real),
    ]


def _roots(turns: Tensor, size: Size, sign: int, dtype: torch.dtype) -> Parts:
    """Roots of unity: of `turns` parts of a circle of `size` parts; zeros are exact."""
    size = _number(size)
    turns = turns % size
    angles = turns.to(torch.float64) * (2 * math.pi) / size
    cosines = angles.cos().masked_fill(4 * turns % (2 * size) == size, 0.0)
    sines = (sign * angles.sin()).masked_fill(2 * turns % size == 0, 0.0)
    return [cosines.to(dtype), sines.to(dtype)]


def _number(size: Size) -> int | Tensor:
    """A size as a tensor where it varies: a SymInt among the arguments of an op would be fixed."""
    return size if isinstance(size, int) else torch.arange(size)[-1] + 1
