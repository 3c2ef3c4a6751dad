"""The noise floor: what eager itself loses in the target dtype, against an fp64 reference.

Memory stays small: one eager module exists at a time, and the fp64 reference is the captured
program interpreted with its weights raised to fp64 one by one, right before they are used.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.errors import EnginecastError, VerificationError
from enginecast.passes.base import PassContext
from enginecast.passes.checks import AssertionFailedError
from enginecast.passes.graph_edit import structural_copy
from enginecast.passes.interpret import interpret_cases
from enginecast.passes.pipeline import run_pipeline
from enginecast.passes.unify_dtype import DTYPES, UnifyDtype
from enginecast.runtime.arrays import to_array
from enginecast.verify.boundaries import range_report
from enginecast.verify.comparison import Comparison, Floor, compare
from enginecast.verify.metrics import Array, Metrics, masked_outputs
from enginecast.verify.padding import UNCHANGED, moved, other_padding, padded_case
from enginecast.verify.reference import Reference, ReferenceCase
from enginecast.verify.valueless import valueless_outputs
from enginecast.verify.verdict import FP16_PER_BF16, floor_failures

Outputs = Mapping[str, Mapping[str, Array]]
"""Case name -> output name -> array."""
Eager = Callable[[torch.dtype], nn.Module]
Forward = Callable[[nn.Module, Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Runs a module on a case's inputs and names its outputs."""


NARROW = "Where the model does not take such sizes, narrow them: --dynamic NAME:DIM=MIN..MAX."


