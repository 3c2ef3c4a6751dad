"""An export from beginning to end: open, capture, reference, passes, lower, run, judge, publish.

`ExportSession` is the order of events; each step is a call of the module that does it.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from enginecast.capture.python.locations import SourceLocation
from enginecast.capture.sources.decoder import DecoderSource
from enginecast.capture.sources.encoder_decoder import ENCODER, CrossDecoderSource
from enginecast.capture.sources.source import Source
from enginecast.capture.sources.stateful import StatefulSource
from enginecast.capture.torchscript.script import DEPRECATION, require_torchscript
from enginecast.capture.tracing.attempt import RefusedError
from enginecast.capture.tracing.ladder import LEADS_ON
from enginecast.capture.tracing.patches.table import flex_attention_spelled_out
from enginecast.capture.tracing.sizes.shapes import FrozenDimensionError
from enginecast.compiler import budget
from enginecast.compiler.cases import cover_branches, in_example_values
from enginecast.compiler.culprits import find_culprits, is_wrong, without_culprits
from enginecast.compiler.engines import (
    Criteria,
    EngineRun,
    Follows,
    criteria_of,
    lowering_request,
    open_part,
    run_engine,
    unsealed,
)
from enginecast.compiler.fit_values import error_of
from enginecast.compiler.fresh_inputs import failures_on_fresh_inputs, with_more_calibration
from enginecast.compiler.fusion_contract import count_fusions, expect_fusions
from enginecast.compiler.generation import Run, check, generated, generation_note
from enginecast.compiler.manifest import PLAN_NAME, describe_program, describe_rungs
from enginecast.compiler.memory import fewer_collections, keeping_freed
from enginecast.compiler.prepare import (
    Prepared,
    captured_wrongly,
    edge_cases,
    given_plan,
    input_specs,
    open_model,
    place_of_loss,
    prepare,
    reference_of,
    with_kernels,
)
from enginecast.compiler.publish import Candidate, Export, Measure, publish
from enginecast.compiler.request import EngineConfig, ExportRequest, ModelOptions
from enginecast.compiler.rewrite import Rewritten, rewrite, without_vnni
from enginecast.compiler.scripted import (
    ScriptEngines,
    SizesDecideError,
    explore,
    prepare_script,
    reference_of_script,
)
from enginecast.compiler.stateful import check as check_turn
from enginecast.compiler.stateful import step_note, turn, write_start
from enginecast.compiler.steps import Steps
from enginecast.compiler.ties import Ties
from enginecast.errors import (
    CaptureError,
    EnginecastError,
    LoweringError,
    PassError,
    UsageError,
    VerificationError,
)
from enginecast.exporters.registry import target_of
from enginecast.exporters.target import Artifact
from enginecast.passes.ir.interpret import AssertionFailedError
from enginecast.passes.ir.quantization_plan import QuantizationPlan, plan_of
from enginecast.passes.ir.text import print_ir
from enginecast.passes.registry import build
from enginecast.runtime.bundle.manifest import GenerationCheck, Manifest, StepCheck
from enginecast.runtime.bundle.staging import Staging, stage
from enginecast.runtime.device.torch_threads import torch_threads
from enginecast.runtime.engine import Engine
from enginecast.runtime.sessions.integer_sums import EXACT, SUMS
from enginecast.verification.accept import check_names, parse_accept
from enginecast.verification.emulate.widened import widened_cases
from enginecast.verification.floor import Floor
from enginecast.verification.generation import write_continued
from enginecast.verification.reference import Reference
from enginecast.verification.verdict import verdict_line

OF_SIZES = frozenset({"specialized-dimension", "operator", "model-error"})
"""Kinds of refusals that sizes may be the reason of."""


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
        target_of(engine.target).require(engine.options)  # before the work, and not after it
    with (
        stage(request.output, overwrite=request.overwrite) as staging,
        steps.listening(),
        fewer_collections(),
    ):
        source = open_model(request.model, request.options, request.example)
        budget.require(source, config, staging.folder)
        session = ExportSession(request, config, source, staging, steps)
        with (
            keeping_freed(sum(source.weight_elements().values())),
            flex_attention_spelled_out(),  # once the model's code is imported
        ):
            if isinstance(source, CrossDecoderSource):
                input_specs(source, request.options.inputs, request.options.dynamic)  # may refuse
                encoder = session.part(source.encoder, ENCODER)
                if encoder.bundle is None:
                    return publish(encoder.candidate, request, staging, steps)
                session = replace(session, encoder=encoder)
            candidate = session.candidate()
        return publish(candidate, request, staging, steps, measure)


def falls_back(error: CaptureError, options: ModelOptions) -> bool:
    """Whether an export goes on with TorchScript after this refusal."""
    leads_on = isinstance(error, RefusedError) and error.refusal.kind in LEADS_ON
    # Of a module itself no calls in turn would be compared.
    is_single = not options.task and not options.state
    return leads_on and options.fallback == "torchscript" and is_single


def _is_of_sizes(error: EnginecastError) -> bool:
    """Whether sizes that vary may be the reason of a failure."""
    if isinstance(error, RefusedError):
        return error.refusal.kind in OF_SIZES
    return isinstance(error, FrozenDimensionError) or not isinstance(error, CaptureError)


@dataclass(frozen=True)
class ExportSession:
    """One export of an open model."""

    request: ExportRequest
    config: EngineConfig
    """Of the first engine."""
    source: Source
    staging: Staging
    steps: Steps
    notes: tuple[str, ...] = ()
    """What was decided before the capture, for the report."""
    encoder: Export | None = None
    """Of a decoder that attends to one: its bundle, which is in the folder of this one."""

    def part(self, source: Source, name: str) -> Export:
        """Make and judge the engines of a part of the model, and publish them within the folder."""
        self.steps.say(f"{source.name}:")
        with stage(self.staging.folder / name) as staging:
            made = replace(self, source=source, staging=staging).candidate()
            done = publish(made, self.request, staging, self.steps)
        if done.bundle is None:
            shutil.rmtree(done.folder)  # its reports are written again, where users look for them
        return done

    def candidate(self) -> Candidate:
        """Make and judge the engines; in sizes that nobody asked for where that is possible, else
        in those of the example.
        """
        try:
            return self._candidate()
        except (CaptureError, PassError, LoweringError, VerificationError) as error:
            fixed = (
                self._in_example_sizes(error.message.splitlines()[0])
                if _is_of_sizes(error)
                else None
            )
            if fixed is None:
                raise
            try:
                return fixed._candidate()
            except EnginecastError as second:
                raise (second if isinstance(error, FrozenDimensionError) else error) from None

    def _in_example_sizes(self, why: str) -> "ExportSession | None":
        """This session without sizes that vary only because the example has several rows; None
        where there is none.
        """
        options = self.request.options
        specs = input_specs(self.source, options.inputs, options.dynamic).specs
        guesses = {
            f"{spec.name}:{index}": dim.given
            for spec in specs
            for index, dim in enumerate(spec.dims)
            if dim.name is not None and dim.given is not None and not dim.asked
        }
        if not guesses:
            return None
        sizes = ", ".join(f"{place}={size}" for place, size in guesses.items())
        note = f"sizes are fixed at those of the example ({sizes}): where they vary, {why}"
        texts = [f"{place}={size}" for place, size in guesses.items()]
        request = replace(
            self.request, options=replace(options, dynamic=(*options.dynamic, *texts))
        )
        self.steps.say(note)
        return replace(self, request=request, notes=(note,))

    def _candidate(self) -> Candidate:
        """Engines of a program, or of the module where there is none."""
        takes = target_of(self.config.target).takes
        is_script = self.source.given_script() is not None
        if is_script and "script" not in takes:
            raise UsageError(
                f"{self.source.name} is a TorchScript module, and {self.config.target} takes"
                " programs of torch.export",
                hint="Use --target torchscript, or --target onnxruntime in fp32.",
            )
        if is_script or "program" not in takes:
            return self._of_module()
        try:
            model = self._as_eager(self._capture())
        except RefusedError as refused:
            if "script" not in takes or not falls_back(refused, self.request.options):
                raise
            return self._after_refusal(refused)
        try:
            return self._of_program(model)
        except (LoweringError, PassError) as error:
            if not model.captured.is_widened:
                raise
            self.steps.say(
                f"rewritten for more sizes, the model does not become an engine: {error}"
            )
        return self._of_program(self._capture(widens=False))

    def _capture(self, widens: bool = True) -> Prepared:
        plan = given_plan(self.config, self.source)
        options = replace(self.request.options, widens=widens)
        return prepare(self.source, options, self.steps, plan, self.notes)

    def _traced_as_eager(self) -> Candidate | None:
        """Engines of the model, traced along the code that eager runs; None if that fails."""
        options = self.request.options
        if options.as_eager or options.fallback == "none":
            return None
        options = replace(options, as_eager=True)
        again = replace(self, request=replace(self.request, options=options))
        self.steps.say("the trace differs from eager; tracing again, hidden from the model's code")
        try:
            found = again._of_program(again._capture())
        except EnginecastError as error:
            self.steps.log(f"tracing hidden from the model's code failed: {error}")
            return None
        return found if found.artifacts else None

    def _as_eager(self, model: Prepared) -> Prepared:
        """The model, or where its code tells sizes that vary from numbers, in the example's."""
        difference = model.captured.unlike_eager
        fixed = self._in_example_sizes(difference) if difference else None
        try:
            other = fixed._capture() if fixed else model
        except EnginecastError:
            return model
        return model if other.captured.unlike_eager else other

    def _of_program(self, model: Prepared) -> Candidate:
        """Passes, lowering and the first run of every engine that is made of a program."""
        with self.steps("read the weights"):
            self.source.fingerprint()  # refuses weights that are not numbers
        state_notes: list[str] = []
        with self.steps("reference"), torch_threads(1 if model.is_small else None):
            model, reference = self._reference(model, state_notes)
            reference = self._accepting(reference)
            wrong = captured_wrongly(model, reference)
            if self.config.quantized:
                model = with_more_calibration(model)
        # Code that drops a tensor was rewritten, and did not hide it from the trace.
        may_be_hidden = wrong and not model.captured.dropping
        if may_be_hidden and (other := self._traced_as_eager()) is not None:
            return other
        problems = (*model.unverified, *wrong)
        for note in state_notes:
            self.steps.say(note)
        kept = (*model.captured.notes, *state_notes)
        # The eager module of the first call is not needed again: its memory is free from here on.
        model = replace(model, captured=replace(model.captured, notes=kept), first=None)
        # A plan takes many runs of the program.
        with torch_threads(1 if model.is_small and not self.config.quantized else None):
            rewritten = self._rewrite(model, reference, () if problems else self.config.engines)
        problems = (*problems, *rewritten.failures)
        plan = plan_notes(plan_of(rewritten.program))
        judged = Candidate(
            model=model,
            config=self.config,
            reference=rewritten.reference,
            runs=(),
            rungs=model.captured.rungs,
            notes=(*model.captured.notes, *plan, *rewritten.notes),
            program=print_ir(
                rewritten.engines[0].program if rewritten.engines else rewritten.program
            ),
            rewritten=rewritten,
        )
        if problems or rewritten.reference.floor.defects:
            criteria = Criteria(rewritten.reference, rewritten.emulated, problems)
            return replace(judged, runs=(EngineRun(criteria.judge()),))
        artifacts = self._lower(model, rewritten)
        with self.steps("describe"):
            manifest = describe_program(model, self.config, rewritten, artifacts)
        sums = self._sums(model, rewritten, artifacts)
        manifest = msgspec.structs.replace(manifest, notes=(*manifest.notes, *sums))
        runs = self._run(model, manifest, rewritten, artifacts)
        fusions = count_fusions(
            expect_fusions(model.captured.program),
            rewritten.program,
            artifacts[0].ops,
            runs[0].executed,
            rewritten.sites(),
        )
        notes = [*sums, *(note for engine in rewritten.engines for note in engine.notes)]
        checked = next((run.followed for run in runs if run.followed), None)
        if isinstance(checked, StepCheck):
            manifest = msgspec.structs.replace(manifest, stepped=checked)
            notes.append(step_note(checked))
        elif manifest.generation is not None and checked is not None:
            generation = msgspec.structs.replace(manifest.generation, checked=checked)
            manifest = msgspec.structs.replace(manifest, generation=generation)
            notes.append(generation_note(checked))
        if self.encoder is not None:
            part = self.encoder.report
            notes.append(f"{ENCODER}: {verdict_line(part.verdict, part.floor_dtype)}")
        return replace(
            judged,
            reference=runs[0].reference or judged.reference,
            runs=runs,
            notes=(*judged.notes, *notes),
            artifacts=artifacts,
            manifest=manifest,
            fusions=fusions,
        )

    def _reference(self, model: Prepared, notes: list[str]) -> tuple[Prepared, Reference]:
        """What eager gives; for values of the example alone where the model refuses others."""
        refer = partial(reference_of, dtype=self.config.precision, edges=not self.config.quantized)
        try:
            return model, refer(model, notes=notes)
        except VerificationError as error:
            if model.watched:  # other values may take other paths
                raise
            _refuse_caught(model.source, error)
            cases = in_example_values(model.cases, model.source.example())
            if model.branches:  # on values, which assertions are, too
                places, settled = model.branches, model.settled
                covered = cover_branches(model.source, model.inputs, cases, places, settled)
                if covered.unverified:
                    raise
                cases = covered.cases
            model = replace(model, cases=cases)
            for runs in (model.plain, model.exact):
                runs.watch([case.inputs for case in model.observed])
            try:
                reference = refer(model, notes=notes)
            except EnginecastError:
                raise error from None
            notes.append(f"floats were compared only at the example's values: {error.message}")
            return model, reference

    def _accepting(self, reference: Reference) -> Reference:
        """The reference with what the user accepts.

        Raises:
            UsageError: there is no such output or case.
        """
        outputs = list(reference.cases[0].outputs)
        cases = [case.name for case in (*reference.cases, *reference.edges)]
        accept = tuple(parse_accept(text, outputs, cases) for text in self.request.accept)
        check_names(accept, outputs, cases)
        return replace(reference, floor=replace(reference.floor, accept=accept))

    def _rewrite(
        self, model: Prepared, reference: Reference, engines: tuple[EngineConfig, ...]
    ) -> Rewritten:
        """Run the passes, and those that lower; where that goes wrong, search for the culprits."""
        passes, target = build(self.config.pipeline), self.config.target
        rewritten = rewrite(model, passes, reference, self.steps, target=target, engines=engines)
        if not is_wrong(rewritten):
            return rewritten
        if self.request.drop_guilty:
            return without_culprits(
                model, passes, reference, rewritten, target, self.steps, engines
            )
        return replace(rewritten, bisection=find_culprits(model, rewritten, self.steps))

    def _lower(self, model: Prepared, rewritten: Rewritten) -> tuple[Artifact, ...]:
        """Write the files of every engine."""
        artifacts = []
        for config, engine in zip(self.config.engines, rewritten.engines, strict=True):
            request = lowering_request(model, config, engine.program, self.staging.folder)
            request = replace(request, tell=self.steps.tell, say=self.steps.say)
            with self.steps(self._step("lower", config)):
                artifact = target_of(config.target).lower(request)
            self.steps.log(f"lowered: {artifact.nodes} nodes, {dict(artifact.ops)}")
            for note in engine.notes:
                self.steps.say(note)
            artifacts.append(artifact)
        return tuple(artifacts)

    def _sums(
        self, model: Prepared, rewritten: Rewritten, artifacts: Sequence[Artifact]
    ) -> list[str]:
        """What engines would lose whose sums not every CPU has."""
        notes = []
        for engine, artifact in zip(rewritten.engines, artifacts, strict=True):
            if artifact.requires.get(SUMS) == EXACT:
                with self.steps("emulate a CPU without VNNI"):
                    notes.append(without_vnni(model, engine, rewritten.reference))
                self.steps.say(notes[-1])
        return notes

    def _run(
        self,
        model: Prepared,
        manifest: Manifest,
        rewritten: Rewritten,
        artifacts: tuple[Artifact, ...],
    ) -> tuple[EngineRun, ...]:
        """Run every engine that this machine can run, and judge it."""
        names = [name for artifact in artifacts for name in artifact.files]
        bundle = unsealed(self.staging.folder, manifest, names)
        runs = []
        follows = self._follows(model, rewritten.reference.floor)
        pairs = zip(self.config.engines, manifest.engines, strict=True)
        for index, (config, record) in enumerate(pairs):
            with self.steps(self._step("verify", config)):
                engine = rewritten.engines[index]
                criteria = criteria_of(replace(rewritten, emulated=engine.emulated))
                cases = (*model.cases, *edge_cases(model))
                widened = partial(widened_cases, engine.program, cases, model.output_names)
                threads = self.request.threads
                # A bundle has one stored reference, for one engine's choices and kernels.
                is_single = len(self.config.engines) == 1
                ties = Ties(model, engine, config, manifest, record, self.staging.folder, threads)
                runs.append(
                    run_engine(
                        *(bundle, record, config, criteria, threads),
                        widened=widened,
                        follows=None if follows is None else follows(config),
                        at_ties=ties.tie_reference if is_single else None,
                        with_kernels=partial(with_kernels, model) if is_single else None,
                        place_of_loss=partial(place_of_loss, model),
                        also=partial(
                            failures_on_fresh_inputs, model, plan_of(rewritten.program), criteria
                        ),
                    )
                )
        return tuple(runs)

    def _follows(self, model: Prepared, floor: Floor) -> Callable[[EngineConfig], Follows] | None:
        """What calls an engine in turn, as the model is called; None for one without state."""
        source = self.source
        if isinstance(source, StatefulSource):
            with self.steps("calls in turn"):
                write_start(self.staging.folder, source)
                turned = partial(check_turn, turn(model, source, floor))
            return lambda _: turned
        if not isinstance(source, DecoderSource):
            return None
        read = None if self.encoder is None else self.encoder.candidate.model
        assert read is None or isinstance(read, Prepared)  # it is made of a program, too
        with self.steps("generate"):
            run = generated(model, source, floor, read)
            write_continued(self.staging.folder, run.model, run.encoded)
        return lambda config: partial(self._check, run, config)

    def _check(
        self, run: Run, config: EngineConfig, engine: Engine
    ) -> tuple[GenerationCheck, tuple[str, ...]]:
        """Let an engine generate, with that of its encoder where there is one."""
        bundle = None if self.encoder is None else self.encoder.bundle
        if bundle is None:
            return check(run, engine)
        with open_part(bundle, config, self.request.threads) as encoder:
            return check(run, engine, encoder)

    def _step(self, name: str, config: EngineConfig) -> str:
        return name if config is self.config else f"{name} for {config.target}"

    def _after_refusal(self, refused: RefusedError) -> Candidate:
        """Engines of the module, after torch.export refused it for its control flow."""
        for rung in refused.rungs:
            self.steps.say(f"capture: {rung}")
        self.steps.say("torch.export does not capture this model: falling back to TorchScript")
        try:
            return self._of_module(refused)
        except (CaptureError, LoweringError, VerificationError) as second:
            raise CaptureError(
                f"{refused.message}\nTorchScript does not help: {second.message}",
                hint=refused.hint,
            ) from second

    def _of_module(self, refused: RefusedError | None = None) -> Candidate:
        """An engine of the module itself: scripted where it branches, traced elsewhere.

        Args:
            refused: of torch.export; the place that it names must be scripted.

        Raises:
            LoweringError: it was to be quantized, which passes do to programs alone.
        """
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
        refusal = None if refused is None else refused.refusal
        must: tuple[SourceLocation, ...] = ()
        if refusal is not None and refusal.file:
            must = (SourceLocation(refusal.file, refusal.line).resolved,)
        try:
            engine, notes = self._best_script(must)
        except SizesDecideError as error:
            if self.request.options.dynamic:
                raise
            self.steps.log("again, with fixed sizes")
            engine, notes = self._best_script(must, fixed=error.message)
        rungs = engine.rungs
        if refused is not None:
            self.steps.say(f"capture: {rungs[0]}")
            rungs = (*refused.rungs, *rungs)
        assert engine.manifest is not None  # the engine was written
        manifest = msgspec.structs.replace(
            engine.manifest, capture=describe_rungs(rungs), notes=notes
        )
        return replace(engine, rungs=rungs, notes=notes, manifest=manifest)

    def _best_script(
        self, must: tuple[SourceLocation, ...], fixed: str = ""
    ) -> tuple[Candidate, tuple[str, ...]]:
        """An engine of the module itself, and the notes on it and its reference.

        Args:
            must: places that must be scripted.
            fixed: why no size may vary; empty where sizes may.
        """
        model = prepare_script(self.source, self.request.options, self.steps, fixed=fixed)
        with self.steps("paths"):
            model, explored = explore(model, must)
        config = replace(self.config, pipeline="")
        with self.steps("reference"):
            branches = self.request.options.allow_unverified_branches
            reference, notes = reference_of_script(model, config.precision, branches=branches)
            reference = self._accepting(reference)
        engine = ScriptEngines(
            model, reference, config, self.request, self.staging, self.steps, explored, must
        ).best()
        return engine, (*engine.notes, *explored.verified, *notes)


def _refuse_caught(source: Source, error: EnginecastError) -> None:
    """Refuse a program of which an assertion fails where eager runs.

    Raises:
        VerificationError: the model's code catches the error, and goes on.
    """
    failed = error.inputs if isinstance(error, AssertionFailedError) else None
    if failed is not None and not error_of(source.eager(), failed):
        raise VerificationError(
            f"{error.message}, and eager runs on the same inputs",
            hint="Where the model's code catches the error and goes on, rewrite the `try` there.",
        ) from error


def plan_notes(found: QuantizationPlan | None) -> tuple[str, ...]:
    """A quantization plan in one sentence, and how it was found; nothing without one."""
    if found is None:
        return ()
    choices = Counter(layer.choice for layer in found.layers)
    counts = ", ".join(f"{count} {choice}" for choice, count in sorted(choices.items()))
    predicted = found.predicted_error
    error = "" if predicted is None else f"predicted error {predicted:.2g}, "
    return (
        f"{found.format} plan for {found.arch}: {counts}; {error}allowed {found.max_error:.2g}"
        f" ({PLAN_NAME})",
        *found.notes,
    )
