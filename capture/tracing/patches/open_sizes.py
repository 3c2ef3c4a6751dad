"""Trace without specializing on whether a size is 1.

torch.export guards each computed size against 1, where it would broadcast, so that `x[-10:]`,
`x[n // 2:]`, `x[::3]` or `unfold` are refused for ranges in which one of them becomes 1.  Left
unasked, a size that must not be 1 (or must be equal to another) is a guard still.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from enginecast.library_names import aten, private

MOST_SIZES = 10_000
"""Sizes of one dimension for which pieces are counted."""

_PRODUCTS = (nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)


@contextmanager
def open_sizes() -> Iterator[None]:
    """Trace within the block so."""
    config = private("torch.fx.experimental._config", "a size that may be 1")
    with config.patch(backed_size_oblivious=True), _Pieces():
        yield


class _Pieces(TorchFunctionMode):
    """Cuts tensors into pieces by slices, for `chunk` and `split` fix how many there are, as
    `linspace` does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_off = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("chunk", "split") and not self._is_off:

            def whole() -> Any:
                self._is_off = True
                try:
                    return func(*args, **kwargs)
                finally:
                    self._is_off = False

            pieces = _cut(name, whole, *args, **kwargs)
            if pieces is not None:
                return pieces
        if func in _PRODUCTS and args:
            args = (_dense(args[0]), *args[1:])
        if func is Tensor.contiguous and len(args) == 1 and not kwargs:
            dense = _dense(args[0])
            if dense is not args[0]:
                return dense
        if func is nn.functional.max_pool1d and not kwargs.get("return_indices"):
            # Of the pools it alone asks how long its input is, and not where it gives the places.
            return func(*args, **{**kwargs, "return_indices": True})[0]
        if func is nn.functional.unfold:
            return _columns(*args, **kwargs)
        if func is torch.linspace:
            evenly = _evenly(*args, **kwargs)
            return func(*args, **kwargs) if evenly is None else evenly
        return func(*args, **kwargs)


def _dense(source: Any) -> Any:
    """A copy in row-major order of a part of a tensor whose sizes vary, such as `x[:, :8]`.

    What multiplies or copies it asks whether the part happens to be the whole.
    """
    varies = isinstance(source, Tensor) and any(isinstance(n, torch.SymInt) for n in source.shape)
    is_dense = private("torch._prims_common.is_contiguous_or_false", "a size that varies")
    if not varies or is_dense(source):
        return source
    return source.clone(memory_format=torch.contiguous_format)


def _columns(
    source: Tensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Tensor:
    """What `functional.unfold` computes, whose op asks whether one window fits."""
    high, wide = _pair(padding)
    windows = nn.functional.pad(source, (wide, wide, high, high))
    for length, step, by in zip(*map(_pair, (kernel_size, dilation, stride)), strict=True):
        # Windows become the last dimension, so that the next one is that of the columns.
        windows = windows.unfold(-2, (length - 1) * step + 1, by)[..., ::step]
    rank = source.dim() - 2
    order = (*range(rank), rank + 2, rank + 3, rank, rank + 1)
    copied = windows.permute(order).clone(memory_format=torch.contiguous_format)
    return copied.flatten(-2).flatten(rank - 1, rank + 1)


def _pair(value: Any) -> tuple[Any, Any]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _evenly(
    start: Any,
    end: Any,
    steps: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **others: Any,
) -> Tensor | None:
    """What `linspace` computes, from both ends, where a size says how many: its op takes none.

    torch multiplies and adds in one rounding, so that the middle of -1 to 1 is zero for some counts
    and a rounding for others.
    """
    dtype = dtype or torch.get_default_dtype()
    is_plain = "out" not in others and all(type(at) in (int, float) for at in (start, end))
    if not isinstance(steps, torch.SymInt) or not is_plain or not dtype.is_floating_point:
        return None
    count: Any = steps  # torch's types have no symbolic numbers
    index = torch.arange(count, dtype=dtype, device=device)
    width = torch.full((), end, dtype=dtype, device=device) - start
    step = width / torch.sym_max(steps - 1, 1)
    is_first = index < torch.sym_max(steps // 2, 1)
    places = torch.where(is_first, index, index - (count - 1))
    return _times_plus(places, step, torch.where(is_first, float(start), float(end)).to(dtype))


def _times_plus(count: Tensor, step: Tensor, start: Tensor) -> Tensor:
    """count * step + start, rounded once: what is lost on the way is added (Dekker, 1971)."""
    scaled = step * 4097
    high = scaled - (scaled - step)  # of so few bits that a product with a small count is exact
    product = count * high
    total = product + start
    part = total - product
    lost = (product - (total - part)) + (start - part)
    return total + (lost + count * (step - high))


def _cut(
    name: str, whole: Callable[[], Any], tensor: Tensor, *args: Any, **kwargs: Any
) -> "Sequence[Tensor] | None":
    given = [*args, *kwargs.values()]
    number = given[0] if given else None
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if not isinstance(number, int) or not isinstance(dim, int) or not isinstance(tensor, Tensor):
        return None
    size = tensor.shape[dim]
    sizes = _sizes(size) if isinstance(size, torch.SymInt) else None
    if sizes is None or not number:
        return None
    step = (size + number - 1) // number if name == "chunk" else number
    counts = {-(-n // (-(-n // number) if name == "chunk" else number)) for n in sizes if n}
    pieces = [_slice(tensor, dim, index, step) for index in range(min(counts))]
    if len(counts) == 1:
        return tuple(pieces)
    return _Some(pieces, whole)


def _slice(tensor: Tensor, dim: int, index: int, step: Any) -> Tensor:
    found: Tensor = aten.slice.Tensor(tensor, dim, index * step, (index + 1) * step)
    return found


def _sizes(size: torch.SymInt) -> set[int] | None:
    """The sizes that a dimension may have, where one symbol decides them."""
    expression, environment = size.node.expr, size.node.shape_env
    symbols = list(expression.free_symbols)
    if len(symbols) != 1 or symbols[0] not in environment.var_to_range:
        return None
    known = environment.var_to_range[symbols[0]]
    if not known.upper.is_finite or known.upper - known.lower > MOST_SIZES:
        return None
    values = range(int(known.lower), int(known.upper) + 1)
    if expression == symbols[0]:
        return set(values)
    return {int(expression.subs(symbols[0], value)) for value in values}


class _Some(Sequence[Tensor]):
    """Pieces of which some sizes have more: those that all have can be taken."""

    def __init__(self, pieces: list[Tensor], cut: Callable[[], Sequence[Tensor]]) -> None:
        self._pieces = pieces
        self._cut = cut

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: Any) -> Any:
        count = len(self._pieces)
        if isinstance(index, int):
            return (self._pieces if 0 <= index < count else self._cut())[index]
        is_there = (index.start or 0) >= 0 and index.stop is not None and 0 <= index.stop <= count
        return tuple((self._pieces if is_there else self._cut())[index])

    def __len__(self) -> int:
        return len(self._cut())
