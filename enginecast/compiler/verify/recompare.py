"""Compute the reference of a bundle again, from the model."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from enginecast.capture.inputs.calls import call_of_names
from enginecast.capture.outputs.flatten import UnknownOutputError
from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.calls.recording import RECORDED, Recorded
from enginecast.capture.sources.huggingface.component_options import ComponentOptions
from enginecast.compiler.engines.checks import Check, Judged, OtherKernels, Running
from enginecast.compiler.engines.fresh_inputs import with_more_calibration
from enginecast.compiler.engines.rebuild import Rebuild
from enginecast.compiler.engines.rows_apart import RowsApart, lowered, without_fused_attention
from enginecast.compiler.export.scripted import prepare_script, reference_of_script
from enginecast.compiler.prepare.open_model import open_model
from enginecast.compiler.prepare.program import Prepared, prepare
from enginecast.compiler.prepare.reference import captured_wrongly, reference_of, with_kernels
from enginecast.compiler.request import EngineConfig, ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.errors import CaptureError, EnginecastError, UsageError
from enginecast.exporters.registry import target_of
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.quantize.plan.file import read_plan
from enginecast.passes.registry import build
from enginecast.runtime.bundle.manifest import Manifest
from enginecast.runtime.engine import Engine
from enginecast.verification.emulate.profiles import get_profile
from enginecast.verification.emulate.run import emulate, true_dtype_check
from enginecast.verification.engine import runs_natively
from enginecast.verification.program.quantized_floor import planned_reference
from enginecast.verification.reference import REFERENCE_NAME, Reference, read_reference


@dataclass(frozen=True)
class Remade:
    """A reference that was computed from a model for an existing bundle."""

    reference: Reference
    notes: tuple[str, ...]
    """How the model differs from the one that the bundle was made from."""
    problems: tuple[str, ...] = ()
    """Why it cannot serve as a reference: the captured program differs from the model."""
    checks: tuple[Check, ...] = ()
    """That reconsider a verdict."""
    prepared: Prepared | None = None
    """None: the model was scripted."""

    def checks_of(self, engine: Engine) -> tuple[Check, ...]:
        """What reconsiders the verdict of an engine."""
        if self.prepared is None or engine.manifest.quantization is not None:
            return self.checks
        record, manifest = engine.record, engine.manifest
        options = target_of(record.target).options
        config = EngineConfig(
            record.target,
            record.precision,
            manifest.pipeline,
            "cpu" if "cpu" in engine.provider.lower() else "cuda",
            runs_here=True,
            arch=record.arch,
            options=options and options(),
        )
        about = (self.prepared, config, self.reference, Steps())
        rebuild = Rebuild(self.prepared, config, manifest, record, None, engine.settings.threads)
        apart = RowsApart(
            rebuild, partial(lowered, *about), partial(without_fused_attention, *about)
        )
        return (*self.checks, apart)


def reference_of_model(
    model: str,
    manifest: Manifest,
    folder: Path,
    *,
    allow_code: bool = False,
    random_weights: int | None = None,
    inputs: Path | None = None,
    dynamic: Sequence[str] = (),
    values: Sequence[str] = (),
) -> Remade:
    """Run eager over new verification inputs, in the sizes and values that the engine accepts.

    Args:
        folder: folder of the bundle, which holds the plan of a quantized one.
        inputs, dynamic, values: as for an export, in place of the manifest's.

    Raises:
        UsageError: the model has other inputs or outputs than the engine.
    """
    options = replace(
        options_of(manifest, allow_code=allow_code, random_weights=random_weights),
        inputs=inputs,
        dynamic=(*dynamic, *_dynamic(manifest, given=dynamic)),
        values=(*values, *_values(manifest, given=values)),
    )
    source = open_again(model, options, manifest, folder)
    if any(rung.name == "torchscript" for rung in manifest.capture):
        script = prepare_script(source, options, Steps())
        _check_names(source.name, "takes", [spec.name for spec in script.inputs], manifest)
        # The export may have been allowed branches that nothing verifies.
        reference, notes = reference_of_script(script, manifest.precision, branches=True)
        _check_names(source.name, "gives", list(reference.cases[0].outputs), manifest)
        return Remade(reference, (*notes, *same_model(model, source, manifest)))
    try:
        prepared = prepare(source, options, Steps())
    except UnknownOutputError as error:
        _check_names(source.name, "gives", error.given, manifest)
        raise
    except (CaptureError, UsageError):  # in the sizes and values of the bundle
        try:
            free = prepare(source, replace(options, dynamic=(), values=()), Steps())
        except UnknownOutputError as error:
            _check_names(source.name, "gives", error.given, manifest)
            raise
        _check_names(source.name, "takes", [spec.name for spec in free.inputs], manifest)
        _check_names(source.name, "gives", free.model_outputs, manifest)
        raise
    _check_names(source.name, "takes", [spec.name for spec in prepared.inputs], manifest)
    _check_names(source.name, "gives", prepared.model_outputs, manifest)
    plain = manifest.quantization is None
    reference = reference_of(prepared, manifest.precision, edges=plain)
    problems = captured_wrongly(prepared, reference)
    if manifest.quantization is not None:
        plan = read_plan(folder / manifest.quantization.plan)
        # Its error is added to the floor.
        program = structural_copy(prepared.captured.program)
        passes = itertools.takewhile(lambda p: not p.carries_out_plan, build(manifest.pipeline))
        run_pipeline(list(passes), program, replace(prepared.context, plan=plan))
        reference = planned_reference(
            *(program, plan, prepared.cases, reference, prepared.output_names),
            _calibration(prepared, folder),
        )
    checks: tuple[Check, ...] = (OtherKernels(partial(with_kernels, prepared)),)
    if manifest.precision == "fp16" and plain:
        checks = (*checks, InRange(prepared, reference, manifest, folder))
    return Remade(reference, same_model(model, source, manifest), problems, checks, prepared)


@dataclass(frozen=True)
class InRange(Check):
    """An fp16 engine holds the values of these inputs: its passes chose powers of two by those of
    its export. Where the machine computes fp16 in fp32, nothing else shows it.
    """

    prepared: Prepared
    reference: Reference
    manifest: Manifest
    folder: Path

    def reconsider(self, running: Running, judged: Judged) -> Judged:
        engine, verdict = running.engine, judged.verdict
        natively = runs_natively(engine.record.precision, engine.provider)
        if natively and verdict.outcome != "rejected":
            return judged
        prepared, program = self.prepared, structural_copy(self.prepared.captured.program)
        stored = _of_export(prepared, self.folder)
        context = replace(prepared.context, calibration=tuple(stored), names=())
        profile = get_profile(target_of(engine.record.target).arithmetic)
        try:
            run_pipeline(build(self.manifest.pipeline), program, context)
        except EnginecastError:  # too few of the inputs of the export are stored
            return judged
        found = true_dtype_check(
            program, prepared.cases, self.reference, profile, names=prepared.output_names
        )
        overflow = found.emulation.overflow
        if not found.problems or overflow is None:
            return judged
        _, before = emulate(program, {str(n): case for n, case in enumerate(stored)}, profile)
        bits = (
            place.headroom_bits
            for place in before.modules
            if place.module == overflow.module and place.headroom_bits is not None
        )
        left = next((f", where those of the export left {each:.1f} bits" for each in bits), "")
        reason = (
            f"{found.problems[0]}{left}: export again with such inputs (--inputs, --prompts), or"
            " use --precision bf16"
        )
        reasons = verdict.reasons if verdict.outcome == "rejected" else ()
        return replace(
            judged,
            verdict=msgspec.structs.replace(
                verdict, outcome="rejected", reasons=(reason, *reasons)
            ),
        )


def options_of(manifest: Manifest, *, allow_code: bool, random_weights: int | None) -> ModelOptions:
    """What a user said of the model that a bundle was made from; but for sizes and values."""
    return ModelOptions(
        random_weights=random_weights,
        allow_code=allow_code,
        outputs=tuple(spec.name for spec in manifest.outputs) if manifest.outputs_chosen else (),
        # A specialised engine is compared on inputs that take its path.
        fallback="specialise" if manifest.guards else "torchscript",
        component=component_of(manifest),
        stateful=any(state.start for state in manifest.states),
        kv_cache="task" in manifest.model.fingerprint,
    )


def open_again(model: str, options: ModelOptions, manifest: Manifest, folder: Path) -> Source:
    """The model, or the part of it, that a bundle was made from.

    Args:
        options: of `options_of`.
        folder: of the bundle.

    Raises:
        EnginecastError: as `open_model`.
    """
    example = recorded_calls(manifest, folder) if Path(model).is_dir() else None
    source = open_model(model, options, example)
    return source.parts().get(manifest.model.fingerprint.get("part", ""), source)


def recorded_calls(manifest: Manifest, folder: Path) -> Recorded | None:
    """Of the recorded calls that a bundle was made from, those in its reference; None: it was made
    from none, or they took too much room.
    """
    call, stored = manifest.call, folder / REFERENCE_NAME
    if call is None or not stored.is_file():
        return None
    kept = [case for case in read_reference(stored).cases if case.name.startswith(RECORDED)]
    if not kept:
        return None
    tensors = [
        {name: torch.from_numpy(array.copy()) for name, array in case.inputs.items()}
        for case in kept
    ]
    return Recorded(
        manifest.model.name,
        call.model_class,
        call_of_names([*call.inputs], call.constants, call.entry),
        tuple(tensors),
        tuple(case.name for case in kept),
    )


def component_of(manifest: Manifest) -> ComponentOptions:
    """The user's options for the component that the bundle was made from."""
    known = manifest.model.fingerprint
    height, width, frames = (
        int(known[name]) if name in known else None for name in ("height", "width", "frames")
    )
    return ComponentOptions(known.get("variant", ""), known.get("entry", ""), height, width, frames)


