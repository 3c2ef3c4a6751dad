"""Capture a model as a program: torch.export without weights, then the weights bound to it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from enginecast.capture.bind import bind_weights
from enginecast.capture.examples import verification_inputs
from enginecast.capture.inputs import InputSpec
from enginecast.capture.ladder import Ladder
from enginecast.capture.mutation import (
    compute_overwritten,
    drop_idle_writes,
    input_writes,
    refuse_mutation,
)
from enginecast.capture.oracle import Guard
from enginecast.capture.outputs import Named, OutputSpec, name_result
from enginecast.capture.places import Place, real_path
from enginecast.capture.program_inputs import program_inputs
from enginecast.capture.scan import scan
from enginecast.capture.shapes import (
    Range,
    output_specs,
    symbol_names,
)
from enginecast.capture.size_guards import OtherSizes, other_sizes
from enginecast.capture.source import Source
from enginecast.capture.trace import trace
from enginecast.capture.wanted import Wanted
from enginecast.capture.way import Fallback, Rung, Way
from enginecast.errors import UsageError

DECIDING = frozenset({"if", "while", "for", "ternary", "comprehension", "boolean", "try"})
"""Findings where Python takes one of several ways."""
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
    symbols: dict[str, Range]
    """Smallest and largest size by dimension name."""
    notes: tuple[str, ...] = ()
    """What a user should know, such as a range that the model narrowed."""
    rungs: tuple[Rung, ...] = ()
    """How it was captured, and what was tried before; empty for a program that was given."""
    branches: tuple[Place, ...] = ()
    """File and line of each branch whose ways have to be verified, all of them."""
    guards: tuple[Guard, ...] = ()
    """Outputs that tell whether inputs go the way of the program; none when it goes all ways."""
    other_sizes: tuple[OtherSizes, ...] = ()
    """Sizes in range at which the model's code goes another way than the trace did."""
    is_widened: bool = False
    """Whether code was rewritten only so that more sizes are possible."""


