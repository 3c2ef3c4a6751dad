"""From a MODEL argument to a captured program: the first steps of export, inspect and opt."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from enginecast.capture.control_flow.detect.recorder import Read, record
from enginecast.capture.control_flow.detect.reporters import overlooked
from enginecast.capture.inputs.derive.derive import check_required, derive
from enginecast.capture.inputs.derive.diffusion import bound
from enginecast.capture.inputs.derive.image_sizes import with_sizes
from enginecast.capture.inputs.derive.stateful import state_inputs
from enginecast.capture.inputs.examples import Case, edge_inputs, example_sizes, is_heavy, sample
from enginecast.capture.inputs.given import (
    DynamicOption,
    apply_dynamic,
    check_arguments,
    given_prompts,
    parse_dynamic,
    read_inputs,
)
from enginecast.capture.inputs.specs import (
    InputSpec,
    captured_dtype,
    from_example,
    ranges_of,
    sums,
    with_held_marks,
)
from enginecast.capture.outputs.flatten import Wanted, parse_wanted, run_named
from enginecast.capture.python.locations import SourceLocation, Spot
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.sources.decoder import DecoderSource
from enginecast.capture.sources.encoder_decoder import (
    CrossDecoderSource,
    EncoderSource,
    as_generating,
)
from enginecast.capture.sources.recording import Recorded
from enginecast.capture.sources.source import Source, open_source
from enginecast.capture.sources.stateful import StatefulSource, with_state
from enginecast.capture.tracing.captured import Captured, capture, describe, named_leaves
from enginecast.capture.tracing.sizes.look_alikes import settle_sizes
from enginecast.capture.tracing.sizes.shapes import Range, sum_checks
from enginecast.capture.tracing.state.repeated_calls import CalledInTurn
from enginecast.compiler.cases import (
    MOST_TRIALS,
    SEED,
    Covered,
    allowed,
    along_guards,
    check_values,
    choose_cases,
    cover_branches,
    cover_paths,
    telling_outputs,
    that_eager_takes,
    with_other_sizes,
    with_telling_values,
)
from enginecast.compiler.dropped_tensors import dropped_failures
from enginecast.compiler.fit_values import error_of, fit_values, note_uses
from enginecast.compiler.judge_sizes import judge_sizes, leave_out_refused
from enginecast.compiler.request import EngineConfig, ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.compiler.value_ranges import of_program
from enginecast.errors import CaptureError, EnginecastError, UsageError, VerificationError
from enginecast.library_names import aten
from enginecast.passes.ir.base import PassContext, ProgramView
from enginecast.passes.ir.block_view import opened
from enginecast.passes.ir.blocks import all_blocks, all_nodes, blocks, has_structure, is_structured
from enginecast.passes.ir.edit import (
    add_weight,
    drop_unused_weights,
    dtype_of,
    erase_dead,
    free_name,
    structural_copy,
)
from enginecast.passes.ir.effects import WITHOUT_NOISE, draws
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.ir.quantization_plan import QuantizationPlan
from enginecast.passes.ir.source import source_line
from enginecast.passes.ir.text import dtype_text
from enginecast.passes.quantize.plan.file import check_model, read_plan
from enginecast.passes.unify_dtype import KeepHalves, in_halves
from enginecast.runtime.device.torch_threads import torch_threads
from enginecast.verification import lost_digits
from enginecast.verification.eager import (
    aligned_weights,
    capture_failures,
    eager_outputs,
    edge_reference,
    make_reference,
    reference_outputs,
    reference_program,
    with_all_kernels,
)
from enginecast.verification.metrics import BEYOND, Array
from enginecast.verification.reference import Reference
from enginecast.verification.runs import Runs

SORTING = frozenset(
    {
        *(aten.topk.default, aten.sort.default, aten.sort.stable, aten.argsort.default),
        *(aten.argsort.stable, aten.msort.default, aten.kthvalue.default, aten.median.dim),
    }
)
"""Ops that name one of several equal values; torch does not say which."""
FP64_LOSS = 1e-3
"""Relative error in fp32 of a model in fp64, past which nobody means it to be converted."""
OBSERVED = 2
"""Cases that are run after every pass; more take longer and find little more."""
SMALL = 300_000_000
"""Parameters up to which one thread of torch runs a model, unless its inputs are large: what is run
is short, and waking a second thread for each op cost T5-base a tenth to a quarter of its CPU time.
"""
Call = tuple[Mapping[str, Tensor], Mapping[str, Tensor], nn.Module | None]
"""Inputs, what eager gave for them, and the module that did, if it is small enough to be kept."""
CALLS = 8
"""Of a model with state, in turn."""
WITNESSED = 2
"""Cases on which it is recorded what the model reads of its inputs."""


@dataclass(frozen=True)
class OpenedModel:
    """A model, with the inputs that its engines will be compared on."""

    source: Source
    inputs: tuple[InputSpec, ...]
    cases: tuple[Case, ...]
    wanted: Wanted

    @property
    def symbols(self) -> Mapping[str, Range]:
        """Least and greatest size of each symbolic dimension."""
        return ranges_of(self.inputs)

    @property
    def mask_input(self) -> str | None:
        """The input that marks valid rows."""
        # One that is as long as the tokens before, too, has no column for each row of an output;
        # nor does that of an encoder, beside it.
        if sums(self.inputs):
            return None
        masks = (spec.name for spec in self.inputs if spec.kind == "attention_mask")
        return next(masks, None)


@dataclass(frozen=True)
class Prepared(OpenedModel):
    """A model that was captured."""

    captured: Captured
    plain: Runs
    """Of the captured program."""
    exact: Runs
    """Of the captured program in fp64."""
    unverified: tuple[str, ...] = ()
    """Branches of which no case takes one of the paths, where that was not allowed."""
    watched: tuple[Case, ...] = ()
    """The cases that every pass is watched on; empty: the first ones."""
    quantization: QuantizationPlan | None = None
    """A plan that was given, for the passes to carry out."""
    runs: Sequence[Sequence[Read]] = ()
    """What Python read of tensors in runs of the model."""
    first: Call | None = None
    """Inputs of the first case and what eager gave for them, where a run takes long."""
    calibration: tuple[Case, ...] = ()
    """Inputs that static scales are made from besides those of the cases."""
    told: frozenset[str] = frozenset()
    """Outputs of which eager was seen to give a finite number other than zero."""

    @property
    def branches(self) -> tuple[SourceLocation, ...]:
        """Where both paths must be verified: operators, and what torch.export overlooked."""
        eager = overlooked(self.runs, self.captured.decided)
        return tuple(dict.fromkeys((*self.captured.branches, *eager)))

    @property
    def settled(self) -> frozenset[Spot]:
        """Tests in these lines of which one path is in the program, for it is always taken."""
        eager = overlooked(self.runs, self.captured.decided)
        return frozenset(spot for spot in self.captured.settled if spot[0] not in eager)

    @property
    def observed(self) -> tuple[Case, ...]:
        """The cases that are run after every pass; they take every path that any case takes."""
        if self.watched:
            return self.watched
        return self.cases[: 1 if any(case.singles for case in self.cases) else OBSERVED]

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


def open_model(
    model: str | nn.Module,
    options: ModelOptions,
    example: Mapping[str, Any] | Recorded | None = None,
) -> Source:
    """Open a MODEL, with the call of its class where that is known, and sizes of images in it.

    Raises:
        SourceError: the model cannot be read.
        UsageError: an option does not fit the kind of model.
    """
    source = open_source(
        model,
        random_weights=options.random_weights,
        allow_code=options.allow_code,
        example=example,
        component=options.component,
    )
    if options.task:
        return as_generating(source, options.task)
    read = {} if options.inputs is None else read_inputs(options.inputs)
    source = with_sizes(bound(source), read)
    if not options.state:
        return source
    specs, given, _ = input_specs(source, options.inputs, ())
    return with_state(source, calls_in_turn(source, specs, given))


def given_plan(config: EngineConfig, source: Source) -> QuantizationPlan | None:
    """The quantization plan that a user gave for this model."""
    if config.plan is None:
        return None
    given = read_plan(config.plan)
    check_model(given, source.fingerprint(), config.plan)
    return given


def prepare(
    source: Source,
    options: ModelOptions,
    steps: Steps,
    quantization: QuantizationPlan | None = None,
    notes: tuple[str, ...] = (),
) -> Prepared:
    """Capture a model and choose its verification inputs.

    Args:
        quantization: a plan for the passes to carry out.
        notes: what a user should know besides.

    Raises:
        CaptureError: torch.export refused the model.
    """
    wanted = parse_wanted(options.outputs, options.hidden_states)
    prompts = None if options.prompts is None else given_prompts(options.prompts)
    with torch_threads(1):
        specs, given, sizes = input_specs(source, options.inputs, options.dynamic)
        specs, values = fit_values(source, specs, given or source.example())
        said = (*sizes, *values)
        for note in said:
            steps.say(note)
        captured = _settled(source, specs, given, wanted, options, steps)
    captured = replace(captured, notes=(*notes, *said, *captured.notes))
    with torch_threads(1 if _is_small(captured) else None):
        return _with_cases(source, captured, given, prompts, wanted, options, steps, quantization)


def _parameters(program: ExportedProgram) -> int:
    return sum(tensor.numel() for tensor in program.state_dict.values())


def _is_small(captured: Captured) -> bool:
    """Whether runs of a program are too short for several threads."""
    parameters = _parameters(captured.program)
    return parameters <= SMALL and not is_heavy(captured.inputs, parameters)


def _with_cases(
    source: Source,
    captured: Captured,
    given: Mapping[str, Tensor],
    prompts: Sequence[str] | None,
    wanted: Wanted,
    options: ModelOptions,
    steps: Steps,
    quantization: QuantizationPlan | None,
) -> Prepared:
    """A model that was captured, with its verification inputs."""
    parameters = 0 if options.thorough else _parameters(captured.program)
    cases = choose_cases(source, captured.inputs, given, prompts, parameters, steps)
    cases = with_other_sizes(captured.inputs, cases, captured.other_sizes)
    cases = allowed(captured.inputs, cases, captured.size_checks)
    if source.given_program() is None:
        cases = that_eager_takes(source, captured.program, captured.inputs, cases)
    program, names = captured.program, tuple(spec.name for spec in captured.outputs)
    opened = OpenedModel(source, captured.inputs, cases, wanted)
    plain = Runs(lambda: program, names, opened.mask_input)
    exact = Runs(partial(reference_program, program), names, opened.mask_input)
    prepared = Prepared(
        *(source, captured.inputs, cases, wanted, captured, plain, exact), quantization=quantization
    )
    if captured.unlike_eager:
        prepared = _with_difference(prepared, options, steps)
    if captured.guards:
        kept = along_guards(source, cases, captured.guards, steps)
        prepared = replace(prepared, cases=kept)
    elif source.given_program() is None:
        prepared = _recorded(prepared)
    if prepared.branches:
        with steps("branches"):
            places, settled = prepared.branches, prepared.settled
            covered = cover_branches(source, captured.inputs, cases, places, settled)
        prepared = _with_branches(prepared, covered, options, steps)
    if has_structure(captured.program):
        known = [f"{PurePath(file).name}:{line}" for file, line in prepared.branches]
        # Other inputs may take a path that a specialised program does not have.
        trials = 0 if captured.guards else MOST_TRIALS
        inputs = prepared.captured.inputs
        with steps("paths"):
            covered = cover_paths(captured.program, inputs, prepared.cases, known, trials)
        prepared = _with_branches(prepared, covered, options, steps)
    if captured.guards:
        return prepared
    inputs, names = prepared.captured.inputs, prepared.output_names
    observed = [case.inputs for case in prepared.observed]
    plain.watch(observed)
    exact.watch(observed)
    # In fp64, because a program that was captured in fp16 need not run as it is.
    cases = with_telling_values(exact, inputs, prepared.cases, names, prepared.told, plain)
    return replace(prepared, cases=allowed(inputs, cases, captured.size_checks))


def _recorded(prepared: Prepared) -> Prepared:
    """With what Python reads of tensors when eager runs."""
    some = prepared.cases[: min(WITNESSED, len(prepared.observed))]
    given: list[Mapping[str, Tensor]] = []

    def call(module: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        given.append(run_named(module, inputs, prepared.wanted))

    module = prepared.source.eager()
    with quiet_torch():
        runs = record(module, [case.inputs for case in some], call)
    for name, tensor in ((n, t) for outputs in given for n, t in outputs.items()):
        if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
            raise CaptureError(
                f"output {name!r} is {dtype_text(tensor.dtype)}, in which no outputs are compared",
                hint="Return it in a wider dtype, such as with .float().",
            )
    told = frozenset().union(*map(telling_outputs, given))
    costly = len(some) == 1 and any(case.singles for case in prepared.cases)
    kept = module if _parameters(prepared.captured.program) <= SMALL else None
    first = (some[0].inputs, given[0], kept) if given and costly else None
    return replace(prepared, runs=runs, first=first, told=told)


def _settled(
    source: Source,
    specs: tuple[InputSpec, ...],
    given: dict[str, Tensor],
    wanted: Wanted,
    options: ModelOptions,
    steps: Steps,
) -> Captured:
    """Capture, and decide which sizes and values the program takes."""
    with steps("capture"):
        captured = lifted(_capture(source, specs, given, wanted, options))
    if source.given_program() is None:
        inputs, uses = note_uses(captured.program, captured.inputs, given or source.example())
        captured = replace(captured, inputs=inputs, notes=(*captured.notes, *uses))
    captured = judge_sizes(source, captured, wanted)
    stated = sum_checks(captured.inputs)
    captured = replace(captured, size_checks=(*captured.size_checks, *stated))
    with steps("values"):
        inputs, notes = of_program(captured.program, captured.inputs, options.values)
        captured = replace(captured, inputs=inputs, notes=(*captured.notes, *notes))
        if source.given_program() is None:
            captured = leave_out_refused(source, captured, wanted)
    for rung in captured.rungs:
        (steps.say if len(captured.rungs) > 1 else steps.log)(f"capture: {rung}")
    captured = replace(captured, notes=(*captured.notes, *source.notes))
    if source.constants:
        fixed = ", ".join(f"{name} {value}" for name, value in source.constants.items())
        notes = (*captured.notes, f"part of the engine: {fixed}")
        captured = replace(captured, notes=notes)
    if doubles := _doubles(source, captured):
        said = f"the model computes in fp64 ({doubles[0]} is float64), and its engine does not"
        captured = replace(captured, notes=(*captured.notes, said))
    if halves := in_halves(captured.program, is_whole=False if source.keeps_dtypes else None):
        captured = replace(captured, in_halves=structural_copy(captured.program))
        run_pipeline([KeepHalves()], captured.program, PassContext())
        found = "; ".join(sorted({_dtype_and_line(*each) for each in halves.items()}))
        said = f"the model computes in 16 bits itself, and its fp32 engine rounds alike: {found}"
        captured = replace(captured, notes=(*captured.notes, said))
    for note in captured.notes:
        steps.say(note)
    return captured


def _halves_of(captured: Captured) -> str:
    """What a model in fp32 computes in by itself: the coarser of fp16 and bf16; empty: neither."""
    if captured.in_halves is None:
        return ""
    held = {dtype_of(node) for node in all_nodes(captured.in_halves)}
    return "bf16" if torch.bfloat16 in held else "fp16"


def _dtype_and_line(node: Node, dtype: torch.dtype) -> str:
    return f"{dtype_text(dtype)} at {source_line(node) or node.name}"


def _refuse_draws(program: ExportedProgram) -> None:
    """Two calls of a model may give equal values and draw nevertheless: multinomial, where one
    probability is nearly 1.
    """
    drawn = next((node for node in all_nodes(program) if draws(node)), None)
    if drawn is not None:
        raise CaptureError(
            f"the model draws random numbers, by {drawn.target} at "
            f"{source_line(drawn) or drawn.name}",
            hint=WITHOUT_NOISE,
        )


def _doubles(source: Source, captured: Captured) -> list[str]:
    """The weights, or else inputs, that are float64 where the program computes in fp32."""
    if source.given_program() is not None:
        return []
    tensors = {**captured.program.state_dict, **source.example()}
    found = [name for name, tensor in tensors.items() if tensor.dtype == torch.float64]
    kept = source.eager().state_dict() if found else {}  # layers whose code casts what they read
    return [name for name in found if name not in kept or kept[name].dtype != torch.float64]


def _with_difference(prepared: Prepared, options: ModelOptions, steps: Steps) -> Prepared:
    """With what the model's code does otherwise in a trace than in eager."""
    difference = prepared.captured.unlike_eager
    steps.say(difference)
    if not options.allow_unverified_branches:
        return replace(prepared, unverified=(difference,))
    notes = (*prepared.captured.notes, difference)
    return replace(prepared, captured=replace(prepared.captured, notes=notes))


