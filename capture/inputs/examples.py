"""Seeded inputs: the example to trace, the cases to verify an engine on, and variations of given
inputs that may take another path.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from enginecast.capture.inputs.fitting import fitting, in_order, with_marks
from enginecast.capture.inputs.specs import (
    BATCH,
    SEQUENCE,
    InputSpec,
    count_elements,
    named_dims,
    sums,
)

Style = Literal[
    "normal",
    "constant",
    "scaled",
    "zeros",
    "tiny",
    "large",
    "shifted",
    "halves",
    "lowest",
    "highest",
]
SCALE = 8.0
"""Scale factor of images that test for range problems."""
LONGEST = 64
"""Tokens of the longest case for every model."""
CORNERS = (512, 256)
"""Tokens of texts at the corners of the range: 511 and 255 pads behind an empty prompt, and a text
without any.  Pipelines of text-to-image models pad to these."""
MARKED = "marks as in the example"
"""How the names of such cases begin."""


@dataclass(frozen=True)
class _Floats:
    """How floats are made from standard normal values."""

    change: Callable[[Tensor], Tensor]
    edge: str = ""
    """Name of the edge case with such values; empty: there is none."""
    is_tied: bool = False
    """Whether some are equal, or saturate scores to equal ones."""


STYLES: Mapping[Style, _Floats] = {
    "normal": _Floats(lambda values: values),
    "constant": _Floats(lambda values: torch.full_like(values, 0.5)),
    "scaled": _Floats(lambda values: values * SCALE),
    "zeros": _Floats(torch.zeros_like, "zeros", is_tied=True),
    "tiny": _Floats(lambda values: values * 1e-4, "tiny values"),
    "large": _Floats(lambda values: values * 1e3, "large values", is_tied=True),
    "shifted": _Floats(lambda values: values + 100, "shifted values", is_tied=True),
    "halves": _Floats(lambda values: (values * 3).round() / 2, "whole and half numbers", True),
}
ENDS: Mapping[Style, str] = {"lowest": "lowest integers", "highest": "highest integers"}
"""Styles of integers at the ends of their ranges, and the names of the cases."""
SMALL = 12
"""Sizes that are tried one by one."""
NEAR = 4
"""Integers from 0 on that are drawn more often than others."""
EDGE_WORK = 1e12
"""Elements of the float inputs times parameters above which edge cases are skipped: they would take
minutes."""
HEAVY_WORK = 1e13
"""The same for a batch of two, above which only a few cases are run: a ViT-B takes seconds per
image."""
WORK = 2e10
"""Most multiplications of one corner case, some seconds; larger models skip it."""
LARGEST_WORK = 1e7
"""Elements of the inputs times parameters of a case with the largest size of one dimension."""
SCALES = (0.0, 1e-3, 0.1, 10.0, 1e3)
HUGE = 1e6
SHIFTS = (-100.0, -1.0, 1.0, 100.0)
CHANCES = 48
"""Number of random inputs after all others."""
WIDEST = 6.0
"""Random magnitudes range from 10^-WIDEST to 10^(WIDEST / 2)."""


@dataclass(frozen=True)
class Case:
    """Inputs of one comparison, with the name it has in the verdict."""

    name: str
    inputs: dict[str, Tensor]
    singles: tuple[Mapping[str, Tensor], ...] = ()
    """The rows as batches of one, the first of which is the smallest case: expensive references may
    be computed for each row alone, if rows are independent. Empty: no such split."""


@dataclass(frozen=True)
class _Plan:
    """The recipe of a case: wanted sizes (clipped to the ranges), real tokens per row, style."""

    name: str
    batch: int
    sequence: int
    other: int
    """Added to the example size of dimensions that are neither batch nor sequence."""
    lengths: tuple[int, ...] | None = None
    style: Style = "normal"
    least: str = ""
    """A dimension at its smallest size, whatever the others are."""
    most: str = ""
    """A dimension at its largest size."""
    is_marked: bool = False
    """Whether values that mark something occur as often as in the example."""


_EDGE_PLAN = _Plan("", 2, 9, 0)


def example_sizes(specs: Sequence[InputSpec]) -> dict[str, int]:
    """Sizes of the traced example, by dimension name."""
    return {name: dim.size for name, dim in named_dims(specs).items()}


def sizes_with(specs: Sequence[InputSpec], chosen: Mapping[str, int]) -> dict[str, int]:
    """The sizes of the traced example with some replaced; others shrink if a sum would exceed the
    engine's limit.
    """
    dims, sizes = named_dims(specs), {**example_sizes(specs), **chosen}
    for total in sums(specs).values():
        for name in (part for part, _ in total.parts if part in dims and part not in chosen):
            beyond = max(0, total.size_in(sizes) - total.maximum)
            sizes[name] = dims[name].fit(sizes[name] - beyond)
    return sizes


def sample(
    specs: Sequence[InputSpec],
    sizes: Mapping[str, int],
    seed: int,
    *,
    lengths: Sequence[int] | None = None,
    style: Style = "normal",
    is_marked: bool = False,
) -> dict[str, Tensor]:
    """Draw inputs of the given sizes, equal from run to run.

    Args:
        specs: the inputs.
        sizes: size of each named dimension; the example size where a name is absent.
        seed: seeds a generator of this call alone.
        lengths: real tokens of each row, the rest is padding on the right; negative: on the left.
            By default the first row is full and the others are ragged.  Without an attention mask
            all rows are full.
        style: distribution of images and other floats.
        is_marked: whether values that mark something occur as often as in the example.
    """
    generator = torch.Generator().manual_seed(seed)
    masks = _masks(specs, sizes, lengths, generator)
    mask = next(iter(masks.values()), None)
    drawn = {}
    for spec in specs:
        own = masks.get(spec.name, mask)
        values = _draw(spec, _shape(spec, sizes), own, style, generator)
        if spec.marks and (is_marked or spec.draws == "marked"):
            values = with_marks(values, spec, own, generator)
        if spec.draws == "sorted":
            values = in_order(values, spec)
        drawn[spec.name] = values
    return drawn


def without_data(specs: Sequence[InputSpec], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Inputs of the given sizes on the meta device: shapes and dtypes alone."""
    return {
        spec.name: torch.empty(_shape(spec, sizes), dtype=spec.dtype, device="meta")
        for spec in specs
    }