def capture(
    source: Source,
    specs: tuple[InputSpec, ...],
    example: Mapping[str, Tensor],
    wanted: Wanted | None = None,
    fallback: Fallback = "torchscript",
    given: Mapping[str, Tensor] | None = None,
    widens: bool = True,
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
        given: inputs that the user gave, whose way a specialised program goes.
        widens: whether to rewrite the user's own code where a plain export takes fewer sizes.

    Raises:
        RefusedError: torch.export refused the model, whichever way it was asked.
        CaptureError: a dimension cannot vary as asked, or the model writes to its own state.
        SourceError: the weights do not fit.
        UsageError: `example` does not fit `specs`.
    """
    program = source.given_program()
    if program is not None:
        return describe(program)
    _check_example(specs, example)
    inputs = {spec.name: example[spec.name] for spec in specs}
    weights = source.weights()  # before the trace, which takes long, and they are only mapped
    ladder = Ladder(
        source=source,
        attempt=partial(trace, source, specs, inputs, wanted or Wanted()),
        cases=partial(_trials, specs, inputs, given or source.example()),
        fallback=fallback,
        widens=widens,
    )
    climbed = ladder.climb()
    traced = climbed.traced
    program, shapes = traced.program, traced.shapes
    drop_idle_writes(program)
    overwritten = compute_overwritten(program)
    refuse_mutation(program)
    outputs = output_specs(program, output_names(program), symbol_names(program, traced.specs))
    bind_weights(program, weights)
    program.validate()
    notes = (*traced.notes, *shapes.notes, *overwritten, *input_writes(program))
    return Captured(
        program,
        shapes.inputs,
        outputs,
        shapes.symbols,
        notes,
        climbed.rungs,
        branches=_branches(source, specs, climbed.way, traced.proved),
        guards=climbed.way.guards,
        other_sizes=other_sizes(traced.program, shapes.inputs),
        is_widened=climbed.is_widened,
    )


def _branches(
    source: Source, specs: tuple[InputSpec, ...], way: Way, proved: Collection[Place]
) -> tuple[Place, ...]:
    """Where both ways have to be verified: what became an operator, and what eager decides by
    inputs although torch.export did not stumble over it.

    Code can lead around a capture: it swallows torch's refusal (`try`, `suppress`), asks whether it
    is being compiled, or for the type of a number.  torch.export says nothing of the other way.
    """
    if way.guards:
        return ()  # the program tells by itself when another way was right
    decided = [
        (real_path(found.file), found.line)
        for found in scan(source.empty(), [spec.name for spec in specs], is_eager=True)
        if found.kind in DECIDING and found.decides == "inputs" and found.is_blocking
    ]
    return tuple(
        dict.fromkeys((*way.branches(), *(place for place in decided if place not in proved)))
    )


def _trials(
    specs: tuple[InputSpec, ...], traced: Mapping[str, Tensor], given: Mapping[str, Tensor]
) -> list[Mapping[str, Tensor]]:
    """Inputs that the model is run on when its trace is refused: the user's, those of the trace,
    and of other sizes.
    """
    own = [given] if given.keys() == traced.keys() else []
    others = [case.inputs for case in verification_inputs(specs, SEED)[:TRIALS]]
    return [*own, traced, *others]


def describe(program: ExportedProgram) -> Captured:
    """Inputs and outputs of a program that was captured elsewhere (see `program_inputs`).

    Raises:
        CaptureError: a dimension of an input is an expression such as 8*s0, or the program writes
            to its own state.
    """
    refuse_mutation(program)
    inputs = program_inputs(program)
    symbols = {
        dim.name: (dim.minimum, dim.maximum)
        for spec in inputs
        for dim in spec.dims
        if dim.name is not None
    }
    named, leaves = named_leaves(program, Wanted())
    names = _in_order(named, leaves)
    outputs = output_specs(program, names, symbol_names(program, inputs))
    return Captured(program, inputs, outputs, symbols, named.notes)


def output_names(program: ExportedProgram) -> tuple[str, ...]:
    """A name for each value that `program` returns, from the structure of its output.

    Raises:
        CaptureError: a value is no tensor.
    """
    return _in_order(*named_leaves(program, Wanted()))


def _in_order(named: Named, leaves: Sequence[object]) -> tuple[str, ...]:
    names = {id(leaf): name for name, leaf in named.tensors.items()}
    return tuple(names[id(leaf)] for leaf in leaves if leaf is not None)


def named_leaves(program: ExportedProgram, wanted: Wanted) -> tuple[Named, list[object]]:
    """Stand-ins for what `program` returns: by name those that are wanted, and all in order.

    A tensor stands for each tensor, and no two are the same; a number or None is itself.

    Raises:
        CaptureError, UsageError: see `name_result`.
    """
    leaves = [
        _stand_in(spec.arg)
        for spec in program.graph_signature.output_specs
        if spec.kind == OutputKind.USER_OUTPUT
    ]
    spec = program.call_spec.out_spec
    assert spec is not None  # torch.export always records it
    inputs = program.graph_signature.user_inputs
    tree = pytree.tree_unflatten(leaves, spec)
    return name_result(tree, wanted, [str(name) for name in inputs]), leaves


def _stand_in(argument: object) -> object:
    if isinstance(argument, TensorArgument):
        return torch.empty(0, device="meta")
    return argument.value if isinstance(argument, ConstantArgument) else argument


def _check_example(specs: tuple[InputSpec, ...], example: Mapping[str, Tensor]) -> None:
    for spec in specs:
        tensor = example.get(spec.name)
        if tensor is None:
            raise UsageError(f"the example lacks the input {spec.name}")
        sizes = tuple(dim.size for dim in spec.dims)
        if tuple(tensor.shape) != sizes or tensor.dtype != spec.dtype:
            raise UsageError(
                f"the example's {spec.name} is {tensor.dtype} {list(tensor.shape)}, "
                f"expected {spec.dtype} {list(sizes)}"
            )
