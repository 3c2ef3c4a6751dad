"""The reference of a model: inputs, eager's outputs and the noise floor.

It is stored in the bundle, so that a machine without the model and without torch can judge an
engine.

`reference.safetensors` holds, per case, `NAME/in/<input>`, `NAME/out/<output>` (eager fp32,
float32), `NAME/ref/<output>` (fp64 reference, float64) and `NAME/loss/<output>` (what eager loses
at each element in the engine's dtype, float32) and `NAME/order/<output>` (other orders of sums,
float64); everything else is JSON under one key of the file's metadata (one key, because safetensors
does not keep the order of several and a bundle must come out the same, byte for byte).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors
from safetensors.numpy import save_file

from enginecast.errors import BundleError, InputError
from enginecast.runtime.bundle.manifest import ShapeRange, profile_of
from enginecast.runtime.bundle.tensor_files import read_tensors
from enginecast.verification.floor import UNIT_ROUNDOFF, Floor
from enginecast.verification.metrics import Array, Loss, Metrics, compare, measure, row_mask

REFERENCE_NAME = "reference.safetensors"
GIVEN_PROMPTS = "given prompts"
"""The case whose rows are the prompts that a user gave."""
BUDGET = 32 << 20
_KEY = "enginecast"
FLIPS = 0.02
"""Share of elements that may be on fp64's side of a jump, for outputs that are compared with
eager."""
_KINDS = ("in", "out", "ref", "loss", "order")
_DAMAGE = (
    safetensors.SafetensorError,
    msgspec.MsgspecError,
    InputError,
    KeyError,
    TypeError,
    ValueError,
    OSError,
)
"""Errors from reading a file that is not a reference."""


@dataclass(frozen=True)
class ReferenceCase:
    """One set of inputs with eager's outputs."""

    name: str
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    """Eager fp32."""
    reference: Mapping[str, Array]
    """The outputs in fp64."""
    losses: Mapping[str, Array] = field(default_factory=dict)
    """Eager's error at each element in the engine's dtype, by output."""
    orders: Mapping[str, Array] = field(default_factory=dict)
    """Outputs of few numbers with sums in other orders, [orders, ...]."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the inputs, by name."""
        return {name: array.shape for name, array in self.inputs.items()}

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(array.nbytes for part in _parts(self) for array in part.values())


