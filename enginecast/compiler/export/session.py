"""An export from beginning to end: open, capture, reference, passes, lower, run, judge, publish.

`ExportSession` is the order of events; each step is a call of the module that does it. What is
tried again, and after what, stands in `ways`.
"""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from enginecast.capture.inputs.downgraded import Downgraded
from enginecast.capture.python.locations import SourceLocation
from enginecast.capture.sources.base.source import Source
from enginecast.capture.torchscript.script import DEPRECATION, require_torchscript
from enginecast.capture.tracing.patches.table import flex_attention_spelled_out
from enginecast.compiler import budget
from enginecast.compiler.engines.checks import (
    Check,
    Criteria,
    OtherKernels,
    PlacesOfLoss,
    Translated,
)
from enginecast.compiler.engines.culprits import find_culprits, is_wrong, without_culprits
from enginecast.compiler.engines.fresh_inputs import FreshInputs, with_more_calibration
from enginecast.compiler.engines.fusion_contract import count_fusions, expect_fusions
from enginecast.compiler.engines.lower_and_run import (
    EngineRun,
    criteria_of,
    lowering_request,
    run_engine,
    unsealed,
)
from enginecast.compiler.engines.rebuild import Rebuild, keeping
from enginecast.compiler.engines.rewrite import fp32_notes, rewrite
from enginecast.compiler.engines.rows_apart import RowsApart, without_fused_attention
from enginecast.compiler.engines.ties import Ties
from enginecast.compiler.export.scripted import (
    SCRIPTED,
    ScriptEngines,
    explore,
    prepare_script,
    reference_of_script,
)
from enginecast.compiler.export_attempts import (
    Before,
    SizesDecideError,
    Way,
    first_taken,
    ways_for,
)
from enginecast.compiler.memory import fewer_collections, keeping_freed
from enginecast.compiler.prepare.open_model import given_plan, input_specs, open_model
from enginecast.compiler.prepare.program import Prepared, prepare
from enginecast.compiler.prepare.reference import captured_wrongly, reference_of, with_kernels
from enginecast.compiler.publication.bundle import Candidate, Export, Measure, publish
from enginecast.compiler.publication.downgrades import other_dtypes
from enginecast.compiler.publication.manifest import describe_program, describe_rungs
from enginecast.compiler.publication.report_details import plan_notes
from enginecast.compiler.request import EngineConfig, ExportRequest, ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.compiler.tasks.base import Part, with_field
from enginecast.compiler.tasks.registry import task_of
from enginecast.errors import (
    CaptureError,
    EnginecastError,
    LoweringError,
    UsageError,
    VerificationError,
)
from enginecast.exporters.registry import target_of
from enginecast.exporters.target import Artifact
from enginecast.passes.ir.quantization_plan import plan_of
from enginecast.passes.ir.text import print_ir
from enginecast.passes.registry import build
from enginecast.runtime.bundle.staging import Staging, stage
from enginecast.runtime.device.torch_threads import torch_threads
from enginecast.runtime.sessions.integer_sums import EXACT, SUMS
from enginecast.verification.accepted_excess import check_names, parse_accept
from enginecast.verification.emulate.data import headroom_sentence
from enginecast.verification.emulate.widened import widened_cases
from enginecast.verification.reference import Reference
from enginecast.verification.verdict import verdict_line


def export(
    request: ExportRequest, steps: Steps | None = None, measure: Measure | None = None
) -> Export:
    """Make an engine, compare it with eager, publish the bundle or reject it, which is a result.

    Args:
        measure: times the engines, for the report.

    Raises:
        EnginecastError: see the tree in `enginecast.errors`.
    """
    config, steps = request.resolve(), steps or Steps()
    for engine in config.engines:
        target = target_of(engine.target)
        target.require(engine.options)  # before the work, and not after it
        if engine.arch is not None:
            target.require_arch(engine.arch, engine.options)
    with (
        stage(request.output, overwrite=request.overwrite) as staging,
        steps.listening(),
        fewer_collections(),
    ):
        if offer := request.offer:
            steps.say(offer)
        source = open_model(request.model, request.options, request.example)
        budget.require(source, config, staging.folder)
        with (
            keeping_freed(sum(source.weight_elements().values())),
            flex_attention_spelled_out(),  # once the model's code is imported
        ):
            parts: dict[str, Export] = {}
            for name, part in source.parts().items():
                input_specs(source, request.options.inputs, request.options.dynamic)  # may refuse
                steps.say(f"{part.name}:")
                with stage(staging.folder / name) as inner:
                    made = ExportSession(request, config, part, inner, steps).candidate()
                    # What it lacks, the whole lacks, and needs consent for.
                    parts[name] = publish(made, replace(request, allow_fallback=True), inner, steps)
                if parts[name].bundle is None:
                    # Its reports are written again, where users look for them.
                    shutil.rmtree(parts[name].folder)
                    return publish(made, request, staging, steps)
            session = ExportSession(request, config, source, staging, steps, parts)
            candidate = session.candidate()
        return publish(candidate, request, staging, steps, measure)


