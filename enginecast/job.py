"""One export: the steps between a captured model and a published bundle."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from torch.export import ExportedProgram

from enginecast import __version__
from enginecast.capture.shapes import symbol_names
from enginecast.describe import (
    describe_inputs,
    describe_model,
    describe_outputs,
    describe_passes,
    describe_text,
)
from enginecast.exporters.fusion_contract import Expected, count_fusions, expect_fusions
from enginecast.exporters.onnx import WEIGHTS_FILE, Lowered, lower_to_onnx
from enginecast.passes.base import Pass, PassContext
from enginecast.passes.graph_edit import structural_copy, weight_specs, weight_tensor
from enginecast.passes.ir_text import print_ir
from enginecast.passes.pipeline import PassRun, run_pipeline
from enginecast.plan import Plan
from enginecast.prepare import Prepared
from enginecast.runtime.bundle import Bundle, open_bundle
from enginecast.runtime.manifest import EngineRecord, FileRecord, Fusion, Manifest, Verdict, Where
from enginecast.runtime.ort_profile import profile_ops
from enginecast.runtime.ort_session import open_session
from enginecast.runtime.session import Engine
from enginecast.runtime.staging import Staging, require_space
from enginecast.steps import Steps
from enginecast.verify.engine import verify_engine, where_it_ran
from enginecast.verify.floor import make_reference
from enginecast.verify.program import Observer, TrueDtypeRun, true_dtype_check
from enginecast.verify.reference import REFERENCE_NAME, Reference, write_reference
from enginecast.verify.report import HTML_NAME, JSON_NAME, write_report
from enginecast.verify.report_data import Report
from enginecast.verify.verdict import floor_failures, judge

LOG_NAME = "build.log"
REPORTS = (JSON_NAME, HTML_NAME, LOG_NAME)
OBSERVED = 2
"""Cases that are run after every pass; more take longer and find little more."""


@dataclass(frozen=True)
class Export:
    """What an export ended in."""

    report: Report
    bundle: Bundle | None
    """None when it was rejected."""
    folder: Path
    """The bundle, or the folder of reports beside where it would be."""
    nodes: int = 0
    ops: Mapping[str, int] = field(default_factory=dict)
    size: int = 0
    """Bytes of graph and weights."""


@dataclass(frozen=True)
class _Rewritten:
    """A program after its passes."""

    program: ExportedProgram
    runs: list[PassRun]
    observer: Observer


@dataclass(frozen=True)
class Job:
    """One export, step by step."""

    prepared: Prepared
    plan: Plan
    passes: tuple[Pass, ...]
    threads: int | None
    staging: Staging
    steps: Steps

    def run(self) -> Export:
        with self.steps("reference"):
            reference = self._reference()
        expected = expect_fusions(self.prepared.captured.program)
        with self.steps("passes"):
            rewritten = self._rewrite(reference)
        emulated = self._emulate(rewritten, reference)
        failures = [check.failure for check in rewritten.observer.checks if check.failure]
        if any(floor_failures(reference.floor)) or failures:
            return self._reject_early(reference, rewritten, emulated, failures)
        self._require_space(rewritten.program)
        with self.steps("lower"):
            lowered = self._lower(rewritten.program)
        with self.steps("verify"):
            verdict, fusions = self._verify(reference, rewritten, lowered, emulated, expected)
        return self._finish(reference, rewritten, lowered, verdict, fusions)

    def _reference(self) -> Reference:
        prepared = self.prepared
        return make_reference(
            prepared.captured.program,
            prepared.source.eager,
            prepared.cases,
            dtype=self.plan.precision,
            names=prepared.output_names,
            mask_input=prepared.mask_input,
        )

    def _rewrite(self, reference: Reference) -> _Rewritten:
        captured = self.prepared.captured
        observer = Observer(
            captured.program,
            self.prepared.cases[:OBSERVED],
            names=self.prepared.output_names,
            floor=reference.floor.only(frozenset(c.name for c in self.prepared.cases[:OBSERVED])),
            mask_input=self.prepared.mask_input,
            masked=reference.masked,
            strict=False,
        )
        program = structural_copy(captured.program)
        context = PassContext(calibration=tuple(case.inputs for case in self.prepared.cases))
        runs = run_pipeline(self.passes, program, context, (observer,))
        for run in runs:
            left = len(run.sites) - run.rewritten
            self.steps.log(
                f"pass {run.pass_.name}: {run.rewritten} rewritten, {left} left alone,"
                f" {run.seconds:.3f} s"
            )
        return _Rewritten(program, runs, observer)

    def _emulate(self, rewritten: _Rewritten, reference: Reference) -> TrueDtypeRun | None:
        """Judge low precision where it is stored as such: the CPU provider computes in fp32."""
        if self.plan.precision == "fp32":
            return None
        with self.steps(f"run the program in {self.plan.precision}"):
            return true_dtype_check(
                rewritten.program,
                self.prepared.cases,
                {case.name: case.reference for case in reference.cases},
                floor=reference.floor,
                names=self.prepared.output_names,
                mask_input=self.prepared.mask_input,
                masked=reference.masked,
            )

    def _require_space(self, program: ExportedProgram) -> None:
        """Twice the weights as stored: the file, and the reference with room to spare."""
        stored = sum(weight_tensor(program, spec).nbytes for spec in weight_specs(program).values())
        require_space(self.staging.folder, 2 * stored)

    def _lower(self, program: ExportedProgram) -> Lowered:
        captured = self.prepared.captured
        if not self.prepared.source.given_program():
            names = symbol_names(captured.program, captured.inputs)
        else:
            names = {}
        lowered = lower_to_onnx(
            program,
            self.staging.folder,
            outputs=self.prepared.output_names,
            symbols={str(symbol): name for symbol, name in names.items()},
            device=self.plan.device,
        )
        self.steps.log(f"lowered: {lowered.nodes} nodes, {dict(lowered.ops)}")
        return lowered

    def _verify(
        self,
        reference: Reference,
        rewritten: _Rewritten,
        lowered: Lowered,
        emulated: TrueDtypeRun | None,
        expected: Expected,
    ) -> tuple[Verdict, tuple[Fusion, ...]]:
        sites: dict[str, list[Any]] = {}
        for run in rewritten.runs:
            sites.setdefault(run.pass_.name, []).extend(run.sites)
        if not self.plan.runs_here:
            assert emulated is not None
            verdict = judge(
                emulated.measured,
                reference.floor,
                where=where_it_ran(""),
                engine_ran=False,
                emulated=emulated.measured,
                problems=emulated.problems,
            )
            fusions = count_fusions(expected, rewritten.program, lowered.ops, None, sites)
            return verdict, fusions
        manifest = self._manifest(rewritten, lowered, _pending(), ())
        manifest = msgspec.structs.replace(manifest, files=_unsealed(lowered.files))
        bundle = Bundle(self.staging.folder, manifest)
        record = manifest.engines[0]
        session = open_session(bundle, record, self.plan.providers, self.threads)
        with Engine(bundle, record, session) as engine:
            verdict = verify_engine(
                engine,
                reference,
                emulated=emulated.measured if emulated else None,
                problems=emulated.problems if emulated else (),
            )
        if verdict.outcome == "rejected":
            return verdict, count_fusions(expected, rewritten.program, lowered.ops, None, sites)
        executed = profile_ops(
            self.staging.folder / lowered.files[0],
            reference.cases[0].inputs,
            providers=self.plan.providers,
            threads=self.threads,
        )
        ops = [node.op_type for node in executed]
        return verdict, count_fusions(expected, rewritten.program, lowered.ops, ops, sites)

    def _finish(
        self,
        reference: Reference,
        rewritten: _Rewritten,
        lowered: Lowered,
        verdict: Verdict,
        fusions: tuple[Fusion, ...],
    ) -> Export:
        report = self._report(reference, rewritten, verdict, fusions)
        left_out = write_reference(self.staging.folder / REFERENCE_NAME, reference)
        report = replace(report, left_out=left_out)
        self._write_reports(report, rewritten.program)
        size = sum((self.staging.folder / name).stat().st_size for name in lowered.files)
        if verdict.outcome == "rejected":
            folder = self.staging.reject(REPORTS)
            return Export(report, None, folder, lowered.nodes, lowered.ops, size)
        for file in self.prepared.source.tokenizer_files:
            shutil.copyfile(file, self.staging.folder / file.name)
        folder = self.staging.publish(self._manifest(rewritten, lowered, verdict, fusions))
        bundle = open_bundle(folder, check="size")
        return Export(report, bundle, folder, lowered.nodes, lowered.ops, size)

    def _reject_early(
        self,
        reference: Reference,
        rewritten: _Rewritten,
        emulated: TrueDtypeRun | None,
        failures: Sequence[str],
    ) -> Export:
        """Eager itself fails in this precision, or a pass broke its promise: nothing is lowered."""
        floor = reference.floor
        verdict = judge(
            emulated.measured if emulated else floor.cases,
            floor,
            where=where_it_ran(""),
            engine_ran=False,
            emulated=emulated.measured if emulated else None,
            problems=(*failures, *(emulated.problems if emulated else ())),
        )
        report = self._report(reference, rewritten, verdict, ())
        self._write_reports(report, rewritten.program)
        return Export(report, None, self.staging.reject(REPORTS))

    def _report(
        self,
        reference: Reference,
        rewritten: _Rewritten,
        verdict: Verdict,
        fusions: tuple[Fusion, ...],
    ) -> Report:
        return Report(
            model=self.prepared.source.name,
            target=self.plan.target,
            precision=self.plan.precision,
            pipeline=self.plan.pipeline,
            verdict=verdict,
            floor_dtype=reference.floor.dtype,
            passes=tuple(rewritten.observer.checks),
            fusions=fusions,
            seconds=dict(self.steps.seconds),
            notes=self.prepared.captured.notes,
        )

    def _write_reports(self, report: Report, program: ExportedProgram) -> None:
        write_report(self.staging.folder, report)
        self.steps.log(f"verdict: {report.verdict.outcome} {'; '.join(report.verdict.reasons)}")
        lines = [f"enginecast {__version__}", *self.steps.lines, "", print_ir(program)]
        (self.staging.folder / LOG_NAME).write_text("\n".join(lines), encoding="utf-8")

    def _manifest(
        self,
        rewritten: _Rewritten,
        lowered: Lowered,
        verdict: Verdict,
        fusions: tuple[Fusion, ...],
    ) -> Manifest:
        captured = self.prepared.captured
        engine = EngineRecord(
            target=self.plan.target,
            file=lowered.files[0],
            weights=WEIGHTS_FILE if WEIGHTS_FILE in lowered.files else None,
            precision=self.plan.precision,
            opset=lowered.opset,
            domains=dict(lowered.domains),
            minimum_runtime=lowered.minimum_runtime,
            providers=self.plan.engine_providers,
            arch=self.plan.arch,
            verdict=verdict,
        )
        return Manifest(
            enginecast=__version__,
            model=describe_model(self.prepared),
            inputs=describe_inputs(captured.inputs),
            symbols=dict(captured.symbols),
            outputs=describe_outputs(captured.outputs, rewritten.program),
            pipeline=self.plan.pipeline,
            precision=self.plan.precision,
            passes=describe_passes(rewritten.runs),
            fusion=fusions,
            text=describe_text(self.prepared),
            engines=(engine,),
        )


def _unsealed(names: Sequence[str]) -> tuple[FileRecord, ...]:
    """Files of a bundle that is still being made: digests come when it is published."""
    return tuple(FileRecord(name=name, size=0, sha256="0" * 64) for name in names)


def _pending() -> Verdict:
    """Stands in the manifest while the engine is run for the first time; never published."""
    return Verdict(
        outcome="rejected",
        engine="not run on target",
        where=Where(provider="", device="", versions={}),
    )
