"""Make what an engine is judged by: a reference, its noise floor and its edge cases."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.fx import Node

from enginecast.errors import VerificationError
from enginecast.passes.ir.source import module_path, source_line
from enginecast.passes.ir.text import DTYPES
from enginecast.progress import counted
from enginecast.verification.boundaries import fill_values, is_module_output, largest_values
from enginecast.verification.eager.kernel_noise import EDGE_WORK, WORK
from enginecast.verification.eager.other_kernels import noisy, with_losses, with_samples
from enginecast.verification.eager.outputs import (
    Case,
    Eager,
    Forward,
    MixedDtypesError,
    NamedInputs,
    as_array,
    as_arrays,
    autocast_outputs,
    eager_outputs,
    mask_of,
    reference_outputs,
    reference_program,
)
from enginecast.verification.floor import FP16_PER_BF16, KERNELS, LOST, Floor, least_floor
from enginecast.verification.metrics import (
    NOT_FINITE,
    Array,
    Comparison,
    Metrics,
    Outputs,
    distance,
    masked_outputs,
    measure,
    output_names,
    pool_output,
    row_mask,
)
from enginecast.verification.reference import (
    UNCHANGED,
    Reference,
    ReferenceCase,
    Rows,
    moved,
    other_padding,
    padded_case,
)
from enginecast.verification.rows import base_case
from enginecast.verification.runs import Runs

MIXED = 1e-9
"""Relative change of an fp64 output above which its rows depend on each other: kernels for another
batch size sum in another order."""
ALIKE = 4.0
"""Largest ratio of eager's error for a batch to its error for one row at which rows count as
independent."""


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
    row_inputs: Sequence[str] = (),
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
        row_inputs: the inputs that have a row for each element of a batch.
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
    asked = [case for case in [*cases, *again] if case.name not in singles]
    probe = _row_probe(cases, row_inputs, mask_input)
    alone = () if probe is None or probe.case.name in singles else tuple(probe.alone.values())
    try:
        exact_outputs = dict(exact([*asked, *alone]))
    except VerificationError:
        if not alone:
            raise
        probe, exact_outputs = None, dict(exact(asked))  # it takes no such row alone, or no case
    plain = eager_outputs(eager, cases, dtype="fp32", forward=forward)
    joined = set[str]()
    for case in cases:
        if case.name in singles:
            each = singles[case.name]
            if stacked := _stacked(exact, case, each, cases, exact_outputs, plain):
                joined.add(case.name)
            exact_outputs[case.name] = stacked or exact([case])[case.name]
    masked = masked_outputs(
        ({n: a.shape for n, a in exact_outputs[case].items()} for case in masks), masks.values()
    )
    guarded = frozenset[str]()
    if padded is not None and (mask := masks[padded]) is not None:
        before, after = exact_outputs[padded], exact_outputs[again[0].name]
        changes = moved(before, after, mask, sorted(masked))
        guarded = frozenset(name for name, change in changes.items() if change <= UNCHANGED)
    rows = None
    if probe is not None:
        rows = probe.rows(exact_outputs, is_joined=probe.case.name in joined)
    reference = Reference(
        cases=tuple(
            ReferenceCase(name, found, plain[name], exact_outputs[name])
            for name, found in inputs.items()
        ),
        floor=Floor(dtype, {}, halves=halves if dtype == "fp32" else ""),
        mask_input=mask_input,
        masked=masked,
        guarded=guarded,
        rows=rows,
    )
    fixed = frozenset() if program is None else shape_only_outputs(program, names)

    def against(outputs: Outputs) -> Comparison:
        return {case.name: _compared(reference, case, outputs, fixed) for case in reference.cases}

    if dtype == "fp32":
        samples = [] if program is None else noisy(program, cases, names, work)
        by_eager = _by_eager(reference, against(plain), samples)
        reference = replace(reference, floor=replace(reference.floor, by_eager=by_eager))
        reference = replace(reference, floor=replace(reference.floor, cases=against(plain)))
        return with_samples(with_losses(reference, plain), samples)
    low = partial(eager_outputs, eager, cases, forward=forward)
    try:
        own = low(dtype=dtype)
    except MixedDtypesError as error:
        low = partial(autocast_outputs, eager, cases, forward=forward)
        try:
            own = low(dtype=dtype)
        except VerificationError:
            raise error from None
    is_autocast = low.func is autocast_outputs
    floor = Floor(dtype, against(own), autocast=is_autocast)
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
        usual = max((distance(plain[c.name][name], known[c.name][name]) for c in given), default=0)
        if not distance(wanted, stacked[name]) <= ALIKE * max(usual, least_floor("fp32")):
            return {}
    return stacked


@dataclass(frozen=True)
class _RowProbe:
    """The first and the last row of a case alone, to learn whether rows depend on each other."""

    case: Case
    inputs: tuple[str, ...]
    """Those with a row for each element of the batch."""
    mask_input: str | None

    @property
    def alone(self) -> dict[int, NamedInputs]:
        """The two rows, each as a case, by its index."""
        given = self.case.inputs
        return {
            row: NamedInputs(
                f"{self.case.name}, row {row}",
                {n: t[row : row + 1] if n in self.inputs else t for n, t in given.items()},
            )
            for row in (0, len(given[self.inputs[0]]) - 1)
        }

    def rows(self, outputs: Outputs, *, is_joined: bool) -> Rows:
        """The outputs whose rows are what they are alone.

        Args:
            outputs: in fp64, of the case and of its rows.
            is_joined: whether the case was computed row by row, and near to what eager gives.
        """
        whole, count = outputs[self.case.name], len(self.case.inputs[self.inputs[0]])
        held = [name for name in whole if self._has_rows(name, count, outputs)]
        mixed = [] if is_joined else [n for n in held if self._is_mixed(n, outputs)]
        named = ", ".join(map(repr, mixed))
        why = f"in the model, rows of {named} depend on each other" if mixed else ""
        return Rows(self.inputs, tuple(n for n in held if n not in mixed), why)

    def _has_rows(self, name: str, count: int, outputs: Outputs) -> bool:
        """Whether an output has a row for each element; by chance, another size may be as large."""
        singles = [outputs[one.name] for one in self.alone.values() if one.name in outputs]
        return outputs[self.case.name][name].shape[:1] == (count,) and all(
            name not in single or single[name].shape[:1] == (1,) for single in singles
        )

    def _is_mixed(self, name: str, outputs: Outputs) -> bool:
        mask = mask_of(self.case, self.mask_input)
        for row, single in self.alone.items():
            if single.name not in outputs:  # it was tried to join the case of rows, in vain
                return True
            place = slice(row, row + 1)
            together, alone = outputs[self.case.name][name][place], outputs[single.name][name]
            if together.shape != alone.shape:
                return True
            valid = row_mask(alone.shape, None if mask is None else as_array(mask[place]))
            if measure(alone, together, valid).relative > MIXED:
                return True
        return False


def _row_probe(
    cases: Sequence[Case], inputs: Sequence[str], mask_input: str | None
) -> _RowProbe | None:
    name = base_case({case.name: as_arrays(case.inputs) for case in cases}, inputs)
    found = (case for case in cases if case.name == name)
    return next((_RowProbe(case, tuple(inputs), mask_input) for case in found), None)


def _are_equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(tensor, right[name]) for name, tensor in left.items())


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
        return with_samples(reference, noisy(program, left, names, work)).edges
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
            if node.op == "placeholder":
                place = f"the input {node.name!r}"
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
