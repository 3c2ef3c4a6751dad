"""One export by way of TorchScript: for `--target torchscript`, and where torch.export gives up."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import msgspec

from enginecast.build_log import (
    LOG_NAME,
    build_log,
    input_lines,
    machine_lines,
    request_lines,
    verdict_lines,
)
from enginecast.capture.examples import Case
from enginecast.capture.places import Place, real_path
from enginecast.capture.scan import scan
from enginecast.capture.source import Source
from enginecast.capture.torchscript import DEPRECATION, Hybrid, hybrid, require_torchscript
from enginecast.cases import SEED
from enginecast.describe import judged
from enginecast.explore import Explored, explore
from enginecast.job import REPORTS, Export
from enginecast.passes.unify_dtype import DTYPES
from enginecast.plan import Plan
from enginecast.prepare import ModelOptions
from enginecast.runtime.bundle import open_bundle
from enginecast.runtime.manifest import Rung
from enginecast.runtime.staging import Staging
from enginecast.script_engine import Made, Workshop
from enginecast.scripted import prepare_script, reference_of_script
from enginecast.steps import Steps
from enginecast.verify.reference import REFERENCE_NAME, Reference, write_reference
from enginecast.verify.report import write_report
from enginecast.verify.report_data import Report


@dataclass(frozen=True)
class ScriptJob:
    """One export, step by step."""

    source: Source
    options: ModelOptions
    plan: Plan
    threads: int | None
    staging: Staging
    steps: Steps
    places: tuple[Place, ...] = ()
    """Branches that must be scripted; others that a run meets are scripted where they can be."""
    rungs: tuple[Rung, ...] = ()
    """What was tried before, and why it failed."""
    cases: tuple[Case, ...] = ()
    """More verification inputs, such as those that take a way that the drawn ones do not."""

    def run(self) -> Export:
        """Do it; a result that does not agree with eager is an outcome, not an error.

        Raises:
            CaptureError: a branch that must be scripted cannot be, or the trace failed.
            MissingError: this torch has no TorchScript any more.
            VerificationError: eager itself does not run.
        """
        require_torchscript()
        self.steps.log(DEPRECATION)
        with self.steps("read the weights"):
            self.source.fingerprint()  # refuses weights that are no numbers
        model = prepare_script(self.source, self.options, self.steps, self.cases)
        with self.steps("ways"):
            model, explored = explore(model, self.places)
        with self.steps("reference"):
            reference, notes = reference_of_script(model, self.plan.precision)
        workshop = Workshop(model, reference, self.plan, self.threads, self.staging, self.steps)
        made = self._best(workshop, explored)
        made = replace(made, notes=(*made.notes, *explored.verified, *notes))
        if self.rungs:
            self.steps.say(_told(self._rungs(made)[-1]))
        if made.verdict.outcome == "rejected":
            return self._reject(workshop, made)
        with self.steps("publish"):
            return self._publish(workshop, made)

    def _best(self, workshop: Workshop, explored: Explored) -> Made:
        """The first engine that agrees with eager; else the last one that does not."""
        tried: list[Hybrid] = []
        for optional in self._optional(explored.places, tried):
            with self.steps("script and trace"):
                made = hybrid(
                    self.source.eager(DTYPES[self.plan.precision]).to(self.plan.device),
                    workshop.example,
                    self.places,
                    wanted=workshop.model.wanted,
                    dtype=DTYPES[self.plan.precision],
                    optional=optional,
                )
            for line in (*made.notes, *(f"the tracer warns: {s}" for s in made.suspects)):
                self.steps.log(line)
            tried.append(made)
            engine = workshop.torchscript(made, self._unseen(made, explored))
            if engine.verdict.outcome == "rejected":
                continue
            return engine if self.plan.target == "torchscript" else workshop.or_onnx(engine)
        return engine

    def _optional(self, met: tuple[Place, ...], tried: list[Hybrid]) -> Iterator[tuple[Place, ...]]:
        """What may be scripted: first what a run reads, then what the tracer warned of."""
        yield met
        warned = {(real_path(s.file), s.line) for s in tried[-1].suspects}
        suspects = warned - {*met, *self.places}
        if suspects:
            self.steps.log("the trace does not agree with eager: scripting what it warned of")
            yield (*met, *sorted(suspects))
        # A loop over a shape is traced without a warning; only its source tells.
        found = {*self._scanned(tried[-1].inputs)} - {*met, *self.places, *suspects}
        if found:
            self.steps.log("the trace does not agree with eager: scripting what decides by sizes")
            yield (*met, *sorted(suspects), *sorted(found))

    def _scanned(self, inputs: Sequence[str]) -> list[Place]:
        return [
            (real_path(finding.file), finding.line)
            for finding in scan(self.source.empty(), inputs)
            if finding.decides in ("inputs", "shapes") and finding.file
        ]

    def _unseen(self, made: Hybrid, explored: Explored) -> tuple[str, ...]:
        """Branches that were not compared both ways: scripted ones, and those that are baked."""
        if self.options.allow_unverified_branches:
            return ()
        return explored.unseen((*made.held, *made.unscripted), made.unscripted)

    def _rungs(self, made: Made) -> tuple[Rung, ...]:
        return (*self.rungs, Rung(name="torchscript", outcome="taken", reason=made.how))

    def _report(self, made: Made, reference: Reference) -> Report:
        return Report(
            model=self.source.name,
            target=made.target,
            precision=self.plan.precision,
            pipeline="",
            verdict=made.verdict,
            floor_dtype=reference.floor.dtype,
            seconds=dict(self.steps.seconds),
            memory=dict(self.steps.memory),
            notes=made.notes,
        )

    def _reject(self, workshop: Workshop, made: Made) -> Export:
        report = self._report(made, workshop.reference)
        self._write_reports(workshop, made, report)
        folder = self.staging.reject(REPORTS)
        return Export(report, None, folder, made.lowered.nodes, made.lowered.ops)

    def _publish(self, workshop: Workshop, made: Made) -> Export:
        folder = self.staging.folder
        left_out = write_reference(folder / REFERENCE_NAME, workshop.reference)
        report = replace(self._report(made, workshop.reference), left_out=left_out)
        self._write_reports(workshop, made, report)
        self.source.write_beside(folder)
        size = sum((folder / name).stat().st_size for name in made.lowered.files)
        manifest = judged(
            workshop.manifest(made.target, made.lowered, made.outputs), [made.verdict], ()
        )
        manifest = msgspec.structs.replace(manifest, capture=self._rungs(made), notes=made.notes)
        published = self.staging.publish(manifest)
        bundle = open_bundle(published, check="size")
        return Export(report, bundle, published, made.lowered.nodes, made.lowered.ops, size)

    def _write_reports(self, workshop: Workshop, made: Made, report: Report) -> None:
        write_report(self.staging.folder, report)
        self.steps.log(f"verdict: {report.verdict.outcome} {'; '.join(report.verdict.reasons)}")
        asked = {"model": self.source.name, "threads": self.threads, "seed": SEED}
        model = workshop.model
        log = build_log(
            [
                ("request", request_lines({**asked, **asdict(self.plan), **asdict(self.options)})),
                ("machine", machine_lines()),
                ("model", request_lines(self.source.fingerprint())),
                ("capture", [*map(_told, self._rungs(made)), *report.notes]),
                ("inputs", input_lines(model.inputs, model.cases)),
                ("steps", self.steps.lines),
                ("verdict", verdict_lines(report)),
                ("program", made.hybrid.module.code.splitlines()),
            ]
        )
        (self.staging.folder / LOG_NAME).write_text(log, encoding="utf-8")


def _told(rung: Rung) -> str:
    where = f" at {rung.place}" if rung.place else ""
    return f"capture: {rung.name} {rung.outcome}{where}: {rung.reason}"
