"""Trace a model: torch.export on a module without weights, with dimensions that may be narrowed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.export import ExportedProgram

from enginecast.capture import endless
from enginecast.capture.constraints import user_places
from enginecast.capture.empty import capture_mode, fake_weights
from enginecast.capture.endless import Bounded
from enginecast.capture.examples import example_sizes, sample
from enginecast.capture.inputs import InputSpec
from enginecast.capture.lacking import lacking
from enginecast.capture.narrowing import fix, narrow
from enginecast.capture.outputs import name_outputs
from enginecast.capture.places import Place
from enginecast.capture.proved import noting_proofs
from enginecast.capture.quiet import quiet_torch
from enginecast.capture.refusal import REASONS, Refusal, explain, is_user_code
from enginecast.capture.shapes import FrozenDimensionError, Shapes, check_shapes, dynamic_shapes
from enginecast.capture.source import Source
from enginecast.capture.vmap import without_vmap
from enginecast.capture.wanted import Wanted
from enginecast.capture.way import RefusedError, Way
from enginecast.errors import CaptureError, EnginecastError

MOST_NARROWINGS = 4
"""How often a trace is tried again with narrower dimensions; each costs as much as the first."""
SEED = 0
"""Of the example of a trace that is tried again."""


@dataclass(frozen=True)
class Traced:
    """A program without weights."""

    program: ExportedProgram
    shapes: Shapes
    specs: tuple[InputSpec, ...]
    """As traced: with the dimensions that were narrowed."""
    notes: tuple[str, ...]
    narrowed: tuple[str, ...] = ()
    """Those of the notes that tell of dimensions that were narrowed or fixed."""
    proved: frozenset[Place] = frozenset()
    """Where the trace decided by numbers, as it must be for every input."""


def trace(
    source: Source,
    specs: tuple[InputSpec, ...],
    inputs: Mapping[str, Tensor],
    wanted: Wanted,
    way: Way,
) -> Traced:
    """Trace in one way, narrowing what nobody asked for as long as that helps.

    Args:
        source: the model.
        specs: its inputs.
        inputs: one tensor for each, of the example sizes.
        wanted: the outputs that the program returns.
        way: how.

    Raises:
        RefusedError: torch.export refused it.
        FrozenDimensionError: a dimension that the user asked for cannot vary.
    """
    notes: tuple[str, ...] = ()
    is_proved = False
    for _ in range(MOST_NARROWINGS):
        try:
            return _once(source, specs, inputs, wanted, way, notes, is_proved)
        except FrozenDimensionError as error:
            fitted = fix(specs, error.names)
            if fitted is None or (fitted.notes and not way.narrows):
                raise
        except CaptureError as error:
            place = error.refusal.place if isinstance(error, RefusedError) else ""
            fitted = narrow(specs, str(error.__cause__), place)
            if fitted is None or (fitted.notes and not way.narrows):
                raise
        specs, notes = fitted.specs, (*notes, *fitted.notes)
        is_proved = is_proved or fitted.is_proved
        inputs = sample(specs, example_sizes(specs), SEED)
    return _once(source, specs, inputs, wanted, way, notes, is_proved)


def _once(
    source: Source,
    specs: tuple[InputSpec, ...],
    inputs: Mapping[str, Tensor],
    wanted: Wanted,
    way: Way,
    notes: tuple[str, ...],
    is_proved: bool,
) -> Traced:
    with noting_proofs(is_user_code) as proved:
        program, named = _export(source, specs, inputs, wanted, way, is_proved)
    shapes = check_shapes(program, specs)
    narrowed = (*notes, *shapes.notes)
    return Traced(program, shapes, specs, (*notes, *named), narrowed, frozenset(proved))


def _export(
    source: Source,
    specs: tuple[InputSpec, ...],
    inputs: Mapping[str, Tensor],
    wanted: Wanted,
    way: Way,
    is_proved: bool,
) -> tuple[ExportedProgram, tuple[str, ...]]:
    """The program, and notes on the names of its outputs.

    Where the guards are proved, torch puts those it cannot prove itself into the program, where
    every case that is verified checks them again.
    """
    module = source.empty()
    mode = capture_mode()
    fake_weights(module, mode)
    notes = name_outputs(module, tuple(inputs), wanted)
    # With fake inputs a strict export keeps no guard: a branch on a size is baked without a word.
    given = inputs if way.is_strict else {n: mode.from_tensor(t) for n, t in inputs.items()}
    try:
        # Without no_grad the sdpa decomposition fails on symbolic shapes.
        with (
            Bounded(endless.LONGEST_TRACE),
            way.entered(module),
            torch.no_grad(),
            quiet_torch(),
            user_places(is_user_code),
        ):
            program = torch.export.export(
                module,
                (),
                dict(given),
                dynamic_shapes=dynamic_shapes(specs),
                strict=way.is_strict,
                prefer_deferred_runtime_asserts_over_guards=is_proved,
            )
    except EnginecastError:
        raise
    except Exception as error:  # torch raises many kinds, and the model's own code any
        missing = lacking(error, "the model's forward")
        raise missing or RefusedError(_with_sizes(explain(error), specs)) from error
    program = without_vmap(program)
    program.example_inputs = ((), dict(inputs))
    return program, tuple(notes)


def _with_sizes(refusal: Refusal, specs: Sequence[InputSpec]) -> Refusal:
    """Say in which sizes the code was run when it raised an error, where the user asked for some.

    The model may take none but equal ones: the message of its error has torch's names of them.
    """
    is_asked = any(dim.asked for spec in specs for dim in spec.dims)
    if refusal.kind not in ("model-error", "operator") or not is_asked:
        return refusal
    named = {
        spec.name: ", ".join(f"{d.name}={d.size}" if d.name else str(d.size) for d in spec.dims)
        for spec in specs
    }
    sizes = "; ".join(f"{name} [{dims}]" for name, dims in named.items())
    return replace(
        refusal,
        reason=f"{refusal.reason}, in sizes that it may not take: {sizes}",
        hint=REASONS["specialized-dimension"][1],
    )