def _with_branches(
    prepared: Prepared, covered: Covered, options: ModelOptions, steps: Steps
) -> Prepared:
    """With the cases that take other paths, and what no case takes."""
    unverified = tuple(map(str, covered.unverified))
    for line in (*covered.verified, *unverified):
        steps.say(line)
    allowed = options.allow_unverified_branches
    notes = (*prepared.captured.notes, *covered.verified, *(unverified if allowed else ()))
    return replace(
        prepared,
        inputs=covered.inputs,
        captured=replace(prepared.captured, inputs=covered.inputs, notes=notes),
        cases=covered.cases,
        watched=covered.watched,
        unverified=() if allowed else (*prepared.unverified, *unverified),
    )


def reference_of(
    prepared: Prepared, dtype: str, notes: list[str] | None = None, *, edges: bool = False
) -> Reference:
    """What the model itself gives for the verification inputs, and its noise floor in `dtype`.

    Args:
        edges: with what it gives for unusual values, where engines of `dtype` are compared there.
        notes: gets sentences on state that the model keeps between calls.

    Raises:
        CaptureError: a second call with equal inputs gives another result, or may.
    """
    run = in_turn(prepared, prepared.first)
    eager = partial(_kept_or_new, prepared)
    exact = partial(reference_outputs, prepared.exact)
    reference = make_reference(
        prepared.captured.program,
        eager,
        prepared.cases,
        dtype=dtype,
        names=prepared.output_names,
        forward=run,
        mask_input=prepared.mask_input,
        exact=exact,
        singles={case.name: case.singles for case in prepared.cases if case.singles},
        halves=_halves_of(prepared.captured),
    )
    _refuse_draws(prepared.captured.program)  # where no two calls differed, which name the line
    if notes is not None:
        notes += run.notes
    if not edges:
        return reference
    forward = partial(run_named, wanted=prepared.wanted)
    program, names, cases = prepared.captured.program, prepared.output_names, edge_cases(prepared)
    found = edge_reference(prepared.source.eager, cases, forward, exact, program, names, dtype)
    return replace(reference, edges=found)


