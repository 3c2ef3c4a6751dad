"""Run eager and the captured program, to build a reference and its noise floor.

Memory stays small: one eager module exists at a time, and the fp64 reference is the captured
program interpreted with its weights raised to fp64 one by one, right before they are used.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from enginecast.errors import EnginecastError, VerificationError
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.interpret import ALIGNMENT, AssertionFailedError
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.ir.source import module_path, source_line
from enginecast.passes.ir.text import DTYPES
from enginecast.passes.registry import build
from enginecast.progress import counted
from enginecast.runtime.values.arrays import to_array
from enginecast.verification.boundaries import fill_values, is_module_output, largest_values
from enginecast.verification.floor import (
    FP16_PER_BF16,
    KERNELS,
    LARGEST_FLOOR,
    LIMIT,
    LOST,
    UNIT_ROUNDOFF,
    Floor,
    least_floor,
)
from enginecast.verification.kernel_noise import (
    EDGE_WORK,
    WORK,
    affordable,
    noisy_outputs,
    ordered_outputs,
)
from enginecast.verification.metrics import (
    NOT_FINITE,
    Array,
    Comparison,
    Loss,
    Metrics,
    Outputs,
    masked_outputs,
    measure,
    output_names,
    pool_output,
)
from enginecast.verification.reference import (
    UNCHANGED,
    Reference,
    ReferenceCase,
    moved,
    other_padding,
    padded_case,
)
from enginecast.verification.runs import Runs
from enginecast.verification.terms import output_terms

Eager = Callable[[torch.dtype], nn.Module]
"""Makes the eager module in a dtype."""
Forward = Callable[[nn.Module, Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Runs a module on a case's inputs and names its outputs."""

ALIKE = 4.0
"""Largest ratio of eager's error for a batch to its error for one row at which rows count as
independent."""
FEW = 16
"""An output with fewer numbers in a case: two samples of their error are a matter of luck."""
ROUNDS = 4
"""How many rounds of samples such outputs get, in cases that are small enough."""
FP32_ALONE = "Where an op has no kernel in {}, say .float() before it, or use --precision fp32."
FP32_FIRST = (
    "It computes in 16 bits by itself: give it in fp32 (a .pt2 program is exported from"
    " model.float()), and choose the engine's precision with --precision."
)
NARROW = "Where the model does not take such sizes, narrow them: --dynamic NAME:DIM=MIN..MAX."


class Case(Protocol):
    """Named inputs."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class NamedInputs:
    """A case that is not the user's: with other padding, one of its rows, or rounded."""

    name: str
    inputs: Mapping[str, Tensor]


def as_array(tensor: Tensor) -> Array:
    """A tensor as a numpy array, bfloat16 included."""
    return to_array(tensor.detach().cpu().contiguous())