def _dynamic(manifest: Manifest, given: Sequence[str]) -> Iterator[str]:
    """The sizes of the engine's inputs, as `--dynamic` options."""
    asked = {part.partition("=")[0].strip() for text in given for part in text.split(",")}
    places = [(f"{s.name}:{n}", size) for s in manifest.inputs for n, size in enumerate(s.shape)]
    tied = {size for place, size in places if place in asked and isinstance(size, str)}
    for place, size in places:
        if place in asked or size in tied:
            continue
        if isinstance(size, int):
            if size:
                yield f"{place}={size}"
            continue
        least, most = manifest.symbols[size]
        step = f"/{manifest.steps[size]}" if size in manifest.steps else ""
        if least or manifest.generation is not None:  # whose past may be empty anyway
            yield f"{place}={size}:{max(least, 1)}..{most}{step}"


def _values(manifest: Manifest, given: Sequence[str]) -> Iterator[str]:
    """The value ranges of its integer inputs, as `--values` options."""
    asked = {text.partition("=")[0].strip() for text in given}
    for spec in manifest.inputs:
        is_guess = spec.kind == "tensor" or spec.kind == "token_type_ids"
        if is_guess and spec.name not in asked and None not in (spec.minimum, spec.maximum):
            yield f"{spec.name}={spec.minimum:.0f}..{spec.maximum:.0f}"


