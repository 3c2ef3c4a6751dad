"""The engines of a bundle: lowering requests to their targets, and the first run of each engine."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch
from torch.export import ExportedProgram

from enginecast.capture.inputs.specs import InputSpec, named_dims, sums
from enginecast.capture.tracing.sizes.shapes import named_sizes
from enginecast.compiler.engines.checks import Check, Criteria, Judged, Running, Twin
from enginecast.compiler.engines.rewrite import Rewritten
from enginecast.compiler.prepare.program import Prepared
from enginecast.compiler.request import EngineConfig
from enginecast.errors import (
    BundleError,
    InputError,
    LoweringError,
    MissingError,
    VerificationError,
)
from enginecast.exporters.registry import target_of
from enginecast.exporters.target import LoweringRequest
from enginecast.runtime.bundle.manifest import (
    EngineRecord,
    FileRecord,
    GenerationCheck,
    Input,
    Manifest,
    StepCheck,
    Verdict,
)
from enginecast.runtime.bundle.reader import Bundle, unpublished
from enginecast.runtime.engine import Engine
from enginecast.runtime.sessions.registry import session_class
from enginecast.verification.engine import (
    compare_edges,
    edges_of,
    measure_engine,
    rows_left_out,
    trimming_failures,
)
from enginecast.verification.reference import Reference, within_profiles
from enginecast.verification.verdict import noted

LOW = ("float16", "bfloat16")


def criteria_of(rewritten: Rewritten, *problems: str) -> Criteria:
    """The criteria for engines made from a rewritten program, with `problems` added."""
    problems = (*problems, *rewritten.problems)
    return Criteria(rewritten.reference, rewritten.emulated, problems)


@dataclass(frozen=True)
class EngineRun:
    """The result of the first run of an engine."""

    verdict: Verdict
    executed: tuple[str, ...] | None = None
    """Op types as the runtime executed them; None if it did not run or does not report them."""
    layers: tuple[str, ...] = ()
    """A description of the engine's layers, if its runtime reports them."""
    leaks: Mapping[str, str] = field(default_factory=dict)
    """Outputs that were proved independent of padding but change with it, and how."""
    in_turn: GenerationCheck | StepCheck | None = None
    """The comparison over consecutive calls; None for an engine without state."""
    reference: Reference | None = None
    """The one that it was judged by, if that is not the model's."""


def dtype_name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


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


def lowering_request(
    prepared: Prepared, config: EngineConfig, program: ExportedProgram, folder: Path
) -> LoweringRequest:
    """The lowering request for a target, with the program as the lowering passes left it."""
    captured = prepared.captured
    given = prepared.source.given_program() is not None
    names = {} if given else named_sizes(captured.program, captured.inputs)
    return LoweringRequest(
        program,
        folder,
        outputs=prepared.output_names,
        symbols={str(symbol): str(size) for symbol, size in names.items()},
        shapes=[spec.dims for spec in captured.outputs],
        device=config.device,
        arch=config.arch,
        inputs=describe_inputs(prepared.inputs),
        ranges=dict(prepared.symbols),
        steps={name: dim.step for name, dim in named_dims(prepared.inputs).items()},
        sums={name: dim.parts for name, dim in sums(prepared.inputs).items()},
        options=config.options,
    )


def run_engine(
    bundle: Bundle,
    record: EngineRecord,
    config: EngineConfig,
    criteria: Criteria,
    threads: int | None,
    checks: Sequence[Check] = (),
    *,
    counts_ops: bool = True,
) -> EngineRun:
    """Run the engine if this machine can, else its fp32 twin, and judge it."""
    if not config.runs_here:
        twin = run_twin(bundle, record, config, criteria, threads, checks)
        notes = [f"parsed and built by {record.built_by}"] if record.built_by else []
        notes += rows_left_out(twin.reference or criteria.reference)
        verdict = noted(criteria.judge(twin=twin), notes)
        return EngineRun(verdict, in_turn=twin.in_turn, reference=twin.reference)
    reference, unreached = within_profiles(criteria.reference, record.profile)
    criteria = replace(criteria, reference=reference)
    try:
        opened = session_class(config.target).open(
            bundle, record, config.providers, threads, counts_ops=counts_ops
        )
        with Engine(bundle, record, opened) as engine:
            running = Running(engine, criteria, config, threads)
            running, in_turn = _examined(running, checks)
            judged = Judged(criteria.judge(engine, running.wrong))
            layers = engine.layers()
            for check in checks:
                judged = check.reconsider(running, judged)
            leaks = trimming_failures(engine, judged.reference or criteria.reference)
    except (BundleError, InputError) as error:
        # We made the engine, so its errors are a rejection and not bad input.
        return EngineRun(criteria.judge(more=[f"the engine does not run: {error.message}"]))
    except MissingError as error:
        if "NOT_IMPLEMENTED" not in error.message:
            raise
        raise LoweringError(
            f"the lowering made an operator without a kernel: {error.message}",
            hint="Replace the op of torch that it stands for.",
        ) from error
    executed, verdict = opened.executed_ops(), noted(judged.verdict, unreached)
    return EngineRun(verdict, executed, layers, leaks, in_turn, judged.reference)