@dataclass(frozen=True)
class Rows:
    """What of a model has a row for each element of a batch."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    """Those of which eager gives the same row in any batch as alone."""
    why: str = ""
    """Why some outputs, or all, are not compared by row; empty: all are."""


@dataclass(frozen=True)
class Reference:
    """All cases of a model."""

    cases: tuple[ReferenceCase, ...]
    floor: Floor
    mask_input: str | None = None
    """Input that marks valid rows; None: every row counts."""
    masked: frozenset[str] = frozenset()
    """Outputs whose rows follow the mask."""
    guarded: frozenset[str] = frozenset()
    """Those of them whose valid rows do not depend on the content of padding."""
    rows: Rows | None = None
    """None: no input has rows, no case has two of them, or the file is of an earlier version."""
    edges: tuple[ReferenceCase, ...] = ()
    """Edge cases with unusual values, judged one by one (`verification.edges`)."""
    left_out: tuple[str, ...] = ()
    """Cases that were verified at export but did not fit into the file."""

    def mask_of(self, case: ReferenceCase) -> Array | None:
        """The attention mask of a case."""
        return None if self.mask_input is None else case.inputs[self.mask_input]

    def compare(self, case: ReferenceCase, outputs: Mapping[str, Array]) -> dict[str, Metrics]:
        """Measure the outputs of a case against fp64, over the valid rows; or against eager, for
        outputs that eager itself is the reference of.

        Raises:
            VerificationError: a shape differs.
        """
        dtype = self.floor.dtype
        given = len(next(iter(case.inputs.values()), ())) if case.name == GIVEN_PROMPTS else 0
        wanted = {
            name: _nearer(outputs[name], case.outputs[name], exact)
            if name in self.floor.by_eager and name in outputs
            else exact
            for name, exact in case.reference.items()
        }
        measured = compare(
            outputs,
            wanted | in_other_orders(outputs, wanted, case.orders),
            attention_mask=self.mask_of(case),
            masked=self.masked,
            losses={n: Loss(a, dtype, UNIT_ROUNDOFF[dtype]) for n, a in case.losses.items()},
            given=given,
        )
        for name in case.orders.keys() & measured.keys():
            distance = measure(outputs[name], wanted[name]).error_norm
            measured[name] = replace(measured[name], distance=distance)
        return measured


def within_profiles(
    reference: Reference, profile: Sequence[ShapeRange]
) -> tuple[Reference, tuple[str, ...]]:
    """The cases whose shapes one of an engine's profiles has, and a note that names the others.

    Args:
        profile: of the engine's record; empty: it takes every case.
    """

    def is_taken(case: ReferenceCase) -> bool:
        return not profile or profile_of(profile, case.shapes) is not None

    kept, edges = (tuple(filter(is_taken, cases)) for cases in (reference.cases, reference.edges))
    names = frozenset(case.name for case in kept)
    others = [case.name for case in reference.cases if case.name not in names]
    if not kept or (not others and len(edges) == len(reference.edges)):
        return reference, ()
    note = f"not compared: {', '.join(others)}, whose shapes no profile of the engine has"
    floor = reference.floor.only(names)
    return replace(reference, cases=kept, edges=edges, floor=floor), (note,) if others else ()


def in_other_orders(
    outputs: Mapping[str, Array], wanted: Mapping[str, Array], orders: Mapping[str, Array]
) -> dict[str, Array]:
    """The outputs that have `orders`: of the values between the wanted ones and those of other
    orders of sums, the nearest.
    """
    nearest: dict[str, Array] = {}
    for name in orders.keys() & outputs.keys():
        found, every = outputs[name], np.concatenate([wanted[name][None], orders[name]])
        if found.shape == every.shape[1:] and np.isfinite(every).all():
            low, high = every.min(axis=0), every.max(axis=0)
            nearest[name] = np.clip(found.astype(np.float64), low, high)
    return nearest


def _nearer(found: Array, plain: Array, exact: Array) -> Array:
    """Eager's output, with fp64's value for the few elements that are on fp64's side of a jump."""
    if not found.shape == plain.shape == exact.shape:
        return plain
    if found.dtype.kind in "biu":
        jumped = np.asarray((found == exact) & (found != plain))
    else:
        engine, eager, wide = (side.astype(np.float64) for side in (found, plain, exact))
        with np.errstate(invalid="ignore", over="ignore"):
            jumped = np.asarray(np.abs(engine - wide) < np.abs(engine - eager))
    return np.where(jumped, exact, plain) if jumped.sum() <= FLIPS * jumped.size else plain


def fit(reference: Reference, budget: int = BUDGET) -> Reference:
    """Drop whole cases if not all fit; at least one stays.

    The largest that fits is kept, then the small ones: positions that only a long case reaches are
    compared, and as many cases as there is room for.

    Args:
        budget: most bytes of tensor data.
    """
    ascending = sorted(reference.cases, key=lambda case: case.size)
    largest = next((c for c in reversed(ascending) if c.size <= budget), ascending[0])
    kept, used = {largest.name}, largest.size
    for case in ascending:
        if case is not largest and used + case.size <= budget:
            kept.add(case.name)
            used += case.size
    edges = reference.edges if used + sum(e.size for e in reference.edges) <= budget else ()
    left_out = [case.name for case in reference.cases if case.name not in kept]
    left_out += [] if edges else [case.name for case in reference.edges]
    return replace(
        reference,
        cases=tuple(case for case in reference.cases if case.name in kept),
        floor=reference.floor.only(frozenset(kept)),
        edges=edges,
        left_out=(*reference.left_out, *left_out),
    )


def write_reference(path: Path, reference: Reference, *, budget: int = BUDGET) -> tuple[str, ...]:
    """Write the cases that fit into the size limit.

    Args:
        path: the file to write.
        budget: bytes of tensor data that may be stored.

    Returns:
        The names of the cases that were left out.
    """
    stored = fit(reference, budget)
    tensors: dict[str, Array] = {}
    for case in (*stored.cases, *stored.edges):
        for kind, arrays in zip(_KINDS, _parts(case), strict=True):
            for name, array in arrays.items():
                tensors[f"{case.name}/{kind}/{name}"] = np.array(array, order="C", copy=None)
    metadata = {
        "cases": [_names(case) for case in stored.cases],
        "edges": [_names(case) for case in stored.edges],
        "floor": asdict(stored.floor),
        "mask_input": stored.mask_input,
        "masked": sorted(stored.masked),
        "guarded": sorted(stored.guarded),
        "rows": stored.rows and asdict(stored.rows),
        "left_out": list(stored.left_out),
    }
    text = json.dumps(metadata, sort_keys=True, allow_nan=False)
    save_file(tensors, path, metadata={_KEY: text})
    return stored.left_out


