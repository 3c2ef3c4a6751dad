"""Publish the result of an export: a bundle, or the reports of a rejection next to its place."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from enginecast.capture.sources.base.source import Source
from enginecast.capture.tracing.attempt import Rung
from enginecast.compiler.engines.lower_and_run import EngineRun, describe_inputs, unsealed
from enginecast.compiler.engines.rewrite import Rewritten
from enginecast.compiler.export_attempts import Tried
from enginecast.compiler.prepare.cases import SEED
from enginecast.compiler.prepare.program import OpenedModel
from enginecast.compiler.publication.downgrades import downgrades_of
from enginecast.compiler.publication.manifest import PLAN_NAME
from enginecast.compiler.publication.report_details import (
    origin_of,
    plan_notes,
    reported_plan,
    shown_prompts,
    stored_weights,
)
from enginecast.compiler.request import EngineConfig, ExportRequest
from enginecast.compiler.steps import Steps
from enginecast.doctor.checks import Report as Machine
from enginecast.doctor.checks import examine
from enginecast.exporters.target import Artifact
from enginecast.passes.ir.pipeline import PassRun
from enginecast.passes.ir.quantization_plan import QuantizationPlan, plan_of
from enginecast.passes.quantize.plan.file import write_plan
from enginecast.runtime.bundle.manifest import Downgrade, Fusion, Manifest, Verdict
from enginecast.runtime.bundle.reader import Bundle, open_bundle
from enginecast.runtime.bundle.staging import Staging
from enginecast.verification.bisect.culprit import Bisection
from enginecast.verification.reference import REFERENCE_NAME, Reference, write_reference
from enginecast.verification.report.data import SCHEMA_VERSION, Origin, Profile, Report
from enginecast.verification.report.files import HTML_NAME, JSON_NAME, write_report
from enginecast.verification.report.speed import Speed
from enginecast.version import __version__

LOG_NAME = "build.log"
REPORTS = (JSON_NAME, HTML_NAME, LOG_NAME, PLAN_NAME)
Section = tuple[str, Sequence[str]]


@dataclass(frozen=True)
class Candidate:
    """Engines that were made and judged, or a program that was rejected before lowering."""

    model: OpenedModel
    config: EngineConfig
    reference: Reference
    runs: tuple[EngineRun, ...]
    """One run for each engine; a single one if nothing was lowered."""
    rungs: tuple[Rung, ...]
    """The capture attempts, the successful one last."""
    notes: tuple[str, ...]
    program: str
    """Text of the program that the engines were made from."""
    artifacts: tuple[Artifact, ...] = ()
    manifest: Manifest | None = None
    """The manifest without verdicts, fusions and digests; None: nothing was lowered."""
    fusions: tuple[Fusion, ...] = ()
    rewritten: Rewritten | None = None
    """The result of the passes; None if none ran."""
    tried: tuple[Tried, ...] = ()
    """The attempts to make engines, the one that made these last."""

    @property
    def others(self) -> dict[str, Verdict]:
        """Verdicts on further engines, by target."""
        others = zip(self.config.engines[1:], self.runs[1:], strict=False)
        return {config.target: run.verdict for config, run in others}

    @property
    def verdict(self) -> Verdict:
        """The verdict of the first engine, or of the first rejected one."""
        first = self.runs[0].verdict
        wrong = tuple(
            f"the {target} engine: {reason}"
            for target, verdict in self.others.items()
            if verdict.outcome == "rejected"
            for reason in verdict.reasons
        )
        if not wrong:
            return first
        reasons = (*first.reasons, *wrong) if first.outcome == "rejected" else wrong
        return msgspec.structs.replace(first, outcome="rejected", reasons=reasons)

    def report(
        self,
        steps: Steps,
        origin: Origin,
        left_out: tuple[str, ...] = (),
        timing: "Timing | None" = None,
        size: int = 0,
        downgrades: tuple[Downgrade, ...] = (),
        *,
        request: ExportRequest,
    ) -> Report:
        """The report, for people and programs.

        Args:
            size: size of the first engine in bytes.
        """
        rewritten = self.rewritten
        plan = None if rewritten is None else plan_of(rewritten.program)
        speed = None if timing is None else timing.speed
        emulated = None if rewritten is None else rewritten.emulated
        source, options, manifest = self.model.source, request.options, self.manifest
        seed = options.random_weights
        lowered = () if rewritten is None else rewritten.engines
        file = ""
        if manifest is not None and self.verdict.outcome != "rejected":
            file = manifest.engines[0].network or manifest.engines[0].file
        return Report(
            model=source.name,
            target=self.config.target,
            precision=self.config.asked_precision,
            pipeline=self.config.pipeline,
            verdict=self.verdict,
            floor_dtype=self.reference.floor.label,
            passes=() if rewritten is None else rewritten.every_check,
            emulation=emulated.emulation if emulated is not None else None,
            fusions=self.fusions,
            left_out=left_out,
            seconds=dict(steps.seconds),
            memory=dict(steps.memory),
            notes=tuple(map(str, self.notes)),
            downgrades=downgrades,
            layers=self.runs[0].layers,
            others=self.others,
            speed="" if speed is None else str(speed),
            timed=speed,
            schema_version=SCHEMA_VERSION,
            origin=origin,
            plan=None if plan is None else reported_plan(plan, self.config.precision),
            profile=None if not timing or not timing.profiles else timing.profiles[0],
            more_profiles=() if timing is None else timing.profiles[1:],
            size=size,
            nodes=self.artifacts[0].nodes if self.artifacts else 0,
            file=file,
            model_class="" if source.model_class is None else source.model_class.__name__,
            weights="the model's own" if seed is None else f"random (seed {seed})",
            inputs=describe_inputs(self.model.inputs),
            outputs=() if manifest is None else manifest.outputs,
            symbols=dict(self.model.symbols),
            stored=stored_weights(lowered[0].program) if lowered else (),
            prompts=shown_prompts(options.prompts),
        )


@dataclass(frozen=True)
class Timing:
    """The timing of the first engine."""

    speed: Speed | None = None
    """Compared with eager; None: not timed."""
    profiles: tuple[Profile, ...] = ()
    """Time by layer, at some sizes; empty: not timed, or its runtime does not time layers."""


Measure = Callable[[Candidate, Bundle, Mapping[str, float]], Timing]
"""Times the engines of a bundle before it is published, after steps that took so many seconds."""


@dataclass(frozen=True)
class Export:
    """The result of an export."""

    candidate: Candidate
    report: Report
    bundle: Bundle | None
    """None if the export was rejected, or lacks what was asked for."""
    folder: Path
    """Folder of the bundle; or, next to its path, of the rejection's reports, or of a bundle that
    lacks what was asked for."""
    size: int = 0
    """Size of graph and weights in bytes."""
    speed: Speed | None = None

    def __repr__(self) -> str:
        """What became of it, and where."""
        what = self.bundle or self.report.verdict
        return f"Export({str(self.folder)!r}: {what})"

    @property
    def withheld(self) -> tuple[Downgrade, ...]:
        """Why a bundle that agrees with eager was not published: what it lacks, without consent."""
        is_rejected = self.report.verdict.outcome == "rejected"
        lacking = (each for each in self.report.downgrades if each.consent == "missing")
        return () if is_rejected else tuple(lacking)

    @property
    def notable(self) -> tuple[str, ...]:
        """The notes without those on how a quantization plan was found."""
        rewritten = self.candidate.rewritten
        plan = None if rewritten is None else plan_of(rewritten.program)
        # Of weights that were given in fp8, a user should know which are kept.
        usual = set(plan_notes(plan)[1:]) if plan is not None and plan.rounds else set()
        return tuple(note for note in self.report.notes if note not in usual)

    @property
    def ops(self) -> Mapping[str, int]:
        """Op counts of the first engine; empty if nothing was lowered."""
        return self.candidate.artifacts[0].ops if self.candidate.artifacts else {}

    @property
    def nodes(self) -> int:
        return sum(self.ops.values())

    @property
    def bisection(self) -> Bisection | None:
        """The bisection of the passes, if they made the program wrong."""
        rewritten = self.candidate.rewritten
        return None if rewritten is None else rewritten.bisection


def publish(
    candidate: Candidate,
    request: ExportRequest,
    staging: Staging,
    steps: Steps,
    measure: Measure | None = None,
) -> Export:
    """Publish the bundle, or reject it and leave only reports next to the bundle's path; a bundle
    that lacks what was asked for is left there whole.
    """
    downgrades = downgrades_of(candidate.notes, request)
    machine = examine()
    origin = origin_of(machine, request.command, candidate.model.source.fingerprint())
    if candidate.verdict.outcome == "rejected" or candidate.manifest is None:
        report = candidate.report(steps, origin, downgrades=downgrades, request=request)
        _write_reports(candidate, report, request, staging.folder, steps, machine)
        return Export(candidate, report, None, staging.reject(REPORTS))
    files = [name for artifact in candidate.artifacts for name in artifact.files]
    sizes = {name: (staging.folder / name).stat().st_size for name in files}
    timing = Timing()
    if measure is not None:
        with steps("speed"):
            made = unsealed(staging.folder, candidate.manifest, files)
            timing = measure(candidate, made, dict(steps.seconds))
    with steps("publish"):
        floor = replace(candidate.reference.floor, accept=())  # each engine's verdict says it
        reference = replace(candidate.reference, floor=floor)
        left_out = write_reference(staging.folder / REFERENCE_NAME, reference)
        first = sum(sizes[name] for name in candidate.artifacts[0].files)
        report = candidate.report(
            *(steps, origin, left_out, timing, first, downgrades), request=request
        )
        _write_reports(candidate, report, request, staging.folder, steps, machine)
        candidate.model.source.write_beside(staging.folder)
        engines = tuple(
            msgspec.structs.replace(engine, verdict=run.verdict)
            for engine, run in zip(candidate.manifest.engines, candidate.runs, strict=True)
        )
        notes = candidate.manifest.notes
        if report.timed and (slower := report.timed.slower_than_fp32(report.timed.machine)):
            notes = (*notes, slower)
        leaks = {name: why for run in candidate.runs for name, why in run.leaks.items()}
        padding = candidate.manifest.padding
        if padding is not None and leaks:  # without outputs that were seen to change with padding
            outputs = tuple(name for name in padding.outputs if name not in leaks)
            padding = msgspec.structs.replace(
                padding,
                outputs=outputs,
                side=padding.side if outputs else "none",
                reasons={**padding.reasons, **leaks},
            )
        manifest = msgspec.structs.replace(
            candidate.manifest,
            engines=engines,
            fusion=candidate.fusions,
            padding=padding,
            notes=notes,
            downgrades=downgrades,
        )
        size = sum(sizes.values())
        if any(each.consent == "missing" for each in downgrades):
            folder = staging.withhold(manifest, REPORTS)
            return Export(candidate, report, None, folder, size, timing.speed)
        folder = staging.publish(manifest)
        bundle = open_bundle(folder, check="size")
        return Export(candidate, report, bundle, folder, size, timing.speed)


def _write_reports(
    candidate: Candidate,
    report: Report,
    request: ExportRequest,
    folder: Path,
    steps: Steps,
    machine: Machine,
) -> None:
    write_report(folder, report)
    model, rewritten = candidate.model, candidate.rewritten
    plan = None if rewritten is None else plan_of(rewritten.program)
    if plan is not None:
        write_model_plan(folder / PLAN_NAME, plan, model.source)
    steps.log(f"verdict: {report.verdict.outcome} {'; '.join(report.verdict.reasons)}")
    asked: dict[str, Any] = {"model": model.source.name, "threads": request.threads}
    asked |= {"drop_guilty": request.drop_guilty, "accept": tuple(request.accept), "seed": SEED}
    asked |= asdict(candidate.config) | asdict(request.options)
    asked |= {"fallback": request.options.furthest, "allow_fallback": request.allow_fallback}
    verdict = msgspec.json.format(msgspec.json.encode(report.verdict), indent=1).decode()
    times = [f"{name}: {spent:.2f} s" for name, spent in report.seconds.items()]
    # The inputs with their ranges, and their shapes in each comparison.
    lines = []
    for spec in model.inputs:
        dims = ", ".join(
            str(dim.size) if dim.name is None else f"{dim.name}={dim.shown}" for dim in spec.dims
        )
        values = "" if spec.low is None else f", values {spec.low}..{spec.high}"
        lines.append(f"{spec.name}: {spec.kind} {spec.dtype} [{dims}]{values}")
    for case in model.cases:
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in case.inputs.items())
        lines.append(f"case {case.name!r}: {shapes}")
    sections: list[Section] = [
        ("request", request_lines(asked)),
        ("machine", _machine_lines(machine)),
        ("model", request_lines(model.source.fingerprint())),
        ("attempts", list(map(str, candidate.tried))),
        ("capture", [*map(str, candidate.rungs), *(f"note: {note}" for note in report.notes)]),
        ("inputs", lines),
        ("steps", steps.lines),
        ("passes", _pass_lines(() if rewritten is None else rewritten.every_run, report)),
        ("verdict", [*verdict.splitlines(), *times]),
        ("program", candidate.program.splitlines()),
    ]
    (folder / LOG_NAME).write_text(build_log(sections), encoding="utf-8")


def write_model_plan(path: Path, plan: QuantizationPlan, source: Source) -> None:
    """Write a plan together with the fingerprint of its model."""
    write_plan(path, msgspec.structs.replace(plan, model=source.fingerprint()))


def build_log(sections: Sequence[Section]) -> str:
    """The text of a log: a title and lines for each nonempty section."""
    parts = ["\n".join([f"== {title}", *lines]) for title, lines in sections if lines]
    return "\n\n".join([f"enginecast {__version__} build log", *parts]) + "\n"


def request_lines(request: Mapping[str, Any]) -> list[str]:
    """The request as log lines, defaults included."""
    return [f"{name}: {value}" for name, value in request.items() if value not in (None, "", ())]


def _machine_lines(found: Machine) -> list[str]:
    """Versions, providers and GPUs, as `enginecast doctor` finds them."""
    return [
        f"python {found.python} on {found.platform}",
        *(f"{one.name} {one.version}" for one in found.packages if one.version is not None),
        f"ONNX Runtime providers: {', '.join(found.providers)}",
        f"CUDA of torch: {found.torch_cuda or 'none'}",
        *(f"GPU: {gpu.name} ({gpu.arch}), {gpu.memory} bytes" for gpu in found.gpus),
    ]


def _pass_lines(runs: Sequence[PassRun], report: Report) -> list[str]:
    """Each pass with its sites and the result of the comparison after it."""
    lines = []
    for run, check in zip(runs, report.passes, strict=True):
        error = "not finite" if check.worst_error is None else f"{check.worst_error:.3g}"
        lines.append(
            f"{check.name}: {check.rewritten} rewritten, {check.left_alone} left,"
            f" {check.seconds:.2f} s; {error} at"
            f" {check.worst_place or 'no module'} ({check.check_seconds:.2f} s to check)"
        )
        lines += [
            f"    {site.module or '(root)'} {site.source}: {site.reason or 'rewritten'}"
            for site in run.sites
        ]
    return lines
