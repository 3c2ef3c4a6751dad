"""Run a loaded engine over the stored cases and judge it.  Needs neither torch nor the model."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import ml_dtypes
import msgspec
import numpy as np

from enginecast.errors import InputError, VerificationError
from enginecast.progress import counted
from enginecast.runtime.bundle.manifest import Verdict, Where
from enginecast.runtime.device.versions import installed
from enginecast.runtime.engine import Engine
from enginecast.runtime.trimming import PadRows
from enginecast.verification.edges import edge_failures
from enginecast.verification.floor import UNIT_ROUNDOFF
from enginecast.verification.metrics import Array, Comparison, Metrics, pool_output, row_mask
from enginecast.verification.reference import (
    Reference,
    ReferenceCase,
    moved,
    other_padding,
    padded_case,
)
from enginecast.verification.rows import RowError, judge_rows
from enginecast.verification.rows import batches as rows_in_batches
from enginecast.verification.verdict import judge, limit_of, noted

EXACT: PadRows = "exact"
ZERO: PadRows = "zero"

LEAK = 0.1
"""Share of the noise floor by which other padding may change an output: some kernels sum in another
order in each run."""
LEAST_LEAK = 4 * UNIT_ROUNDOFF["fp32"]


def verify_engine(
    engine: Engine,
    reference: Reference,
    *,
    emulated: Comparison | None = None,
    problems: tuple[str, ...] = (),
) -> Verdict:
    """Run every case of the reference and judge the outputs by its noise floor.

    Args:
        engine: loaded, on the provider to be judged.
        reference: of the model the engine was made from.
        emulated: the program in true dtype arithmetic, if it could be run; must pass too.
        problems: reasons to reject that were found elsewhere.

    Raises:
        InputError: a stored case does not fit the engine's declared inputs.
    """
    measured, found = measure_engine(engine, reference)
    if not found:
        found = padding_leaks(engine, reference)
    found = (*found, *compare_edges(engine, reference))
    batches, apart = row_errors(engine, reference)
    verdict = judge(
        measured,
        reference.floor,
        where=where_it_ran(engine),
        engine_ran=runs_natively(reference.floor.dtype, engine.provider),
        emulated=emulated,
        problems=(*problems, *(error.reason for error in apart), *found),
        edges=[*(case.name for case in edges_of(reference)), *batches],
    )
    if verdict.outcome == "rejected":
        # The smallest batch says most; of its sizes, the cases may have some.
        smallest = [] if problems else rows_apart(engine, reference)
        reasons = dict.fromkeys((*(str(error.reason) for error in smallest), *verdict.reasons))
        return msgspec.structs.replace(verdict, reasons=tuple(reasons))
    return noted(verdict, rows_left_out(reference))


def rows_left_out(reference: Reference) -> list[str]:
    """A note where rows of a batch cannot be compared with each alone; else none."""
    why = "" if reference.rows is None else reference.rows.why
    return [f"rows of a batch were not compared with each alone: {why}"] if why else []


def row_errors(
    engine: Engine, reference: Reference, *, every: bool = False
) -> tuple[list[str], list[RowError]]:
    """Run rows of a case in other batches; return the names of the batches, and the rows of the
    first wrong one that are not what they are alone.

    Args:
        every: in all batches, instead of those whose size no case has.
    """
    names = list[str]()
    if reference.rows is None:
        return names, []
    for batch, case in rows_in_batches(engine.manifest, engine.record, reference, every=every):
        outputs = engine.run(feeds_of(engine, case), check_finite=False, pad_rows=EXACT)
        names.append(case.name)
        if found := list(judge_rows(reference, batch, case, outputs)):
            return names, found
    return names, []


def rows_apart(engine: Engine, reference: Reference) -> list[RowError]:
    """The rows that a rejected engine computes wrongly in a batch, and right alone."""
    _, found = row_errors(engine, reference, every=True)
    return [] if any(error.batch == 1 for error in found) else found


def compare_edges(engine: Engine, reference: Reference) -> tuple[str, ...]:
    """Report where an engine differs from eager on unusual values."""
    return tuple(
        failure
        for case in edges_of(reference)
        for failure in edge_failures(
            case,
            engine.run(feeds_of(engine, case), check_finite=False, pad_rows=EXACT),
            reference.floor.dtype,
            reference.floor.halves,
        )
    )


def edges_of(reference: Reference) -> Sequence[ReferenceCase]:
    """The edge cases, for which eager is a valid measure: not for quantized engines, which
    saturate.
    """
    return () if reference.floor.rounding else reference.edges


def measure_engine(engine: Engine, reference: Reference) -> tuple[Comparison, tuple[str, ...]]:
    """Run every case; return the metrics, and reasons why cases could not be measured.

    Raises:
        InputError: a stored case does not fit the engine's declared inputs.
    """
    measured: dict[str, dict[str, Metrics]] = {}
    problems: list[str] = []
    for case in counted(reference.cases, "cases"):
        outputs = engine.run(feeds_of(engine, case), check_finite=False, pad_rows=EXACT)
        try:
            measured[case.name] = reference.compare(case, outputs)
        except VerificationError as error:
            problems.append(f"case {case.name!r}: {error.message}")
    return measured, tuple(problems)


def translation_failures(
    engine: Engine, cases: Sequence[ReferenceCase], reference: Reference
) -> tuple[str, ...]:
    """Report where an fp32 engine differs from its own program.

    Args:
        cases: with the program's outputs in fp32 and, as the reference, in fp64.
        reference: determines the valid rows.
    """
    found: list[str] = []
    for case in cases:
        mask = reference.mask_of(case)
        outputs = engine.run(feeds_of(engine, case), check_finite=False, pad_rows=EXACT)

        sides = (case.outputs, case.reference, outputs)
        plain, exact, got = (_valid(side, mask, reference.masked) for side in sides)
        case = replace(case, outputs=plain, reference=exact)
        found += edge_failures(case, got, halves=reference.floor.halves)
    return tuple(found)


def _valid(
    outputs: Mapping[str, Array], mask: Array | None, masked: frozenset[str]
) -> dict[str, Array]:
    """The outputs with zeros in their padding rows."""
    found = dict(outputs)
    for name in masked & outputs.keys():
        rows = row_mask(found[name].shape, mask)
        if rows is not None:
            found[name] = np.where(
                rows.reshape(rows.shape + (1,) * (found[name].ndim - rows.ndim)), found[name], 0
            )
    return found


def padding_leaks(engine: Engine, reference: Reference) -> tuple[str, ...]:
    """Run one case with other padding; report outputs that depend on it although eager's do not."""
    masks = {case.name: reference.mask_of(case) for case in reference.cases}
    case = next((c for c in reference.cases if c.name == padded_case(masks)), None)
    if case is None or reference.mask_input is None or not reference.guarded:
        return ()
    mask = case.inputs[reference.mask_input]
    other = replace(case, inputs=other_padding(case.inputs, reference.mask_input))
    before, after = (
        engine.run(feeds_of(engine, c), check_finite=False, pad_rows=EXACT) for c in (case, other)
    )
    changes = moved(before, after, mask, sorted(reference.guarded & before.keys()))
    floor = reference.floor
    return tuple(
        f"output {name!r}, case {case.name!r}: valid rows change by {change:.2g} when only padding"
        " changes, and eager's do not: the mask is lost"
        for name, change in changes.items()
        if change > max(LEAK * pool_output(floor.cases, name).relative, LEAST_LEAK)
    )


