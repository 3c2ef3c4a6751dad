"""What the model itself gives for the verification inputs, and whether its program is the model."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.export import ExportedProgram

from enginecast.capture.outputs.flatten import run_named
from enginecast.capture.tracing.state.repeated_calls import CalledInTurn
from enginecast.compiler.prepare.dropped_tensors import dropped_failures
from enginecast.compiler.prepare.program import OpenedModel, Prepared
from enginecast.compiler.ranges.eager import Eager
from enginecast.errors import CaptureError, EnginecastError, VerificationError
from enginecast.passes.ir.blocks import all_nodes
from enginecast.passes.ir.edit import dtype_of, is_float
from enginecast.passes.ir.effects import WITHOUT_NOISE, draws
from enginecast.passes.ir.source import source_line
from enginecast.runtime.device.torch_threads import torch_threads
from enginecast.verification.eager import kernel_noise
from enginecast.verification.eager.captured import aligned_weights, capture_failures
from enginecast.verification.eager.choices import choice_nodes
from enginecast.verification.eager.make_reference import edge_reference, make_reference
from enginecast.verification.eager.other_kernels import with_all_kernels
from enginecast.verification.eager.outputs import Case, reference_outputs
from enginecast.verification.metrics import BEYOND, Array
from enginecast.verification.reference import Reference, Rows
from enginecast.verification.runs import Runs

FP64_LOSS = 1e-3
"""Relative error in fp32 of a model in fp64, past which nobody means it to be converted."""


def reference_of(
    prepared: Prepared, dtype: str, notes: list[str] | None = None, *, edges: bool = False
) -> Reference:
    """What the model itself gives for the verification inputs, and its noise floor in `dtype`.

    Args:
        edges: with what it gives for unusual values, where engines of `dtype` are compared there.
        notes: gets sentences on state that the model keeps between calls.

    Raises:
        CaptureError: a second call with equal inputs gives another result, or may; or the model
            computes in 16 bits by itself, as by torch.autocast, and the engine would not.
    """
    program, names = prepared.captured.program, prepared.output_names
    halves = _halves_of(prepared.captured.in_halves)
    if dtype == "fp32":
        refuse_autocast(prepared)
    elif prepared.source.keeps_dtypes and halves not in ("", dtype):
        raise CaptureError(
            f"the model computes in {halves} whatever its weights are cast to, and an {dtype}"
            " engine would not round alike",
            hint=f"Give --precision {halves} or fp32, or let its code follow its weights:"
            " x.to(self.weight.dtype).",
        )
    run, eager = in_turn(prepared), prepared.source.eager
    exact = partial(reference_outputs, prepared.exact)
    reference = make_reference(
        program,
        eager,
        prepared.cases,
        dtype=dtype,
        names=names,
        forward=run,
        mask_input=prepared.mask_input,
        exact=exact,
        singles={case.name: case.singles for case in prepared.cases if case.singles},
        halves=halves,
        row_inputs=prepared.row_inputs,
    )
    reference = replace(reference, rows=_that_never_tie(program, reference.rows))
    _refuse_draws(program)  # where no two calls differed, which name the line
    if notes is not None:
        notes += run.notes
    if not edges:
        return reference
    forward = partial(run_named, wanted=prepared.wanted)
    cases = prepared.edge_cases
    found = edge_reference(prepared.source.eager, cases, forward, exact, program, names, dtype)
    return replace(reference, edges=found)


def refuse_autocast(prepared: Prepared) -> None:
    """An fp32 engine does not round where torch.autocast does; where it casts nothing, all is well.

    Raises:
        CaptureError: names the region.
    """
    if not (places := prepared.captured.autocast):
        return
    case, wanted = prepared.cases[0], prepared.wanted
    with torch.no_grad():
        off, on = (
            run_named(prepared.source.eager(), _copied(case.inputs), wanted, autocasts=casts)
            for casts in (False, True)
        )
    if all(torch.equal(tensor, on[name]) for name, tensor in off.items()):
        return
    raise CaptureError(
        f"forward computes in {places[0].replace(' at ', ' within torch.autocast at ')}, and an"
        " fp32 engine would not",
        hint="Give --precision fp16 or bf16, or leave autocast out of forward.",
    )


def _copied(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in inputs.items()}


def _that_never_tie(program: ExportedProgram, rows: Rows | None) -> Rows | None:
    """The rows that are the same in every batch: none where the model chooses among floats, whose
    rounding may decide otherwise in another.
    """
    chosen = (each for each in choice_nodes(program).values() if is_float(each.source))
    node = next((each.node for each in chosen), None)
    if node is None or rows is None:
        return rows
    place = source_line(node) or node.name
    why = f"the model chooses among floats by {node.target} at {place}, and rounding may decide"
    return replace(rows, outputs=(), why=why)


def in_turn(model: OpenedModel, *, autocasts: bool = False) -> CalledInTurn:
    """What runs eager, after it has looked for state that is kept from call to call.

    Args:
        autocasts: see `run_named`; TorchScript has the model's regions as they are.
    """
    smallest = min(model.cases, key=lambda case: sum(t.numel() for t in case.inputs.values()))
    inputs = smallest.inputs
    others = [case.inputs for case in model.cases if case.inputs is not inputs]
    alike = [other for other in others if _shapes(other) == _shapes(inputs)]
    sizes = [other for other in others if _shapes(other) != _shapes(inputs)]
    fitting = {spec.name for spec in model.inputs if not spec.is_free}
    changed = alike[:1] or [{n: t if n in fitting else _other_values(t) for n, t in inputs.items()}]
    # A heavy model is called on its cases first, and on other values only where it keeps something.
    heavy = [case.inputs for case in model.cases if case.singles]
    call = partial(run_named, wanted=model.wanted, autocasts=autocasts)
    return CalledInTurn(call, inputs, [*heavy[:1], *changed, *sizes[:1]], model.source.trained)


def _shapes(inputs: Mapping[str, Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in inputs.values()]


def _other_values(tensor: Tensor) -> Tensor:
    """Other floats, larger ones; other values are the same in another order."""
    floats = tensor.is_floating_point() or tensor.is_complex()
    return tensor * -1.7 + 0.6 if floats else tensor.flip(tuple(range(tensor.ndim)))


def _halves_of(program: ExportedProgram | None) -> str:
    """What a model in fp32 computes in by itself: the coarser of fp16 and bf16; empty: neither."""
    if program is None:
        return ""
    held = {dtype_of(node) for node in all_nodes(program)}
    return "bf16" if torch.bfloat16 in held else "fp16"


def _refuse_draws(program: ExportedProgram) -> None:
    """Two calls of a model may give equal values and draw nevertheless: multinomial, where one
    probability is nearly 1.
    """
    drawn = next((node for node in all_nodes(program) if draws(node)), None)
    if drawn is not None:
        raise CaptureError(
            f"the model draws random numbers, by {drawn.target} at "
            f"{source_line(drawn) or drawn.name}",
            hint=WITHOUT_NOISE,
        )


def with_kernels(prepared: Prepared, reference: Reference) -> Reference:
    """A reference in fp32 with what other kernels may lose in all of its cases: as many runs of the
    model again, which an engine that agrees with eager does not need.
    """
    program, names = prepared.captured.program, prepared.output_names
    with torch_threads(1 if prepared.is_small else None):
        return with_all_kernels(reference, program, prepared.cases, prepared.edge_cases, names)


def place_of_loss(prepared: Prepared, output: str, case: str) -> str:
    """The op in which most of the error of an output arises, in a case or (empty) in the first;
    empty if it is not known.
    """
    cases = [*prepared.cases, *prepared.edge_cases]
    chosen = next((each for each in cases if each.name == case), cases[0])
    position = prepared.output_names.index(output)
    try:
        with torch_threads(1 if prepared.is_small else None):
            return kernel_noise.place_of_loss(prepared.captured.program, chosen.inputs, position)
    except (EnginecastError, IndexError, RuntimeError, ValueError):
        return ""  # values decide what it runs, and noise decides otherwise


def captured_wrongly(prepared: Prepared, reference: Reference) -> tuple[str, ...]:
    """Where the captured program is not the model, which every comparison stands on."""
    return tuple(_differences(prepared, reference))


def _differences(prepared: Prepared, reference: Reference) -> Iterator[str]:
    captured, floor = prepared.captured, reference.floor
    guards = [guard.output for guard in captured.guards]
    cases = [case for case in prepared.cases if not case.singles]  # eager was compared with those

    def aligned(case: Case) -> Mapping[str, Array]:
        """What eager fp32 gives with its weights where the program has its own; nothing where it
        does not run.
        """
        eager = Eager(prepared.source.eager(), prepared.wanted)
        try:
            with aligned_weights(eager.module):
                return eager.outputs([case])[case.name]
        except VerificationError:
            return {}

    dtype = floor.halves or "fp32"
    yield from capture_failures(prepared.plain, cases, reference, guards, aligned, dtype)
    written = captured.in_halves
    if written is not None:
        runs = Runs(lambda: written, prepared.output_names, prepared.mask_input)
        yield from capture_failures(runs, cases, reference, guards, aligned)
    if captured.dropping:
        yield from dropped_failures(
            *(Eager(prepared.source.eager(), prepared.wanted), prepared.plain, prepared.exact),
            *(prepared.inputs, prepared.cases, captured.dropping),
        )
    if floor.dtype == "fp32" and floor.largest > FP64_LOSS and prepared.doubles:
        off = f"is off by {floor.largest:.2g}" if floor.largest <= BEYOND else "leaves its range"
        yield (
            f"the model computes in fp64, and eager fp32 {off}: an engine would compute"
            " something else; call .float() on it if that is acceptable"
        )
