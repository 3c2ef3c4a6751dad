"""Which precision is safe for a model, and what each costs: measured on the captured program.

A precision is safe when every value that it computes in 16 bits stays within the range of the dtype
on the inputs that were run. What the passes in front of `unify-dtype` do about it (those of the
preset, whatever they are) is done first, and measured again.  A small model is also judged as an
export judges it: its program in true arithmetic, by the noise floor.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.capture.inputs.examples import Case
from enginecast.compiler.prepare.program import Prepared
from enginecast.compiler.prepare.reference import reference_of, refuse_autocast
from enginecast.errors import CaptureError, EnginecastError, PassError
from enginecast.passes.ir.base import Pass, PassContext
from enginecast.passes.ir.edit import dtype_of, structural_copy, value, weight_expressions
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.ir.source import module_path, source_line
from enginecast.passes.ir.text import DTYPES
from enginecast.passes.precision.low_values import low_values
from enginecast.passes.precision.out_of_range import is_beyond
from enginecast.passes.presets import preset
from enginecast.passes.registry import build
from enginecast.passes.unify_dtype import UnifyDtype
from enginecast.runtime.bundle.manifest import Where
from enginecast.verification.boundaries import largest_values
from enginecast.verification.emulate.profiles import Profile, get_profile
from enginecast.verification.emulate.run import true_dtype_check
from enginecast.verification.floor import LARGEST_FLOOR
from enginecast.verification.metrics import output_names, pool_output
from enginecast.verification.reference import Reference
from enginecast.verification.verdict import judge

PRECISIONS = ("fp16", "mixed", "bf16", "fp32")
"""The cheapest first; of those that are as cheap the one that loses less."""
FEW = 2
"""Cases that are run where more would take long."""
LARGE = 1_000_000_000
"""Elements from which on only few cases are run."""
SMALL = 50_000_000
"""Elements up to which the program is run in each precision, to measure its error."""
TRIES = 8
CLOSE = 1.0
"""Bits of headroom below which other inputs may well leave the range."""
WIDE = 1e30
"""A limit above it is that of fp32 and bf16."""


@dataclass(frozen=True)
class LargestValue:
    """A value, and how large it gets."""

    module: str
    source: str
    largest: float

    def __str__(self) -> str:
        at = f" at {self.source}" if self.source else ""
        return f"{self.module or 'the model itself'} reaches {self.largest:.3g}{at}"


@dataclass(frozen=True)
class PrecisionOption:
    """One precision for one model."""

    precision: str
    limit: float
    """The largest finite number of its compute dtype."""
    remedies: tuple[str, ...] = ()
    """Passes of its preset in front of unify-dtype."""
    as_it_is: tuple[LargestValue, ...] = ()
    """The largest value before any remedy."""
    beyond: tuple[LargestValue, ...] = ()
    """Values beyond the limit before any remedy, the largest first."""
    largest: LargestValue | None = None
    """The largest value, after the remedies where they were needed."""
    left: tuple[LargestValue, ...] = ()
    """Values beyond the limit that the remedies left."""
    keep: str = ""
    """A pattern for --skip-modules-pattern that leaves none beyond the limit."""
    headroom_bits: float | None = None
    """How many times the largest value may double."""
    weight_bytes: int = 0
    error: float | None = None
    """Relative L2 error in true arithmetic of this precision; None: not measured, or not finite."""
    trouble: str = ""
    """What is wrong with the outputs in true arithmetic; empty when nothing is, or not measured."""
    refusal: str = ""
    """Why the passes do not take this model."""
    sentence: str = ""

    @property
    def safe(self) -> bool:
        return not (self.left or self.trouble or self.refusal)

    def in_words(self, safe: Sequence[str]) -> str:
        """The sentence, which names the precisions that are safe for the model instead."""
        if self.refusal:
            return f"not possible: {self.refusal}"
        if self.left:
            return f"not safe as it is: {self._places()}; {self._alternative(safe)}"
        if self.trouble:
            is_finite = self.error is not None and self.largest is not None
            peak = f", though {self.largest} at most" if is_finite else ""
            return f"not safe: {self.trouble}{peak}; {self._alternative(safe)}"
        if self.largest is None:
            return "safe: no value is computed in it"
        if self.limit > WIDE:
            return "safe: it has the range of fp32"
        if self.beyond:
            remedies = " and ".join(self.remedies)
            return (
                f"safe with {remedies}, which is in its pipeline: {self._places()}, and after it"
                f" {self.largest}"
            )
        if self.headroom_bits is not None and self.headroom_bits < CLOSE:
            return f"close: {self.largest} (limit {self._limit()}); other inputs may pass it"
        return f"safe: {self.largest} (limit {self._limit()})"

    def _places(self) -> str:
        places = self.left or self.beyond
        modules = {place.module for place in places}
        more = f", and {len(modules) - 1} more modules leave it" if len(modules) > 1 else ""
        return f"{places[0]} (limit {self._limit()}){more}"

    def _limit(self) -> str:
        return f"{self.limit:.0f}" if self.limit < 1e6 else f"{self.limit:.2g}"

    def _alternative(self, safe: Sequence[str]) -> str:
        others = " or ".join(f"--precision {name}" for name in safe)
        if self.keep:
            return f"it is with --skip-modules-pattern '{self.keep}', or use {others}"
        return f"use {others}" if others else "no precision holds this model"


@dataclass(frozen=True)
class Advice:
    """What each precision means for one model."""

    options: tuple[PrecisionOption, ...]
    recommended: str
    """The cheapest that is safe."""
    cases: tuple[str, ...]
    """What the ranges were measured on."""


@dataclass(frozen=True)
class _Measured:
    """A program and how large its values get."""

    program: ExportedProgram
    cases: Sequence[Case]
    largest: Mapping[Node, float]
    outputs: Sequence[Mapping[str, Tensor]]


def advise(prepared: Prepared, arithmetic: str = "ort-cuda") -> Advice:
    """Run the captured program in fp32 over the verification inputs, and judge each precision.

    Args:
        arithmetic: the profile of the target's kernels.
    """
    elements = sum(prepared.source.weight_elements().values())
    cases = prepared.cases[:FEW] if elements > LARGE else prepared.cases
    plain = _measure(prepared.captured.program, cases)
    if not all(tensor.isfinite().all() for each in plain.outputs for tensor in each.values()):
        prepared.source.fingerprint()  # names the weights that are not numbers, if it is they
    trial = _Trial(prepared, get_profile(arithmetic)) if elements <= SMALL else None
    options = [_option(name, plain, trial) for name in PRECISIONS]
    try:
        refuse_autocast(prepared)
    except CaptureError as error:
        options[-1] = replace(options[-1], refusal=error.message)
    safe = [option.precision for option in options if option.safe]
    return Advice(
        options=tuple(replace(option, sentence=option.in_words(safe)) for option in options),
        recommended=safe[0] if safe else "fp32",
        cases=tuple(case.name for case in cases),
    )


def _measure(program: ExportedProgram, cases: Sequence[Case]) -> _Measured:
    """Run in fp32, also what was captured in a low dtype: values must not leave their range."""
    weights, low = weight_expressions(program), (torch.float16, torch.bfloat16)
    wide = program
    if any(dtype_of(node) in low for node in program.graph.nodes if node not in weights):
        wide = structural_copy(program)
        run_pipeline((UnifyDtype(to="fp32"),), wide, PassContext())
    found, outputs = largest_values(wide, [case.inputs for case in cases])
    names = {node.name: size for node, size in found.items()}
    largest = {node: names[node.name] for node in program.graph.nodes if node.name in names}
    return _Measured(program, cases, largest, outputs)


def _split(precision: str) -> tuple[tuple[Pass, ...], UnifyDtype, tuple[Pass, ...]]:
    """The passes of a preset in front of its unify-dtype, that pass, and those behind it."""
    passes = build(preset(precision))
    for index, pass_ in enumerate(passes):
        if isinstance(pass_, UnifyDtype):
            return passes[:index], pass_, passes[index + 1 :]
    return (), UnifyDtype(to="fp32"), ()


def _option(precision: str, plain: _Measured, trial: "_Trial | None") -> PrecisionOption:
    """Judge one precision; with a trial, by running the program in it, too."""
    before, policy, behind = _split(precision)
    limit = torch.finfo(DTYPES[policy.to]).max
    remedies = tuple(each.name for each in before)
    option = PrecisionOption(precision, limit, remedies)
    try:
        places = _places(plain, policy)
        option = replace(option, as_it_is=_largest_first(places)[:1], beyond=_beyond(places, limit))
        measured = plain
        if before and option.beyond:
            program = structural_copy(plain.program)
            calibration = tuple(case.inputs for case in plain.cases)
            run_pipeline(before, program, PassContext(calibration=calibration))
            measured = _measure(program, plain.cases)
            places = _places(measured, policy)
        left = _beyond(places, limit)
        unified = structural_copy(measured.program)
        run_pipeline((policy,), unified, PassContext())
    except PassError as error:
        return replace(option, refusal=error.message)
    top = max(places, key=lambda place: place.largest, default=None)
    weights = weight_expressions(unified)
    stored = [value(n) for n in weights if any(user not in weights for user in n.users)]
    option = replace(
        option,
        largest=top,
        left=left,
        keep=_keep(measured, policy, limit) if left and precision == "mixed" else "",
        headroom_bits=round(math.log2(limit / top.largest), 1) if top and top.largest else None,
        weight_bytes=sum(each.numel() * each.dtype.itemsize for each in stored),
    )
    if trial is None or policy.to == "fp32":
        return option
    run_pipeline(behind, unified, trial.prepared.context)
    return trial.of(option, unified, policy.to)


def _places(measured: _Measured, policy: UnifyDtype) -> list[LargestValue]:
    """Where 16-bit values would be, in order of execution."""
    limit = torch.finfo(DTYPES[policy.to]).max
    return [
        LargestValue(
            f"the input {node.name!r}" if node.op == "placeholder" else module_path(node),
            source_line(node),
            measured.largest[node],
        )
        for node in low_values(
            measured.program, policy.kept(measured.program), measured.largest, limit
        )
        if node in measured.largest and not (policy.to == "fp16" and is_beyond(node))
    ]


def _largest_first(places: Sequence[LargestValue]) -> tuple[LargestValue, ...]:
    return tuple(sorted(places, key=lambda place: -place.largest))


def _beyond(places: Sequence[LargestValue], limit: float) -> tuple[LargestValue, ...]:
    return tuple(place for place in _largest_first(places) if place.largest > limit)


def _keep(measured: _Measured, policy: UnifyDtype, limit: float) -> str:
    """A pattern of modules that, kept in fp32, leave no value beyond the limit; "" if none does.

    The first module that leaves the range is taken, in all layers; what follows from it may be fp32
    then, too, so it is looked at again.
    """
    found: list[str] = []
    for _ in range(TRIES):
        kept = replace(policy, keep=("|".join(found),)) if found else policy
        first = next((p for p in _places(measured, kept) if p.largest > limit), None)
        if first is None:
            return "|".join(found)
        if not first.source:  # an input
            return ""
        # In all layers: `block.0.wo` becomes `block[.][0-9]+[.]wo`.
        parts = ["[0-9]+" if p.isdigit() else re.escape(p) for p in first.module.split(".")]
        pattern = "^" + "[.]".join(parts) + "([.]|$)"
        if pattern in found:
            return ""
        found.append(pattern)
    return ""


@dataclass
class _Trial:
    """Judges a program in true arithmetic, as an export does."""

    prepared: Prepared
    profile: Profile
    references: dict[str, Reference] = field(default_factory=dict)
    """By compute dtype."""

    def of(self, option: PrecisionOption, program: ExportedProgram, dtype: str) -> PrecisionOption:
        """With the relative error of the program in a 16-bit dtype, and what speaks against it."""
        model = self.prepared
        try:
            if dtype not in self.references:
                self.references[dtype] = reference_of(model, dtype)
            reference = self.references[dtype]
            run = true_dtype_check(
                program, model.cases, reference, self.profile, model.output_names
            )
        except EnginecastError as refused:  # eager does not run in this dtype
            return replace(option, trouble=refused.message)
        pooled = [pool_output(run.measured, name) for name in output_names(run.measured)]
        error = max((p.relative for p in pooled), default=0.0)
        if any(p.nonfinite for p in pooled) or not math.isfinite(error):
            plain = "its outputs are not finite in true arithmetic"
            return replace(option, trouble=next(iter(run.problems), plain))
        option = replace(option, error=error)
        if error > LARGEST_FLOOR["bf16"]:
            off = f"{error:.0%}" if error < 10 else f"{error:.1g} times their size"
            return replace(option, trouble=f"its outputs are finite, and off by {off}")
        verdict = judge(
            None,
            reference.floor,
            where=Where(provider="", device="", versions={}),
            engine_ran=False,
            emulated=run.measured,
            problems=run.problems,
        )
        rejected = verdict.outcome == "rejected"
        return replace(option, trouble=verdict.reasons[0]) if rejected else option