def as_arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Each tensor as a numpy array."""
    return {name: as_array(tensor) for name, tensor in tensors.items()}


def mask_of(case: Case, mask_input: str | None) -> Tensor | None:
    """The attention mask of a case, [B, S]."""
    return None if mask_input is None else case.inputs[mask_input]


def reference_program(program: ExportedProgram) -> ExportedProgram:
    """A copy of the program that computes in fp64; it shares the weights."""
    copy = structural_copy(program)
    run_pipeline(build("unify-dtype{to=fp64}"), copy, PassContext())
    return copy


def reference_outputs(exact: Runs, cases: Sequence[Case]) -> Outputs:
    """The fp64 outputs of every case, computed by the `reference_program` of the captured program.

    Raises:
        AssertionFailedError: an assertion of the program does not hold in a case.
        VerificationError: the program does not run in a case.
    """
    inputs = [case.inputs for case in cases]
    try:
        outputs = exact.outputs(inputs)
    except AssertionFailedError as error:
        case = cases[error.case]
        raise AssertionFailedError(
            f"case {case.name!r}: {error.message}",
            error.case,
            hint=error.hint,
            inputs=case.inputs,
        ) from error
    except EnginecastError:
        raise
    except (IndexError, RuntimeError, ValueError) as error:  # an operator's, as eager would get it
        raise VerificationError(
            f"the captured program does not run in all its sizes: {str(error).splitlines()[0]}",
            hint=NARROW,
        ) from error
    return {case.name: as_arrays(found) for case, found in zip(cases, outputs, strict=True)}


def eager_outputs(eager: Eager, cases: Sequence[Case], *, dtype: str, forward: Forward) -> Outputs:
    """Run the eager module in one dtype over all cases.

    Args:
        dtype: "fp32", "fp16" or "bf16"; float inputs are cast to it.

    Raises:
        VerificationError: eager cannot run in this dtype.
    """
    module = eager(DTYPES[dtype])
    found = {}
    for case in counted(cases, "cases"):
        # Copies: a forward may write into what it is given.
        inputs = {
            name: tensor.to(DTYPES[dtype] if tensor.is_floating_point() else None, copy=True)
            for name, tensor in case.inputs.items()
        }
        try:
            with torch.no_grad():
                found[case.name] = as_arrays(forward(module, inputs))
        except EnginecastError:
            raise
        except Exception as error:  # the model's own code, which may not take every size
            sizes = ", ".join(f"{name} {list(t.shape)}" for name, t in inputs.items())
            of_dtypes = any(word in str(error) for word in ("dtype", "Half", "BFloat16"))
            hint = FP32_FIRST if of_dtypes else NARROW
            raise VerificationError(
                f"case {case.name!r} ({sizes}): eager {dtype} cannot run here: {error}",
                hint="Without eager there is no floor to judge an engine by. "
                + (FP32_ALONE.format(dtype) if dtype in ("fp16", "bf16") else hint),
            ) from error
    return found


def make_reference(
    program: ExportedProgram | None,
    eager: Eager,
    cases: Sequence[Case],
    *,
    dtype: str,
    names: Sequence[str],
    forward: Forward,
    mask_input: str | None = None,
    exact: Callable[[Sequence[Case]], Outputs] | None = None,
    singles: Mapping[str, Sequence[Mapping[str, Tensor]]] | None = None,
    work: float = WORK,
    halves: str = "",
) -> Reference:
    """Compute everything an engine is judged by: fp64 reference, eager fp32, and eager in the
    target dtype.

    Args:
        program: as captured, before any pass; None: `exact` makes the reference.
        dtype: the engine's compute dtype: "fp32", "fp16" or "bf16".
        mask_input: input that marks valid rows; None: every row counts.
        exact: gives the fp64 outputs of cases.
        singles: inputs of cases as batches of one: fp64 is computed for each row alone if rows are
            independent.
        work: limit for runs with kernel noise (`kernel_noise.affordable`).
        halves: see `Floor.halves`.
    """
    singles = singles or {}
    if exact is None:
        assert program is not None
        exact = partial(reference_outputs, Runs(partial(reference_program, program), names))
    inputs = {case.name: as_arrays(case.inputs) for case in cases}
    masks = {n: None if mask_input is None else found[mask_input] for n, found in inputs.items()}
    padded, again = padded_case(masks), list[Case]()
    if padded is not None and mask_input is not None:
        arrays = other_padding(inputs[padded], mask_input)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        again = [NamedInputs(f"{padded}, padded otherwise", tensors)]
    exact_outputs = dict(exact([case for case in [*cases, *again] if case.name not in singles]))
    plain = eager_outputs(eager, cases, dtype="fp32", forward=forward)
    for case in cases:
        if case.name in singles:
            rows = singles[case.name]
            stacked = _stacked(exact, case, rows, cases, exact_outputs, plain)
            exact_outputs[case.name] = stacked or exact([case])[case.name]
    masked = masked_outputs(
        ({n: a.shape for n, a in exact_outputs[case].items()} for case in masks), masks.values()
    )
    guarded = frozenset[str]()
    if padded is not None and (mask := masks[padded]) is not None:
        before, after = exact_outputs[padded], exact_outputs[again[0].name]
        changes = moved(before, after, mask, sorted(masked))
        guarded = frozenset(name for name, change in changes.items() if change <= UNCHANGED)
    reference = Reference(
        cases=tuple(
            ReferenceCase(name, found, plain[name], exact_outputs[name])
            for name, found in inputs.items()
        ),
        floor=Floor(dtype, {}, halves=halves if dtype == "fp32" else ""),
        mask_input=mask_input,
        masked=masked,
        guarded=guarded,
    )
    fixed = frozenset() if program is None else shape_only_outputs(program, names)

    def against(outputs: Outputs) -> Comparison:
        return {case.name: _compared(reference, case, outputs, fixed) for case in reference.cases}

    if dtype == "fp32":
        samples = [] if program is None else _noisy(program, cases, names, work)
        by_eager = _by_eager(reference, against(plain), samples)
        reference = replace(reference, floor=replace(reference.floor, by_eager=by_eager))
        reference = replace(reference, floor=replace(reference.floor, cases=against(plain)))
        return _with_samples(with_losses(reference, plain), samples)
    low = partial(eager_outputs, eager, cases, forward=forward)
    own = low(dtype=dtype)
    floor = Floor(dtype, against(own))
    reference = with_losses(replace(reference, floor=floor), own)
    if dtype == "fp16":
        wider = low(dtype="bf16")
        floor = _fp16_floor(replace(floor, wider=against(wider)), program, cases)
        reference = with_losses(replace(reference, floor=floor), wider, 1 / FP16_PER_BF16)
    return reference


def _stacked(
    exact: Callable[[Sequence[Case]], Outputs],
    case: Case,
    rows: Sequence[Mapping[str, Tensor]],
    cases: Sequence[Case],
    known: Outputs,
    plain: Outputs,
) -> dict[str, Array]:
    """The fp64 outputs of a batch, joined from those of its rows: half the work if one of the rows
    is a case.

    Eager computes the batch at once, and must not be farther from it than for that case.

    Args:
        rows: the rows of the batch, as batches of one.
        known: fp64 outputs of other cases.
        plain: outputs of eager fp32.

    Returns:
        Nothing where a row depends on others.
    """
    given = [c for c in cases if any(_are_equal(c.inputs, row) for row in rows)]
    alone = [
        next((c for c in given if _are_equal(c.inputs, row)), NamedInputs(f"{case.name}, {n}", row))
        for n, row in enumerate(rows)
    ]
    outputs = {**known, **exact([row for row in alone if row.name not in known])}
    parts = [outputs[row.name] for row in alone]
    stacked = {}
    for name, wanted in plain[case.name].items():
        arrays = [part[name] for part in parts]
        if not all(array.shape[:1] == (1,) for array in arrays):
            return {}
        stacked[name] = np.concatenate(arrays)
        usual = max((_distance(plain[c.name][name], known[c.name][name]) for c in given), default=0)
        if not _distance(wanted, stacked[name]) <= ALIKE * max(usual, least_floor("fp32")):
            return {}
    return stacked


def _are_equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def with_losses(reference: Reference, outputs: Outputs, factor: float = 1.0) -> Reference:
    """The reference with its losses raised to a run's error at each element, times a factor.

    At the edges, it is the distance from eager's own outputs.
    """

    def worse(case: ReferenceCase, by_eager: Collection[str]) -> ReferenceCase:
        losses = {}
        for name, exact in case.reference.items():
            wanted = case.outputs[name] if name in by_eager else exact
            found = outputs.get(case.name, {}).get(name)
            if found is None or wanted.dtype.kind in "biu" or found.shape != wanted.shape:
                continue
            with np.errstate(all="ignore"):
                lost = np.abs(found.astype(np.float64) - wanted.astype(np.float64)) * factor
            lost = np.where(np.isfinite(lost), lost, 0.0).astype(np.float32)
            losses[name] = np.maximum(lost, case.losses.get(name, lost))
        return replace(case, losses={**case.losses, **losses})

    return replace(
        reference,
        cases=tuple(worse(case, reference.floor.by_eager) for case in reference.cases),
        edges=tuple(worse(case, case.outputs) for case in reference.edges),
    )


def _by_eager(
    reference: Reference, measured: Comparison, samples: Sequence[Outputs]
) -> dict[str, float]:
    """The outputs that eager fp32 cannot compute accurately, and its error in them.

    The model is discontinuous or cancels there, and a correct engine has the same error. A single
    case counts if kernel noise does not change eager's result.

    Args:
        measured: metrics of eager fp32 against fp64.
        samples: outputs of the program with kernel noise.
    """

    def is_near(found: Array, plain: Array) -> bool:
        if found.shape != plain.shape:
            return False
        metrics = measure(found, plain)
        return not metrics.nonfinite and metrics.relative <= KERNELS

    found = {}
    for name in output_names(measured):
        pooled = pool_output(measured, name)
        lost = pooled.relative > reference.floor.most or pooled.nonfinite > 0
        for case in reference.cases:
            if name in measured[case.name] and measured[case.name][name].relative > LOST:
                noisy = [sample[case.name][name] for sample in samples if case.name in sample]
                lost |= bool(noisy) and all(is_near(each, case.outputs[name]) for each in noisy)
        if lost:
            found[name] = NOT_FINITE if pooled.nonfinite else pooled.relative
    return found


def _samples(
    run: Callable[..., list[list[dict[str, Tensor]]]],
    program: ExportedProgram,
    cases: Sequence[Case],
    names: Sequence[str],
) -> list[Outputs]:
    """Outputs of the program as other kernels may compute them."""
    try:
        samples = run(program, [case.inputs for case in cases], names)
    except (EnginecastError, IndexError, RuntimeError, ValueError):
        return []  # values decide what it runs, and noise decides otherwise
    return [
        {case.name: as_arrays(found) for case, found in zip(cases, sample, strict=True)}
        for sample in samples
    ]


def _noisy(
    program: ExportedProgram,
    cases: Sequence[Case],
    names: Sequence[str],
    work: float,
    seed: int = 0,
) -> list[Outputs]:
    """Outputs of the program with kernel noise, for the cases that are small enough."""
    parameters = sum(tensor.numel() for tensor in program.state_dict.values())
    some = [cases[i] for i in affordable([case.inputs for case in cases], parameters, work)]
    return _samples(partial(noisy_outputs, seed=seed), program, some, names)


def _with_samples(reference: Reference, samples: Sequence[Outputs]) -> Reference:
    """The reference with the error of other kernels in its cases and edges: the largest of all
    samples.
    """
    floor = reference.floor
    kernels = {case: dict(found) for case, found in (floor.kernels or {}).items()}
    for outputs in samples:
        for case in reference.cases:
            if case.name not in outputs:
                continue
            try:
                found = reference.compare(case, outputs[case.name])
            except VerificationError:  # noise decides a size
                continue
            known = kernels.setdefault(case.name, {})
            for name, metrics in found.items():
                if name not in known or metrics.relative > known[name].relative:
                    known[name] = replace(metrics, part=None)
        reference = with_losses(reference, outputs)
    return replace(reference, floor=replace(floor, kernels=kernels))


def with_all_kernels(
    reference: Reference,
    program: ExportedProgram,
    cases: Sequence[Case],
    edges: Sequence[Case],
    names: Sequence[str],
) -> Reference:
    """The reference with the error of other kernels, including cases that were too large to run
    with noise; where an output holds few numbers, with that of more samples.

    Args:
        program: as captured, with the names of its outputs.
        cases: those of the reference, which must be in fp32.
        edges: inputs of its edge cases.
    """
    known = {*(reference.floor.kernels or {}), *(e.name for e in reference.edges if e.losses)}
    unknown = {case.name for case in (*reference.cases, *reference.edges)} - known
    for some in (cases, edges):
        left = [case for case in some if case.name in unknown]
        reference = _with_samples(reference, _noisy(program, left, names, math.inf))
    has_few = any(a.size < FEW for case in reference.cases for a in case.losses.values())
    for seed in range(1, ROUNDS if has_few else 1):
        for some in (cases, edges):
            samples = _noisy(program, some, names, WORK, seed)
            reference = _with_samples(reference, _of_size(samples, few=True))
    ordered = [
        sample
        for some in (cases, edges)
        for sample in _samples(ordered_outputs, program, some, names)
    ]
    reference = _with_samples(reference, _of_size(ordered, few=False))
    terms: Mapping[str, Mapping[str, float]] = {}
    every = [*cases, *edges]
    # As for noise, and a sum of something else than numbers of one kind.
    with suppress(EnginecastError, IndexError, RuntimeError, ValueError, TypeError):
        found = output_terms(program, [case.inputs for case in every], names)
        terms = {case.name: sizes for case, sizes in zip(every, found, strict=True)}
    kernels = {
        case: {
            name: replace(metrics, terms=terms.get(case, {}).get(name, 0.0))
            for name, metrics in outputs.items()
        }
        for case, outputs in (reference.floor.kernels or {}).items()
    }
    few = _of_size(ordered, few=True)
    return replace(
        reference,
        cases=tuple(_with_orders(case, few, terms.get(case.name, {})) for case in reference.cases),
        edges=tuple(_with_orders(case, few, terms.get(case.name, {})) for case in reference.edges),
        floor=replace(reference.floor, kernels=kernels),
    )


def _of_size(samples: Sequence[Outputs], *, few: bool) -> list[Outputs]:
    """The outputs of samples that hold few numbers, or those that do not."""
    return [
        {
            case: {name: found for name, found in outputs.items() if (found.size < FEW) is few}
            for case, outputs in sample.items()
        }
        for sample in samples
    ]


def _with_orders(
    case: ReferenceCase, samples: Sequence[Outputs], terms: Mapping[str, float]
) -> ReferenceCase:
    """The case with outputs whose sums were in other orders.

    What an order changes by more than `LARGEST_FLOOR` of the terms is not an order's.
    """
    orders = {}
    for name, plain in case.outputs.items():
        several = [s[case.name][name] for s in samples if name in s.get(case.name, {})]
        exact = case.reference[name]
        if exact.dtype.kind != "f" or not several or several[0].shape != exact.shape:
            continue
        size = terms.get(name, 0.0) / math.sqrt(max(exact.size, 1))
        most = LARGEST_FLOOR["fp32"] * np.maximum(np.abs(exact), size)
        is_finite = bool(np.isfinite(exact).all())
        wanted: Array = (exact if is_finite else plain).astype(np.float64)
        off = np.subtract(np.stack(several), wanted, dtype=np.float64)
        orders[name] = wanted + np.clip(off, -most, most)
    return replace(case, orders=orders)


def edge_reference(
    eager: Eager,
    cases: Sequence[Case],
    forward: Forward,
    exact: Callable[[Sequence[Case]], Outputs],
    program: ExportedProgram | None = None,
    names: Sequence[str] = (),
    dtype: str = "fp32",
    work: float = EDGE_WORK,
) -> tuple[ReferenceCase, ...]:
    """The edge cases of a reference: eager's outputs for unusual values in fp32 and fp64, where it
    accepts them, and the error of other kernels.

    For 16-bit dtypes, inputs are rounded to the dtype first, and eager's own error in it is stored.

    Args:
        eager: makes the eager module in a dtype.
        cases: unusual inputs, in sizes that the program accepts.
        forward: runs a module and names its outputs.
        exact: gives the fp64 outputs of cases.
        program: as captured, with the names of its outputs; None without a program.
        dtype: the engines' compute dtype.
        work: as for `make_reference`.
    """
    if dtype != "fp32":
        low = DTYPES[dtype]
        cases = [
            NamedInputs(
                case.name,
                {
                    name: tensor.to(low).to(tensor.dtype) if tensor.is_floating_point() else tensor
                    for name, tensor in case.inputs.items()
                },
            )
            for case in cases
        ]
    found = []
    for case, plain in _eager_where_it_runs(eager, cases, "fp32", forward):
        try:
            wanted = exact([case])[case.name]
        except VerificationError:
            continue
        found.append(ReferenceCase(case.name, as_arrays(case.inputs), plain, wanted))
    if dtype == "fp32":
        if program is None:
            return tuple(found)
        names_found = {edge.name for edge in found}
        left = [case for case in cases if case.name in names_found]
        reference = Reference((), Floor("fp32", {}), edges=tuple(found))
        return _with_samples(reference, _noisy(program, left, names, work)).edges
    own = {case.name: a for case, a in _eager_where_it_runs(eager, cases, dtype, forward)}
    return tuple(
        replace(case, losses=_own_losses(case, own[case.name]))
        for case in found
        if case.name in own
    )


def _eager_where_it_runs(
    eager: Eager, cases: Sequence[Case], dtype: str, forward: Forward
) -> Iterator[tuple[Case, Mapping[str, Array]]]:
    module = eager(DTYPES[dtype])
    for case in counted(cases, "edge cases"):
        try:
            made = eager_outputs(lambda _: module, [case], dtype=dtype, forward=forward)
        except VerificationError:
            continue
        yield case, made[case.name]


def _own_losses(case: ReferenceCase, own: Mapping[str, Array]) -> dict[str, Array]:
    """Eager's error in 16 bits at each element: infinite if only eager, or only fp64, is not
    finite; for integers and booleans, 1 where they differ. Empty for outputs of another size.
    """
    losses = {}
    for name, exact in case.reference.items():
        found = own[name]
        if found.shape != exact.shape:
            continue
        if exact.dtype.kind in "biu":
            losses[name] = (found != exact).astype(np.float32)
            continue
        plain, wide = found.astype(np.float64), exact.astype(np.float64)
        is_equal = (plain == wide) | (np.isnan(plain) & np.isnan(wide))
        with np.errstate(all="ignore"):
            lost = np.where(is_equal, 0.0, np.abs(plain - wide))
            losses[name] = np.where(np.isnan(lost), np.inf, lost).astype(np.float32)
    return losses


def _compared(
    reference: Reference, case: ReferenceCase, outputs: Outputs, fixed: frozenset[str]
) -> dict[str, Metrics]:
    """Compare eager with fp64.

    Args:
        fixed: outputs that depend on no input value: their zeros are intended, and agreement on
            them suffices.
    """
    try:
        measured = reference.compare(case, outputs[case.name])
    except VerificationError as error:
        raise VerificationError(
            f"case {case.name!r}: eager's output does not have the captured program's form: "
            f"{error.message}",
            hint="If values decide a size, the precision may change it.",
        ) from error
    return {
        name: replace(metrics, degenerate="zero by construction")
        if name in fixed and metrics.degenerate == "all zero"
        else metrics
        for name, metrics in measured.items()
    }


def _fp16_floor(floor: Floor, program: ExportedProgram | None, cases: Sequence[Case]) -> Floor:
    """The floor in fp16, measured along with bf16 to separate lost precision from lost range.

    If eager fp16 leaves its range, it cannot be compared with. A program that stays in range can be
    as good as fp16's precision: an eighth of the error of bf16, which has fp32's range.
    """
    if program is None or not floor.defects:
        return floor
    assert floor.wider is not None
    culprit = range_culprit(program, cases) or range_culprit(program, cases, inner=True)
    if culprit is None or Floor("bf16", floor.wider).defects:
        return replace(floor, culprit=culprit or "")
    eighth = {
        case: {name: _less(found, 1 / FP16_PER_BF16) for name, found in outputs.items()}
        for case, outputs in floor.wider.items()
    }
    return replace(floor, cases=eighth, culprit=culprit, estimated=True)


def _less(found: Metrics, factor: float) -> Metrics:
    """The same with errors times `factor`; a cosine's distance from 1 scales with its square."""
    return replace(
        found,
        error_norm=found.error_norm * factor,
        worst_row=found.worst_row * factor,
        max_abs=found.max_abs * factor,
        cosine=1 - (1 - found.cosine) * factor**2,
        pad_error=None if found.pad_error is None else found.pad_error * factor,
    )


