"""Describe a model and its engines for the manifest: inputs, outputs, symbols, passes, text."""

import dataclasses
import math
from collections.abc import Sequence

import msgspec

from enginecast.capture.inputs.calls import Slot, leaves_of
from enginecast.capture.inputs.specs import InputSpec, named_dims
from enginecast.capture.outputs.flatten import OutputSpec
from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.weights.sketch import sketch_of
from enginecast.capture.tracing import attempt
from enginecast.compiler.engines.lower_and_run import describe_inputs, dtype_name
from enginecast.compiler.engines.rewrite import Rewritten
from enginecast.compiler.prepare.program import OpenedModel, Prepared
from enginecast.compiler.request import EngineConfig
from enginecast.exporters.target import Artifact
from enginecast.passes.analyses.padding.proof import prove_padding
from enginecast.passes.ir.edit import dtype_of
from enginecast.passes.ir.options import spec_from_pass
from enginecast.passes.ir.quantization_plan import plan_of
from enginecast.runtime.bundle.manifest import (
    Call,
    EngineRecord,
    Guard,
    Manifest,
    Model,
    Output,
    Padding,
    PassRecord,
    Quantization,
    Rung,
    Site,
    SizeCheck,
    Text,
    Verdict,
    Where,
)
from enginecast.runtime.device.versions import library_of
from enginecast.version import __version__

PLAN_NAME = "plan.json"
"""Name of the plan file in the folder of a quantized bundle."""
PENDING = Verdict(
    outcome="rejected",
    engine="not run on target",
    where=Where(provider="", device="", versions={}),
)
"""Placeholder in the manifest during the first run of the engine; never published."""


def describe_manifest(
    model: OpenedModel,
    config: EngineConfig,
    outputs: Sequence[OutputSpec],
    artifacts: Sequence[Artifact],
) -> Manifest:
    """The manifest of a bundle, without the results of running its engines."""
    return Manifest(
        enginecast=__version__,
        model=Model(name=model.source.name, fingerprint=model.source.fingerprint()),
        inputs=describe_inputs(model.inputs),
        symbols=dict(model.symbols),
        steps={n: dim.step for n, dim in named_dims(model.inputs).items() if dim.step > 1},
        outputs=tuple(
            Output(name=spec.name, dtype=dtype_name(spec.dtype), shape=tuple(spec.dims))  # type: ignore[arg-type]
            for spec in outputs
        ),
        outputs_chosen=bool(model.wanted),
        pipeline=config.pipeline,
        precision=config.precision,
        text=_describe_text(model.source, model.inputs),
        call=_describe_call(model.source, model.inputs),
        engines=tuple(
            EngineRecord(
                target=engine.target,
                file=artifact.files[0],
                weights=next((n for n in artifact.files if n.endswith(".safetensors")), None),
                precision=engine.precision,
                opset=artifact.opset or None,
                domains=dict(artifact.domains),
                minimum_runtime=artifact.minimum_runtime,
                providers=engine.engine_providers,
                arch=engine.arch or artifact.requires.get("gpu"),
                quantized=artifact.quantized,
                requires=dict(artifact.requires),
                **artifact.record,
                verdict=PENDING,
            )
            for engine, artifact in zip(config.engines, artifacts, strict=True)
        ),
    )


def describe_program(
    model: Prepared, config: EngineConfig, rewritten: Rewritten, artifacts: Sequence[Artifact]
) -> Manifest:
    """The manifest of a bundle whose engines were made from one program."""
    captured = model.captured
    guards = {guard.output for guard in captured.guards}  # the runtime looks at them itself
    # Names and shapes as captured, dtypes as the passes left them.
    nodes = {node.name: node for node in rewritten.program.graph.nodes}
    names = (spec.arg.name for spec in rewritten.program.graph_signature.output_specs)
    returned = [nodes[name] for name in names if name in nodes]
    given = [
        dataclasses.replace(spec, dtype=dtype_of(node) or spec.dtype)
        for spec, node in zip(captured.outputs, returned, strict=True)
        if spec.name not in guards
    ]
    plan, quantization = plan_of(rewritten.program), None
    if plan is not None:
        quantization = Quantization(
            precision=config.asked_precision,
            format=plan.format,
            arch=plan.arch,
            max_error=plan.max_error,
            least_cosine=math.sqrt(max(0.0, 1 - plan.max_error**2)),
            predicted_error=plan.predicted_error,
            plan=PLAN_NAME,
        )
    return msgspec.structs.replace(
        describe_manifest(model, config, given, artifacts),
        capture=describe_rungs(captured.rungs),
        guards=tuple(
            Guard(
                output=guard.output,
                place=f"{guard.read.file}:{guard.read.line}",
                code=guard.read.code,
                value=str(guard.read.value),
            )
            for guard in captured.guards
        ),
        size_checks=tuple(
            SizeCheck(condition=check.condition, place=check.place)
            for check in captured.size_checks
        ),
        notes=tuple(map(str, captured.notes)),
        padding=_describe_padding(model),
        quantization=quantization,
        passes=tuple(
            PassRecord(
                name=run.pass_.name,
                spec=str(spec_from_pass(run.pass_)),
                rewritten=run.rewritten,
                sites=tuple(msgspec.convert(s, Site, from_attributes=True) for s in run.sites),
            )
            for run in rewritten.runs
        ),
    )


def _describe_padding(model: Prepared) -> Padding | None:
    """Which outputs stay the same when columns of padding are cut off."""
    if model.mask_input is None:
        return None
    if model.captured.guards:
        reason = "the engine was specialized"
        return Padding(
            mask=model.mask_input, side="none", reasons=dict.fromkeys(model.model_outputs, reason)
        )
    proof = prove_padding(model.captured.program, model.mask_input, model.output_names)
    return Padding(
        mask=model.mask_input,
        side=proof.side or "none",
        outputs=tuple(name for name, reason in proof.outputs.items() if not reason),
        reasons={name: reason for name, reason in proof.outputs.items() if reason},
    )


def describe_rungs(rungs: Sequence[attempt.Rung]) -> tuple[Rung, ...]:
    return tuple(msgspec.convert(rung, Rung, from_attributes=True) for rung in rungs)


def _describe_call(source: Source, inputs: Sequence[InputSpec]) -> Call | None:
    """How Python code calls the model; None for a program."""
    if source.model_class is None:
        return None
    name = source.model_class.__name__
    weights = {} if source.in_memory else sketch_of(source.weights())
    library = library_of(source.model_class)
    if source.call is None:
        plain = {spec.name: spec.name for spec in inputs}
        return Call(model_class=name, inputs=plain, weights=weights, library=library)
    leaves = leaves_of(source.call.arguments)
    return Call(
        model_class=name,
        entry=source.call.entry,
        inputs={path: leaf.name for path, leaf in leaves.items() if isinstance(leaf, Slot)},
        constants={path: leaf for path, leaf in leaves.items() if not isinstance(leaf, Slot)},
        weights=weights,
        library=library,
    )


def _describe_text(source: Source, inputs: Sequence[InputSpec]) -> Text | None:
    """How prompts become ids; None for a model without tokenizer or token ids."""
    ids = next((spec for spec in inputs if spec.kind == "token_ids"), None)
    if ids is None or all(f.name != "tokenizer.json" for f in source.tokenizer_files):
        return None
    longest = min(ids.dims[-1].maximum, source.longest_text or ids.dims[-1].maximum)
    side = source.padding_side
    form = msgspec.structs.asdict(source.text_form)
    return Text(padding_id=ids.padding or 0, max_length=longest, padding_side=side, **form)
