"""Seeded inputs: the example that is traced, and the cases that an engine is verified on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from enginecast.capture.inputs.specs import BATCH, SEQUENCE, InputSpec

ImageStyle = Literal["normal", "constant", "scaled"]
SCALE = 8.0
"""Factor of the images that look for range problems."""
LONGEST = 64
"""Tokens of the longest case that every model is verified on."""
CORNERS = (512, 256)
"""Tokens of texts at the corners of the range: 511 and 255 pads behind an empty prompt, and a text
without any.  Pipelines of text-to-image models pad to these."""
WORK = 2e10
"""Products that a run of one corner may take: seconds.  Larger models do without."""


@dataclass(frozen=True)
class Case:
    """Inputs of one comparison, with the name it has in the verdict."""

    name: str
    inputs: dict[str, Tensor]


@dataclass(frozen=True)
class _Plan:
    """How a case is made: sizes wanted (clipped to the ranges), real tokens by row, image style."""

    name: str
    batch: int
    sequence: int
    other: int
    """Added to the example size of dimensions that are neither batch nor sequence."""
    lengths: tuple[int, ...] | None = None
    style: ImageStyle = "normal"


def example_sizes(specs: Sequence[InputSpec]) -> dict[str, int]:
    """Sizes of the traced example, by dimension name."""
    return {dim.name: dim.size for spec in specs for dim in spec.dims if dim.name is not None}


def sample(
    specs: Sequence[InputSpec],
    sizes: Mapping[str, int],
    seed: int,
    *,
    lengths: Sequence[int] | None = None,
    style: ImageStyle = "normal",
) -> dict[str, Tensor]:
    """Draw inputs of the given sizes, equal from run to run.

    Args:
        specs: the inputs.
        sizes: size of each named dimension; the example size where a name is absent.
        seed: seeds a generator of this call alone.
        lengths: real tokens of each row, the rest is padding on the right.  By default the first
            row is full and the others are ragged.  Without an attention mask all rows are full.
        style: what images look like.
    """
    generator = torch.Generator().manual_seed(seed)
    mask = _mask(specs, sizes, lengths, generator)
    return {spec.name: _draw(spec, _shape(spec, sizes), mask, style, generator) for spec in specs}


def verification_inputs(
    specs: Sequence[InputSpec], seed: int, *, longest: int = LONGEST, parameters: int | None = None
) -> list[Case]:
    """Cases for a verdict: other shapes than the traced one, corners of the ranges, padding.

    Cases that the ranges make equal are given once; equal calls give equal cases.  The first two
    are those that every pass is watched on: one of them has padding.

    Args:
        specs: the inputs.
        seed: of the first case; each has its own.
        longest: tokens of the case called "long".
        parameters: of the model; given them, corners of long texts are added as far as `WORK`
            allows: every position up to the longest, and an empty prompt with nothing but pads.
    """
    kinds = {spec.kind for spec in specs}
    plans = [_Plan("smallest", 1, 1, -(10**9))]
    if "attention_mask" in kinds:
        plans.append(_Plan("ragged masks", 4, 17, 0, (17, 11, 5, 2)))
        # Without padding: models, transformers' among them, have a path of their own for a mask
        # that is all ones, and a program holds only one of the two.
        plans.append(_Plan("odd sizes", 2, 13, 1, (13, 13)))
        plans.append(_Plan("empty prompt", 2, 9, 0, (9, 1)))
    else:
        plans.append(_Plan("odd sizes", 2, 13, 1))
    if "token_ids" in kinds:
        plans.append(_Plan("long", 2, longest, 0, (longest, longest // 2 + 1)))
    else:
        plans.append(_Plan("several", 5, longest, 0))
    if "image" in kinds:
        plans.append(_Plan("constant image", 2, 9, 0, style="constant"))
        plans.append(_Plan("scaled image", 2, 9, 0, style="scaled"))
    if "token_ids" in kinds and parameters is not None:
        plans += _corners(specs, parameters)
    cases: list[Case] = []
    for index, plan in enumerate(plans):
        sizes = _sizes(specs, plan)
        inputs = sample(specs, sizes, seed + index, lengths=plan.lengths, style=plan.style)
        if not any(_is_repeat(plan, inputs, case) for case in cases):
            cases.append(Case(plan.name, inputs))
    return cases


def _corners(specs: Sequence[InputSpec], parameters: int) -> list[_Plan]:
    """Long texts, as far as the work and the range of the sequence allow."""
    [most] = {dim.maximum for spec in specs for dim in spec.dims if dim.name == SEQUENCE} or {0}
    fits = [n for n in CORNERS if n > LONGEST and n * parameters <= WORK]
    sizes = sorted({min(size, most) for size in fits if min(size, most) > LONGEST})
    if not any(spec.kind == "attention_mask" for spec in specs):
        return [_Plan("longest", 1, size, 0) for size in sizes[-1:]]
    empty = [_Plan(f"empty prompt, {n - 1} pads", 1, n, 0, (1,)) for n in sizes]
    return [_Plan("longest", 1, sizes[-1], 0, (sizes[-1],)), *empty] if sizes else []


def _is_repeat(plan: _Plan, inputs: dict[str, Tensor], case: Case) -> bool:
    if plan.lengths is not None or plan.style != "normal":
        return False
    return all(inputs[name].shape == tensor.shape for name, tensor in case.inputs.items())


def _sizes(specs: Sequence[InputSpec], plan: _Plan) -> dict[str, int]:
    wanted = {BATCH: plan.batch, SEQUENCE: plan.sequence}
    return {
        dim.name: min(max(wanted.get(dim.name, dim.size + plan.other), dim.minimum), dim.maximum)
        for spec in specs
        for dim in spec.dims
        if dim.name is not None
    }


def _shape(spec: InputSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes.get(dim.name, dim.size) if dim.name else dim.size for dim in spec.dims)


def _mask(
    specs: Sequence[InputSpec],
    sizes: Mapping[str, int],
    lengths: Sequence[int] | None,
    generator: torch.Generator,
) -> Tensor | None:
    """True where a token is real, [batch, sequence]; None for a model without attention mask."""
    spec = next((spec for spec in specs if spec.kind == "attention_mask"), None)
    if spec is None:
        return None
    batch, sequence = _shape(spec, sizes)
    drawn = torch.randint(1, sequence + 1, (batch,), generator=generator)
    drawn[0] = sequence
    for row, length in enumerate((lengths or ())[:batch]):
        drawn[row] = min(length, sequence)
    return torch.arange(sequence)[None, :] < drawn[:, None]


def _draw(
    spec: InputSpec,
    shape: tuple[int, ...],
    mask: Tensor | None,
    style: ImageStyle,
    generator: torch.Generator,
) -> Tensor:
    if spec.kind == "attention_mask" and mask is not None:
        return mask.to(spec.dtype)
    if spec.low is not None and spec.high is not None:
        ids = torch.randint(spec.low, spec.high + 1, shape, generator=generator).to(spec.dtype)
        if spec.is_box:
            return ids.sort(dim=-1).values  # left <= top <= right <= bottom
        return _as_text(ids, spec, mask) if spec.kind == "token_ids" else ids
    if spec.dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    values = torch.randn(shape, generator=generator)
    if spec.kind == "image" and style == "constant":
        values = torch.full(shape, 0.5)
    if spec.kind == "image" and style == "scaled":
        values = values * SCALE
    return values.to(spec.dtype)


def _as_text(ids: Tensor, spec: InputSpec, mask: Tensor | None) -> Tensor:
    """Let every row end as texts of this model do, and fill the rest of it up."""
    if mask is None or ids.ndim != 2:
        return ids
    if spec.ending is not None:
        last = mask.sum(1, keepdim=True) - 1
        ids = ids.scatter(1, last, spec.ending)
    return ids if spec.padding is None else ids.masked_fill(~mask, spec.padding)