def range_culprit(
    program: ExportedProgram, cases: Sequence[Case], *, inner: bool = False
) -> str | None:
    """Where values first leave fp16's range, in words; None: nowhere.

    Args:
        inner: values that stay within a module, instead of those that leave one. They may do no
            harm: 1 / inf is 0.
    """
    limit = torch.finfo(torch.float16).max
    largest, _ = largest_values(program, [case.inputs for case in cases])
    fills = fill_values(program)
    for node, size in largest.items():
        if size > limit and node not in fills and is_module_output(node) is not inner:
            place = f"{module_path(node) or 'the model itself'} {source_line(node)}".strip()
            return f"values leave fp16's range at {place} (max {size:.3g} > {limit:.0f})"
    return None


def shape_only_outputs(program: ExportedProgram, names: Sequence[str]) -> frozenset[str]:
    """The outputs that depend only on sizes, such as `torch.zeros(x.shape[0])`.

    Any other all-zero reference proves nothing, since a broken engine may return zeros too.
    """

    def depends_on_values(node: Node) -> bool:
        """Of an input or weight tensor; numbers are not followed."""
        waiting, seen = [node], set()
        while waiting:
            found = waiting.pop()
            if found in seen:
                continue
            seen.add(found)
            if found.op != "call_function":
                return True
            values = (Tensor, tuple, list)  # several of an op with several results
            waiting += [s for s in found.all_input_nodes if isinstance(s.meta.get("val"), values)]
            if any(source.op == "get_attr" for source in found.all_input_nodes):
                return True  # a graph within the graph
        return False

    nodes = {node.name: node for node in program.graph.nodes}
    outputs = (s for s in program.graph_signature.output_specs if s.kind == OutputKind.USER_OUTPUT)
    made = [nodes[spec.arg.name] for spec in outputs if isinstance(spec.arg, TensorArgument)]
    return frozenset(
        name for name, node in zip(names, made, strict=True) if not depends_on_values(node)
    )


