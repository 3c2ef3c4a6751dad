"""Capture a model as a program: torch.export without weights, then bind the weights to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    Named,
    OutputSpec,
    Wanted,
    name_outputs,
    name_result,
)
from enginecast.capture.python.locations import SourceLocation, Spot
from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.factory import is_dense
from enginecast.capture.tracing.answers.possible_values import values_of
from enginecast.capture.tracing.answers.recorded_reads import Guard
from enginecast.capture.tracing.attempt import OF_OWN_CODE, Attempt, Fallback, Rung
from enginecast.capture.tracing.ladder import ATTEMPTS, HIDDEN, UNWIDENED, Search, climb
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
from enginecast.errors import CaptureError, UsageError
from enginecast.passes.captured.bind_weights import bind_weights
from enginecast.passes.captured.drop_idle_draws import drop_idle_draws
from enginecast.passes.captured.functionalize import functionalize
from enginecast.passes.captured.writes import ON_TRACES, show_statistics
from enginecast.passes.ir.blocks import all_nodes
from enginecast.passes.ir.edit import structural_copy, weight_specs
from enginecast.passes.ir.source import source_line

SEED = 0
"""Of the inputs that the model is run on when its trace is refused."""
TRIALS = 2
"""How many sizes besides the traced one."""


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
    is_widened: bool = False
    """Whether code was rewritten only so that more sizes are possible."""
    in_halves: ExportedProgram | None = None
    """The program before what the model computes in 16 bits became rounded fp32."""


def capture(
    source: Source,
    specs: tuple[InputSpec, ...],
    example: Mapping[str, Tensor],
    wanted: Wanted = ALL,
    fallback: Fallback = "torchscript",
    given: Mapping[str, Tensor] | None = None,
    widens: bool = True,
    is_hidden: bool = False,
) -> Captured:
    """Capture `source` in fp32, whatever dtype its weights are stored in.

    The module is traced without weights in memory, so nothing is copied; stored weights are bound
    as they are, behind binding casts (see `bind`).  A program that was given is taken as it is.

    Args:
        source: the model.
        specs: its inputs, in the order that the program takes them.
        example: one tensor for each, of the example sizes.
        wanted: the outputs that the program returns; a program that was given keeps all.
        fallback: how far down the ladder it may go (see `ladder`).
        given: inputs that the user gave, whose path a specialised program takes.
        widens: whether to rewrite the user's own code where a plain export takes fewer sizes.
        is_hidden: whether to trace along the code that eager runs, and not by the ladder.

    Raises:
        RefusedError: torch.export refused the model, by whichever strategy.
        CaptureError: a dimension cannot vary as asked, or the model writes to its own state.
        SourceError: the weights do not fit.
        UsageError: `example` does not fit `specs`.
    """
    program = source.given_program()
    if program is not None:
        return describe(structural_copy(program))
    for spec in specs:
        tensor, sizes = example.get(spec.name), [dim.size for dim in spec.dims]
        if tensor is None:
            raise UsageError(f"the example lacks the input {spec.name}")
        if list(tensor.shape) != sizes or tensor.dtype != spec.dtype:
            raise UsageError(
                f"the example's {spec.name} is {tensor.dtype} {list(tensor.shape)}, "
                f"expected {spec.dtype} {sizes}"
            )
    inputs = {spec.name: example[spec.name] for spec in specs}
    weights = source.weights()  # before the trace, which takes long, and they are only mapped

    def cases() -> list[Mapping[str, Tensor]]:
        """The user's inputs, those of the trace, and some of other sizes."""
        users = given or source.example()
        others = [case.inputs for case in verification_inputs(specs, SEED)[:TRIALS]]
        return [*([users] if users.keys() == inputs.keys() else []), inputs, *others]

    search = Search(source, Attempt(specs, inputs), wanted, cases, fallback, values_of(specs))
    traced = climb(search, HIDDEN if is_hidden else ATTEMPTS if widens else UNWIDENED)
    program = traced.program
    for rewrite in ON_TRACES:
        rewrite(program)
    state = source.buffers
    notes = [*traced.notes, *computed_instead(program, state)]
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
    symbols = named_sizes(program, traced.attempt.specs)
    outputs = output_specs(program, output_names(program), symbols)
    broken, checks = tried_guards(program, traced.inputs)
    swept = _swept(source, traced, wanted)
    drop_idle_draws(program)  # eager, which a sweep compares with, draws
    bind_weights(program, weights)
    _refuse_what_no_engine_holds(program)
    notes += input_writes(program)
    functionalize(program)
    program.validate()
    return Captured(
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
        is_widened=search.is_widened,
    )


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
    with libraries_patched(module), attempt.entered(module):
        return Sweep(walker, traced.inputs, example_sizes(traced.inputs)).find()


def describe(program: ExportedProgram) -> Captured:
    """Inputs and outputs of a program that was captured elsewhere (see `program_inputs`), which is
    functionalized in place.

    Raises:
        CaptureError: a dimension of an input is an expression such as 2*s0 + 1, or the program
            writes to its own state.
    """
    show_statistics(program)
    refuse_mutation(program)
    functionalize(program)
    inputs = program_inputs(program)
    named, leaves = named_leaves(program, ALL)
    names = _in_order(named, leaves)
    outputs = output_specs(program, names, named_sizes(program, inputs))
    return Captured(program, inputs, outputs, named.notes)


def output_names(program: ExportedProgram) -> tuple[str, ...]:
    """A name for each value that `program` returns, from the structure of its output.

    Raises:
        CaptureError: a value is not a tensor.
    """
    return _in_order(*named_leaves(program, ALL))


def _in_order(named: Named, leaves: Sequence[object]) -> tuple[str, ...]:
    names = {id(leaf): name for name, leaf in named.tensors.items()}
    return tuple(names[id(leaf)] for leaf in leaves if leaf is not None)


def named_leaves(program: ExportedProgram, wanted: Wanted) -> tuple[Named, list[object]]:
    """Stand-ins for what `program` returns: by name those that are wanted, and all in order.

    A tensor stands for each tensor, and no two are the same; a number or None is itself.

    Raises:
        CaptureError, UsageError: see `name_result`.
    """
    leaves: list[object] = []
    for output in program.graph_signature.output_specs:
        if output.kind == OutputKind.USER_OUTPUT:
            is_tensor = isinstance(output.arg, TensorArgument)
            leaf = torch.empty(0, device="meta") if is_tensor else output.arg
            leaves.append(leaf.value if isinstance(leaf, ConstantArgument) else leaf)
    spec = program.call_spec.out_spec
    assert spec is not None  # torch.export always records it
    inputs = [str(name) for name in program.graph_signature.user_inputs]
    tree = pytree.tree_unflatten(leaves, spec)
    return name_result(tree, wanted, inputs, takes_numbers=False), leaves


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
