"""The export, as one call."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from enginecast.budget import require
from enginecast.capture.ladder import LEADS_ON
from enginecast.capture.places import real_path
from enginecast.capture.way import Fallback, RefusedError
from enginecast.describe import describe_rungs
from enginecast.errors import (
    CaptureError,
    LoweringError,
    PassError,
    UsageError,
    VerificationError,
)
from enginecast.exporters.targets import TARGETS
from enginecast.exporters.tensorrt_options import TensorRTOptions
from enginecast.job import Export, Job
from enginecast.passes.pipeline import build
from enginecast.plan import Plan, make_plan
from enginecast.prepare import ModelOptions, open_model, prepare
from enginecast.quantization import given_plan
from enginecast.runtime.bundle import Bundle
from enginecast.runtime.staging import stage
from enginecast.script_job import ScriptJob
from enginecast.steps import Steps


def compile(
    model: str | os.PathLike[str] | nn.Module,
    output: str | os.PathLike[str],
    *,
    example: Mapping[str, Any] | None = None,
    target: str = "onnxruntime",
    precision: str | None = None,
    pipeline: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    outputs: Sequence[str] = (),
    hidden_states: Sequence[int] = (),
    drop_guilty: bool = False,
    fallback: Fallback | None = None,
    arch: str | None = None,
    also: Sequence[str] = (),
    tensorrt: TensorRTOptions | None = None,
    max_error: float | None = None,
    plan: str | os.PathLike[str] | None = None,
    options: ModelOptions | None = None,
    steps: Steps | None = None,
) -> Bundle:
    """Export a model and publish the bundle.

    Args:
        model: a Hugging Face folder, `package.module:factory`, a `.pt2` file, or a module.
        output: the bundle's folder; it must not exist.
        example: inputs by name, for a module.
        target: "onnxruntime"; "tensorrt"; "aotinductor": machine code; "torchscript": the model
            as it is, without passes.
        precision: "fp32" (default), "fp16", "bf16", "mixed", or a quantised one ("int8", "fp8",
            "int8-storage", ...): the preset pipeline and the measure.
        pipeline: a pipeline spec instead of a preset.
        device: "cpu" or "cuda": what the engine is for; None: where the precision runs.
        threads: threads within one operator, when the engine is verified.
        overwrite: replace a bundle that is there.
        outputs: names of the outputs that the engine gives, in order; empty: all.
        hidden_states: indices of hidden states that come as outputs, too, as `hidden_states.-2`.
        drop_guilty: leave out the sites with which a pass breaks its promise, and go on.
        fallback: how far a capture may go where torch.export refuses the model for its control
            flow: "none", "rewrite", "specialise" or "torchscript"; None: as `options` say.
        arch: GPU architecture that the engine is for, such as "sm90".
        also: targets of further engines in the bundle: "onnxruntime", beside "tensorrt".
        tensorrt: options of a TensorRT build.
        max_error: largest relative L2 error of an output that quantisation may cause.
        plan: a quantisation plan to carry out (JSON).
        options: weights, inputs, dynamic dimensions.
        steps: gets the progress.

    Raises:
        VerificationError: the result does not agree with eager; nothing was published.
        EnginecastError: see the tree in `enginecast.errors`.
    """
    file = None if plan is None else Path(plan)
    decided = make_plan(
        target,
        precision,
        pipeline,
        device,
        arch=arch,
        max_error=max_error,
        file=file,
        tensorrt=tensorrt,
        also=tuple(also),
    )
    options = options or ModelOptions()
    options = replace(
        options,
        outputs=outputs or options.outputs,
        hidden_states=hidden_states or options.hidden_states,
        fallback=fallback or options.fallback,
    )
    source = model if isinstance(model, nn.Module) else os.fspath(model)
    done = export(source, output, decided, options, example, threads, overwrite, steps, drop_guilty)
    if done.bundle is None:
        verdict = done.report.verdict
        raise VerificationError(
            f"rejected: {'; '.join(verdict.reasons)}", hint=f"The report is in {done.folder}."
        )
    return done.bundle


def export(
    model: str | nn.Module,
    output: str | os.PathLike[str],
    plan: Plan,
    options: ModelOptions | None = None,
    example: Mapping[str, Any] | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    steps: Steps | None = None,
    drop_guilty: bool = False,
) -> Export:
    """Like `compile`, with the whole outcome, a rejection included, as the result."""
    if threads is not None and threads < 1:
        raise UsageError(f"threads: expected at least 1, got {threads}")
    options, steps = options or ModelOptions(), steps or Steps()
    passes = build(plan.pipeline)
    if plan.target in TARGETS:
        TARGETS[plan.target].require(plan.tensorrt)  # before the work, and not after it
    with stage(output, overwrite=overwrite) as staging, steps.listening():
        source = open_model(model, options, example)
        require(source, plan, staging.folder)
        script = ScriptJob(source, options, plan, threads, staging, steps)
        if plan.target == "torchscript":
            return script.run()
        quantization = given_plan(plan, source)
        try:
            prepared = prepare(source, options, steps, quantization)
        except RefusedError as error:
            if plan.target != "onnxruntime" or not falls_back(error, options):
                raise
            return scripted_export(script, error)
        job = Job(prepared, plan, passes, threads, staging, steps, drop_guilty)
        try:
            return job.run()
        except (LoweringError, PassError) as error:
            if not prepared.captured.is_widened:
                raise
            steps.say(f"rewritten for more sizes, the model does not get to an engine: {error}")
        prepared = prepare(source, replace(options, widens=False), steps, quantization)
        return replace(job, prepared=prepared).run()


def falls_back(error: CaptureError, options: ModelOptions) -> bool:
    """Whether an export goes on with TorchScript after this refusal."""
    leads_on = isinstance(error, RefusedError) and error.refusal.kind in LEADS_ON
    return leads_on and options.fallback == "torchscript"


def scripted_export(script: ScriptJob, error: RefusedError) -> Export:
    """Export with TorchScript what torch.export refused for its control flow: the last rung.

    Args:
        script: what to export.
        error: the refusal; its place must be scripted.

    Raises:
        CaptureError: TorchScript refuses the model too; says what both have against it.
    """
    refusal = error.refusal
    for rung in error.rungs:
        script.steps.say(f"capture: {rung}")
    script.steps.say("torch.export does not capture this model: falling back to TorchScript")
    places = ((real_path(refusal.file), refusal.line),) if refusal.file else ()
    try:
        return replace(script, places=places, rungs=describe_rungs(error.rungs)).run()
    except (CaptureError, LoweringError, VerificationError) as second:
        raise CaptureError(
            f"{error.message}\nTorchScript does not help: {second.message}", hint=error.hint
        ) from second
