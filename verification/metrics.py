"""Errors of arrays against their reference, and metrics pooled over several cases.

Every measure is relative to the size of the reference, so that an output cannot agree by being
small (the neck of a randomly initialized SAM has values around 3e-21).  Numbers stay finite and go
into JSON as they are: a relative error is capped at `BEYOND`, an SQNR at `SQNR_CAP` dB, and values
that are not finite are counted, not averaged.
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from enginecast.errors import VerificationError
from enginecast.verification.row_and_channel_errors import Part, worst_part

Array = NDArray[np.generic]
Mask = NDArray[np.bool_]
Outputs = Mapping[str, Mapping[str, Array]]
"""Case name -> output name -> array."""

BEYOND = 1e30
NOT_FINITE = 1e31
"""Stands in JSON for an error that is infinite or NaN: more than any that is measured."""
SQNR_CAP = 400.0
SMALL_ROW = 0.1
"""A row with a norm below this share of the median norm is measured against that share instead:
dividing by a tiny norm would let the row decide the verdict, and dropping the row would hide it.
The mean would be dominated by a few large rows."""


@dataclass(frozen=True)
class Metrics:
    """The distance of one output of one case from its reference, over the rows that count.

    A row is a vector along the last axis; for an output that has exactly the mask's dimensions it
    is one element.
    """

    rows: int
    """Rows judged."""
    error_norm: float
    """L2 norm of the difference over the judged rows."""
    reference_norm: float
    """L2 norm of the reference over the judged rows."""
    worst_row: float
    """Largest relative L2 error of a judged row."""
    max_abs: float
    """Largest absolute difference in the judged rows."""
    cosine: float
    """Smallest cosine between a judged row and its reference; rows of tiny norm have no direction
    to compare."""
    reference_max: float
    """Largest absolute value of the reference in the judged rows."""
    nonfinite: int = 0
    """Elements that are wrongly infinite or NaN, or wrongly finite."""
    first_nonfinite: tuple[int, ...] | None = None
    """Index of the first of them."""
    pad_error: float | None = None
    """Relative L2 error over the rows that the mask leaves out; None without such rows."""
    degenerate: str = ""
    """Why the reference proves little: "all zero" or "constant"; else empty."""
    worst_at: tuple[int, ...] | None = None
    """Indices of the worst row along the leading dimensions, such as prompt and token; None over
    several cases."""
    prompts: int = 0
    """Prompts judged; 0 for an output that follows no mask."""
    prompt_cosine: float = 1.0
    """Smallest cosine between a prompt's mean over its valid rows and the reference's, as in
    sentence embeddings."""
    prompt_errors: tuple[float | None, ...] = ()
    """Relative L2 error of each prompt that was given, over its valid rows; None: not finite.
    Empty where no prompts were given, and over several cases."""
    prompt_cosines: tuple[float | None, ...] = ()
    """Likewise the smallest cosine of a row."""
    wrong: int | None = None
    """Elements that differ in an output of integers or booleans, where each element is a row; else
    None."""
    part: Part | None = None
    """The row or channel with the largest error relative to eager's error there, if known."""
    distance: float = 0.0
    """L2 norm of the difference to the reference itself, where an error is counted from the nearest
    result of any order of sums; 0: it is the error."""
    terms: float = 0.0
    """L2 norm of the magnitudes that the values are sums of (`terms`); 0: not known."""

    @property
    def relative(self) -> float:
        """Relative L2 error, ||y - r|| / ||r||; for integers and booleans, the differing share."""
        if self.wrong is not None:
            return ratio(self.wrong, self.rows)
        return ratio(self.error_norm, self.reference_norm)

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio in dB."""
        return sqnr_db(self.relative)


Comparison = Mapping[str, Mapping[str, Metrics]]
"""Case name -> output name -> metrics."""


def ratio(part: float, whole: float) -> float:
    """part / whole, capped at `BEYOND`; 0/0 is 0."""
    if part == 0.0:
        return 0.0
    return BEYOND if whole == 0.0 else min(part / whole, BEYOND)


def sqnr_db(relative: float) -> float:
    """A relative L2 error in dB, within +-`SQNR_CAP`."""
    if relative == 0.0:
        return SQNR_CAP
    return max(-SQNR_CAP, min(SQNR_CAP, -20.0 * math.log10(relative)))


def times(value: float) -> str:
    """A ratio as people read it: "0.04x", "1.1x", "47x", "1.2e+05x"."""
    if value >= 9.95:
        return f"{value:.0f}x" if value < 1e4 else f"{value:.1e}x"
    return f"{value:.1f}x" if value >= 0.095 or value == 0.0 else f"{value:.1g}x"


@dataclass(frozen=True)
class Loss:
    """Eager's error at each element of an output, in its dtype."""

    values: Array
    dtype: str
    unit: float
    """Unit roundoff of the dtype."""


