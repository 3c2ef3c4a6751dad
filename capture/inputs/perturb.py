"""Inputs near given ones, in search of those with which a model takes another way.

The order goes from what is likely to turn a predicate over to what is merely different: sizes,
boundary values, signs and scales of one input after another, then seeded chance.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from enginecast.capture.inputs.examples import sample
from enginecast.capture.inputs.specs import InputSpec

SCALES = (0.0, 1e-3, 0.1, 10.0, 1e3)
SHIFTS = (-100.0, -1.0, 1.0, 100.0)
CHANCES = 48
"""Inputs drawn at random after all others."""
WIDEST = 6.0
"""Random values reach from 10 to the minus this to 10 to the plus half of this."""

Inputs = dict[str, Tensor]


def perturbed(
    specs: Sequence[InputSpec], bases: Sequence[Mapping[str, Tensor]], seed: int
) -> Iterator[Inputs]:
    """Inputs of the same names and dtypes as `bases`, finite, sizes within the ranges of `specs`.

    Args:
        specs: the model's inputs.
        bases: inputs that the model takes; sizes and values are changed one at a time.
        seed: of what is drawn at random.
    """
    yield from _other_sizes(specs, seed)
    for base in bases[:2]:
        for spec in specs:
            for value in _variants(base[spec.name], spec):
                yield {**base, spec.name: value}
    generator = torch.Generator().manual_seed(seed)
    for _ in range(CHANCES):
        base = bases[int(torch.randint(len(bases), (), generator=generator))]
        yield {spec.name: _chance(base[spec.name], spec, generator) for spec in specs}


def _other_sizes(specs: Sequence[InputSpec], seed: int) -> Iterator[Inputs]:
    """The smallest, the largest within reason, and some between, of every named dimension."""
    dims = {dim.name: dim for spec in specs for dim in spec.dims if dim.name is not None}
    usual = {name: dim.size for name, dim in dims.items()}
    for name, dim in dims.items():
        wanted = {dim.minimum, dim.minimum + 1, dim.size * 2, min(dim.maximum, dim.size * 8)}
        for size in sorted(wanted - {dim.size}):
            if dim.minimum <= size <= dim.maximum:
                yield sample(specs, {**usual, name: size}, seed)


def _variants(tensor: Tensor, spec: InputSpec) -> Iterator[Tensor]:
    if tensor.is_floating_point():
        yield -tensor
        yield tensor.abs()
        yield -tensor.abs()
        yield from (tensor * scale for scale in SCALES)
        yield from (tensor + shift for shift in SHIFTS)
    elif tensor.dtype == torch.bool:
        yield ~tensor
        yield torch.zeros_like(tensor)
        yield torch.ones_like(tensor)
    else:
        yield from (torch.full_like(tensor, value) for value in _boundaries(tensor, spec))
        if tensor.ndim:
            yield tensor.flip(-1)


def _boundaries(tensor: Tensor, spec: InputSpec) -> list[int]:
    """Integers at and around the edges of an input's range.

    The range of ids is known.  That of other integers is only what the example held, so a model
    may be asked about more; `coverage` drops what eager refuses.
    """
    low, high = spec.low, spec.high
    if low is None or high is None:
        low, high = (int(tensor.min()), int(tensor.max())) if tensor.numel() else (0, 1)
    middle = (low + high) // 2
    if spec.kind != "tensor":
        return sorted({low, min(low + 1, high), middle, high})
    return sorted({0, 1, low, high, middle, low - 1, high + 1, 2 * high + 1})


def _chance(tensor: Tensor, spec: InputSpec, generator: torch.Generator) -> Tensor:
    if tensor.is_floating_point():
        exponent = torch.rand((), generator=generator) * WIDEST * 1.5 - WIDEST
        shift = torch.randn((), generator=generator)
        noise = torch.randn(tensor.shape, generator=generator)
        scale = math.pow(10.0, float(exponent))
        return ((noise + shift) * scale).to(tensor.dtype)
    low, high = (0, 1) if tensor.dtype == torch.bool else (spec.low, spec.high)
    if low is None or high is None or spec.kind == "attention_mask":
        return tensor
    drawn = torch.randint(low, high + 1, tensor.shape, generator=generator)
    return drawn.to(tensor.dtype)
