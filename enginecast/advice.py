"""Which precision is safe for a model, and what each costs: measured on the captured program.

A precision is safe when every value that it computes in 16 bits stays within the range of the dtype
on the inputs that were run.  What the passes in front of `unify-dtype` do about it (those of the
preset, whatever they are) is done first, and measured again.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.advice_words import Option, Place, worded
from enginecast.errors import PassError
from enginecast.passes.base import Pass, PassContext
from enginecast.passes.graph_edit import dtype_of, structural_copy, value, weight_expressions
from enginecast.passes.interpret import interpret_cases
from enginecast.passes.low_values import low_values
from enginecast.passes.pipeline import build, run_pipeline
from enginecast.passes.presets import preset
from enginecast.passes.source import module_path, source_line
from enginecast.passes.unify_dtype import DTYPES, UnifyDtype
from enginecast.prepare import Prepared
from enginecast.runtime.arrays import Array, to_array
from enginecast.verify.comparison import compare, output_names, pool_output
from enginecast.verify.metrics import masked_outputs
from enginecast.verify.reach import reaches
from enginecast.verify.verdict import LARGEST_FLOOR

PRECISIONS = ("fp16", "mixed", "bf16", "fp32")
"""The cheapest first; of those that are as cheap the one that loses less."""
FEW = 2
"""Cases that are run where more would take long."""
LARGE = 1_000_000_000
"""Elements from which on only few cases are run."""
SMALL = 50_000_000
"""Elements up to which the program is run in each precision, to tell its error."""
TRIES = 8

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Advice:
    """What each precision means for one model."""

    options: tuple[Option, ...]
    recommended: str
    """The cheapest that is safe."""
    cases: tuple[str, ...]
    """What the ranges were measured on."""


@dataclass(frozen=True)
class _Measured:
    """A program and how far its values reach."""

    program: ExportedProgram
    largest: Mapping[Node, float]
    outputs: Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class _Run:
    """What is run."""

    cases: Sequence[Inputs]
    mask: str | None
    """The input that marks valid rows."""
    small: bool
    """Whether each precision is run, too."""


def advise(prepared: Prepared) -> Advice:
    """Run the captured program in fp32 over the verification inputs, and judge each precision.

    Raises:
        SourceError: the outputs are not finite, for the weights are not.
    """
    elements = sum(prepared.source.weight_elements().values())
    cases = prepared.cases[:FEW] if elements > LARGE else prepared.cases
    inputs = tuple(case.inputs for case in cases)
    run = _Run(inputs, prepared.mask_input, elements <= SMALL)
    plain = _measure(prepared.captured.program, inputs)
    if not all(tensor.isfinite().all() for each in plain.outputs for tensor in each.values()):
        prepared.source.fingerprint()  # names the weights that are no numbers, if it is they
    options = [_option(name, plain, run) for name in PRECISIONS]
    safe = [option.precision for option in options if option.safe]
    return Advice(
        options=tuple(worded(option, safe) for option in options),
        recommended=safe[0] if safe else "fp32",
        cases=tuple(case.name for case in cases),
    )


def _measure(program: ExportedProgram, cases: Sequence[Inputs]) -> _Measured:
    """Run in fp32, also what was captured in a low dtype: values must not leave their range."""
    if not _has_low_values(program):
        return _Measured(program, *reaches(program, cases))
    wide = structural_copy(program)
    run_pipeline((UnifyDtype(to="fp32"),), wide, PassContext())
    largest, outputs = reaches(wide, cases)
    names = {node.name: reach for node, reach in largest.items()}
    nodes = [node for node in program.graph.nodes if node.name in names]
    return _Measured(program, {node: names[node.name] for node in nodes}, outputs)


def _has_low_values(program: ExportedProgram) -> bool:
    weights = weight_expressions(program)
    low = (torch.float16, torch.bfloat16)
    return any(dtype_of(node) in low for node in program.graph.nodes if node not in weights)


def _split(precision: str) -> tuple[tuple[Pass, ...], UnifyDtype]:
    """The passes of a preset in front of its unify-dtype, and that pass."""
    passes = build(preset(precision))
    for index, pass_ in enumerate(passes):
        if isinstance(pass_, UnifyDtype):
            return passes[:index], pass_
    return (), UnifyDtype(to="fp32")


def _option(precision: str, plain: _Measured, run: _Run) -> Option:
    before, policy = _split(precision)
    limit = torch.finfo(DTYPES[policy.to]).max
    option = Option(precision=precision, limit=limit, remedies=tuple(p.name for p in before))
    try:
        places = _places(plain, policy)
        option = replace(option, as_it_is=places[:1], beyond=_beyond(places, limit))
        measured = plain
        if before and option.beyond:
            program = structural_copy(plain.program)
            run_pipeline(before, program, PassContext(calibration=tuple(run.cases)))
            measured = _measure(program, run.cases)
            places = _places(measured, policy)
        left = _beyond(places, limit)
        measures_error = run.small and policy.to != "fp32"
        unified = structural_copy(measured.program)
        run_pipeline((policy,), unified, PassContext())
        return replace(
            option,
            largest=places[0] if places else None,
            left=left,
            keep=_keep(measured, policy, limit) if left and precision == "mixed" else "",
            headroom_bits=_headroom(places, limit),
            weight_bytes=_bytes(unified),
            **(_judged(unified, plain, run) if measures_error else {}),
        )
    except PassError as error:
        return replace(option, refusal=error.message)


def _places(measured: _Measured, policy: UnifyDtype) -> tuple[Place, ...]:
    """Where 16-bit values would be, the largest first."""
    return tuple(sorted(_in_order(measured, policy), key=lambda place: -place.largest))


def _in_order(measured: _Measured, policy: UnifyDtype) -> tuple[Place, ...]:
    return tuple(
        Place(module_path(node), source_line(node), measured.largest[node])
        for node in low_values(measured.program, policy)
        if node in measured.largest
    )


def _beyond(places: Sequence[Place], limit: float) -> tuple[Place, ...]:
    return tuple(place for place in places if place.largest > limit)


def _headroom(places: Sequence[Place], limit: float) -> float | None:
    largest = places[0].largest if places else 0.0
    return round(math.log2(limit / largest), 1) if largest > 0 else None


def _keep(measured: _Measured, policy: UnifyDtype, limit: float) -> str:
    """A pattern of modules that, kept in fp32, leave no value beyond the limit; "" if none does.

    The first module that leaves the range is taken, in all layers; what follows from it may be fp32
    then, too, so it is looked at again.
    """
    found: list[str] = []
    for _ in range(TRIES):
        kept = replace(policy, keep=("|".join(found),)) if found else policy
        left = _beyond(_in_order(measured, kept), limit)
        if not left:
            return "|".join(found)
        pattern = _pattern(left[0].module)
        if pattern in found:
            return ""
        found.append(pattern)
    return ""


def _pattern(module: str) -> str:
    """A module in all layers: `block[.]0[.]wo` becomes `block[.][0-9]+[.]wo`."""
    parts = ["[0-9]+" if part.isdigit() else re.escape(part) for part in module.split(".")]
    return "^" + "[.]".join(parts) + "([.]|$)"


def _judged(unified: ExportedProgram, plain: _Measured, run: _Run) -> dict[str, Any]:
    try:
        error = _error(unified, plain, run)
    except (NotImplementedError, RuntimeError) as lacking:
        if "not implemented for" not in str(lacking):  # torch's words for a kernel that it lacks
            raise
        return {"trouble": f"eager cannot run in it here: {lacking}"}
    if not math.isfinite(error):
        return {"trouble": "its outputs are not finite in true arithmetic"}
    if error > LARGEST_FLOOR:
        return {"error": error, "trouble": f"its outputs are finite, and off by {error:.0%}"}
    return {"error": error}


def _bytes(unified: ExportedProgram) -> int:
    """What an engine of this policy stores: every weight in the dtype that it is read in."""
    weights = weight_expressions(unified)
    stored = [n for n in weights if any(user not in weights for user in n.users)]
    return sum(value(n).numel() * value(n).dtype.itemsize for n in stored)


def _error(unified: ExportedProgram, plain: _Measured, run: _Run) -> float:
    """The relative error of the program in true arithmetic of the precision; infinite where the
    outputs are not finite.
    """
    cases = run.cases[:FEW]
    found = interpret_cases(unified, cases)
    masks = [None if run.mask is None else to_array(case[run.mask]) for case in cases]
    wanted = [_arrays(outputs, double=True) for outputs in plain.outputs[:FEW]]
    shapes = [{name: array.shape for name, array in each.items()} for each in wanted]
    masked = masked_outputs(shapes, masks)
    measured = {
        str(index): compare(_arrays(outputs), right, attention_mask=valid, masked=masked)
        for index, (outputs, right, valid) in enumerate(zip(found, wanted, masks, strict=True))
    }
    pooled = [pool_output(measured, name) for name in output_names(measured)]
    if any(p.nonfinite for p in pooled):
        return math.inf
    return max((p.relative for p in pooled), default=0.0)


def _arrays(tensors: Mapping[str, Tensor], *, double: bool = False) -> dict[str, Array]:
    return {
        name: to_array((tensor.double() if double else tensor).contiguous())
        for name, tensor in tensors.items()
    }