def _examined(
    running: Running, checks: Sequence[Check]
) -> tuple[Running, GenerationCheck | StepCheck | None]:
    """With what all checks found wrong, and the comparison over consecutive calls."""
    in_turn = None
    for check in checks:
        found = check.examine(running)
        if found.reference is not None:
            criteria = replace(running.criteria, reference=found.reference)
            running = replace(running, criteria=criteria)
        running = replace(running, wrong=(*running.wrong, *found.wrong))
        in_turn = in_turn or found.in_turn
    return running, in_turn


def open_part(bundle: Bundle, config: EngineConfig, threads: int | None) -> Engine:
    """The engine of a part whose outputs another engine reads; its twin if the other has one.

    Raises:
        BundleError: the engine does not run.
        MissingError: this machine cannot run it.
    """
    record = next(one for one in bundle.manifest.engines if one.target == config.target)
    if config.runs_here:
        opened = session_class(config.target).open(bundle, record, config.providers, threads)
        return Engine(bundle, record, opened)
    twin = target_of(record.target).open_twin(bundle.path(record.file), threads)
    if twin is None:
        raise MissingError(f"{bundle.root}: nothing here runs the file of {record.target} in fp32")
    return Engine(replace(bundle, manifest=_in_fp32(bundle.manifest)), record, twin)


def run_twin(
    bundle: Bundle,
    record: EngineRecord,
    config: EngineConfig,
    criteria: Criteria,
    threads: int | None,
    checks: Sequence[Check],
) -> Twin:
    """Run an engine file with its 16-bit values in fp32, if this machine can."""
    reference, widened = criteria.reference, replace(bundle, manifest=_in_fp32(bundle.manifest))
    unrun = tuple(check.without_run for check in checks if check.without_run)
    try:
        session = target_of(record.target).open_twin(bundle.path(record.file), threads)
        if session is None:
            return Twin(problems=unrun)
        with Engine(widened, record, session) as engine:
            measured, problems = measure_engine(engine, reference)
            wrong = (*problems, *compare_edges(engine, reference))
            running = Running(engine, criteria, config, threads, is_twin=True, wrong=wrong)
            running, in_turn = _examined(running, checks)
            provider = engine.provider
    except MissingError as error:
        note = f"the engine file did not run in fp32, either: {error.message}"
        return Twin(problems=unrun, note=note)
    except (BundleError, InputError, VerificationError) as error:
        why = f"the engine file does not run in fp32: {error.message}"
        return Twin(problems=(why, *unrun))
    return Twin(
        measured,
        tuple(f"the engine file, run in fp32: {problem}" for problem in running.wrong),
        f"the engine file ran on {provider} with its 16-bit values in fp32",
        tuple(case.name for case in edges_of(reference)),
        in_turn,
        None if running.criteria is criteria else running.criteria.reference,
    )


def _in_fp32(manifest: Manifest) -> Manifest:
    """The manifest of a bundle as if its 16-bit inputs and outputs were fp32."""
    inputs, outputs = (
        tuple(msgspec.structs.replace(t, dtype="float32") if t.dtype in LOW else t for t in tensors)
        for tensors in (manifest.inputs, manifest.outputs)
    )
    return msgspec.structs.replace(manifest, inputs=inputs, outputs=outputs)


def unsealed(folder: Path, manifest: Manifest, names: Iterable[str]) -> Bundle:
    """A bundle without digests, which are computed when it is published."""
    files = tuple(FileRecord(name=name, size=0, sha256="0" * 64) for name in names)
    return unpublished(folder, msgspec.structs.replace(manifest, files=files))