class _Widening(TorchDispatchMode):
    """Function mode that gives fp64 to every operator that asks for fp32.

    `module.double()` is not enough: forward may say `.float()` or `dtype=torch.float32`, as norms
    and rotary embeddings do.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(
            lambda value: torch.float64 if value is torch.float32 else value, (args, kwargs or {})
        )
        return func(*args, **kwargs)


@contextmanager
def in_fp64() -> Iterator[None]:
    """Within the block, compute in fp64 even where the code asks for fp32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widening():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)


def fp64_outputs(
    eager: Eager, cases: Sequence[Case], forward: Forward
) -> tuple[Outputs, str | None]:
    """The model's outputs in fp64, or in fp32 if it does not run in fp64.

    The latter is a stricter measure: eager fp32 has no error by it, and an engine may have three
    unit roundoffs.

    Returns:
        The outputs, and a note on why they are fp32; None when they are fp64.
    """

    def widened(dtype: torch.dtype) -> nn.Module:
        # Some keep buffers in fp32.  Complex ones would lose their imaginary part by `Module.to`.
        module: nn.Module = eager(dtype)
        module._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)
        return module

    def forward_fp64(module: nn.Module, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with in_fp64():
            return forward(module, inputs)

    try:
        return eager_outputs(widened, cases, dtype="fp64", forward=forward_fp64), None
    except VerificationError as error:
        plain = eager_outputs(eager, cases, dtype="fp32", forward=forward)
        return (
            plain,
            f"the reference is eager fp32: the model does not run in fp64: {error.message}",
        )


def capture_failures(
    captured: Runs,
    cases: Sequence[Case],
    reference: Reference,
    guards: Collection[str] = (),
    again: Callable[[Case], Mapping[str, Array]] | None = None,
    dtype: str = "fp32",
) -> Iterator[str]:
    """Report where the captured program in fp32 differs from eager fp32 by more than rounding.

    Every later comparison depends on this one: the fp64 reference is computed from the program, so
    a capture that baked in a branch would have a reference with the same defect, and every engine
    made from it would agree. The same ops on the same kernels are mostly bit-equal; a kernel with
    another order may differ by the program's own error against fp64.

    Args:
        captured: runs the program.
        guards: additional outputs of the program, which must be true.
        reference: holds eager fp32 and the program's fp64 outputs for the same cases.
        again: runs eager fp32 once more, with its weights in memory as the program's are: a product
            with one row adds up in another order where a weight lies at an odd address, as in a
            mapped file.
        dtype: whose rounding may make a difference: of a model in fp32 that computes in 16 bits by
            itself, and a program that rounds to them.
    """
    stored = {case.name: case for case in (*reference.cases, *reference.edges)}
    inputs = {case.name: case.inputs for case in cases}
    for edge in reference.edges:
        inputs[edge.name] = {name: torch.from_numpy(a) for name, a in edge.inputs.items()}
    found_in = captured.outputs(list(inputs.values()))
    for case, outputs in zip(inputs, found_in, strict=True):
        aligned: Mapping[str, Array] | None = None
        for name, found in as_arrays(outputs).items():
            if name in guards:
                if not found.all():
                    yield f"case {case!r}: the program takes another path than eager ({name})"
                continue
            plain, exact = stored[case].outputs[name], stored[case].reference[name]
            problem = _other_than(found, plain, exact, dtype)
            if problem and again is not None:
                aligned = again(NamedInputs(case, inputs[case])) if aligned is None else aligned
                other = aligned.get(name, plain)
                is_alike = not _other_than(found, other, exact, dtype)
                if _distance(other, plain) <= KERNELS and is_alike:
                    continue
            if problem:
                yield (
                    f"output {name!r}, case {case!r}: the captured program is not the model: "
                    f"{problem}"
                )


@contextmanager
def aligned_weights(module: nn.Module) -> Iterator[None]:
    """Align the weights of a module as torch's allocator would: unaligned ones are replaced by
    copies within the block.
    """
    moved = [
        (weight, weight.data)
        for weight in (*module.parameters(), *module.buffers())
        if weight.layout is torch.strided and weight.numel() and weight.data_ptr() % ALIGNMENT
    ]
    try:
        for weight, data in moved:
            weight.data = data.clone()
        yield
    finally:
        for weight, data in moved:
            weight.data = data


def _other_than(found: Array, plain: Array, exact: Array, dtype: str) -> str:
    """How an output of the program differs from eager fp32 by more than rounding; "" if it does
    not.
    """
    allowed = LIMIT * max(_distance(found, exact), least_floor(dtype))
    off = _distance(found, plain)
    if not off <= allowed:
        return f"it differs from eager fp32 by {off:.2g}, rounding allows {allowed:.2g}"
    if found.dtype.kind in "biu" or found.shape != exact.shape:
        return ""
    with np.errstate(all="ignore"):
        lost = np.abs(found.astype(np.float64) - exact.astype(np.float64))
    lost = np.where(np.isfinite(lost), lost, 0.0)
    part = measure(found, plain, loss=Loss(lost, dtype, UNIT_ROUNDOFF[dtype])).part
    if part is None or part.excess <= 1:
        return ""
    return (
        f"{part.place} differs from eager fp32 by {part.error:.2g}, rounding allows"
        f" {part.allowed:.2g}"
    )


def _distance(found: Array, wanted: Array) -> float:
    """Relative L2 distance; infinite if shapes differ or only one side is finite somewhere."""
    if found.shape != wanted.shape:
        return float("inf")
    measured = measure(found, wanted)
    if measured.nonfinite:
        return float("inf")
    return measured.error_norm / (measured.reference_norm or 1.0)
