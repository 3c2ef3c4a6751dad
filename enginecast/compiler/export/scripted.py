"""Make engines from the module itself, as a hybrid of script and trace (TorchScript, or ONNX from
it): inputs, cases, reference, and the paths through its code.

Without a program, nothing proves which sizes an engine accepts. The ranges in its manifest are
those that it was compared over: at their ends, and at sizes where code is likely to differ from its
trace.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from enginecast.capture.control_flow.cover.branches import Unverified, find_predicates
from enginecast.capture.control_flow.detect.recorder import Read, record
from enginecast.capture.control_flow.detect.statements import sizes_decide
from enginecast.capture.inputs.downgraded import Downgraded
from enginecast.capture.inputs.examples import WORK, Case, example_sizes, sample
from enginecast.capture.inputs.given import given_prompts
from enginecast.capture.inputs.narrowing import fix
from enginecast.capture.inputs.specs import dim_place, named_dims, sizes_of
from enginecast.capture.outputs.flatten import OutputSpec, parse_wanted, run_named
from enginecast.capture.python.locations import SourceLocation, is_library_code
from enginecast.capture.sources.base.source import Source
from enginecast.capture.torchscript.questions import questions
from enginecast.capture.torchscript.script import DEPRECATION, Hybrid, hybrid
from enginecast.capture.tracing.attempt import Rung
from enginecast.compiler.engines.checks import Criteria
from enginecast.compiler.engines.lower_and_run import run_engine, unsealed
from enginecast.compiler.export_attempts import SizesDecideError
from enginecast.compiler.prepare.cases import SEED, accepted_branch, choose_cases, cover_branches
from enginecast.compiler.prepare.open_model import input_specs
from enginecast.compiler.prepare.program import OpenedModel
from enginecast.compiler.prepare.reference import in_turn
from enginecast.compiler.publication.bundle import Candidate
from enginecast.compiler.publication.manifest import describe_manifest
from enginecast.compiler.ranges.eager import Eager
from enginecast.compiler.ranges.fit_values import fit_values
from enginecast.compiler.ranges.sizes import STYLES, fix_refused, telling_cases
from enginecast.compiler.ranges.values import of_module
from enginecast.compiler.request import EngineConfig, ExportRequest, ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.errors import CaptureError, EnginecastError, UsageError
from enginecast.exporters.registry import target_of
from enginecast.exporters.target import ScriptRequest, Target
from enginecast.exporters.torchscript.lower import branches
from enginecast.exporters.torchscript.target import TorchScript
from enginecast.passes.ir.text import DTYPES
from enginecast.runtime.bundle.staging import Staging
from enginecast.verification.eager.make_reference import edge_reference, make_reference
from enginecast.verification.eager.outputs import fp64_outputs
from enginecast.verification.reference import Reference

SCRIPTED = "--fallback torchscript"
"""The option that asks for an engine of the module itself, where no program can be captured."""


def prepare_script(
    source: Source, options: ModelOptions, steps: Steps, *, fixed: str = ""
) -> OpenedModel:
    """Choose the inputs and the cases; every dimension that varies appears in three sizes.

    Args:
        fixed: why no size may vary; empty where sizes may.
    """
    if source.given_program() is not None:
        raise UsageError(
            f"{source.name} is a program of torch.export, and TorchScript is made of modules",
            hint="Use --target onnxruntime.",
        )
    prompts = None if options.prompts is None else given_prompts(options.prompts)
    specs, given, settled = input_specs(source, options.inputs, options.dynamic)
    specs, values = fit_values(source, specs, given or source.example())
    notes: list[str] = []
    notes += [*settled, *values]
    if fixed:
        narrowed = fix(specs, tuple(named_dims(specs)))
        assert narrowed is not None  # the caller asks only where the user asked for no size
        specs = narrowed.specs
        notes += [
            note.with_reason(fixed) for note in narrowed.notes if isinstance(note, Downgraded)
        ]
    eager = Eager(source.eager())
    specs, refused = fix_refused(eager, specs)
    specs, said = of_module(eager.module, specs, options.values)
    notes += [*refused, *said, *source.stored.notes()]
    for note in notes:
        steps.say(note)
    parameters = sum(source.weight_elements().values())
    work = 0 if options.thorough else parameters
    cases = choose_cases(source, specs, given, prompts, work, steps)
    example = example_sizes(specs)
    for index, (name, dim) in enumerate(named_dims(specs).items()):
        size = dim.maximum  # or the largest that runs in seconds
        others = math.prod(taken for other, taken in example.items() if other != name)
        while not dim.asked and size > 2 * dim.size and size * others * parameters > WORK:
            size = dim.fit(size // 2)
        inputs = sample(specs, {**example, name: size}, SEED + 100 + index)
        cases = (*cases, Case(f"largest {name}", inputs))
    # The ranges are those that the cases span.
    sizes = [sizes_of(specs, case.inputs) for case in cases]
    spans = {name: [each[name] for each in sizes] for name in sizes[0]}
    for name, dim in named_dims(specs).items():
        compared = replace(dim, minimum=min(spans[name]), maximum=max(spans[name]))
        if compared != dim:
            option = f"--dynamic {dim_place(specs, name)}={compared.shown}"
            text = f"{name} takes {compared.shown}, not {dim.shown}: others were not compared"
            notes.append(Downgraded(text, "sizes", option, is_asked=dim.asked))
            steps.say(notes[-1])
    specs = tuple(
        replace(
            spec,
            dims=tuple(
                replace(dim, minimum=min(spans[dim.name]), maximum=max(spans[dim.name]))
                if dim.name is not None
                else dim
                for dim in spec.dims
            ),
        )
        for spec in specs
    )
    wanted = parse_wanted(options.outputs, options.hidden_states)
    return OpenedModel(source, specs, cases, wanted, notes=tuple(notes))


def reference_of_script(
    model: OpenedModel, dtype: str, *, branches: bool = False
) -> tuple[Reference, tuple[str, ...]]:
    """The model's outputs in fp64 and in `dtype`, as a reference, and notes on it.

    Args:
        branches: the model may branch on values that nothing verifies; other sizes are then
            compared on usual values only.
    """
    notes: list[str] = []
    eager = model.source.eager
    forward = partial(run_named, wanted=model.wanted, autocasts=True)

    def exact(cases: Sequence[Any]) -> Mapping[str, Mapping[str, Any]]:
        outputs, note = fp64_outputs(eager, cases, forward)
        notes.extend([note] if note else [])
        return outputs

    run = in_turn(model, autocasts=True)
    is_script = model.source.given_script() is not None
    code = nn.Module() if is_script else model.source.empty()  # Python code mentions sizes
    parameters = sum(model.source.weight_elements().values())
    styles = STYLES[:1] if branches else STYLES
    telling = telling_cases(code, model.inputs, parameters, styles)
    swept = edge_reference(eager, telling, forward, exact, dtype=dtype)
    reference = make_reference(
        None,
        eager,
        model.cases,
        dtype=dtype,
        names=(),
        forward=run,
        mask_input=model.mask_input,
        exact=exact,
        singles={case.name: case.singles for case in model.cases if case.singles},
        row_inputs=model.row_inputs,
    )
    return replace(reference, edges=swept), (*dict.fromkeys(notes), *run.notes)


def output_specs(
    model: OpenedModel, reference: Reference, dtypes: Mapping[str, torch.dtype]
) -> tuple[OutputSpec, ...]:
    """Shapes of the outputs over all cases, as symbols where a size follows one."""
    sizes = [sizes_of(model.inputs, case.inputs) for case in reference.cases]
    specs = []
    for name, dtype in dtypes.items():
        shapes = [case.outputs[name].shape for case in reference.cases]
        ranks = sorted({len(shape) for shape in shapes})
        if len(ranks) > 1:
            raise CaptureError(
                f"the output {name!r} has {ranks} dimensions, depending on the input, and an"
                " engine's output has a fixed number",
                hint="Return it with a fixed number of dimensions.",
            )
        columns = zip(*shapes, strict=True)
        dims = tuple(_dim(tuple(c), sizes, f"{name}_{axis}") for axis, c in enumerate(columns))
        specs.append(OutputSpec(name, dtype, dims))
    return tuple(specs)


def _dim(found: tuple[int, ...], sizes: Sequence[Mapping[str, int]], other: str) -> int | str:
    """A number, a symbol, a multiple of one, or a name of its own."""
    for symbol in sizes[0]:
        given = tuple(case[symbol] for case in sizes)
        if len(set(given)) == 1:
            continue
        if given == found:
            return symbol
        factor = found[0] // given[0]
        if factor > 1 and all(f == factor * g for f, g in zip(found, given, strict=True)):
            return f"{factor}*{symbol}"
    return found[0] if len(set(found)) == 1 else other


@dataclass(frozen=True)
class Explored:
    """The tensor values that Python reads while the model runs, and the paths they decide."""

    runs: list[list[Read]]
    """For each case, the reads that depend on inputs or sizes."""
    unverified: dict[SourceLocation, str]
    """Predicates that took one path for all inputs tried, and that path."""
    verified: tuple[str, ...] = ()
    """A note on the branches whose paths were both seen."""

    @property
    def places(self) -> tuple[SourceLocation, ...]:
        return tuple(dict.fromkeys(read.place for run in self.runs for read in run))

    def unseen(
        self, held: Collection[SourceLocation], baked: Collection[SourceLocation]
    ) -> tuple[str, ...]:
        """The decisions of an engine that was not compared on both paths, in words.

        A value that is read from inputs and not scripted is a constant of the trace, and a later
        line may branch on it.

        Args:
            held: places that are scripted, where the engine chooses its own path.
            baked: places where it always takes the path of the trace.
        """
        decided = (*held, *baked)
        unseen = {place: self.unverified[place] for place in decided if place in self.unverified}
        for place in self.places:
            reads = [
                [r for r in run if r.place == place and r.decides == "inputs"] for run in self.runs
            ]
            values = {tuple(" ".join(str(r.value).split()) for r in run) for run in reads} - {()}
            if not values or place in held or is_library_code(place.file):
                continue
            [first, *_] = (read for run in reads for read in run)
            if len(values) == 1:
                found = f"Python always read {', '.join(*values)}"
            elif first.kind == "bool":
                continue
            else:
                found = f"the trace fixes what {first.code!r} reads, and code may branch on it"
            unseen.setdefault(place, str(Unverified(str(place), found)))
        return tuple(unseen.values())


def explore(model: OpenedModel, places: Collection[SourceLocation]) -> tuple[OpenedModel, Explored]:
    """Run the model to find deciding reads, and cases that take the remaining paths.

    Args:
        places: additional deciding lines, named by torch.export.
    """
    module = model.source.eager(torch.float32)
    runs = _reads(module, model.cases)
    met = {read.place for run in runs for read in run} | {*places}
    if not met:
        return model, Explored(runs, {})
    first = model.cases[0].inputs
    predicates = met - {*find_predicates(module, first, met).unseen}
    covered = cover_branches(model.source, model.inputs, model.cases, predicates)
    if len(covered.cases) > len(model.cases):
        model = replace(model, inputs=covered.inputs, cases=covered.cases)
        runs = _reads(module, model.cases)
    found = {one.place: str(one) for one in covered.unverified}
    unverified = {p: found[str(p)] for p in predicates if str(p) in found}
    return model, Explored(runs, unverified, covered.verified)


def _reads(module: nn.Module, cases: Sequence[Case]) -> list[list[Read]]:
    runs = record(module, [case.inputs for case in cases])
    return [[read for read in run if read.decides != "weights"] for run in runs]


@dataclass(frozen=True)
class ScriptEngines:
    """Makes engines of one model and compares them with it."""

    model: OpenedModel
    reference: Reference
    config: EngineConfig
    request: ExportRequest
    staging: Staging
    steps: Steps
    explored: Explored
    places: tuple[SourceLocation, ...] = ()
    """Branches that must be scripted; others that a run meets are scripted if possible."""

    def best(self) -> Candidate:
        """The first engine that agrees with eager, else the last one made."""
        dtype, source = DTYPES[self.config.precision], self.model.source
        suspects: list[SourceLocation] = []
        engine: Candidate | None = None
        # Scripted if possible: what reads in a run, then what the tracer warned of, then what only
        # the source shows to decide by sizes.
        optional = self.explored.places
        for why, find in (
            ("", tuple),
            ("it warned about", lambda: suspects),
            ("that branch on sizes", self._decided_by_sizes),
        ):
            found = {*find()} - {*optional, *self.places}
            if why and not found:
                continue
            if why:
                self.steps.log(f"the trace does not agree with eager: scripting the modules {why}")
            optional = (*optional, *sorted(found))
            try:
                with self.steps("script and trace"):
                    made = hybrid(
                        source.eager(dtype).to(self.config.device),
                        self._example,
                        self.places,
                        wanted=self.model.wanted,
                        dtype=dtype,
                        optional=optional,
                    )
            except CaptureError as error:
                if engine is None:
                    raise
                self.steps.log(f"with more modules scripted: {error.message}")
                break  # the earlier engine is more informative: it was compared with eager
            for line in (*made.notes, *(f"the tracer warns: {s}" for s in made.suspects)):
                self.steps.log(line)
            self._refuse_questions(made)
            suspects[:] = [suspect.place.resolved for suspect in made.suspects]
            # Not compared on both paths: branches that are scripted, and those that are baked.
            problems = self.explored.unseen(made.held, made.unscripted)
            note = f"{DEPRECATION}: a later torch may not load this engine"
            notes = [note]
            if self.request.options.allow_unverified_branches:
                notes += map(accepted_branch, problems)
                problems = ()
            engine = self._engine(made, TorchScript(), "a TorchScript engine", notes, problems)
            if engine.verdict.outcome != "rejected":
                is_asked = self.config.target == engine.config.target
                return engine if is_asked else self._or_onnx(engine, made)
        assert engine is not None  # the first attempt made one, or raised
        return engine

    @cached_property
    def _example(self) -> dict[str, Tensor]:
        """The inputs to trace, on the engine's device: sizes of two or more, pairwise different."""
        example = sample(self.model.inputs, example_sizes(self.model.inputs), SEED)
        return {name: tensor.to(self.config.device) for name, tensor in example.items()}

    def _decided_by_sizes(self) -> Collection[SourceLocation]:
        """Where sizes decide: a loop over a shape is traced without a warning, and only its source
        shows it.
        """
        example = {name: tensor.cpu() for name, tensor in self._example.items()}
        return sizes_decide(self.model.source.eager(), example)

    def _refuse_questions(self, made: Hybrid) -> None:
        """Refuse sizes that were not compared if code asks whether it is TorchScript.

        A script is the same code as eager, so a few sizes stand for the others; code that asks may
        treat one size in a hundred differently.
        """
        if self.model.source.given_script() is not None:  # eager is that script
            return
        dims = named_dims(self.model.inputs)
        cases = [case.inputs for case in (*self.reference.cases, *self.reference.edges)]
        found = [sizes_of(self.model.inputs, inputs) for inputs in cases]
        compared = {tuple(sizes[name] for name in dims) for sizes in found}
        ranges = [dim.sizes for dim in dims.values()]
        count = math.prod(map(len, ranges))
        if count <= len(compared) and compared.issuperset(itertools.product(*ranges)):
            return
        asked = questions(made.module)
        if not asked:
            return
        names = [name for name, dim in dims.items() if len(dim.sizes) > 1]
        raise SizesDecideError(
            f"{asked[0]} asks whether it is TorchScript, and may then compute something other than"
            f" eager: of the sizes {', '.join(names)}, only those compared can be accepted",
            hint="Keep the sizes fixed, or ask for so few that all are compared.",
        )

    def _or_onnx(self, engine: Candidate, made: Hybrid) -> Candidate:
        """The engine converted to ONNX if that agrees with eager too, else `engine`."""
        is_script = self.model.source.given_script() is not None
        try:
            count = branches(made.module) if is_script else 0
            if count and not self.request.options.allow_unverified_branches:
                found = "a branch or loop" if count == 1 else f"{count} branches or loops"
                raise CaptureError(  # no run shows which path it takes
                    f"the TorchScript module has {found}, and which paths the verification takes"
                    " there is not known: --allow-unverified-branches converts it all the same"
                )
            unknown = "which paths of the TorchScript module the verification takes is not known"
            onnx = self._engine(
                made,
                target_of(self.config.target),
                "an ONNX engine, by torch's legacy exporter",
                [
                    f"{DEPRECATION}: this engine was made with it and with torch's legacy ONNX"
                    " exporter; running it needs neither",
                    *([accepted_branch(unknown)] if count else []),
                    Downgraded("no passes ran on what is made from the module itself", "passes"),
                ],
            )
        except EnginecastError as error:
            reason = error.message
        else:
            rejected = onnx.verdict.outcome == "rejected"
            for name in (onnx if rejected else engine).artifacts[0].files:
                (self.staging.folder / name).unlink()
            if not rejected:
                return onnx
            reason = " ".join(onnx.verdict.reasons[0].split())
        note = Downgraded(
            f"no ONNX engine ({reason}): this becomes a TorchScript engine, which needs torch, and"
            " --allow-code to run",
            "engine",
            SCRIPTED,
            is_asked=True,
        )
        self.steps.say(note)
        [taken] = engine.rungs
        taken = replace(taken, reason=f"{taken.reason}; no ONNX engine: {reason}")
        return replace(engine, rungs=(taken,), notes=(*engine.notes, note))

    def _engine(
        self,
        made: Hybrid,
        target: Target,
        how: str,
        notes: Sequence[str],
        problems: tuple[str, ...] = (),
    ) -> Candidate:
        """Write an engine, run it over all cases and judge it."""
        config = replace(self.config, target=target.name)
        with torch.no_grad():
            given = made.module(*self._example.values())
        dtypes = {name: t.dtype for name, t in zip(made.outputs, given, strict=True)}
        outputs = output_specs(self.model, self.reference, dtypes)
        request = ScriptRequest(
            made.module,
            self.staging.folder,
            self._example,
            made.outputs,
            input_dims={
                spec.name: {i: d.name for i, d in enumerate(spec.dims) if d.name}
                for spec in self.model.inputs
            },
            output_dims={
                spec.name: {i: d for i, d in enumerate(spec.dims) if isinstance(d, str)}
                for spec in outputs
            },
            precision=config.precision,
        )
        step = "lower" if target.name == TorchScript.name else "lower to ONNX"
        with self.steps(step):
            artifact = target.lower_script(request)
        manifest = describe_manifest(self.model, config, outputs, (artifact,))
        bundle = unsealed(self.staging.folder, manifest, artifact.files)
        criteria = Criteria(self.reference, problems=problems)
        threads, record = self.request.threads, manifest.engines[0]
        with self.steps("verify"):
            run = run_engine(bundle, record, config, criteria, threads, counts_ops=False)
        return Candidate(
            model=self.model,
            config=config,
            reference=self.reference,
            runs=(run,),
            rungs=(Rung("torchscript", "taken", how),),
            notes=(*made.notes, *notes),
            program=made.module.code,
            artifacts=(artifact,),
            manifest=manifest,
        )