def measure(
    output: Array,
    reference: Array,
    mask: Mask | None = None,
    loss: Loss | None = None,
    *,
    given: int = 0,
) -> Metrics:
    """Compare an output with its reference.

    Args:
        output: any dtype, ml_dtypes' included.
        reference: float64 or float32, or integers, of the same shape.
        mask: which rows count, of the leading dimensions of the output (see `row_mask`); None
            counts all of them.
        loss: eager's error, which rows and channels are measured against; None: they are not
            measured.
        given: number of prompts that are the rows of the batch; each is measured.

    Raises:
        VerificationError: the shapes differ, or only one side has booleans or integers: for
            example, eager skips a sum over a dimension of size 1.
    """
    if output.shape != reference.shape:
        raise VerificationError(
            f"the output has shape {list(output.shape)}, its reference {list(reference.shape)}"
        )
    kinds = [{"u": "i", "V": "f"}.get(x.dtype.kind, x.dtype.kind) for x in (output, reference)]
    if kinds[0] != kinds[1]:  # ml_dtypes' are V
        raise VerificationError(f"the output is {output.dtype}, its reference {reference.dtype}")
    counts = np.broadcast_to(
        True if mask is None else mask.reshape(mask.shape + (1,) * (reference.ndim - mask.ndim)),
        reference.shape,
    )
    if kinds[0] in "bi":
        return _measure_exact(output, reference, counts)
    found, wanted = output.astype(np.float64), reference.astype(np.float64)
    # An infinity of the engine counts in a padding row too. One of only the reference counts only
    # in a judged row: eager attention over a fully padded row may be NaN, which nobody reads.
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    wrong = (~np.isfinite(found) | (~np.isfinite(wanted) & counts)) & ~same
    usable = np.isfinite(found) & np.isfinite(wanted)
    sides = np.where(usable, found, 0.0), np.where(usable, wanted, 0.0)
    judged, pads = _split(*sides, mask)
    first = np.argwhere(wrong)[:1]
    measured, worst = _measure_rows(*judged)
    prompts, prompt_cosine = 0, 1.0
    if mask is not None and mask.ndim == 2 and found.ndim == 3 and usable.all():
        # The mean of each prompt's valid rows, [prompts, size].
        weights, kept = mask / np.maximum(mask.sum(1, keepdims=True), 1), mask.any(1)
        one, other = (np.einsum("bt,bts->bs", weights, side)[kept] for side in (found, wanted))
        prompts = len(one)
        prompt_cosine = _least_cosine(one, other, np.linalg.norm(other, axis=1) > 1e-300)
    each: list[tuple[float | None, float | None]] = []
    if found.shape[:1] == (given,):
        for index in range(given):
            own = np.array(True) if mask is None else mask[index]
            one, _ = _measure_rows(*(_as_rows(side[index][own]) for side in sides))
            is_finite = not wrong[index][own].any()
            each.append((one.relative, one.cosine) if is_finite else (None, None))
    part = None
    if loss is not None:
        known = counts & usable
        one, other, lost = (
            np.where(known, side, 0.0) for side in (found, wanted, loss.values.astype(np.float64))
        )
        part = worst_part(one, other, lost, known, loss.dtype, loss.unit)
    return replace(
        measured,
        worst_at=_place(worst, found.shape, mask) if measured.rows else None,
        prompts=prompts,
        prompt_cosine=prompt_cosine,
        prompt_errors=tuple(error for error, _ in each),
        prompt_cosines=tuple(cosine for _, cosine in each),
        degenerate=measured.degenerate if usable.any() or not usable.size else "not finite",
        nonfinite=int(wrong.sum()),
        first_nonfinite=tuple(int(i) for i in first[0]) if len(first) else None,
        pad_error=None if pads is None else ratio(_norm(pads[0] - pads[1]), _norm(pads[1])),
        part=part,
    )


