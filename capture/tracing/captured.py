"""Capture a model as a program: torch.export without weights, then bind the weights to it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from enginecast.capture.inputs.examples import example_sizes, verification_inputs
from enginecast.capture.inputs.specs import (
    BATCH,
    SEQUENCE,
    DimSpec,
    InputSpec,
    Origin,
    kind_of,
    named_dims,
)
from enginecast.capture.outputs.flatten import (
    ALL,
    OutputSpec,
    Wanted,
    name_outputs,
    name_result,
)
from enginecast.capture.python.autocast import autocast_off
from enginecast.capture.python.locations import SourceLocation, Spot
from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.factory import is_dense
from enginecast.capture.tracing.answers.possible_values import values_of
from enginecast.capture.tracing.answers.recorded_reads import Guard
from enginecast.capture.tracing.attempt import OF_OWN_CODE, Attempt, Fallback, Rung
from enginecast.capture.tracing.ladder import Search, climb
from enginecast.capture.tracing.patches.table import libraries_patched
from enginecast.capture.tracing.sizes.fingerprint import Walker
from enginecast.capture.tracing.sizes.shapes import (
    OtherSizes,
    SizeCheck,
    input_values,
    named_sizes,
    output_specs,
    symbol_range,
    tried_guards,
)
from enginecast.capture.tracing.sizes.sweep import Sweep, untold
from enginecast.capture.tracing.state.program_writes import (
    computed_instead,
    input_writes,
    refuse_mutation,
    settles,
    writes_of_weights,
)
from enginecast.capture.tracing.torch_export import Traced
from enginecast.errors import CaptureError
from enginecast.passes.captured.inline_autocast import InlineAutocast, regions
from enginecast.passes.captured.keep_outputs import KeepOutputs
from enginecast.passes.captured.widen_halves import WidenHalves
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.blocks import all_nodes, has_structure
from enginecast.passes.ir.edit import structural_copy, weight_specs
from enginecast.passes.ir.pipeline import Observer, PassRun, run_pipeline
from enginecast.passes.ir.source import source_line
from enginecast.passes.presets import CAPTURED, JUDGED
from enginecast.passes.registry import build
from enginecast.passes.unify_dtype import in_halves

SEED = 0
"""Of the inputs that the model is run on when its trace is refused."""
TRIALS = 2
"""How many sizes besides the traced one."""
Watch = Callable[[ExportedProgram], Observer]


@dataclass(frozen=True)
class Captured:
    """A program with real weights, and what its inputs and outputs are.

    `program.module()(**inputs)` returns the outputs by name.
    """

    program: ExportedProgram
    inputs: tuple[InputSpec, ...]
    """In the order of the program's inputs; dimensions with the ranges that the program kept."""
    outputs: tuple[OutputSpec, ...]
    """In the order of the program's outputs."""
    notes: tuple[str, ...] = ()
    """What a user should know, such as a range that the model narrowed."""
    rungs: tuple[Rung, ...] = ()
    """How it was captured, and what was tried before; empty for a program that was given."""
    branches: tuple[SourceLocation, ...] = ()
    """Branches that became operators: each of their paths has to be verified."""
    dropping: tuple[SourceLocation, ...] = ()
    """Branches that drop a tensor on one path, where the program computes with it on both."""
    settled: frozenset[Spot] = frozenset()
    """Tests in rewritten code whose answer is known while tracing: they may share such a line."""
    decided: frozenset[SourceLocation] = frozenset()
    """Where the trace decided by sizes, or by numbers as it must for every input."""
    guards: tuple[Guard, ...] = ()
    """Outputs that say whether inputs take the program's path; none when it takes all paths."""
    other_sizes: tuple[OtherSizes, ...] = ()
    """Sizes in range at which the model's code takes another path than the trace did."""
    size_checks: tuple[SizeCheck, ...] = ()
    """What an engine has to check of sizes: nothing proved or disproved it."""
    unlike_eager: str = ""
    """Where the user's code does otherwise because it is traced; empty where it does not."""
    in_halves: ExportedProgram | None = None
    """The program before what the model computes in 16 bits became rounded fp32."""
    runs: tuple[PassRun, ...] = ()
    """Of the passes that every capture runs."""
    autocast: tuple[str, ...] = ()
    """The model's regions of torch.autocast that cast, with dtype and line: they were off."""

    @property
    def as_written(self) -> ExportedProgram:
        """The program that rounds to 16 bits as eager does, and computes in them."""
        return self.program if self.in_halves is None else self.in_halves