def with_kernels(prepared: Prepared, reference: Reference) -> Reference:
    """A reference in fp32 with what other kernels may lose in all of its cases: as many runs of the
    model again, which an engine that agrees with eager does not need.
    """
    program, names = prepared.captured.program, prepared.output_names
    with torch_threads(1 if prepared.is_small else None):
        return with_all_kernels(reference, program, prepared.cases, edge_cases(prepared), names)


def place_of_loss(prepared: Prepared, output: str, case: str) -> str:
    """Where most of the error of an output arises, in a case or (empty) in the first."""
    cases = [*prepared.cases, *edge_cases(prepared)]
    chosen = next((each for each in cases if each.name == case), cases[0])
    position = prepared.output_names.index(output)
    try:
        with torch_threads(1 if prepared.is_small else None):
            return lost_digits.place_of_loss(prepared.captured.program, chosen.inputs, position)
    except (EnginecastError, IndexError, RuntimeError, ValueError):
        return ""  # values decide what it runs, and noise decides otherwise


def _kept_or_new(prepared: Prepared, dtype: torch.dtype) -> nn.Module:
    kept = None if prepared.first is None else prepared.first[2]
    return prepared.source.eager(dtype) if kept is None or dtype != torch.float32 else kept


def in_turn(model: OpenedModel, first: Call | None = None) -> CalledInTurn:
    """What runs eager, after it has looked for state that is kept from call to call.

    Args:
        first: a call before.
    """
    smallest = min(model.cases, key=lambda case: sum(t.numel() for t in case.inputs.values()))
    inputs = smallest.inputs
    others = [case.inputs for case in model.cases if case.inputs is not inputs]
    alike = [other for other in others if _shapes(other) == _shapes(inputs)]
    sizes = [other for other in others if _shapes(other) != _shapes(inputs)]
    fitting = {spec.name for spec in model.inputs if not spec.is_free}
    changed = alike[:1] or [{n: t if n in fitting else _other_values(t) for n, t in inputs.items()}]
    # A heavy model is called on its cases first, and on other values only where it keeps something.
    heavy = [case.inputs for case in model.cases if case.singles]
    call = partial(run_named, wanted=model.wanted)
    before, by = first[1:] if first is not None and first[0] is inputs else (None, None)
    others = [*heavy[:1], *changed, *sizes[:1]]
    return CalledInTurn(call, inputs, others, model.source.trained, before, by)


