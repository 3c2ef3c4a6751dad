"""One export: the steps between a captured model and a published bundle."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from enginecast.build_log import (
    LOG_NAME,
    build_log,
    capture_lines,
    input_lines,
    machine_lines,
    pass_lines,
    request_lines,
    verdict_lines,
)
from enginecast.cases import SEED
from enginecast.culprits import explained
from enginecast.describe import describe_manifest, judged
from enginecast.engines import Workshop, together
from enginecast.exporters.fusion_contract import count_fusions, expect_fusions
from enginecast.exporters.onnx import Lowered
from enginecast.passes.base import Pass
from enginecast.passes.ir_text import print_ir
from enginecast.passes.quantization_plan import plan_of
from enginecast.plan import Plan
from enginecast.prepare import Prepared, reference_of
from enginecast.quantization import PLAN_NAME, plan_notes, save_plan
from enginecast.rewrite import Rewritten
from enginecast.runtime.bundle import Bundle, open_bundle
from enginecast.runtime.manifest import Fusion, Manifest, Verdict, Where
from enginecast.runtime.staging import Staging
from enginecast.steps import Steps
from enginecast.trial import Trial, by_emulation
from enginecast.verify.culprit import Bisection, Culprit
from enginecast.verify.fidelity import capture_failures
from enginecast.verify.reference import REFERENCE_NAME, Reference, write_reference
from enginecast.verify.report import HTML_NAME, JSON_NAME, write_report
from enginecast.verify.report_data import Report
from enginecast.verify.verdict import floor_failures

REPORTS = (JSON_NAME, HTML_NAME, LOG_NAME, PLAN_NAME)
PENDING = Verdict(
    outcome="rejected",
    engine="not run on target",
    where=Where(provider="", device="", versions={}),
)
"""Stands in the manifest while the engine is run for the first time; never published."""


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
    bisection: Bisection | None = None
    """What of the passes does harm, when they made the program wrong."""
    dropped: tuple[Culprit, ...] = ()
    """Whose sites were left out because they did."""


@dataclass(frozen=True)
class Job:
    """One export, step by step."""

    prepared: Prepared
    plan: Plan
    passes: tuple[Pass, ...]
    threads: int | None
    staging: Staging
    steps: Steps
    drop_guilty: bool = False
    """Leave out the sites that break a pass's promise, and go on."""
    _state_notes: list[str] = field(default_factory=list)

    def run(self) -> Export:
        """Do it; a result that does not agree with eager is an outcome, not an error."""
        with self.steps("read the weights"):
            self.prepared.source.fingerprint()  # refuses weights that are no numbers
        with self.steps("reference"):
            reference = reference_of(self.prepared, self.plan.precision, self._state_notes)
            problems = (*self.prepared.unverified, *self._capture_problems(reference))
        for note in self._state_notes:
            self.steps.say(note)
        rewritten = explained(
            self.prepared,
            self.passes,
            reference,
            self.steps,
            target=self.plan.target,
            drop_guilty=self.drop_guilty,
        )
        problems = (*problems, *rewritten.failures)
        if problems or any(floor_failures(rewritten.reference.floor)):
            verdict = by_emulation(rewritten, problems)
            return self._reject(rewritten, self._report(rewritten, verdict, ()), ())
        workshop = Workshop(self.prepared, self.plan, self.threads, self.staging, self.steps)
        lowered = workshop.lower(rewritten)
        with self.steps("describe"):
            manifest = describe_manifest(self.prepared, self.plan, rewritten, lowered, PENDING)
        trials = workshop.try_all(manifest, rewritten, problems)
        fusions = count_fusions(
            expect_fusions(self.prepared.captured.program),
            rewritten.program,
            lowered[0].ops,
            trials[0].executed,
            rewritten.sites(),
        )
        notes = [note for made in lowered for note in made.notes]
        report = self._report(rewritten, together(self.plan, trials), fusions, notes)
        report = replace(report, **self._beside(trials))
        if report.verdict.outcome == "rejected":
            return self._reject(rewritten, report, lowered)
        with self.steps("publish"):
            return self._publish(rewritten, report, lowered, manifest, trials)

    def _beside(self, trials: Sequence[Trial]) -> dict[str, Any]:
        """What the report says of the engines besides the first one's verdict."""
        others = zip(self.plan.engines[1:], trials[1:], strict=True)
        return {
            "layers": trials[0].layers,
            "others": {plan.target: trial.verdict for plan, trial in others},
        }

    def _capture_problems(self, reference: Reference) -> tuple[str, ...]:
        prepared = self.prepared
        return tuple(
            capture_failures(
                prepared.captured.program,
                prepared.cases,
                prepared.output_names,
                reference,
                [guard.output for guard in prepared.captured.guards],
            )
        )

    def _report(
        self,
        rewritten: Rewritten,
        verdict: Verdict,
        fusions: Sequence[Fusion],
        notes: Sequence[str] = (),
    ) -> Report:
        return Report(
            model=self.prepared.source.name,
            target=self.plan.target,
            precision=self.plan.name,
            pipeline=self.plan.pipeline,
            verdict=verdict,
            floor_dtype=rewritten.reference.floor.label,
            passes=rewritten.checks,
            emulation=rewritten.emulation,
            fusions=tuple(fusions),
            seconds=dict(self.steps.seconds),
            memory=dict(self.steps.memory),
            notes=(
                *self.prepared.captured.notes,
                *self._state_notes,
                *plan_notes(plan_of(rewritten.program)),
                *rewritten.notes,
                *notes,
            ),
        )

    def _reject(self, rewritten: Rewritten, report: Report, lowered: Sequence[Lowered]) -> Export:
        self._write_reports(rewritten, report)
        folder = self.staging.reject(REPORTS)
        done = Export(
            report, None, folder, bisection=rewritten.bisection, dropped=rewritten.dropped
        )
        return replace(done, nodes=lowered[0].nodes, ops=lowered[0].ops) if lowered else done

    def _publish(
        self,
        rewritten: Rewritten,
        report: Report,
        lowered: Sequence[Lowered],
        manifest: Manifest,
        trials: Sequence[Trial],
    ) -> Export:
        left_out = write_reference(self.staging.folder / REFERENCE_NAME, rewritten.reference)
        report = replace(report, left_out=left_out)
        self._write_reports(rewritten, report)
        self.prepared.source.write_beside(self.staging.folder)
        files = [name for made in lowered for name in made.files]
        size = sum((self.staging.folder / name).stat().st_size for name in files)
        verdicts = [trial.verdict for trial in trials]
        folder = self.staging.publish(judged(manifest, verdicts, report.fusions))
        bundle = open_bundle(folder, check="size")
        return Export(
            report,
            bundle,
            folder,
            lowered[0].nodes,
            lowered[0].ops,
            size,
            dropped=rewritten.dropped,
        )

    def _request(self) -> list[str]:
        asked = {"model": self.prepared.source.name, "threads": self.threads}
        asked |= {"drop_guilty": self.drop_guilty, "seed": SEED}
        return request_lines({**asked, **asdict(self.plan), **asdict(self.prepared.options)})

    def _write_reports(self, rewritten: Rewritten, report: Report) -> None:
        write_report(self.staging.folder, report)
        if (plan := plan_of(rewritten.program)) is not None:
            save_plan(self.staging.folder / PLAN_NAME, plan, self.prepared.source)
        self.steps.log(f"verdict: {report.verdict.outcome} {'; '.join(report.verdict.reasons)}")
        prepared, captured = self.prepared, self.prepared.captured
        log = build_log(
            [
                ("request", self._request()),
                ("machine", machine_lines()),
                ("model", request_lines(prepared.source.fingerprint())),
                ("capture", capture_lines(captured.rungs, report.notes)),
                ("inputs", input_lines(captured.inputs, prepared.cases)),
                ("steps", self.steps.lines),
                ("passes", pass_lines(rewritten.runs, report)),
                ("verdict", verdict_lines(report)),
                ("program", print_ir(rewritten.program).splitlines()),
            ]
        )
        (self.staging.folder / LOG_NAME).write_text(log, encoding="utf-8")
