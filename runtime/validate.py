"""Check the inputs of an engine before it runs.

ONNX Runtime takes much without a word (tried, 1.31): ids below zero wrap around, NaN passes
through, a batch of 2 beside a batch of 1 broadcasts, big-endian bytes are read as little-endian.
And its own refusals name neither the input nor what it expected.  Nothing is cast here: a caller
who gets a silent cast does not learn of the precision that was lost.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from enginecast.errors import InputError
from enginecast.runtime.bundle.manifest import Input, SizeCheck
from enginecast.runtime.size_checks import check_sizes
from enginecast.runtime.values.arrays import Array, is_finite, to_array
from enginecast.runtime.values.device_tensor import DeviceTensor, Feed, lies_on_gpu, view

Ranges = Mapping[str, tuple[int, int]]


def check_inputs(
    inputs: Sequence[Input],
    symbols: Ranges,
    feeds: Mapping[str, Any],
    *,
    steps: Mapping[str, int] = MappingProxyType({}),
    size_checks: Sequence[SizeCheck] = (),
    read_devices: bool = True,
) -> dict[str, Feed]:
    """Check feeds against the declared inputs.

    Args:
        inputs: what the engine declares.
        symbols: least and greatest size of each symbolic dimension.
        feeds: numpy arrays, or tensors that have `__dlpack__` (torch, jax), in CPU memory or on a
            CUDA GPU, by input name; None is left out.
        steps: of which number the sizes of symbolic dimensions are multiples.
        size_checks: what the sizes of symbolic dimensions have to be, besides.
        read_devices: look at the values of tensors on a GPU as well, for which the host has to
            wait; False: at their dtype and shape alone.

    Returns:
        The feeds as numpy arrays, or as tensors on their device, that share their memory, in the
        declared order.

    Raises:
        InputError: names the input, what was expected, and what was got.
    """
    if not isinstance(feeds, Mapping):
        raise InputError(f"feeds: expected arrays by input name, got a {type(feeds).__name__}")
    names = [spec.name for spec in inputs]
    if len(feeds) != len(names) or any(feeds.get(name) is None for name in names):
        got = [name for name in feeds if feeds[name] is not None]
        problems = [f"{name!r} is missing" for name in names if name not in got]
        problems += [f"{name!r} is unknown" for name in got if name not in names]
        if problems:
            raise InputError(f"inputs: {', '.join(problems)}; expected {', '.join(names)}")
    found = {name: _feed(name, feeds[name]) for name in names}
    sizes: dict[str, tuple[int, str]] = {}
    for spec in inputs:
        feed = found[spec.name]
        # `is` costs little: numpy has one object for a dtype of this machine's byte order.
        if not (
            isinstance(feed, np.ndarray)
            and feed.dtype is np.dtype(spec.dtype)
            and feed.flags.c_contiguous
        ):
            dtype = feed.dtype if isinstance(feed, DeviceTensor) else feed.dtype.name
            if dtype != spec.dtype:
                raise InputError(
                    f"input {spec.name!r}: expected dtype {spec.dtype}, got {dtype}",
                    hint="Cast it yourself: the engine does not cast silently.",
                )
            _check_layout(spec, feed)
        _check_shape(spec, feed.shape, symbols, steps, sizes)
        if not isinstance(feed, DeviceTensor):
            _check_values(spec, feed)
        elif read_devices and not feed.is_within(spec.minimum, spec.maximum):
            _check_values(spec, to_array(feed.tensor.cpu()))
    if size_checks:
        check_sizes(size_checks, {name: size for name, (size, _) in sizes.items()})
    return found


def _feed(name: str, value: Any) -> Feed:
    if type(value) is np.ndarray:
        return value
    try:
        on_device = isinstance(value, DeviceTensor) or lies_on_gpu(value)
        return view(value) if on_device else to_array(value)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise InputError(
            f"input {name!r}: expected a numpy array or a tensor with __dlpack__, got {error}",
            hint="Pass numpy arrays, or detached tensors on the CPU or a CUDA GPU.",
        ) from error


def _check_layout(spec: Input, feed: Feed) -> None:
    if isinstance(feed, DeviceTensor):
        if not feed.tensor.is_contiguous():
            raise InputError(
                f"input {spec.name!r}: expected a contiguous tensor, got strides {feed.strides}",
                hint="Use .contiguous().",
            )
        return
    if not feed.dtype.isnative:
        raise InputError(
            f"input {spec.name!r}: expected this machine's byte order, got {feed.dtype.str}",
            hint="Use array.astype(array.dtype.newbyteorder('=')).",
        )
    if not feed.flags.c_contiguous:
        raise InputError(
            f"input {spec.name!r}: expected a contiguous array, got strides {feed.strides}",
            hint="Use numpy.ascontiguousarray, or .contiguous() on a tensor.",
        )


def _check_shape(
    spec: Input,
    shape: tuple[int, ...],
    symbols: Ranges,
    steps: Mapping[str, int],
    sizes: dict[str, tuple[int, str]],
) -> None:
    """Check a shape; `sizes` collects what each symbol was, and in which input it was so."""
    if len(shape) != len(spec.shape):
        raise InputError(f"input {spec.name!r}: expected shape {_show(spec)}, got {list(shape)}")
    for axis, (declared, size) in enumerate(zip(spec.shape, shape, strict=True)):
        if isinstance(declared, int):
            if size != declared:
                raise InputError(f"{_place(spec, axis)}: expected {declared}, got {size}")
            continue
        least, greatest = symbols[declared]
        step = steps.get(declared, 1)
        if not least <= size <= greatest or size % step:
            multiple = f", a multiple of {step}" if step > 1 else ""
            expected = f"expected {declared} in {least}..{greatest}{multiple}"
            raise InputError(f"{_place(spec, axis)}: {expected}, got {size}")
        first, owner = sizes.setdefault(declared, (size, spec.name))
        if size != first:
            expected = f"expected {declared} = {first} as in {owner!r}"
            raise InputError(f"{_place(spec, axis)}: {expected}, got {size}")


def _place(spec: Input, axis: int) -> str:
    return f"input {spec.name!r}: dimension {axis} of {_show(spec)}"


def _check_values(spec: Input, array: Array) -> None:
    if array.size == 0 or array.dtype == np.bool_:
        return
    if spec.dtype.endswith(("float16", "float32", "float64")) and not is_finite(array):
        index = _first(~np.isfinite(array))
        raise InputError(
            f"input {spec.name!r}: expected finite values, got {array[index]} at {list(index)}"
        )
    if spec.minimum is not None and array.min() < spec.minimum:
        _refuse_range(spec, array, _first(array < spec.minimum))
    if spec.maximum is not None and array.max() > spec.maximum:
        _refuse_range(spec, array, _first(array > spec.maximum))


def _refuse_range(spec: Input, array: Array, index: tuple[int, ...]) -> None:
    least = "" if spec.minimum is None else f"{spec.minimum:.16g}"
    greatest = "" if spec.maximum is None else f"{spec.maximum:.16g}"
    raise InputError(
        f"input {spec.name!r}: expected values in {least}..{greatest}, "
        f"got {array[index]} at {list(index)}"
    )


def _first(mask: Array) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(mask.argmax()), mask.shape))


def _show(spec: Input) -> str:
    return f"[{', '.join(str(size) for size in spec.shape)}]"
