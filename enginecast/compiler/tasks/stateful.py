"""Consecutive calls of a module with state, as the reference for its engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from enginecast.capture.inputs.specs import captured_dtype
from enginecast.capture.outputs.flatten import run_named
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.stateful import StatefulSource
from enginecast.compiler.engines.checks import Check, Examined, Running
from enginecast.compiler.prepare.program import Prepared
from enginecast.compiler.steps import Steps
from enginecast.compiler.tasks.base import NOT_COMPARED, Part, Task, with_field
from enginecast.errors import EnginecastError, first_line
from enginecast.passes.ir.text import DTYPES
from enginecast.runtime.bundle.manifest import (
    STATE_NAME,
    GenerationCheck,
    Manifest,
    State,
    StepCheck,
)
from enginecast.runtime.stepping import Stepper
from enginecast.verification.eager.outputs import as_arrays
from enginecast.verification.engine import as_declared, runs_natively, where_it_ran
from enginecast.verification.floor import Floor
from enginecast.verification.metrics import Array, measure, output_names, pool_output, ratio, times
from enginecast.verification.verdict import judge


@dataclass(frozen=True)
class Turn:
    """Consecutive calls: inputs without the state, and the fp64 outputs of each call."""

    inputs: tuple[Mapping[str, Tensor], ...]
    exact: tuple[Mapping[str, Array], ...]
    floor: Floor
    """The error of the module itself, which updates its own buffers."""


def turn(prepared: Prepared, source: StatefulSource, floor: Floor) -> Turn:
    """Run consecutive calls of the module, and of its program in fp64.

    Args:
        floor: the noise floor of single calls, in the engine's dtype.

    Raises:
        EnginecastError: the module or the program does not run.
    """
    dtype = floor.dtype
    names, back = (
        set(source.start),
        {source.output_of[n]: before for n, before in source.input_of.items()},
    )
    inputs = [{n: t for n, t in call.items() if n not in names} for call in source.calls]
    module = source.without_state().eager(DTYPES[dtype])
    plain = []
    for call in inputs:
        cast = {n: t.to(DTYPES[dtype]) if t.is_floating_point() else t for n, t in call.items()}
        with torch.no_grad(), quiet_torch():
            found = dict(
                run_named(module, {n: t.clone() for n, t in cast.items()}, prepared.wanted)
            )
        buffers = dict(module.named_buffers())
        state = {source.output_of[name]: buffers[name] for name in source.buffers}
        # The next call may write to what this one returned: forward may return its buffer.
        plain.append(as_arrays({n: t.clone() for n, t in {**found, **state}.items()}))
    exact = []
    state = {name: _captured(tensor) for name, tensor in source.start.items()}
    for call in inputs:
        fed = {**{n: _captured(t) for n, t in call.items()}, **state}
        [outputs] = prepared.exact.outputs([fed])
        exact.append(as_arrays(outputs))
        state = {back[name]: outputs[name] for name in back}
    cases: dict[str, Any] = {
        f"call {index + 1} in turn": {
            name: measure(found[name], wanted) for name, wanted in right.items() if name in found
        }
        for index, (found, right) in enumerate(zip(plain, exact, strict=True))
    }
    return Turn(tuple(inputs), tuple(exact), Floor(dtype, cases, kernels=floor.kernels))


@dataclass(frozen=True)
class KeepsState(Check):
    """An engine whose state is fed back gives what the module does in the same calls."""

    turn: Turn
    without_run = NOT_COMPARED

    def examine(self, running: Running) -> Examined:
        run, engine = self.turn, running.engine
        measured: dict[str, Any] = {}
        failures: list[str] = []
        try:
            stepper = Stepper(engine)
            for (name, known), call, exact in zip(
                run.floor.cases.items(), run.inputs, run.exact, strict=True
            ):
                outputs = stepper.run(as_declared(engine, as_arrays(call)), check_finite=False)
                measured[name] = {n: measure(outputs[n], exact[n]) for n in known}
        except EnginecastError as error:
            failures.append(f"call {len(measured) + 1} in turn: {first_line(error)}")
        verdict = judge(
            measured,
            run.floor,
            where=where_it_ran(engine),
            engine_ran=runs_natively(run.floor.dtype, engine.provider),
        )
        if verdict.outcome == "rejected":
            failures += verdict.reasons
        worst = max(
            output_names(run.floor.cases),
            key=lambda name: ratio(pool_output(measured, name).relative, run.floor.of(name)),
            default="",
        )
        checked = StepCheck(
            calls=len(run.inputs),
            error=pool_output(measured, worst).relative,
            floor=run.floor.of(worst),
        )
        return Examined(tuple(f"consecutive calls: {each}" for each in failures), checked)


class StateTask(Task):
    """A module with state, which goes from call to call."""

    def describe(self, source: Source) -> dict[str, Any]:
        assert isinstance(source, StatefulSource)  # sources name their task
        names = source.input_of.items()
        outputs = source.output_of
        states = (State(input=before, output=outputs[name], start=before) for name, before in names)
        return {"states": tuple(states)}

    def checks(
        self,
        prepared: Prepared,
        floor: Floor,
        folder: Path,
        steps: Steps,
        parts: Mapping[str, Part],
    ) -> tuple[Check, ...]:
        source = prepared.source
        assert isinstance(source, StatefulSource)
        with steps("calls in turn"):
            start = {name: _captured(t).contiguous() for name, t in source.start.items()}
            save_file(start, folder / STATE_NAME)  # which the first call is fed
            return (KeepsState(turn(prepared, source, floor)),)

    def with_result(
        self, manifest: Manifest, found: GenerationCheck | StepCheck
    ) -> tuple[Manifest, str]:
        assert isinstance(found, StepCheck)
        note = (
            f"{found.calls} consecutive calls match the module, which keeps its own state:"
            f" {times(ratio(found.error, found.floor))} the model's own error"
        )
        return with_field(manifest, stepped=found), note


def _captured(tensor: Tensor) -> Tensor:
    return tensor.to(captured_dtype(tensor))