def _measure_exact(output: Array, reference: Array, counts: Mask) -> Metrics:
    """Measure integers and booleans by equality: an id that is off by ten is as wrong as any."""
    differs = np.asarray(output != reference)
    found, wanted = (side[counts].astype(np.float64)[:, None] for side in (output, reference))
    measured, _ = _measure_rows(found, wanted)
    places = np.argwhere(differs & counts)
    return replace(
        measured,
        wrong=len(places),
        worst_at=tuple(int(i) for i in places[0]) if len(places) else None,
        pad_error=None if counts.all() else ratio(float(differs[~counts].sum()), (~counts).sum()),
    )


Rows = tuple[NDArray[np.float64], NDArray[np.float64]]


def _split(
    found: NDArray[np.float64], wanted: NDArray[np.float64], mask: Mask | None
) -> tuple[Rows, Rows | None]:
    """Judged rows and pad rows of both sides, each [rows, length]."""
    if mask is None:
        return (_as_rows(found), _as_rows(wanted)), None
    if found.ndim == mask.ndim:
        found, wanted = found[..., None], wanted[..., None]
    judged = _as_rows(found[mask]), _as_rows(wanted[mask])
    if mask.all():
        return judged, None
    return judged, (_as_rows(found[~mask]), _as_rows(wanted[~mask]))


def _as_rows(array: NDArray[np.float64]) -> NDArray[np.float64]:
    if array.ndim == 0:
        return array.reshape(1, 1)
    rows = math.prod(array.shape[:-1])
    return array.reshape(rows, array.shape[-1])


def _place(row: int, shape: tuple[int, ...], mask: Mask | None) -> tuple[int, ...]:
    """Indices of a judged row along the leading dimensions."""
    if mask is None:
        return tuple(int(i) for i in np.unravel_index(row, shape[:-1] or (1,)))
    inner = shape[mask.ndim : -1]
    outer, rest = divmod(row, math.prod(inner))
    places = (*np.argwhere(mask)[outer], *np.unravel_index(rest, inner or (1,))[: len(inner)])
    return tuple(int(i) for i in places)


def _measure_rows(found: NDArray[np.float64], wanted: NDArray[np.float64]) -> tuple[Metrics, int]:
    """The metrics of the judged rows, and the index of the worst."""
    if found.size == 0:
        return Metrics(0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0), 0
    # Dividing by the largest value first keeps the squares of tiny and huge values inside float64.
    scale = float(np.abs(wanted).max()) or 1.0
    found, wanted = found / scale, wanted / scale
    error = found - wanted
    error_rows, wanted_rows = np.linalg.norm(error, axis=1), np.linalg.norm(wanted, axis=1)
    shown = wanted_rows[wanted_rows > 0]
    least = SMALL_ROW * float(np.median(shown)) if len(shown) else 0.0
    errors = list(map(ratio, error_rows.tolist(), np.maximum(wanted_rows, least).tolist()))
    worst = max(errors)
    degenerate = "constant" if wanted.size > 1 and (wanted == wanted.flat[0]).all() else ""
    measured = Metrics(
        rows=len(found),
        error_norm=_finite(_norm(error_rows) * scale),
        reference_norm=_finite(_norm(wanted_rows) * scale),
        worst_row=worst,
        max_abs=_finite(float(np.abs(error).max()) * scale),
        cosine=_least_cosine(found, wanted, wanted_rows >= max(least, 1e-300)),
        reference_max=scale if wanted.any() else 0.0,
        degenerate=degenerate if wanted.any() else "all zero",
    )
    return measured, errors.index(worst)


def _least_cosine(found: NDArray[np.float64], wanted: NDArray[np.float64], keep: Mask) -> float:
    if not keep.any():
        return 1.0
    found, wanted = found[keep], wanted[keep]
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    dots = np.einsum("ij,ij->i", found, wanted)
    cosines = np.divide(dots, lengths, out=np.zeros_like(dots), where=lengths > 0)
    return float(np.clip(cosines, -1.0, 1.0).min())


def _finite(value: float) -> float:
    return min(value, sys.float_info.max)


def _norm(values: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(values))


