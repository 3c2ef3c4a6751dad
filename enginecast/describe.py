"""What the manifest says of a captured model: inputs, outputs, symbols, text, passes."""

from collections.abc import Sequence

import msgspec
import torch
from torch.export import ExportedProgram

from enginecast import __version__
from enginecast.capture import way
from enginecast.capture.export import Captured
from enginecast.capture.inputs import InputSpec
from enginecast.capture.outputs import OutputSpec
from enginecast.capture.source import Source
from enginecast.exporters.onnx import Lowered
from enginecast.passes.graph_edit import dtype_of
from enginecast.passes.options import spec_from_pass
from enginecast.passes.pipeline import PassRun
from enginecast.passes.quantization_plan import plan_of
from enginecast.plan import Plan
from enginecast.prepare import Prepared
from enginecast.quantization import describe_plan
from enginecast.rewrite import Rewritten
from enginecast.runtime.manifest import (
    EngineRecord,
    Fusion,
    Guard,
    Input,
    Manifest,
    Model,
    Output,
    PassRecord,
    Rung,
    Site,
    Text,
    Verdict,
)


def dtype_name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def describe_model(source: Source) -> Model:
    return Model(name=source.name, fingerprint=source.fingerprint())


def describe_inputs(specs: Sequence[InputSpec]) -> tuple[Input, ...]:
    return tuple(
        Input(
            name=spec.name,
            kind=spec.kind,
            dtype=dtype_name(spec.dtype),  # type: ignore[arg-type]  # checked when it is encoded
            shape=tuple(dim.name or dim.size for dim in spec.dims),
            minimum=spec.low,
            maximum=spec.high,
        )
        for spec in specs
    )


def describe_outputs(specs: Sequence[OutputSpec], program: ExportedProgram) -> tuple[Output, ...]:
    """Names and shapes as captured, dtypes as the passes left them."""
    nodes = {node.name: node for node in program.graph.nodes}
    dtypes = [
        dtype_of(nodes[spec.arg.name])
        for spec in program.graph_signature.output_specs
        if spec.arg.name in nodes
    ]
    return tuple(
        Output(name=spec.name, dtype=dtype_name(dtype), shape=tuple(spec.dims))  # type: ignore[arg-type]
        for spec, dtype in zip(specs, dtypes, strict=True)
    )


def describe_text(source: Source, inputs: Sequence[InputSpec]) -> Text | None:
    """How prompts become ids; None for a model without tokenizer or token ids."""
    ids = [spec for spec in inputs if spec.kind == "token_ids"]
    if not ids or all(f.name != "tokenizer.json" for f in source.tokenizer_files):
        return None
    return Text(padding_id=ids[0].padding or 0, max_length=ids[0].dims[-1].maximum)


def describe_rungs(rungs: Sequence[way.Rung]) -> tuple[Rung, ...]:
    return tuple(
        Rung(name=rung.name, outcome=rung.outcome, reason=rung.reason, place=rung.place)
        for rung in rungs
    )


def describe_guards(captured: Captured) -> tuple[Guard, ...]:
    return tuple(
        Guard(
            output=guard.output,
            place=f"{guard.read.file}:{guard.read.line}",
            code=guard.read.code,
            value=str(guard.read.value),
        )
        for guard in captured.guards
    )


def describe_passes(runs: Sequence[PassRun]) -> tuple[PassRecord, ...]:
    return tuple(
        PassRecord(
            name=run.pass_.name,
            spec=str(spec_from_pass(run.pass_)),
            rewritten=run.rewritten,
            sites=tuple(
                Site(
                    module=site.module,
                    source=site.source,
                    ordinal=site.ordinal,
                    reason=site.reason,
                    note=site.note,
                )
                for site in run.sites
            ),
        )
        for run in runs
    )


def _without_guards(outputs: Sequence[Output], captured: Captured) -> tuple[Output, ...]:
    """What users get: the runtime looks at the guards itself."""
    guards = {guard.output for guard in captured.guards}
    return tuple(output for output in outputs if output.name not in guards)


def describe_manifest(
    prepared: Prepared,
    plan: Plan,
    rewritten: Rewritten,
    lowered: Sequence[Lowered],
    verdict: Verdict,
) -> Manifest:
    """The manifest of a bundle with the engines of a plan; files are listed when it is published.

    The model's fingerprint hashes its weights, so this is done once; `judged` fills in the rest.
    """
    return Manifest(
        enginecast=__version__,
        model=describe_model(prepared.source),
        inputs=describe_inputs(prepared.captured.inputs),
        symbols=dict(prepared.captured.symbols),
        outputs=_without_guards(
            describe_outputs(prepared.captured.outputs, rewritten.program), prepared.captured
        ),
        outputs_chosen=bool(prepared.wanted),
        capture=describe_rungs(prepared.captured.rungs),
        guards=describe_guards(prepared.captured),
        notes=prepared.captured.notes,
        pipeline=plan.pipeline,
        precision=plan.precision,
        quantization=describe_plan(plan, plan_of(rewritten.program)),
        passes=describe_passes(rewritten.runs),
        text=describe_text(prepared.source, prepared.captured.inputs),
        engines=tuple(
            describe_engine(each, made, verdict)
            for each, made in zip(plan.engines, lowered, strict=True)
        ),
    )


def describe_engine(plan: Plan, lowered: Lowered, verdict: Verdict) -> EngineRecord:
    """What the manifest says of one engine."""
    return EngineRecord(
        target=plan.target,
        file=lowered.files[0],
        weights=next((name for name in lowered.files if name.endswith(".safetensors")), None),
        precision=plan.precision,
        opset=lowered.opset or None,
        domains=dict(lowered.domains),
        minimum_runtime=lowered.minimum_runtime,
        providers=plan.engine_providers,
        arch=plan.arch or lowered.requires.get("gpu"),
        quantized=lowered.quantized,
        requires=dict(lowered.requires),
        profile=lowered.profile,
        network=lowered.network,
        verdict=verdict,
    )


def judged(manifest: Manifest, verdicts: Sequence[Verdict], fusions: Sequence[Fusion]) -> Manifest:
    """The manifest with what was found when its engines ran."""
    engines = tuple(
        msgspec.structs.replace(engine, verdict=verdict)
        for engine, verdict in zip(manifest.engines, verdicts, strict=True)
    )
    return msgspec.structs.replace(manifest, engines=engines, fusion=tuple(fusions))
