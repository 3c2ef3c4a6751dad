"""From a source to a captured program and its verification inputs: the first steps of export,
inspect and opt.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import PurePath

import torch
from torch import Tensor, nn
from torch.fx import Node

from enginecast.capture.control_flow.detect.recorder import Read
from enginecast.capture.control_flow.detect.reporters import overlooked
from enginecast.capture.inputs.downgraded import Downgraded
from enginecast.capture.inputs.examples import Case, edge_inputs, example_sizes, is_heavy, sample
from enginecast.capture.inputs.given import given_prompts
from enginecast.capture.inputs.specs import BATCH, InputSpec, ranges_of, sums
from enginecast.capture.outputs.flatten import Wanted, parse_wanted
from enginecast.capture.sources.base.source import Source
from enginecast.capture.tracing.captured import Captured, Watch, capture
from enginecast.capture.tracing.sizes.shapes import Range, sum_checks
from enginecast.compiler.prepare.cases import (
    MOST_TRIALS,
    SEED,
    Covered,
    accepted_branch,
    allowed,
    along_guards,
    choose_cases,
    cover_branches,
    cover_paths,
    telling_outputs,
    that_eager_takes,
    with_other_sizes,
    with_telling_values,
)
from enginecast.compiler.prepare.open_model import input_specs
from enginecast.compiler.ranges.eager import Eager, parameters_of
from enginecast.compiler.ranges.fit_values import fit_values, note_uses
from enginecast.compiler.ranges.sizes import judge_sizes, leave_out_refused
from enginecast.compiler.ranges.values import of_program
from enginecast.compiler.request import ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.errors import CaptureError, UsageError
from enginecast.library_names import aten
from enginecast.passes.captured.widen_halves import WidenHalves
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.blocks import all_nodes, has_structure
from enginecast.passes.ir.quantization_plan import QuantizationPlan
from enginecast.passes.ir.text import dtype_text
from enginecast.runtime.device.torch_threads import torch_threads
from enginecast.verification.eager.outputs import reference_program
from enginecast.verification.runs import Runs

SORTING = frozenset(
    {
        *(aten.topk.default, aten.sort.default, aten.sort.stable, aten.argsort.default),
        *(aten.argsort.stable, aten.msort.default, aten.kthvalue.default, aten.median.dim),
    }
)
"""Ops that name one of several equal values; torch does not say which."""
OBSERVED = 2
"""Cases that are run after every pass; more take longer and find little more."""
SMALL = 300_000_000
"""Parameters up to which one thread of torch runs a model, unless its inputs are large: what is run
is short, and waking a second thread for each op cost T5-base a tenth to a quarter of its CPU time.
"""
WITNESSED = 2
"""Cases on which it is recorded what the model reads of its inputs."""


@dataclass(frozen=True)
class OpenedModel:
    """A model, with the inputs that its engines will be compared on."""

    source: Source
    inputs: tuple[InputSpec, ...]
    cases: tuple[Case, ...]
    wanted: Wanted
    notes: tuple[str, ...] = ()
    """What a user should know of one without a program; those of others are in `captured`."""

    @property
    def symbols(self) -> Mapping[str, Range]:
        """Least and greatest size of each symbolic dimension."""
        return ranges_of(self.inputs)

    @property
    def row_inputs(self) -> tuple[str, ...]:
        """The inputs with a row for each element of a batch, whose size varies from 1 on."""
        first = [(spec.name, spec.dims[0]) for spec in self.inputs if spec.dims]
        named = [dim.name for _, dim in first if dim.name and not dim.parts and 1 in dim.sizes]
        batch = BATCH if BATCH in named else next(iter(named), None)
        if any(dim.name == batch for spec in self.inputs for dim in spec.dims[1:]):
            return ()
        return tuple(name for name, dim in first if dim.name == batch) if batch else ()

    @property
    def mask_input(self) -> str | None:
        """The input that marks valid rows."""
        # One that is as long as the tokens before, too, has no column for each row of an output;
        # nor does that of an encoder, beside it.
        if sums(self.inputs):
            return None
        masks = (spec.name for spec in self.inputs if spec.kind == "attention_mask")
        return next(masks, None)


@dataclass(frozen=True, kw_only=True)
class Prepared(OpenedModel):
    """A model that was captured."""

    captured: Captured
    plain: Runs
    """Of the captured program."""
    exact: Runs
    """Of the captured program in fp64."""
    watched: tuple[Case, ...] = ()
    """The cases that every pass is watched on; empty: the first ones."""
    unverified: tuple[str, ...] = ()
    """Branches of which no case takes one of the paths, where that was not allowed."""
    quantization: QuantizationPlan | None = None
    """A plan that was given, for the passes to carry out."""
    runs: Sequence[Sequence[Read]] = ()
    """What Python read of tensors in runs of the model."""
    doubles: tuple[str, ...] = ()
    """Weights or inputs that are float64 where the program computes in fp32."""
    scales: Mapping[str, Tensor] = field(default_factory=dict)
    """Those of weights that stay in fp8 as the checkpoint has them, by name: [] or [N, 1]."""
    calibration: tuple[Case, ...] = ()
    """Inputs that static scales are made from besides those of the cases."""

    @property
    def observed(self) -> tuple[Case, ...]:
        """The cases that are run after every pass; they take every path that any case takes."""
        return self.watched or _first(self.cases)

    @property
    def is_small(self) -> bool:
        """Whether runs of it are too short for several threads."""
        return _is_small(self.captured)

    @property
    def context(self) -> PassContext:
        """What passes may know of the model."""
        calibration = (*self.cases, *self.calibration)
        return PassContext(
            calibration=tuple(case.inputs for case in calibration),
            names=tuple(case.name for case in calibration),
            plan=self.quantization,
            mask_input=self.mask_input,
            scales=self.scales,
        )

    @property
    def model_outputs(self) -> tuple[str, ...]:
        """What the model returns."""
        guards = {guard.output for guard in self.captured.guards}
        return tuple(name for name in self.output_names if name not in guards)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Of the program, guards included."""
        return tuple(spec.name for spec in self.captured.outputs)

    @cached_property
    def edge_cases(self) -> list[Case]:
        """Unusual values; none for a program that takes the path of one run alone."""
        program = self.captured.program
        if self.captured.guards:
            return []
        sorts = any(node.target in SORTING for node in all_nodes(program))
        return edge_inputs(self.inputs, SEED, parameters_of(program), sorts=sorts)