def capture(
    source: Source,
    specs: tuple[InputSpec, ...],
    example: Mapping[str, Tensor],
    wanted: Wanted = ALL,
    fallback: Fallback = "torchscript",
    given: Mapping[str, Tensor] | None = None,
    watch: Watch | None = None,
) -> Captured:
    """Capture `source` in fp32, whatever dtype its weights are stored in.

    The module is traced without weights in memory, so nothing is copied; stored weights are bound
    as they are, behind binding casts.  A program that was given goes through the same passes.

    Args:
        source: the model.
        specs: its inputs, in the order that the program takes them.
        example: one tensor for each, of the example sizes.
        wanted: the outputs that the program returns.
        fallback: how far down the ladder it may go (see `ladder`).
        given: inputs that the user gave, whose path a specialised program takes.
        watch: given the program that was traced or given, makes an observer of the passes.

    Raises:
        RefusedError: torch.export refused the model, by whichever strategy.
        CaptureError: a dimension cannot vary as asked, or the model writes to its own state.
        SourceError: the weights do not fit.
    """
    program = source.given_program()
    if program is not None:
        return describe(structural_copy(program), wanted, watch)
    inputs = {spec.name: example[spec.name] for spec in specs}
    weights = source.weights()  # before the trace, which takes long, and they are only mapped

    def cases() -> list[Mapping[str, Tensor]]:
        """The user's inputs, those of the trace, and some of other sizes."""
        users = given or source.example()
        others = [case.inputs for case in verification_inputs(specs, SEED)[:TRIALS]]
        return [*([users] if users.keys() == inputs.keys() else []), inputs, *others]

    search = Search(source, Attempt(specs, inputs), wanted, cases, fallback, values_of(specs))
    traced = climb(search)
    if wanted or has_structure(traced.program):  # nodes of torch's own may lack some users
        traced = replace(traced, program=structural_copy(traced.program))
    program = traced.program
    observe = [] if watch is None else [watch(program)]
    runs = [*traced.runs, *run_pipeline(build(JUDGED), program, PassContext(), observe)]
    notes = [*traced.notes, *computed_instead(program, runs[-1].sites, source.buffers)]
    writes = writes_of_weights(program)
    # What a first call alone writes, from weights, the engine has as it becomes.
    if writes and settles(source.eager(), inputs):
        names = ", ".join(dict.fromkeys(writes.values()))
        notes.append(
            f"the model changes {names} in its first call: the engine has what they become"
        )
    else:
        writes = {}
    refuse_mutation(program, writes)
    notes += input_writes(program)
    symbols = named_sizes(program, traced.attempt.specs)
    outputs = output_specs(program, tuple(named_outputs(program)[0]), symbols)
    broken, checks = tried_guards(program, traced.inputs)
    swept = _swept(source, traced, wanted)
    _refuse_what_no_engine_holds(program)
    captured = Captured(
        program,
        traced.inputs,
        outputs,
        tuple(notes),
        tuple(search.rungs),
        branches=traced.branches,
        dropping=traced.dropping,
        settled=traced.settled,
        decided=traced.decided | traced.idle,
        guards=traced.attempt.guards,
        other_sizes=(*broken, *swept),
        size_checks=checks,
        unlike_eager=search.unlike_eager,
        runs=tuple(runs),
        autocast=traced.autocast,
    )
    return _finished(captured, wanted, observe, weights, source.keeps_dtypes)


def _finished(
    captured: Captured,
    wanted: Wanted,
    observe: Sequence[Observer],
    weights: Mapping[str, Tensor] | None = None,
    keeps_dtypes: bool = False,
) -> Captured:
    """A program after the passes that every capture ends with, which run in place."""
    program, halves = captured.program, None
    passes = [*build(CAPTURED), *([KeepOutputs()] if wanted else [])]
    runs = run_pipeline(passes, program, PassContext(weights=weights), observe)
    if in_halves(program, is_whole=False if keeps_dtypes else None):
        halves = structural_copy(program)
        runs += run_pipeline([WidenHalves()], program, PassContext(), observe)
    unread = [n.name for n in program.graph.find_nodes(op="placeholder") if not n.users]
    notes = tuple(
        f"no output needs the input {name!r}, but the engine takes it"
        for name in unread
        if wanted and name in program.graph_signature.user_inputs
    )
    notes, runs = (*captured.notes, *notes), [*captured.runs, *runs]
    return replace(captured, notes=notes, in_halves=halves, runs=tuple(runs))


def _refuse_what_no_engine_holds(program: ExportedProgram) -> None:
    """Refuse tensors that are not dense, and those that torch.export has made in its trace: nobody
    has their values.
    """
    specs = weight_specs(program)
    for node in all_nodes(program):
        line = next((line for near in (node, *node.users) if (line := source_line(near))), "")
        where = f" at {line}" if line else ""
        values = pytree.tree_leaves(node.meta.get("val"))
        quantizes = str(node.target).startswith("aten.quantize_per_")  # fake results are dense
        if quantizes or any(not is_dense(each) for each in values):
            raise CaptureError(
                f"forward makes a sparse or quantized tensor{where}, which engines do not hold",
                hint="Compute it with dense tensors of floats and integers.",
            )
        spec = specs.get(node.name)
        if spec is not None and is_fake(program.constants.get(spec.target or "")):
            raise CaptureError(
                f"torch.export does not see how the model makes a tensor that it reads{where}, as"
                " in a backward pass",
                hint="Compute it with tensor operations alone, without torch.autograd.",
            )