def _shapes(inputs: Mapping[str, Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in inputs.values()]


def _other_values(tensor: Tensor) -> Tensor:
    """Other floats, larger ones; other values are the same in another order."""
    floats = tensor.is_floating_point() or tensor.is_complex()
    return tensor * -1.7 + 0.6 if floats else tensor.flip(tuple(range(tensor.ndim)))


def edge_cases(prepared: Prepared) -> list[Case]:
    """Unusual values; none for a program that takes the path of one run alone."""
    if prepared.captured.guards:
        return []
    program = prepared.captured.program
    parameters = _parameters(program)
    sorts = any(node.target in SORTING for node in all_nodes(program))
    return edge_inputs(prepared.inputs, SEED, parameters, sorts=sorts)


def captured_wrongly(prepared: Prepared, reference: Reference) -> tuple[str, ...]:
    """Where the captured program is not the model, which every comparison stands on."""
    guards = [guard.output for guard in prepared.captured.guards]
    cases = [case for case in prepared.cases if not case.singles]  # eager was compared with those
    again = partial(_aligned_eager, prepared)
    written, dtype = prepared.captured.in_halves, reference.floor.halves or "fp32"
    failures = [*capture_failures(prepared.plain, cases, reference, guards, again, dtype)]
    if written is not None:
        runs = Runs(lambda: written, prepared.output_names, prepared.mask_input)
        failures += capture_failures(runs, cases, reference, guards, again)
    return (*failures, *_dropped_failures(prepared), *_fp64_failures(prepared, reference))


def _dropped_failures(prepared: Prepared) -> Iterator[str]:
    """Where a tensor that eager drops on one path, and the program keeps, makes a difference."""
    places = prepared.captured.dropping
    if not places:
        return
    forward = partial(run_named, wanted=prepared.wanted)
    module, inputs = prepared.source.eager(), prepared.inputs
    plain, exact = prepared.plain, prepared.exact
    yield from dropped_failures(module, forward, plain, exact, inputs, prepared.cases, places)


def _aligned_eager(prepared: Prepared, case: Case) -> Mapping[str, Array]:
    """What eager fp32 gives with its weights where the program has its own; nothing where it does
    not run.
    """
    module = prepared.source.eager(torch.float32)
    forward = partial(run_named, wanted=prepared.wanted)
    try:
        with aligned_weights(module):
            run = eager_outputs(lambda _: module, [case], dtype="fp32", forward=forward)
    except VerificationError:
        return {}
    return run[case.name]


def _fp64_failures(prepared: Prepared, reference: Reference) -> Iterator[str]:
    """Say where a model that computes in fp64 would not be the same in fp32."""
    floor = reference.floor
    if (
        floor.dtype == "fp32"
        and floor.largest > FP64_LOSS
        and _doubles(prepared.source, prepared.captured)
    ):
        off = f"is off by {floor.largest:.2g}" if floor.largest <= BEYOND else "leaves its range"
        yield (
            f"the model computes in fp64, and eager fp32 {off}: an engine would compute"
            " something else; call .float() on it if that is acceptable"
        )


def _capture(
    source: Source,
    specs: tuple[InputSpec, ...],
    inputs: dict[str, Tensor],
    wanted: Wanted,
    options: ModelOptions,
) -> Captured:
    """Capture without what only outputs need that nobody wants."""
    given = source.given_program()
    if given is not None and wanted:
        return _cut(given, wanted)
    example = sample(specs, example_sizes(specs), SEED)
    captured = capture(
        source,
        specs,
        example,
        wanted,
        options.fallback,
        inputs,
        widens=options.widens,
        is_hidden=options.as_eager,
    )
    if not wanted:
        return captured
    # A copy, because nodes of torch's own may lack some of their users.
    program = structural_copy(captured.program)
    _drop_dead(program)
    return replace(captured, program=program, notes=(*captured.notes, *_unread(program)))


def _cut(given: ExportedProgram, wanted: Wanted) -> Captured:
    """The wanted outputs of a program; it stays as it is, for eager is all of it."""
    named, leaves = named_leaves(given, wanted)
    places = {id(leaf): place for place, leaf in enumerate(leaves)}
    program = structural_copy(given)
    _keep_outputs(program, {name: places[id(leaf)] for name, leaf in named.tensors.items()})
    captured = describe(program)
    return replace(captured, notes=(*named.notes, *captured.notes, *_unread(program)))


def _unread(program: ExportedProgram) -> tuple[str, ...]:
    """Notes on inputs that only outputs needed that were left out; eager still takes them."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return tuple(
        f"no output needs the input {name!r}, but the engine takes it"
        for name in program.graph_signature.user_inputs
        if name in nodes and not nodes[name].users
    )


class ModelInputs(NamedTuple):
    """The inputs that a program of a model will take."""

    specs: tuple[InputSpec, ...]
    given: dict[str, Tensor]
    """Those of a safetensors file."""
    notes: tuple[str, ...] = ()
    """What a user should know of their sizes."""


def input_specs(source: Source, inputs: Path | None, dynamic: Sequence[str]) -> ModelInputs:
    """The inputs that a program of `source` will take, and those of a safetensors file."""
    if source.given_program() is not None:
        return ModelInputs((), {})
    if isinstance(source, StatefulSource):
        specs, given, notes = input_specs(source.model, inputs, ())
        specs = (*specs, *state_inputs(source))
        given = {**given, **source.start} if given else {}
        return ModelInputs(apply_dynamic(specs, _parsed(dynamic)), given, notes)
    if inputs is not None and isinstance(source, (DecoderSource, EncoderSource)):
        raise UsageError(
            f"--inputs {inputs} does not fit --task: its inputs belong together",
            hint="Give texts to generate from: --prompts FILE.",
        )
    if inputs is not None:
        specs, given = _given_inputs(source, inputs)
    else:
        parameters = source.forward_signature.parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            check_arguments(source.example(), source, "the example")
        specs, given = derive(source), {}
    options = _parsed(_of_part(source, specs, dynamic))
    if source.given_script() is not None:
        return ModelInputs(apply_dynamic(specs, options), given)
    settled = settle_sizes(source, specs, given or source.example(), options)
    return ModelInputs(settled.specs, given, settled.notes)


def _of_part(source: Source, specs: Sequence[InputSpec], dynamic: Sequence[str]) -> Sequence[str]:
    """The options for inputs of this part of a model; those of no part are the decoder's, which
    refuses them.
    """
    if not isinstance(source, (EncoderSource, CrossDecoderSource)):
        return dynamic
    options = [part for text in dynamic for part in text.split(",")]
    if isinstance(source, EncoderSource):
        return [text for text in options if parse_dynamic(text).input in _names(specs)]
    others = _names(derive(source.encoder))
    return [text for text in options if parse_dynamic(text).input not in others]


def _names(specs: Sequence[InputSpec]) -> set[str]:
    return {spec.name for spec in specs}


def _parsed(dynamic: Sequence[str]) -> list[DynamicOption]:
    return [parse_dynamic(part) for text in dynamic for part in text.split(",")]


def calls_in_turn(
    source: Source, specs: Sequence[InputSpec], given: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Inputs of calls by which the state of a model is found: those of the user or the example
    first, and drawn ones of the same sizes.
    """
    known, sizes = dict(given) or source.example(), example_sizes(specs)
    if not known:
        return [sample(specs, sizes, SEED + n) for n in range(CALLS)]
    first = {spec.name: known[spec.name].to(spec.dtype) for spec in specs}
    sizes |= {  # which a buffer may share
        dim.name: size
        for spec in specs
        for dim, size in zip(spec.dims, first[spec.name].shape, strict=True)
        if dim.name is not None
    }
    return [first, *(sample(specs, sizes, SEED + n) for n in range(1, CALLS))]


def _given_inputs(source: Source, file: Path) -> tuple[tuple[InputSpec, ...], dict[str, Tensor]]:
    fixed = source.call.fixed if source.call is not None else {}
    given = {name: tensor for name, tensor in read_inputs(file).items() if name not in fixed}
    for name, tensor in given.items():
        if not tensor.numel():
            raise UsageError(
                f"--inputs {file}: {name}: expected values, got shape {list(tensor.shape)}"
            )
    check_arguments(given, source, f"--inputs {file}")
    # A safetensors file sorts by name, and the model's forward does not.
    order = [name for name in source.forward_arguments if name in given]
    order += [name for name in given if name not in order]
    given = {name: given[name].to(captured_dtype(given[name])) for name in order}
    specs = check_required(source, from_example(given, source.config, is_one_size=bool(fixed)))
    specs = _as_taken(source, specs, given)
    check_values(given, specs, f"--inputs {file}")
    return specs, given


def _as_taken(
    source: Source, specs: tuple[InputSpec, ...], given: Mapping[str, Tensor]
) -> tuple[InputSpec, ...]:
    """The inputs; masks of tokens mark those of the given inputs alone, where eager takes no others
    but these.
    """
    held = with_held_marks(specs, given)
    if held is specs:
        return specs
    module = source.eager()
    takes = (
        not error_of(module, sample(each, example_sizes(each), SEED)) for each in (specs, held)
    )
    return held if tuple(takes) == (False, True) else specs


def lifted(captured: Captured) -> Captured:
    """Constants within blocks become constants of the program, which passes and exporters know."""
    _check_structure(captured.program)
    if not has_structure(captured.program):
        return captured
    program = structural_copy(captured.program)
    _lift_constants(program)
    _name_places(program)
    program.graph_module.recompile()
    return replace(captured, program=program)


def _keep_outputs(program: ExportedProgram, positions: Mapping[str, int]) -> None:
    """Let `program` return some of its outputs as a dict, in place.

    Args:
        positions: name of each output that stays, in the new order, to its place among the user's
            outputs; one place may have several names.
    """
    output = program.graph.output_node()
    specs = program.graph_signature.output_specs
    user = [index for index, spec in enumerate(specs) if spec.kind is OutputKind.USER_OUTPUT]
    others = [index for index in range(len(specs)) if index not in user]
    kept = [*others, *(user[position] for position in positions.values())]
    values = output.args[0]
    assert isinstance(values, tuple | list)
    output.args = (tuple(values[index] for index in kept),)
    program.graph_signature.output_specs = [copy.deepcopy(specs[index]) for index in kept]
    entry, *modules = program.module_call_graph
    assert entry.signature is not None  # the first entry is the program itself
    signature = replace(
        entry.signature,
        outputs=[],  # torch fills it for submodules alone
        out_spec=pytree.tree_structure(dict.fromkeys(positions, 0)),
    )
    program._module_call_graph = [replace(entry, signature=signature), *modules]
    _drop_dead(program)


def _drop_dead(program: ExportedProgram) -> None:
    """Erase what no output needs: nodes, and weights with their tensors, in place."""
    erase_dead(program.graph)
    drop_unused_weights(program)
    program.graph_module.recompile()
    program.graph.lint()
    program.validate()


def _name_places(program: ExportedProgram) -> None:
    """Give nodes within blocks the module of the op that runs them: torch.export names none."""
    for node, block in all_blocks(program):
        for inner in block.module.graph.nodes:
            for key in ("nn_module_stack", "stack_trace"):
                if inner.op == "call_function" and node.meta.get(key):
                    inner.meta[key] = inner.meta.get(key) or node.meta[key]


def _check_structure(program: ExportedProgram) -> None:
    """Refuse an op that runs a graph in a way that is not known here, such as map."""
    for node in all_nodes(program):
        if not isinstance(node.target, HigherOrderOperator) or is_structured(node):
            continue
        owner: Any = node.graph.owning_module
        held = (n for n in node.all_input_nodes if n.op == "get_attr")
        runs = any(isinstance(getattr(owner, str(n.target), None), GraphModule) for n in held)
        # A wrapper runs its graph once, as it is: interpreting the op is right.
        if runs and not node.target.name().startswith("wrap"):
            place = source_line(node) or node.name
            raise CaptureError(
                f"{node.target} at {place} is a structured operator that engines do not support",
                hint="Use cond, while_loop or scan instead.",
            )


def _lift_constants(program: ProgramView) -> None:
    """Do so in every block of a program, in place."""
    for node in list(program.graph.nodes):
        for block in blocks(node):
            with opened(program, node, block) as inner:
                _lift_constants(inner)
                for found in block.module.graph.find_nodes(op="get_attr"):
                    tensor = getattr(block.module, str(found.target), None)
                    if isinstance(tensor, Tensor):
                        _lift(inner, found, tensor)


def _lift(inner: ProgramView, node: Node, tensor: Tensor) -> None:
    """A weight that is added to an opened block becomes one of the program around it."""
    name = free_name(inner, f"lifted.{node.name}")
    placeholder = add_weight(inner, name, tensor.detach(), InputKind.CONSTANT_TENSOR)
    placeholder.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(placeholder)
    node.graph.erase_node(node)