def _unread_layers(source: Source, captured: Captured) -> Iterator[str]:
    """How many layers of a model nothing reads: those behind the outputs that were asked for."""
    program = captured.program
    live: set[Node] = set()
    for node in reversed(program.graph.nodes):
        if node.op == "output" or node in live:
            live.update(node.all_input_nodes)
    parameters = program.graph_signature.inputs_to_parameters
    read = {parameters[node.name] for node in live if node.name in parameters}
    for path, layers in source.empty().named_modules():
        if isinstance(layers, nn.ModuleList) and len(layers) > 1:
            within = {name for name in read if name.startswith(f"{path}.")}
            places = {name.removeprefix(f"{path}.").partition(".")[0] for name in within}
            if places and len(places) < len(layers):
                unread = len(layers) - len(places)
                yield f"{unread} of {len(layers)} layers left out ({path}): nothing reads them"


def prepare(
    source: Source,
    options: ModelOptions,
    steps: Steps,
    quantization: QuantizationPlan | None = None,
    notes: tuple[str, ...] = (),
    watch: Watch | None = None,
) -> Prepared:
    """Capture a model and choose its verification inputs.

    Args:
        quantization: a plan for the passes to carry out.
        notes: what a user should know besides.
        watch: see `capture`.

    Raises:
        CaptureError: torch.export refused the model.
    """
    wanted = parse_wanted(options.outputs, options.hidden_states)
    prompts = None if options.prompts is None else given_prompts(options.prompts)
    is_code = source.given_program() is None
    scales = source.scales() if options.keep_quantized else {}
    if options.keep_quantized and not any(scale.isfinite().all() for scale in scales.values()):
        raise UsageError(
            f"--keep-quantized does not fit {source.name}: no weight of it is in float8_e4m3fn"
            " with one scale for all or for each row"
        )
    with torch_threads(1):
        specs, given, sizes = input_specs(source, options.inputs, options.dynamic)
        specs, values = fit_values(source, specs, given or source.example())
        for note in (*sizes, *values):
            steps.say(note)
        with steps("capture"):
            captured = capture(
                *(source, specs, sample(specs, example_sizes(specs), SEED), wanted),
                *(options.furthest, given),
                watch=watch,
            )
        steps.log_passes(run for run in captured.runs if run.rewritten)
        written = captured.as_written
        # Which sizes and values the program takes as the model does.
        if is_code:
            inputs, said = note_uses(written, captured.inputs, given or source.example())
            captured = replace(captured, inputs=inputs, notes=(*captured.notes, *said))
        captured = judge_sizes(source, captured, wanted)
        checks = (*captured.size_checks, *sum_checks(captured.inputs))
        with steps("values"):
            inputs, said = of_program(written, captured.inputs, options.values)
            notes_so_far = (*captured.notes, *said)
            captured = replace(captured, inputs=inputs, notes=notes_so_far, size_checks=checks)
            if is_code:
                captured = leave_out_refused(source, captured, wanted)
        for rung in captured.rungs:
            (steps.say if len(captured.rungs) > 1 else steps.log)(f"capture: {rung}")
        more = [*source.notes, *source.stored.notes(widened=not scales)]
        more += _unread_layers(source, captured) if wanted else []
        for name, option in ({} if wanted else source.left_out).items():
            more.append(Downgraded(f"{name} is no output: {option} adds it", "output", option))
        if source.constants:
            fixed = ", ".join(f"{name} {value}" for name, value in source.constants.items())
            more.append(f"part of the engine: {fixed}")
        doubles = tuple(_doubles(source, captured))
        if doubles:
            found = f"{doubles[0]} is float64"
            text = f"the model computes in fp64 ({found}), and its engine does not"
            more.append(Downgraded(text, "precision"))
        if captured.guards:
            reads = (guard.read for guard in captured.guards)
            at = dict.fromkeys(f"{PurePath(read.file).name}:{read.line}" for read in reads)
            text = "one path is in the engine, which refuses inputs that take another"
            text = f"{text}: {', '.join(at)}"
            more.append(Downgraded(text, "branch", "--fallback specialise", is_asked=True))
        widened = (run.sites for run in captured.runs if isinstance(run.pass_, WidenHalves))
        lines = {f"{site.note} at {site.source or site.node}" for site in chain(*widened)}
        if lines:
            found = "; ".join(sorted(lines))
            more.append(
                f"the model computes in 16 bits itself, and its fp32 engine rounds alike: {found}"
            )
        if captured.autocast:
            more.append(
                "the model's regions of torch.autocast are off, for --precision says what is"
                f" computed in 16 bits: {'; '.join(captured.autocast)}"
            )
        for note in (*captured.notes, *more):
            steps.say(note)
    every_note = [*notes, *sizes, *values, *captured.notes, *more]
    with torch_threads(1 if _is_small(captured) else None):
        program, inputs, checks = captured.program, captured.inputs, captured.size_checks
        parameters = 0 if options.thorough else parameters_of(program)
        cases = choose_cases(source, inputs, given, prompts, parameters, steps)
        cases = with_other_sizes(inputs, cases, captured.other_sizes)
        cases = allowed(inputs, cases, checks)
        if is_code:
            cases = that_eager_takes(source, program, inputs, cases)
        names = tuple(spec.name for spec in captured.outputs)
        mask = OpenedModel(source, inputs, cases, wanted).mask_input
        plain = Runs(lambda: program, names, mask)
        exact = Runs(partial(reference_program, program), names, mask)
        unverified = list[str]()
        # What no input shows is a problem, or where a user allows it, a note.
        unshown = every_note if options.allow_unverified_branches else unverified
        as_shown = accepted_branch if options.allow_unverified_branches else str
        if captured.unlike_eager:
            steps.say(captured.unlike_eager)
            unshown.append(as_shown(captured.unlike_eager))
        runs: Sequence[Sequence[Read]] = ()
        told = frozenset[str]()
        if captured.guards:
            cases = along_guards(source, cases, captured.guards, steps)
        elif is_code:
            eager, some = Eager(source.eager(), wanted), _first(cases)[:WITNESSED]
            runs, returned = eager.reads([case.inputs for case in some])
            for name, tensor in ((n, t) for outputs in returned for n, t in outputs.items()):
                if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
                    raise CaptureError(
                        f"output {name!r} is {dtype_text(tensor.dtype)}, in which no outputs are"
                        " compared",
                        hint="Return it in a wider dtype, such as with .float().",
                    )
            told = frozenset().union(*map(telling_outputs, returned))

        def take_notes(covered: Covered) -> None:
            lines = tuple(map(str, covered.unverified))
            for line in (*covered.verified, *lines):
                steps.say(line)
            every_note.extend(covered.verified)
            unshown.extend(map(as_shown, lines))

        by_eager = overlooked(runs, captured.decided)
        places = tuple(dict.fromkeys((*captured.branches, *by_eager)))
        settled = frozenset(spot for spot in captured.settled if spot[0] not in by_eager)
        watched: tuple[Case, ...] = ()
        if places:
            with steps("branches"):
                covered = cover_branches(source, inputs, cases, places, settled)
            take_notes(covered)
            inputs, cases = covered.inputs, covered.cases
        if has_structure(program):
            known = [f"{PurePath(file).name}:{line}" for file, line in places]
            # Other inputs may take a path that a specialised program does not have.
            trials = 0 if captured.guards else MOST_TRIALS
            with steps("paths"):
                covered = cover_paths(program, inputs, cases, known, trials)
            take_notes(covered)
            inputs, cases, watched = covered.inputs, covered.cases, covered.watched
        if not captured.guards:
            for each in (plain, exact):
                each.watch([case.inputs for case in watched or _first(cases)])
            # In fp64, because a program that was captured in fp16 need not run as it is.
            cases = allowed(
                inputs, with_telling_values(exact, inputs, cases, names, told, plain), checks
            )
        return Prepared(
            *(source, inputs, cases, wanted),
            captured=replace(captured, inputs=inputs, notes=tuple(every_note)),
            plain=plain,
            exact=exact,
            watched=watched,
            unverified=tuple(unverified),
            runs=runs,
            quantization=quantization,
            doubles=doubles,
            scales=scales,
        )


def _first(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    return cases[: 1 if any(case.singles for case in cases) else OBSERVED]


def _is_small(captured: Captured) -> bool:
    """Whether runs of a program are too short for several threads."""
    parameters = parameters_of(captured.program)
    return parameters <= SMALL and not is_heavy(captured.inputs, parameters)


def _doubles(source: Source, captured: Captured) -> list[str]:
    """The weights, or else inputs, that are float64 where the program computes in fp32."""
    if source.given_program() is not None:
        return []
    tensors = {**captured.as_written.state_dict, **source.example()}
    found = [name for name, tensor in tensors.items() if tensor.dtype == torch.float64]
    kept = source.eager().state_dict() if found else {}  # layers whose code casts what they read
    return [name for name in found if name not in kept or kept[name].dtype != torch.float64]