def trimming_failures(engine: Engine, reference: Reference) -> dict[str, str]:
    """Run one case with more padding, untrimmed and trimmed; report outputs that differ by more
    than an engine's tolerance.
    """
    padding = engine.manifest.padding
    masks = {case.name: reference.mask_of(case) for case in reference.cases}
    name = padded_case(masks)
    if padding is None or not padding.outputs or name is None:
        return {}
    case = next(case for case in reference.cases if case.name == name)
    mask = case.inputs[padding.mask]
    feeds, outputs = feeds_of(engine, case), padding.outputs
    run = partial(engine.run, outputs=outputs, check_finite=False)
    plain = run(feeds, pad_rows=EXACT)
    # The case with more padding on the right, as far as its range allows.
    tokens = next(spec for spec in engine.inputs if spec.name == padding.mask).shape[1]
    step = engine.manifest.steps.get(str(tokens), 1)
    more = min(engine.manifest.symbols[str(tokens)][1] - mask.shape[1], 5 + -5 % step)
    more -= more % step
    wider: Mapping[str, Array] = {
        spec.name: np.pad(
            feeds[spec.name],
            [(0, more if declared == tokens else 0) for declared in spec.shape],
            mode="constant" if spec.name == padding.mask else "edge",
        )
        for spec in engine.inputs
    }
    try:
        whole = run(wider, pad_rows=EXACT)
    except InputError:  # a condition on sizes
        whole, wider = plain, feeds
    trimmed = run(wider, pad_rows=ZERO)
    failures: dict[str, str] = {}
    for found in (whole, trimmed):
        cut = {
            n: a if a.shape == plain[n].shape else a[:, : mask.shape[1]] for n, a in found.items()
        }
        for output, change in moved(plain, cut, mask, outputs).items():
            floor = pool_output(reference.floor.cases, output).relative
            if not change <= limit_of(reference.floor) * max(floor, LEAST_LEAK):
                failures[output] = f"case {name!r} changes by {change:.2g} with more padding"
    return failures


def feeds_of(engine: Engine, case: ReferenceCase) -> Mapping[str, Array]:
    """The case's inputs in the dtypes the engine declares: an fp16 engine may want fp16 pixels."""
    return as_declared(engine, case.inputs)


def as_declared(engine: Engine, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The given inputs of the engine, in its declared dtypes."""
    feeds = {}
    for declared in engine.inputs:
        if declared.name not in arrays:
            continue
        array = arrays[declared.name]
        dtype = np.dtype(ml_dtypes.bfloat16 if declared.dtype == "bfloat16" else declared.dtype)
        feeds[declared.name] = array if array.dtype == dtype else array.astype(dtype)
    return feeds


def runs_natively(dtype: str, provider: str) -> bool:
    """Whether a provider computes in this dtype.

    ONNX Runtime's CPU provider has no half-precision kernels: it computes fp16 graphs in fp32, so
    that a run there says nothing about overflow.
    """
    return dtype == "fp32" or provider != "CPUExecutionProvider"


def where_it_ran(engine: Engine | None = None) -> Where:
    """This machine, as a verdict records it.

    Args:
        engine: the engine that ran; None: none did.
    """
    versions = installed("enginecast", "onnxruntime", "onnxruntime-gpu", "numpy")
    if engine is not None:
        versions |= engine.versions()
    provider = "" if engine is None else engine.provider
    return Where(provider=provider, device=platform.machine(), versions=versions)