def verification_inputs(
    specs: Sequence[InputSpec], seed: int, *, longest: int = LONGEST, parameters: int | None = None
) -> list[Case]:
    """Cases for a verdict: other shapes than the traced one, corners of the ranges, padding.

    Cases that are equal within the ranges appear once; equal calls return equal cases. Every pass
    is compared on the first two, one of which has padding.

    Args:
        specs: the inputs.
        seed: of the first case; each has its own.
        longest: tokens of the case named "long".
        parameters: of the model; given them, corners of long texts are added as far as `WORK`
            allows: every position up to the longest, and an empty prompt with nothing but pads; and
            each dimension at its largest size, as far as `LARGEST_WORK` allows.  0: of no limit.
    """
    heavy, costly = is_heavy(specs, parameters or 0), _is_costly(specs, parameters or 0)
    plans = _plans(specs, longest, parameters, heavy=heavy, costly=costly)
    cases: list[Case] = []
    for index, plan in enumerate(plans):
        sizes = _sizes(specs, plan)
        inputs = sample(
            specs,
            sizes,
            seed + index,
            lengths=plan.lengths,
            style=plan.style,
            is_marked=plan.is_marked,
        )
        is_alike = plan.lengths is None and plan.style == "normal" and not plan.is_marked
        shapes = {name: tensor.shape for name, tensor in inputs.items()}
        if not is_alike or all(
            {name: t.shape for name, t in case.inputs.items()} != shapes for case in cases
        ):
            case = Case(plan.name, inputs)
            cases.append(
                _of_singles(specs, cases[0], case) if cases and (heavy or costly) else case
            )
    return cases