def pool(cases: Iterable[Metrics]) -> Metrics:
    """One output over all cases: norms add up, extremes are taken."""
    found = list(cases)
    broken = next((m for m in found if m.nonfinite), None)
    pads = [m.pad_error for m in found if m.pad_error is not None]
    flags = {m.degenerate for m in found if m.rows}
    return Metrics(
        rows=sum(m.rows for m in found),
        error_norm=_finite(math.hypot(*(m.error_norm for m in found))),
        reference_norm=_finite(math.hypot(*(m.reference_norm for m in found))),
        worst_row=max((m.worst_row for m in found), default=0.0),
        max_abs=max((m.max_abs for m in found), default=0.0),
        cosine=min((m.cosine for m in found), default=1.0),
        reference_max=max((m.reference_max for m in found), default=0.0),
        nonfinite=sum(m.nonfinite for m in found),
        first_nonfinite=broken.first_nonfinite if broken else None,
        pad_error=max(pads, default=None),
        degenerate=flags.pop() if len(flags) == 1 else "",
        worst_at=found[0].worst_at if len(found) == 1 else None,
        prompts=sum(m.prompts for m in found),
        prompt_cosine=min((m.prompt_cosine for m in found), default=1.0),
        wrong=sum(m.wrong or 0 for m in found) if any(m.wrong is not None for m in found) else None,
        part=max((m.part for m in found if m.part), key=lambda part: part.excess, default=None),
        distance=_finite(math.hypot(*(max(m.distance, m.error_norm) for m in found))),
        terms=_finite(math.hypot(*(max(m.terms, m.reference_norm) for m in found))),
    )


def row_mask(shape: Sequence[int], attention_mask: Array | None) -> Mask | None:
    """The rows of an output that count: where its leading dimensions are the mask's, those with
    mask != 0.

    Args:
        shape: the output's, e.g. [B, S, ...].
        attention_mask: e.g. [B, S]; None when the model has none.
    """
    if attention_mask is None or tuple(shape[: attention_mask.ndim]) != attention_mask.shape:
        return None
    return np.asarray(attention_mask != 0, dtype=np.bool_)


def masked_outputs(
    shapes: Iterable[Mapping[str, Sequence[int]]], masks: Iterable[Array | None]
) -> frozenset[str]:
    """Names of the outputs that follow the mask in every case, through several lengths.

    One length is not enough: a pooled output [B, hidden] looks like [B, S] where S is the hidden
    size, by chance or because it never varies.

    Args:
        shapes: per case, output name -> shape.
        masks: per case, the attention mask.
    """
    masks = list(masks)
    if len({mask.shape[1:] for mask in masks if mask is not None}) < 2:
        return frozenset()
    follows = [
        {name for name, shape in outputs.items() if row_mask(shape, mask) is not None}
        for outputs, mask in zip(shapes, masks, strict=True)
    ]
    return frozenset.intersection(*map(frozenset, follows))


def compare(
    outputs: Mapping[str, Array],
    reference: Mapping[str, Array],
    *,
    attention_mask: Array | None = None,
    masked: frozenset[str] = frozenset(),
    losses: Mapping[str, Loss] = MappingProxyType({}),
    given: int = 0,
) -> dict[str, Metrics]:
    """Measure every output that the reference has and the outputs have.

    Args:
        outputs: output name -> array, any float dtype.
        reference: output name -> float64 array of the same shape.
        attention_mask: of this case, [B, S].
        masked: outputs whose rows follow the mask.
        losses: eager's error in each output.
        given: number of prompts, of a case of prompts that a user gave.

    Raises:
        VerificationError: a shape differs.
    """
    found = {}
    for name, wanted in reference.items():
        if name not in outputs:
            continue
        mask = row_mask(wanted.shape, attention_mask) if name in masked else None
        try:
            found[name] = measure(outputs[name], wanted, mask, losses.get(name), given=given)
        except VerificationError as error:
            raise VerificationError(f"output {name!r}: {error.message}", hint=error.hint) from error
    return found


def pool_output(comparison: Comparison, output: str) -> Metrics:
    """One output over all the cases that have it."""
    return pool(outputs[output] for outputs in comparison.values() if output in outputs)


def output_names(comparison: Comparison) -> tuple[str, ...]:
    """The outputs of all cases, in the order they first appear."""
    return tuple(dict.fromkeys(name for outputs in comparison.values() for name in outputs))


def distance(found: Array, wanted: Array) -> float:
    """Relative L2 distance; infinite if shapes differ or only one side is finite somewhere."""
    if found.shape != wanted.shape:
        return float("inf")
    measured = measure(found, wanted)
    if measured.nonfinite:
        return float("inf")
    return measured.error_norm / (measured.reference_norm or 1.0)
