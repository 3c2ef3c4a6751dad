"""From a MODEL argument to a captured program: the start of export, inspect and opt."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePath

from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.capture.detect import add_findings
from enginecast.capture.examples import Case, example_sizes, sample
from enginecast.capture.export import Captured, capture, describe, named_leaves
from enginecast.capture.factory import FactorySource, as_written, copy_sharing_weights
from enginecast.capture.given import given_prompts
from enginecast.capture.inputs import InputSpec
from enginecast.capture.outputs import run_named
from enginecast.capture.source import Source, open_source
from enginecast.capture.state import CalledTwice
from enginecast.capture.wanted import Wanted, parse_wanted
from enginecast.capture.way import Fallback
from enginecast.cases import (
    Covered,
    along_guards,
    choose_cases,
    cover_branches,
    with_other_sizes,
)
from enginecast.errors import CaptureError
from enginecast.model_inputs import input_specs
from enginecast.passes.base import PassContext
from enginecast.passes.cut_outputs import drop_dead, keep_outputs
from enginecast.passes.graph_edit import structural_copy
from enginecast.passes.quantization_plan import QuantizationPlan
from enginecast.passes.structure import has_structure
from enginecast.steps import Steps
from enginecast.structured import lifted
from enginecast.verify.floor import make_reference
from enginecast.verify.reference import Reference
from enginecast.ways import MOST_TRIALS, cover_ways

SEED = 0
"""Of the example and of the verification inputs: equal calls give equal bundles."""


@dataclass(frozen=True)
class ModelOptions:
    """What a user may say of a model."""

    random_weights: int | None = None
    """Seed, for a folder that has a config.json and no weights."""
    allow_code: bool = False
    inputs: Path | None = None
    """safetensors with example inputs by name."""
    prompts: Path | None = None
    """One prompt a line; they join the verification inputs."""
    dynamic: Sequence[str] = field(default_factory=tuple)
    """NAME:DIM=MIN..MAX, each."""
    outputs: Sequence[str] = field(default_factory=tuple)
    """Names of the outputs that the engine gives, in order; empty: all."""
    hidden_states: Sequence[int | str] = field(default_factory=tuple)
    """Indices of hidden states that come as outputs, too."""
    thorough: bool = False
    """Verify on the longest texts however large the model is."""
    fallback: Fallback = "torchscript"
    """How far down the ladder a capture may go."""
    widens: bool = True
    """Whether code may be rewritten only so that more sizes are possible."""
    allow_unverified_branches: bool = False
    """Publish although no input was found that takes some way of a branch."""


@dataclass(frozen=True)
class Prepared:
    """A model, captured, with the inputs that it will be compared on."""

    source: Source
    captured: Captured
    cases: tuple[Case, ...]
    wanted: Wanted = field(default_factory=Wanted)
    options: ModelOptions = field(default_factory=ModelOptions)
    """What was asked for."""
    unverified: tuple[str, ...] = ()
    """Branches of which no case takes one of the ways, where that was not allowed."""
    watched: tuple[Case, ...] = ()
    """The cases that every pass is watched on; empty: the first ones."""
    quantization: QuantizationPlan | None = None
    """A plan that was given, for the passes to carry out."""

    @property
    def mask_input(self) -> str | None:
        """The input that marks valid rows."""
        masks = [spec.name for spec in self.captured.inputs if spec.kind == "attention_mask"]
        return masks[0] if masks else None

    @property
    def context(self) -> PassContext:
        """What passes may know of the model."""
        return PassContext(
            calibration=tuple(case.inputs for case in self.cases),
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


def open_model(model: str | nn.Module, options: ModelOptions, example: object = None) -> Source:
    """Open a MODEL argument, or take a module as it is.

    Raises:
        SourceError, UsageError: see `open_source`.
    """
    if isinstance(model, nn.Module):
        given = dict(example) if isinstance(example, dict) else {}
        # A copy: the caller's module keeps its mode and its gradients.
        name = type(model).__name__
        return FactorySource(name, copy_sharing_weights(as_written(model, name)), given)
    return open_source(model, random_weights=options.random_weights, allow_code=options.allow_code)


def prepare(
    source: Source,
    options: ModelOptions,
    steps: Steps,
    quantization: QuantizationPlan | None = None,
) -> Prepared:
    """Capture a model and choose its verification inputs.

    Args:
        quantization: a plan for the passes to carry out.

    Raises:
        CaptureError: torch.export refused the model.
        SourceError, UsageError: weights or options do not fit.
    """
    wanted = parse_wanted(options.outputs, options.hidden_states)
    prompts = None if options.prompts is None else given_prompts(options.prompts)
    specs, given = input_specs(source, options.inputs, options.dynamic)
    with steps("capture"):
        try:
            captured = lifted(_capture(source, specs, given, wanted, options))
        except CaptureError as error:
            if source.given_program() is None:
                add_findings(error, source.empty(), [spec.name for spec in specs])
            raise
    for rung in captured.rungs:
        (steps.say if len(captured.rungs) > 1 else steps.log)(f"capture: {rung}")
    for note in captured.notes:
        steps.say(note)
    weights = captured.program.state_dict.values()
    parameters = 0 if options.thorough else sum(tensor.numel() for tensor in weights)
    cases = choose_cases(source, captured.inputs, given, prompts, parameters, steps)
    cases = with_other_sizes(captured.inputs, cases, captured.other_sizes)
    prepared = Prepared(source, captured, cases, wanted, options, quantization=quantization)
    if captured.guards:
        kept = along_guards(source, cases, captured.guards, steps)
        prepared = replace(prepared, cases=kept)
    elif captured.branches:
        with steps("branches"):
            covered = cover_branches(source, captured.inputs, cases, captured.branches)
        prepared = _with_branches(prepared, covered, options, steps)
    if has_structure(captured.program):
        prepared = _with_ways(prepared, options, steps)
    return prepared


def _with_ways(prepared: Prepared, options: ModelOptions, steps: Steps) -> Prepared:
    """With cases for the ways through the blocks that the program holds."""
    captured = prepared.captured
    known = [f"{PurePath(file).name}:{line}" for file, line in captured.branches]
    # Other inputs may go a way that a specialised program does not have.
    trials = 0 if captured.guards else MOST_TRIALS
    with steps("ways"):
        found = cover_ways(captured.program, captured.inputs, prepared.cases, known, trials)
    return replace(_with_branches(prepared, found.covered, options, steps), watched=found.cases)


def _with_branches(
    prepared: Prepared, covered: Covered, options: ModelOptions, steps: Steps
) -> Prepared:
    """With the cases that take other ways, and what no case takes."""
    for line in covered.told:
        steps.say(line)
    allowed = options.allow_unverified_branches
    notes = (*prepared.captured.notes, *(covered.told if allowed else covered.verified))
    return replace(
        prepared,
        captured=replace(prepared.captured, inputs=covered.inputs, notes=notes),
        cases=covered.cases,
        unverified=() if allowed else (*prepared.unverified, *covered.unverified),
    )


def reference_of(prepared: Prepared, dtype: str, notes: list[str] | None = None) -> Reference:
    """What the model itself gives for the verification inputs, and its noise floor in `dtype`.

    Args:
        prepared: the model.
        dtype: that the engine computes in.
        notes: gets sentences on state that the model keeps between calls.

    Raises:
        CaptureError: a second call with equal inputs gives another result.
        VerificationError: eager does not run in this dtype.
    """
    smallest = min(prepared.cases, key=lambda case: sum(t.numel() for t in case.inputs.values()))
    run = CalledTwice(partial(run_named, wanted=prepared.wanted), smallest.inputs)
    reference = make_reference(
        prepared.captured.program,
        prepared.source.eager,
        prepared.cases,
        dtype=dtype,
        names=prepared.output_names,
        forward=run,
        mask_input=prepared.mask_input,
    )
    if notes is not None:
        notes += run.notes
    return reference


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
        source, specs, example, wanted, options.fallback, inputs, widens=options.widens
    )
    if not wanted:
        return captured
    # A copy, because nodes of torch's own may lack some of their users.
    program = structural_copy(captured.program)
    drop_dead(program)
    return replace(captured, program=program, notes=(*captured.notes, *_unread(program)))


def _cut(given: ExportedProgram, wanted: Wanted) -> Captured:
    """The wanted outputs of a program; it stays as it is, for eager is all of it."""
    named, leaves = named_leaves(given, wanted)
    places = {id(leaf): place for place, leaf in enumerate(leaves)}
    program = structural_copy(given)
    keep_outputs(program, {name: places[id(leaf)] for name, leaf in named.tensors.items()})
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