def _plans(
    specs: Sequence[InputSpec],
    longest: int,
    parameters: int | None,
    *,
    heavy: bool,
    costly: bool,
) -> Iterator[_Plan]:
    """The recipes of the cases; heavy and costly models get fewer."""
    kinds, dims = {spec.kind for spec in specs}, named_dims(specs)
    has_text, has_mask, has_image = (
        kind in kinds for kind in ("token_ids", "attention_mask", "image")
    )
    yield _Plan("smallest", 1, 1, -(10**9))
    if heavy and has_image:
        yield _Plan("scaled image", 2, 13, 1, style="scaled")
    elif costly and not heavy:
        yield _Plan("several", 2, 9, 0)
        yield _Plan("constant image", 1, 9, 0, style="constant")
        yield _Plan("scaled image", 1, 9, 0, style="scaled")
    elif has_mask and not heavy:
        # On the left, too: a causal model gives the same with and without padding on the right.
        yield _Plan("ragged masks", 4, 17, 0, (17, 11, -5, 2))
        # Without padding: models, transformers' among them, have a path of their own for a mask
        # that is all ones, and a program holds only one of the two.
        yield _Plan("odd sizes", 2, 13, 1, (13, 13))
        yield _Plan("empty prompt", 2, 9, 0, (9, 1))
    else:
        yield _Plan("odd sizes", 2, 13, 1)
    if not heavy and not costly:
        if has_text:
            yield _Plan("long", 2, longest, 0, (longest, longest // 2 + 1))
        else:
            yield _Plan("several", 5, longest, 0)
        if has_image:
            yield _Plan("constant image", 2, 9, 0, style="constant")
            yield _Plan("scaled image", 2, 9, 0, style="scaled")
    if has_text and parameters is not None:
        yield from _corners(specs, parameters, has_mask=has_mask)
    if sums(specs):  # as generation goes on: one token after many, which padding came before
        yield _Plan("one token after many", 2, 1, longest, (sys.maxsize, -9))
    # A trace may generalize a size of 1 although the code has a separate path for it.
    varying = [name for name, dim in dims.items() if dim.minimum < dim.maximum]
    for name in varying if len(varying) > 1 else ():
        yield _Plan(f"smallest {name}", 2 if heavy else 3, 7, 0, least=name)
    # Of an input that holds a single integer, such as a timestep, each case holds one value.
    if any(
        spec.kind == "tensor"
        and spec.low != spec.high
        and math.prod(dim.size for dim in spec.dims if dim.name != BATCH) == 1
        for spec in specs
    ):
        for style, name in ENDS.items():
            yield _Plan(name, 1, 9, 0, style=style)
    for name in dims if parameters is not None else ():
        plan = _Plan(f"largest {name}", 2, 7, 0, most=name)
        elements = count_elements(specs, _sizes(specs, plan))
        if elements * max(parameters or 0, 1) <= LARGEST_WORK:
            yield plan
    # Random values may never have as many marks as the example.
    if any(spec.marks and spec.is_free for spec in specs):
        yield _Plan(f"{MARKED}, smallest sizes", 1, 1, -(10**9), is_marked=True)
        yield _Plan(f"{MARKED}, odd sizes", 2, 13, 1, is_marked=True)
        yield _Plan(f"{MARKED}, long", 2, longest, 0, is_marked=True)


def _of_singles(specs: Sequence[InputSpec], smallest: Case, case: Case) -> Case:
    """The case with the smallest case as its first row, if it differs in the batch size only."""
    sizes = set()
    for spec in specs:
        one, several = smallest.inputs[spec.name], case.inputs[spec.name]
        if not spec.dims or spec.dims[0].name != BATCH or one.shape[1:] != several.shape[1:]:
            return case
        sizes |= {one.shape[0], several.shape[0]}
    if len(sizes) != 2 or min(sizes) != 1:
        return case
    inputs = {n: torch.cat([smallest.inputs[n], t[1:]]) for n, t in case.inputs.items()}
    rest = ({n: t[i : i + 1] for n, t in inputs.items()} for i in range(1, max(sizes)))
    return replace(case, inputs=inputs, singles=(smallest.inputs, *rest))


def edge_inputs(
    specs: Sequence[InputSpec], seed: int, parameters: int = 0, *, sorts: bool = False
) -> list[Case]:
    """Cases with floats unlike a standard normal distribution, for which kernels lose digits,
    overflow, or decide differently from eager.

    Args:
        specs: the inputs; none of them may be a float.
        seed: of the first case.
        parameters: of the model; see `EDGE_WORK`.
        sorts: whether the model sorts: torch does not define which of equal values comes first.
    """
    sizes = _sizes(specs, _EDGE_PLAN)
    is_drawn = any(spec.is_unbounded for spec in specs)
    if not is_drawn or _float_work(specs, parameters) > EDGE_WORK:
        return []
    edges = [
        (style, floats.edge, floats.is_tied) for style, floats in STYLES.items() if floats.edge
    ]
    return [
        Case(name, sample(specs, sizes, seed + index, style=style))
        for index, (style, name, is_tied) in enumerate(edges)
        if not (sorts and is_tied)
    ]


def is_heavy(specs: Sequence[InputSpec], parameters: int) -> bool:
    """Whether a model runs so slowly that it gets only a few small cases."""
    has_text = any(spec.kind == "token_ids" for spec in specs)
    return not has_text and _float_work(specs, parameters) > HEAVY_WORK


def _is_costly(specs: Sequence[InputSpec], parameters: int) -> bool:
    """Whether runs on images are slow enough to skip cases that differ only in the batch size: only
    if nothing else varies, and without text.
    """
    kinds = {spec.kind for spec in specs}
    if "image" not in kinds or kinds & {"token_ids", "attention_mask"}:
        return False
    varying = {name for name, dim in named_dims(specs).items() if dim.minimum < dim.maximum}
    return varying <= {BATCH} and _float_work(specs, parameters) > EDGE_WORK


def _float_work(specs: Sequence[InputSpec], parameters: int) -> int:
    """Elements of the float inputs of a batch of two, times parameters."""
    sizes = _sizes(specs, _EDGE_PLAN)
    return count_elements([spec for spec in specs if spec.is_unbounded], sizes) * parameters


def _corners(specs: Sequence[InputSpec], parameters: int, *, has_mask: bool) -> list[_Plan]:
    """Cases of long texts, as far as the work limit and the sequence range allow."""
    [most] = {dim.maximum for spec in specs for dim in spec.dims if dim.name == SEQUENCE} or {0}
    fits = [n for n in CORNERS if n > LONGEST and n * parameters <= WORK]
    sizes = sorted({min(size, most) for size in fits if min(size, most) > LONGEST})
    if not has_mask:
        return [_Plan("longest", 1, size, 0) for size in sizes[-1:]]
    empty = [_Plan(f"empty prompt, {n - 1} pads", 1, n, 0, (1,)) for n in sizes]
    return [_Plan("longest", 1, sizes[-1], 0, (sizes[-1],)), *empty] if sizes else []


def _sizes(specs: Sequence[InputSpec], plan: _Plan) -> dict[str, int]:
    wanted = {BATCH: plan.batch, SEQUENCE: plan.sequence, plan.least: 0, plan.most: sys.maxsize}
    dims = named_dims(specs)
    sizes = {
        name: dim.fit(wanted.get(name, dim.size + plan.other * dim.step))
        for name, dim in dims.items()
    }
    for total in sums(specs).values():
        names = sorted((name for name, _ in total.parts if name in dims), key=plan.most.__eq__)
        for name in names:  # what is wanted most is cut last
            beyond = max(0, total.size_in(sizes) - total.maximum)
            sizes[name] = dims[name].fit(sizes[name] - beyond)
    return sizes


def _shape(spec: InputSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(dim.size_in(sizes) for dim in spec.dims)


def _masks(
    specs: Sequence[InputSpec],
    sizes: Mapping[str, int],
    lengths: Sequence[int] | None,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """True where a token is real, [batch, sequence], by mask: one of each length, as that of a
    decoder's tokens and that of its encoder's.
    """
    drawn: dict[tuple[int, ...], Tensor] = {}
    found = {}
    for spec in specs:
        if spec.kind == "attention_mask":
            shape = _shape(spec, sizes)
            if shape not in drawn:
                drawn[shape] = _mask(specs, shape, lengths, generator)
            found[spec.name] = drawn[shape]
    return found


def _mask(
    specs: Sequence[InputSpec],
    shape: tuple[int, ...],
    lengths: Sequence[int] | None,
    generator: torch.Generator,
) -> Tensor:
    batch, sequence = shape
    least = max((column + 1 for each in specs for column, _ in each.places), default=1)
    drawn = torch.randint(min(least, sequence), sequence + 1, (batch,), generator=generator)
    drawn[0] = sequence
    lengths = (lengths or ())[:batch]
    for row, length in enumerate(lengths):
        drawn[row] = min(max(abs(length), least), sequence)
    mask = torch.arange(sequence)[None, :] < drawn[:, None]
    for row, length in enumerate(lengths):
        if length < 0:
            mask[row] = mask[row].flip(0)
    return mask


def _draw(
    spec: InputSpec,
    shape: tuple[int, ...],
    mask: Tensor | None,
    style: Style,
    generator: torch.Generator,
) -> Tensor:
    if not spec.is_searched:
        return fitting(spec, shape, generator)
    if spec.kind == "attention_mask" and mask is not None:
        return mask.to(spec.dtype)
    if spec.kind == "position_ids" and mask is not None:
        return positions_of(mask)[:, -shape[1] :].clamp(max=spec.high).to(spec.dtype)
    if spec.low is not None and spec.high is not None:
        ids = _whole(spec.low, spec.high, shape, style, generator).to(spec.dtype)
        if spec.is_box:
            return ids.sort(dim=-1).values  # left <= top <= right <= bottom
        if spec.kind == "token_ids":
            ids = _as_text(ids, spec, mask)
        return _placed(ids, spec, mask)
    if spec.dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    values = torch.randn(shape, generator=generator)
    floats = STYLES.get(style)
    if floats is not None and (floats.edge or spec.kind == "image"):
        values = floats.change(values)
    return values.to(spec.dtype)


def positions_of(mask: Tensor) -> Tensor:
    """The position of each token in its row, 0 of padding: as transformers' generate counts them.

    Args:
        mask: 0 where there is padding, [batch, tokens].
    """
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)


def _whole(
    low: int, high: int, shape: tuple[int, ...], style: Style, generator: torch.Generator
) -> Tensor:
    """Integers over a whole range; for a wide range both ends and some near zero."""
    if style in ENDS:
        return torch.full(shape, low if style == "lowest" else high)
    drawn = torch.randint(low, high + 1, shape, generator=generator)
    if drawn.numel() < 4 or high - low < NEAR:
        return drawn
    near = torch.randint(0, NEAR, shape, generator=generator).clamp(low, high)
    drawn = torch.where(torch.rand(shape, generator=generator) < 0.25, near, drawn)
    drawn.flatten()[0], drawn.flatten()[-1] = low, high
    return drawn


def _as_text(ids: Tensor, spec: InputSpec, mask: Tensor | None) -> Tensor:
    """End every row with the model's end token, and fill the rest with padding ids.

    A mask of another shape does not apply to these ids.
    """
    if mask is None or ids.shape != mask.shape:
        return ids
    if spec.ending is not None:
        last = (mask * torch.arange(mask.shape[1])).amax(1, keepdim=True)
        ids = ids.scatter(1, last, spec.ending)
    return ids if spec.padding is None else ids.masked_fill(~mask, spec.padding)


def _placed(ids: Tensor, spec: InputSpec, mask: Tensor | None) -> Tensor:
    """Put placeholders at their fixed columns, after left padding, and nowhere else."""
    if not spec.reserved:
        return ids
    assert spec.low is not None  # token ids have a range
    assert spec.high is not None
    taken = {*spec.reserved, spec.padding}
    free = next(id_ for id_ in range(spec.low, spec.high + 1) if id_ not in taken)
    for id_ in spec.reserved:
        ids = ids.masked_fill(ids == id_, free)
    last = max((column for column, _ in spec.places), default=0)
    for row in range(ids.shape[0]):
        first = 0 if mask is None or mask.shape != ids.shape else int(mask[row].int().argmax())
        for column, id_ in spec.places:
            ids[row, min(first, ids.shape[1] - 1 - last) + column] = id_
    return ids


def _all_placed(specs: Sequence[InputSpec], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs with placeholders where they belong."""
    mask = next((inputs[spec.name] for spec in specs if spec.kind == "attention_mask"), None)
    return {
        spec.name: _placed(inputs[spec.name], spec, mask) if spec.reserved else inputs[spec.name]
        for spec in specs
    }


def perturbed(
    specs: Sequence[InputSpec], bases: Sequence[Mapping[str, Tensor]], seed: int
) -> Iterator[dict[str, Tensor]]:
    """Inputs of the same names and dtypes as `bases`, finite, sizes within the ranges of `specs`.

    Ordered by the chance of flipping a predicate: sizes, boundary values, signs and scales of one
    input after another, then seeded random values.
    """
    yield from _other_sizes(specs, seed)
    for base in bases[:2]:
        for spec in specs:
            for value in _variants(base[spec.name], spec) if spec.is_free else ():
                yield _all_placed(specs, {**base, spec.name: value})
        if base is bases[0]:
            for name, dim in named_dims(specs).items():
                for size in dim.sizes[:SMALL]:
                    yield sample(specs, {**example_sizes(specs), name: size}, seed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(CHANCES):
        base = bases[int(torch.randint(len(bases), (), generator=generator))]
        drawn = {
            spec.name: _chance(base[spec.name], spec, generator)
            if spec.is_free
            else base[spec.name]
            for spec in specs
        }
        yield _all_placed(specs, drawn)


def telling(
    specs: Sequence[InputSpec], bases: Sequence[Mapping[str, Tensor]], seed: int
) -> Iterator[dict[str, Tensor]]:
    """Inputs near `bases`, and very large ones, within the engine's ranges."""
    floats = {spec.name for spec in specs if spec.dtype.is_floating_point and spec.is_free}
    large = ({n: t * HUGE if n in floats else t for n, t in b.items()} for b in bases[:1])
    for inputs in (*large, *perturbed(specs, bases, seed)):
        if all(_takes(spec, inputs[spec.name]) for spec in specs):
            yield inputs


def _takes(spec: InputSpec, tensor: Tensor) -> bool:
    if spec.low is None or spec.high is None or not tensor.numel():
        return True
    return bool(((tensor >= spec.low) & (tensor <= spec.high)).all())


def _other_sizes(specs: Sequence[InputSpec], seed: int) -> Iterator[dict[str, Tensor]]:
    """The smallest, a reasonably large, and some intermediate sizes of every named dimension."""
    for name, dim in named_dims(specs).items():
        wanted = {dim.minimum, dim.minimum + dim.step, dim.size * 2, dim.fit(dim.size * 8)}
        for size in sorted(wanted - {dim.size}):
            if size in dim.sizes:
                yield sample(specs, {**example_sizes(specs), name: size}, seed)


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

    The range of ids is known. That of other integers is only the example's, so values beyond it are
    tried; the coverage search drops those that eager refuses.
    """
    low, high = spec.low, spec.high
    if low is None or high is None:
        low, high = (int(tensor.min()), int(tensor.max())) if tensor.numel() else (0, 1)
    middle = (low + high) // 2
    if spec.kind != "tensor":
        return sorted({low, min(low + 1, high), middle, high})
    limits = torch.iinfo(tensor.dtype)
    near = {0, 1, low, high, middle, low - 1, high + 1, 2 * high + 1}
    return sorted(value for value in near if limits.min <= value <= limits.max)


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