def _swept(source: Source, traced: Traced, wanted: Wanted) -> tuple[OtherSizes, ...]:
    """Sizes at which eager computes something else than a program whose weights are fake still, or
    may do so.
    """
    if not named_dims(traced.inputs):
        return ()
    module, attempt = source.empty(), traced.attempt
    if attempt.name not in OF_OWN_CODE:
        return untold(module, traced.program, traced.inputs, example_sizes(traced.inputs))
    name_outputs(module, tuple(spec.name for spec in traced.inputs), wanted)
    walker = Walker(module, traced.program, traced.inputs)
    with libraries_patched(module), attempt.entered(module), autocast_off():
        return Sweep(walker, traced.inputs, example_sizes(traced.inputs)).find()


def describe(
    program: ExportedProgram, wanted: Wanted = ALL, watch: Watch | None = None
) -> Captured:
    """A program that was captured elsewhere, after the passes of every capture, in place.

    Raises:
        CaptureError: a dimension of an input is an expression such as 2*s0 + 1, or the program
            writes to its own state.
    """
    observe = [] if watch is None else [watch(program)]
    first = [InlineAutocast()] if any(regions(program)) else []
    passes, said = [*first, *build(JUDGED)], tuple[str, ...]()
    if wanted:
        places, said = named_outputs(program, wanted)
        passes = [KeepOutputs(tuple(places), tuple(places.values())), *passes]
    runs = run_pipeline(passes, program, PassContext(), observe)
    computed = computed_instead(program, runs[-1].sites)
    refuse_mutation(program)
    inputs = program_inputs(program)
    names, notes = named_outputs(program)
    outputs = output_specs(program, tuple(names), named_sizes(program, inputs))
    found = Captured(program, inputs, outputs, (*said, *notes, *computed), runs=tuple(runs))
    return _finished(found, wanted, observe)


def named_outputs(
    program: ExportedProgram, wanted: Wanted = ALL
) -> tuple[dict[str, int], tuple[str, ...]]:
    """The place of each wanted output among those that `program` returns, by name, in the order of
    the program if all are wanted; and notes.

    Raises:
        CaptureError, UsageError: see `name_result`; such as a value that is not a tensor.
    """
    leaves: list[object] = []  # a tensor for each tensor, no two the same; a number is itself
    for output in program.graph_signature.output_specs:
        if output.kind == OutputKind.USER_OUTPUT:
            is_tensor = isinstance(output.arg, TensorArgument)
            leaf = torch.empty(0, device="meta") if is_tensor else output.arg
            leaves.append(leaf.value if isinstance(leaf, ConstantArgument) else leaf)
    spec = program.call_spec.out_spec
    assert spec is not None  # torch.export always records it
    inputs = [str(name) for name in program.graph_signature.user_inputs]
    tree = pytree.tree_unflatten(leaves, spec)
    named = name_result(tree, wanted, inputs, takes_numbers=False)
    order = {id(leaf): place for place, leaf in enumerate(leaves)}
    places = [(name, order[id(leaf)]) for name, leaf in named.tensors.items()]
    return dict(places if wanted else sorted(places, key=itemgetter(1))), named.notes


def program_inputs(program: ExportedProgram) -> tuple[InputSpec, ...]:
    """Names, kinds, dtypes and dimensions of the inputs.

    Dimensions of text and images are called batch and sequence, as in a capture of ours; others
    keep the program's symbols.
    Values of integer inputs range as in the example that was saved with the program, else over 0
    and 1.
    """
    values = input_values(program)
    names: dict[str, str] = {}
    for name, value in values.items():
        known = {"tensor": (), "image": (BATCH,)}.get(kind_of(name, value), (BATCH, SEQUENCE))
        for size, dim_name in zip(value.shape, known, strict=False):
            if isinstance(size, torch.SymInt) and dim_name not in names.values():
                names.setdefault(str(size.node.expr), dim_name)
    examples = dict(zip(values, pytree.tree_leaves(program.example_inputs or ()), strict=False))
    specs = []
    for name, value in values.items():
        dims = tuple(_dim(program, size, names) for size in value.shape)
        kind = kind_of(name, value)
        low: int | None = None
        high: int | None = None
        origin: Origin = "known"
        is_whole = not (value.is_floating_point() or value.is_complex())
        if is_whole and value.dtype != torch.bool:
            low, high = 0, 1
            if kind != "attention_mask":
                origin = "example"
                example = examples.get(name)
                if isinstance(example, Tensor) and example.numel():
                    low, high = int(example.min()), int(example.max())
        specs.append(InputSpec(name, kind, value.dtype, dims, low, high, origin=origin))
    return tuple(specs)


def _dim(program: ExportedProgram, size: int | torch.SymInt, names: Mapping[str, str]) -> DimSpec:
    if isinstance(size, int):
        return DimSpec.static(size)
    expression = size.node.expr
    factor, symbol = expression.as_coeff_Mul()
    step = int(factor) if symbol.is_symbol else 1
    minimum, maximum = symbol_range(program, expression)
    minimum, maximum = max(minimum, step), maximum - maximum % step
    hint = size.node.hint if size.node.has_hint() else min(max(minimum, 2 * step), maximum)
    name = names.get(str(expression), str(symbol if symbol.is_symbol else expression))
    return DimSpec(name, hint, minimum, maximum, step=step)