@dataclass(frozen=True)
class ExportSession:
    """One export of an open model."""

    request: ExportRequest
    config: EngineConfig
    """Of the first engine."""
    source: Source
    staging: Staging
    steps: Steps
    parts: Mapping[str, Export] = field(default_factory=dict)
    """Bundles of the model's other parts, which are in the folder of this one."""

    def candidate(self) -> Candidate:
        """The engines of the first way that makes any, judged."""
        takes = target_of(self.config.target).takes
        is_script = self.source.given_script() is not None
        if is_script and "script" not in takes:
            raise UsageError(
                f"{self.source.name} is a TorchScript module, and {self.config.target} takes"
                " programs of torch.export",
                hint="Use --target torchscript, or --target onnxruntime in fp32.",
            )
        ways = ways_for(self.request.options, takes=takes, is_script=is_script)
        found = first_taken(ways, self._made)
        return replace(found.made, tried=found.tried)

    def _made(self, way: Way, before: Before) -> Candidate | None:
        """The engines of one way; None where sizes of the example are those of the first."""
        options, notes = self.request.options, tuple[str, ...]()
        if way.sizes == "example":
            guesses = self._sizes_of_example()
            if not guesses:
                return None
            options = replace(options, dynamic=(*options.dynamic, *guesses))
            text = (
                f"sizes are fixed at those of the example ({', '.join(guesses)}): where they vary,"
                f" {before.in_all_sizes}"
            )
            notes = (Downgraded(text, "sizes", f"--dynamic {','.join(guesses)}"),)
            if before.last.sizes != "example":
                self.steps.say(notes[0])
        if way.makes == "script":
            return self._of_module(way, before, options, notes)
        plan = given_plan(self.config, self.source)
        return self._of_program(prepare(self.source, options, self.steps, plan, notes))

    def _sizes_of_example(self) -> list[str]:
        """Options that fix what varies only because the example has several rows."""
        options = self.request.options
        return [
            f"{spec.name}:{index}={dim.given}"
            for spec in input_specs(self.source, options.inputs, options.dynamic).specs
            for index, dim in enumerate(spec.dims)
            if dim.name is not None and dim.given is not None and not dim.asked
        ]

    def _of_program(self, model: Prepared) -> Candidate:
        """Engines that are made of a program, from the reference on."""
        for config in self.config.engines:
            program, folder = model.captured.program, self.staging.folder
            target_of(config.target).check_shapes(lowering_request(model, config, program, folder))
        with self.steps("read the weights"):
            self.source.fingerprint()  # refuses weights that are not numbers
        state_notes: list[str] = []
        with self.steps("reference"), torch_threads(1 if model.is_small else None):
            edges = not self.config.quantized
            reference = reference_of(model, self.config.precision, state_notes, edges=edges)
            reference = self._accepting(reference)
            wrong = captured_wrongly(model, reference)
            if self.config.quantized:
                model = with_more_calibration(model)
        for note in state_notes:
            self.steps.say(note)
        kept = (*model.captured.notes, *state_notes)
        model = replace(model, captured=replace(model.captured, notes=kept))
        problems = (*model.unverified, *wrong)  # why nothing is lowered
        passes, target = build(self.config.pipeline), self.config.target
        engines = () if problems else self.config.engines
        # A plan takes many runs of the program.
        with torch_threads(1 if model.is_small and not self.config.quantized else None):
            steps = self.steps
            rewritten = rewrite(model, passes, reference, steps, target=target, engines=engines)
            if is_wrong(rewritten) and self.request.drop_guilty:
                rewritten = without_culprits(
                    model, passes, reference, rewritten, target, steps, engines
                )
            elif is_wrong(rewritten):
                rewritten = replace(rewritten, bisection=find_culprits(model, rewritten, steps))
        problems = (*problems, *rewritten.failures)
        wide = fp32_notes(rewritten.program, model.output_names)
        plan = plan_notes(plan_of(rewritten.program))
        judged = Candidate(
            model=model,
            config=self.config,
            reference=rewritten.reference,
            runs=(),
            rungs=model.captured.rungs,
            notes=(*model.captured.notes, *wide, *plan, *rewritten.notes),
            program=print_ir(
                rewritten.engines[0].program if rewritten.engines else rewritten.program
            ),
            rewritten=rewritten,
        )
        if problems or rewritten.reference.floor.defects:
            criteria = Criteria(rewritten.reference, rewritten.emulated, problems)
            return replace(judged, runs=(EngineRun(criteria.judge()),))
        artifacts: list[Artifact] = []
        for config, engine in zip(self.config.engines, rewritten.engines, strict=True):
            request = lowering_request(model, config, engine.program, self.staging.folder)
            request, inside = keeping(request, config.keep)
            request = replace(request, tell=self.steps.tell, say=self.steps.say)
            with self.steps(self._step("lower", config)):
                artifacts.append(target_of(config.target).lower(request))
            self.steps.log(f"lowered: {artifacts[-1].nodes} nodes, {dict(artifacts[-1].ops)}")
            for line in artifacts[-1].log:
                self.steps.log(line)
            for note in engine.notes:
                self.steps.say(note)
        task = task_of(self.source)
        with self.steps("describe"):
            manifest = describe_program(model, self.config, rewritten, artifacts)
            manifest = with_field(manifest, **task.describe(self.source), kept=inside)
        notes = [note for artifact in artifacts for note in artifact.notes]
        if any(artifact.requires.get(SUMS) == EXACT for artifact in artifacts):
            notes.append(
                "its int8 products have weights of 8 bits, whose sums saturate on an x86 CPU"
                " without VNNI: load refuses it there"
            )
        emulated = rewritten.engines[0].emulated
        if reference.floor.dtype == "fp16" and emulated is not None:
            notes += filter(None, [headroom_sentence(emulated.emulation)])
        for note in notes:
            self.steps.say(note)
        manifest = with_field(manifest, notes=(*manifest.notes, *notes))
        folder, threads = self.staging.folder, self.request.threads
        bundle = unsealed(folder, manifest, [n for artifact in artifacts for n in artifact.files])
        parts = {
            name: Part(part.candidate.model, part.bundle)
            for name, part in self.parts.items()
            if isinstance(part.candidate.model, Prepared) and part.bundle is not None
        }
        turns = task.checks(model, rewritten.reference.floor, folder, self.steps, parts)
        fresh = FreshInputs(model, plan_of(rewritten.program))
        runs: list[EngineRun] = []
        for config, record, engine in zip(
            self.config.engines, manifest.engines, rewritten.engines, strict=True
        ):
            cases = (*model.cases, *model.edge_cases)
            widened = partial(widened_cases, engine.program, cases, model.output_names)
            checks: list[Check] = [Translated(widened), *turns, fresh]
            is_single = len(self.config.engines) == 1
            rebuild = Rebuild(model, config, manifest, record, folder, threads)
            if is_single:
                # A bundle has one stored reference, for one engine's choices and kernels.
                checks.append(OtherKernels(partial(with_kernels, model)))
                checks.append(Ties(rebuild, engine))
            unfused = partial(without_fused_attention, model, config, reference, self.steps)
            checks.append(RowsApart(rebuild, engine.program, unfused, searches=is_single))
            checks.append(PlacesOfLoss(model))
            criteria = criteria_of(replace(rewritten, emulated=engine.emulated))
            with self.steps(self._step("verify", config)):
                runs.append(run_engine(bundle, record, config, criteria, threads, checks))
        for name in [name for artifact in artifacts for name in artifact.only_here]:
            (folder / name).unlink()
        fusions = count_fusions(
            expect_fusions(model.captured.program, skip_norms=target_of(target).has_skip_norm),
            rewritten.program,
            artifacts[0].ops,
            runs[0].executed,
            rewritten.sites(),
        )
        notes += [note for engine in rewritten.engines for note in engine.notes]
        notes += other_dtypes(model, manifest)
        run = next((run for run in runs if run.in_turn), None)
        if run is not None and run.in_turn is not None:
            manifest, result = task.with_result(manifest, run.in_turn)
            where = "" if run.verdict.engine == "ran" else "; what ran is the network, in fp32"
            notes.append(f"{result}{where}")
        for name, part in self.parts.items():
            line = verdict_line(part.report.verdict, part.report.floor_dtype)
            notes.append(f"{name}: {line}")
            notes += (
                Downgraded(f"{name}: {each}", each.kind, each.option, is_asked=each.is_asked)
                for each in part.candidate.notes
                if isinstance(each, Downgraded)
            )
        return replace(
            judged,
            # Of several engines, only rows that depend on each other in the model make another.
            reference=next((run.reference for run in runs if run.reference), judged.reference),
            runs=tuple(runs),
            notes=(*judged.notes, *notes),
            artifacts=tuple(artifacts),
            manifest=manifest,
            fusions=fusions,
        )

    def _accepting(self, reference: Reference) -> Reference:
        """The reference with what the user accepts.

        Raises:
            UsageError: there is no such output or case.
        """
        outputs = list(reference.cases[0].outputs)
        cases = [case.name for case in (*reference.cases, *reference.edges)]
        accept = tuple(parse_accept(text, outputs, cases) for text in self.request.accept)
        check_names(accept, outputs, cases)
        floor = replace(reference.floor, accept=accept, max_error=self.request.max_error)
        return replace(reference, floor=floor)

    def _step(self, name: str, config: EngineConfig) -> str:
        return name if config is self.config else f"{name} for {config.target}"

    def _of_module(
        self, way: Way, before: Before, options: ModelOptions, notes: tuple[str, ...]
    ) -> Candidate:
        """An engine of the module itself: scripted where it branches, traced elsewhere.

        Args:
            notes: what a user should know besides.

        Raises:
            LoweringError: it was to be quantized, which passes do to programs alone.
        """
        refused = before.refused
        if refused is not None and before.last.makes == "program":
            for rung in refused.rungs:
                self.steps.say(f"capture: {rung}")
            self.steps.say("torch.export does not capture this model: falling back to TorchScript")
        if way.sizes == "fixed":
            self.steps.log("again, with fixed sizes")
        try:
            engine = self._of_script(way, before, options, notes)
        except (CaptureError, LoweringError, VerificationError) as error:
            said: EnginecastError = error
            if refused is not None:
                # The place that torch.export names is what a user has to look at.
                message = f"{refused.message}\nTorchScript does not help: {error.message}"
                said = CaptureError(message, hint=refused.hint)
                if isinstance(error, SizesDecideError):
                    said = SizesDecideError(message, error.why, hint=refused.hint)
            raise said from error
        if refused is None:
            return engine
        self.steps.say(f"capture: {engine.rungs[0]}")
        rungs = (*refused.rungs, *engine.rungs)
        assert engine.manifest is not None  # the engine was written
        manifest = with_field(engine.manifest, capture=describe_rungs(rungs))
        return replace(engine, rungs=rungs, manifest=manifest)

    def _of_script(
        self, way: Way, before: Before, options: ModelOptions, notes: tuple[str, ...]
    ) -> Candidate:
        if self.config.quantized:
            raise LoweringError(
                f"{self.config.quantized} needs a program of torch.export, and this engine would be"
                " made from the module itself",
                hint="Use --precision fp32.",
            )
        require_torchscript()
        self.steps.log(DEPRECATION)
        with self.steps("read the weights"):
            self.source.fingerprint()
        refusal = None if before.refused is None else before.refused.refusal
        must: tuple[SourceLocation, ...] = ()
        if refusal is not None and refusal.file:  # the place that must be scripted
            must = (SourceLocation(refusal.file, refusal.line).resolved,)
        fixed = before.asks_for_script if way.sizes == "fixed" else ""
        model = prepare_script(self.source, options, self.steps, fixed=fixed)
        with self.steps("paths"):
            model, explored = explore(model, must)
        config = replace(self.config, pipeline="", also=())
        notes = (*notes, *model.notes, *self._not_done())
        with self.steps("reference"):
            branches = options.allow_unverified_branches
            reference, more = reference_of_script(model, config.precision, branches=branches)
            reference = self._accepting(reference)
        engine = ScriptEngines(
            model, reference, config, self.request, self.staging, self.steps, explored, must
        ).best()
        notes = (*engine.notes, *notes, *explored.verified, *more)
        assert engine.manifest is not None  # the engine was written
        plain = tuple(map(str, notes))
        manifest = with_field(engine.manifest, capture=describe_rungs(engine.rungs), notes=plain)
        return replace(engine, notes=notes, manifest=manifest)

    def _not_done(self) -> Iterator[Downgraded]:
        """What was asked for, and needs a program of torch.export."""
        request = self.request
        skips = bool(request.skip_modules_pattern or request.skip_modules_classes)
        asked = {"--pipeline": request.pipeline is not None, "--skip-modules-...": skips}
        asked |= {"--keep-output": bool(request.keep_output)}
        if given := " and ".join(option for option, is_given in asked.items() if is_given):
            text = f"{given} did nothing: no passes run on what is made from the module itself"
            yield Downgraded(text, "passes", SCRIPTED, is_asked=True)
        for target in request.also:
            text = f"no engine for {target}, which needs a program of torch.export"
            yield Downgraded(text, "engine", SCRIPTED, is_asked=True)