def _calibration(prepared: Prepared, folder: Path) -> list[Mapping[str, Tensor]]:
    """The inputs that the engine's static scales were made from: those of its export, and those
    that were drawn besides.
    """
    drawn = with_more_calibration(prepared).calibration
    return [*_of_export(prepared, folder), *(case.inputs for case in drawn)]


def _of_export(prepared: Prepared, folder: Path) -> list[Mapping[str, Tensor]]:
    """The inputs that the passes had when the engine was made: those of its reference, of which
    some may not have been stored.
    """
    stored = folder / REFERENCE_NAME
    if not stored.is_file():
        return [case.inputs for case in prepared.cases]
    known = read_reference(stored)
    found: list[Mapping[str, Tensor]] = [
        {name: torch.from_numpy(array.copy()) for name, array in case.inputs.items()}
        for case in known.cases
    ]
    lost = [case for case in prepared.cases if case.name in known.left_out]
    return [*found, *(case.inputs for case in lost)]


def same_model(text: str, source: Source, manifest: Manifest) -> tuple[str, ...]:
    """A note if the bundle was made from another model."""
    if source.fingerprint() == manifest.model.fingerprint:
        return ()
    return (f"{text} is not the model that the bundle was made from",)


def _check_names(model: str, verb: str, names: Sequence[str], manifest: Manifest) -> None:
    """Refuse a model with other input or output names: it is another model."""
    expected = [s.name for s in (manifest.inputs if verb == "takes" else manifest.outputs)]
    if sorted(names) != sorted(expected):
        raise UsageError(
            f"--model {model} {verb} {', '.join(names)}, but the bundle's"
            f" engine {verb} {', '.join(expected)}",
            hint=f"The bundle was made from {manifest.model.name}.",
        )