def _names(case: ReferenceCase) -> dict[str, Any]:
    return {
        "name": case.name,
        **{kind: list(arrays) for kind, arrays in zip(_KINDS, _parts(case), strict=True)},
    }


def _parts(case: ReferenceCase) -> tuple[Mapping[str, Array], ...]:
    return case.inputs, case.outputs, case.reference, case.losses, case.orders


def read_reference(path: Path) -> Reference:
    """Read what `write_reference` wrote.

    Raises:
        BundleError: the file is missing, damaged, or no reference.
    """
    hint = "Export the model again, or verify with `--model`."
    try:
        with safetensors.safe_open(path, framework="np") as file:
            metadata = json.loads((file.metadata() or {})[_KEY])
        tensors = read_tensors(path)

        def cases(kind: str) -> tuple[ReferenceCase, ...]:
            return tuple(
                ReferenceCase(
                    case["name"],
                    *(
                        {
                            name: tensors[f"{case['name']}/{part}/{name}"]
                            for name in case.get(part, ())
                        }
                        for part in _KINDS
                    ),
                )
                for case in metadata.get(kind, ())
            )

        return Reference(
            cases=cases("cases"),
            edges=cases("edges"),
            floor=msgspec.convert(metadata["floor"], Floor),
            mask_input=metadata["mask_input"],
            masked=frozenset(metadata["masked"]),
            guarded=frozenset(metadata["guarded"]),
            rows=msgspec.convert(metadata.get("rows"), Rows | None),
            left_out=tuple(metadata["left_out"]),
        )
    except FileNotFoundError as error:
        raise BundleError(f"{path}: the stored reference is missing", hint=hint) from error
    except _DAMAGE as error:
        raise BundleError(f"{path}: not a stored reference: {error!r}", hint=hint) from error


UNCHANGED = 1e-12
"""Relative change of an fp64 output below which it does not depend on padding."""


def padded_case(masks: Mapping[str, Array | None]) -> str | None:
    """The smallest case that has both padding and valid rows.

    A lost mask moves the output of a small or well-conditioned model by less than fp16's own error,
    and then no comparison with eager can see it. An engine compared with itself has no such noise:
    when only padding differs, the rows that count may not.

    Args:
        masks: attention mask by case name.
    """
    fitting = {
        name: mask.size
        for name, mask in masks.items()
        if mask is not None and bool((mask == 0).any()) and bool((mask != 0).any())
    }
    return min(fitting, key=lambda name: fitting[name], default=None)


def other_padding(inputs: Mapping[str, Array], mask_input: str) -> dict[str, Array]:
    """The same inputs with other integers in padded positions: the largest in use that cannot be a
    placeholder.

    An id that all rows hold equally often may be a placeholder, and one more would need another
    image feature. In a batch of one, any id may be; there padding becomes an unused number between
    those in use.

    Args:
        inputs: of one case; those with the mask's leading dimensions have padding.
        mask_input: the attention mask, which stays as it is.
    """
    changed = dict(inputs)
    for name, array in inputs.items():
        pads = row_mask(array.shape, inputs[mask_input])
        if name != mask_input and pads is not None and array.dtype.kind in "iu":
            changed[name] = array.copy()
            changed[name][~pads] = _largest(array, pads)
    return changed


def _largest(array: Array, rows: Array) -> Any:
    """The largest number where `rows` is true that some rows hold more often than others.

    If there is none, as in a batch of one: the largest unused number below the maximum. For zeros
    and ones: zero, since a one would need a feature.
    """
    spread = rows.reshape(rows.shape + (1,) * (array.ndim - rows.ndim))
    for number in np.unique(array[rows])[::-1]:
        counts = np.count_nonzero((array == number) & spread, axis=-1)
        if counts.min() != counts.max():
            return number
    held = np.unique(array)
    if held[-1] <= 1:
        return 0
    gaps = held[1:][np.diff(held) > 1] - 1
    return gaps[-1] if gaps.size else held[-1]


def moved(
    before: Mapping[str, Array], after: Mapping[str, Array], mask: Array, names: Sequence[str]
) -> dict[str, float]:
    """Relative change of the valid rows, by output.

    Raises:
        VerificationError: a shape differs.
    """
    return {
        name: measure(after[name], before[name], row_mask(before[name].shape, mask)).relative
        for name in names
    }