class Case(Protocol):
    """Inputs under a name."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> Mapping[str, Tensor]: ...


def reference_program(program: ExportedProgram) -> ExportedProgram:
    """A copy of the program that computes in fp64; it shares the weights."""
    copy = structural_copy(program)
    run_pipeline((UnifyDtype(to="fp64"),), copy, PassContext())
    return copy


def reference_outputs(
    program: ExportedProgram, cases: Sequence[Case], names: Sequence[str]
) -> Outputs:
    """The fp64 outputs of every case.

    Args:
        program: as captured, before any pass.
        names: of the tensor outputs, in order.

    Raises:
        VerificationError: an assertion of the program does not hold in a case.
    """
    inputs = [case.inputs for case in cases]
    try:
        outputs = interpret_cases(reference_program(program), inputs, names=names)
    except AssertionFailedError as error:
        case = cases[error.case].name
        raise VerificationError(f"case {case!r}: {error.message}", hint=error.hint) from error
    except EnginecastError:
        raise
    except (IndexError, RuntimeError, ValueError) as error:  # an operator's, as eager would get it
        raise VerificationError(
            f"the captured program does not run in all its sizes: {str(error).splitlines()[0]}",
            hint=NARROW,
        ) from error
    return {case.name: _arrays(found) for case, found in zip(cases, outputs, strict=True)}


def eager_outputs(eager: Eager, cases: Sequence[Case], *, dtype: str, forward: Forward) -> Outputs:
    """Run the eager module in one dtype over all cases.

    Args:
        eager: makes the module in a dtype.
        dtype: "fp32", "fp16" or "bf16"; float inputs are cast to it.

    Raises:
        VerificationError: eager cannot run in this dtype.
    """
    module = eager(DTYPES[dtype])
    found = {}
    for case in cases:
        # Copies: a forward may write into what it is given.
        inputs = {
            name: tensor.to(DTYPES[dtype] if tensor.is_floating_point() else None, copy=True)
            for name, tensor in case.inputs.items()
        }
        try:
            with torch.no_grad():
                found[case.name] = _arrays(forward(module, inputs))
        except EnginecastError:
            raise
        except Exception as error:  # the model's own code, which may not take every size
            sizes = ", ".join(f"{name} {list(t.shape)}" for name, t in inputs.items())
            raise VerificationError(
                f"case {case.name!r} ({sizes}): eager {dtype} cannot run here: {error}",
                hint=f"Without eager there is no floor to judge an engine by. {NARROW}",
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
) -> Reference:
    """Run everything an engine will be judged by: fp64 reference, eager fp32, and eager in the
    target dtype.

    Args:
        program: as captured, before any pass; None when there is none: then `exact` makes the
            reference.
        eager: makes the eager module in a dtype.
        cases: the verification inputs.
        dtype: that the engine computes in: "fp32", "fp16" or "bf16".
        names: of the tensor outputs, in order.
        forward: runs a module and names its outputs.
        mask_input: input that marks valid rows; None: every row counts.
        exact: gives the fp64 outputs of cases.
    """
    inputs = {case.name: _arrays(case.inputs) for case in cases}
    masks = {n: None if mask_input is None else found[mask_input] for n, found in inputs.items()}
    repadded = _repadded(inputs, mask_input)
    if exact is None:
        assert program is not None
        exact = partial(reference_outputs, program, names=names)
    references = exact([*cases, *repadded.values()])
    plain = eager_outputs(eager, cases, dtype="fp32", forward=forward)
    masked = masked_outputs(
        ({n: a.shape for n, a in references[case].items()} for case in masks), masks.values()
    )

    fixed = valueless_outputs(program, names) if program is not None else frozenset()

    def against(outputs: Outputs) -> Comparison:
        return {case: _compared(case, found) for case, found in outputs.items()}

    def _compared(case: str, found: Mapping[str, Array]) -> dict[str, Metrics]:
        try:
            measured = compare(found, references[case], attention_mask=masks[case], masked=masked)
        except VerificationError as error:
            raise VerificationError(
                f"case {case!r}: eager does not give what the captured program does: "
                f"{error.message}",
                hint="Where values decide a size, a precision may change it.",
            ) from error
        return _by_construction(measured, fixed)

    if dtype == "fp32":
        floor = Floor("fp32", against(plain))
    else:
        floor = _low_floor(program, eager, cases, dtype, forward, against)
    return Reference(
        cases=tuple(
            ReferenceCase(c.name, inputs[c.name], plain[c.name], references[c.name]) for c in cases
        ),
        floor=floor,
        mask_input=mask_input,
        masked=masked,
        guarded=_guarded(references, repadded, masks, masked),
    )


def _by_construction(found: Mapping[str, Metrics], fixed: frozenset[str]) -> dict[str, Metrics]:
    """Say of zeros that no value leads to that they are meant: there, agreement proves enough."""
    return {
        name: replace(metrics, degenerate="zero by construction")
        if name in fixed and metrics.degenerate == "all zero"
        else metrics
        for name, metrics in found.items()
    }


def _repadded(inputs: Outputs, mask_input: str | None) -> dict[str, "_Inputs"]:
    """One case once more, with other values in its padding; by the name of that case."""
    if mask_input is None:
        return {}
    name = padded_case({case: found[mask_input] for case, found in inputs.items()})
    if name is None:
        return {}
    arrays = other_padding(inputs[name], mask_input)
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    return {name: _Inputs(f"{name}, padded otherwise", tensors)}


def _guarded(
    references: Outputs,
    repadded: Mapping[str, "_Inputs"],
    masks: Mapping[str, Array | None],
    masked: frozenset[str],
) -> frozenset[str]:
    """Outputs that other padding leaves as they are."""
    found: set[str] = set()
    for name, case in repadded.items():
        mask = masks[name]
        assert mask is not None
        changes = moved(references[name], references[case.name], mask, sorted(masked))
        found |= {output for output, change in changes.items() if change <= UNCHANGED}
    return frozenset(found)


@dataclass(frozen=True)
class _Inputs:
    name: str
    inputs: Mapping[str, Tensor]


def _low_floor(
    program: ExportedProgram | None,
    eager: Eager,
    cases: Sequence[Case],
    dtype: str,
    forward: Forward,
    against: Callable[[Outputs], Comparison],
) -> Floor:
    """fp16 is measured beside bf16, which tells lost precision from lost range.

    Where eager fp16 leaves its range there is no eager to compare with, and a program that stays in
    range can be as good as fp16's precision allows: an eighth of what bf16, with fp32's range,
    loses.
    """
    own = against(eager_outputs(eager, cases, dtype=dtype, forward=forward))
    if dtype != "fp16":
        return Floor(dtype, own)
    wider = against(eager_outputs(eager, cases, dtype="bf16", forward=forward))
    floor = Floor(dtype, own, wider)
    if not any(floor_failures(floor)):
        return floor
    culprit = range_culprit(program, cases) if program is not None else ""
    if not culprit or any(floor_failures(Floor("bf16", wider))):
        return Floor(dtype, own, wider, culprit)
    return Floor(dtype, _eighth(wider), wider, culprit, estimated=True)


def _eighth(wider: Comparison) -> Comparison:
    return {
        case: {name: _less(found, 1 / FP16_PER_BF16) for name, found in outputs.items()}
        for case, outputs in wider.items()
    }


def _less(found: Metrics, factor: float) -> Metrics:
    """The same with errors times `factor`; a cosine's distance from one goes with its square."""
    return replace(
        found,
        error_norm=found.error_norm * factor,
        worst_row=found.worst_row * factor,
        max_abs=found.max_abs * factor,
        cosine=1 - (1 - found.cosine) * factor**2,
        pad_error=None if found.pad_error is None else found.pad_error * factor,
    )


def range_culprit(program: ExportedProgram, cases: Sequence[Case]) -> str:
    """Where values that a module hands on first leave fp16's range, in words; empty when none do.

    Args:
        program: the fp32 program.
    """
    limit = torch.finfo(torch.float16).max
    for case in cases:
        for module, largest in range_report(program, case.inputs):
            if largest > limit:
                place = module or "the model itself"
                return f"values leave fp16's range at {place} (max {largest:.3g} > {limit:.0f})"
    return ""


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    return {name: to_array(tensor.detach().cpu().contiguous()) for name, tensor in tensors.items()}
