"""Split a program into pieces: one of several equal regions is compiled, and runs with the weights
of each.

    %h  = glue0(%x, %w1, ...)           what lies between the regions is a piece, too
    %h1 = region1(%h, %w2, ...)
    %h2 = region1(%h1, %w3, ...)
    %y  = glue2(%h2, %w4, ...)

A piece takes contiguous tensors, weights among them, whatever their memory in the whole program is:
so no value of a weight is compiled, and the strides that Inductor gives a result do not matter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from enginecast.library_names import aten
from enginecast.passes.ir.edit import value
from enginecast.passes.ir.effects import is_metadata_check
from enginecast.passes.ir.regions import (
    Carver,
    Region,
    is_plain,
    is_size,
    is_tensors,
    repeated_regions,
)
from enginecast.passes.ir.source import call_place

LEAST_SAVED = 48
"""Nodes that a group of equal regions need not be compiled for again; a piece has costs of its own:
Inductor's headers take a C++ compiler 10 s.
"""


@dataclass(frozen=True)
class Call:
    """One run of a piece; values go by the names of their nodes."""

    piece: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True)
class Split:
    """A program in pieces."""

    pieces: Mapping[str, ExportedProgram]
    calls: tuple[Call, ...]
    """In order."""
    regions: Mapping[str, tuple[str, ...]]
    """The modules that each piece stands for, but for glue."""

    @property
    def counts(self) -> dict[str, int]:
        """How many modules are computed by the code of one, by the path of the first."""
        return {modules[0]: len(modules) for modules in self.regions.values()}


def split(program: ExportedProgram) -> Split | str:
    """The pieces of a lowered program; why it has none, in words."""
    for node in program.graph.nodes:
        fits = node.op != "call_function" or is_size(node) or is_plain(node)
        fits = fits or is_metadata_check(node)  # of the trace: no piece needs it
        if not fits or node.op == "get_attr" or node.target is aten.as_strided.default:
            return f"{call_place(node)} decides a size by values, or does more than compute tensors"
    groups = [
        group
        for group in repeated_regions(program)
        if (len(group) - 1) * len(group[0].nodes) >= LEAST_SAVED
    ]
    if not groups:
        return "it would save nothing: no large parts of it are equal"
    regions = [region for group in groups for region in group]
    parts = _schedule(program, regions)
    if parts is None:
        return "a size between two of its parts is none of an input"
    pieces: dict[str, ExportedProgram] = {}
    names: dict[str, str] = {}
    calls = []
    for part in parts:
        if part.digest not in names:
            kind = "region" if part.module else "glue"
            names[part.digest] = f"{kind}{len(pieces)}"
            pieces[names[part.digest]] = _program(part, program)
        takes = tuple(node.name for node in (*part.inputs, *part.weights))
        calls.append(Call(names[part.digest], takes, tuple(node.name for node in part.results)))
    modules: dict[str, tuple[str, ...]] = {}
    for part in parts:
        if part.module:
            modules[names[part.digest]] = (*modules.get(names[part.digest], ()), part.module)
    return Split(pieces, tuple(calls), modules)


def _schedule(program: ExportedProgram, regions: Sequence[Region]) -> list[Region] | None:
    """Regions and what lies between them, in an order in which they can run.

    Before each region stands what it needs, and no more: so the glue before equal regions is equal,
    too.  A region that waits for what waits for the region itself is taken apart.
    """
    carver = Carver(program)
    order = {node: number for number, node in enumerate(program.graph.nodes)}
    known = {node for node in order if node.op == "placeholder"}
    waiting = list(regions)
    parts: list[Region] = []
    while waiting:
        held = {node for region in waiting for node in region.nodes}
        for region in waiting:
            needed = _needed((*region.inputs, *region.weights), known, held)
            if needed is not None:
                break
        else:
            del waiting[0]
            continue
        if not _add_glue(carver, parts, sorted(needed, key=order.__getitem__)):
            return None
        parts.append(region)
        known.update(needed, region.nodes)
        waiting.remove(region)
    output = program.graph.output_node()
    needed = _needed(output.all_input_nodes, known, set())
    assert needed is not None  # nothing is held back any more
    return parts if _add_glue(carver, parts, sorted(needed, key=order.__getitem__)) else None


def _add_glue(carver: Carver, parts: list[Region], nodes: Sequence[Node]) -> bool:
    """Whether a part of its own could be made of what lies before a region."""
    if not nodes:
        return True
    part = carver.carve("", nodes)
    if part is not None:
        parts.append(part)
    return part is not None


def _needed(wanted: Sequence[Node], known: set[Node], held: set[Node]) -> set[Node] | None:
    """The tensors that have to be computed first, in any order; None: one is held back."""
    found: set[Node] = set()
    open_ = list(wanted)
    while open_:
        node = open_.pop()
        if node in known or node in found or not is_tensors(node):
            continue  # a size is taken from an input
        if node in held:
            return None
        found.add(node)
        open_ += node.all_input_nodes
        if not isinstance(value(node), Tensor):
            open_ += node.users  # the results of an op that gives several stay together
    return found


def _program(part: Region, program: ExportedProgram) -> ExportedProgram:
    """The graph of a part as a program; every tensor is an input, and contiguous."""
    placeholders = [node for node in part.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        found = value(node)
        with found.fake_mode:
            node.meta["val"] = found.contiguous()
    examples: tuple[Tensor, ...] = tuple(value(node) for node in placeholders)
    output = part.graph.output_node()
    results: Sequence[Node] = output.args[0]  # type: ignore[assignment]
    signature = ExportGraphSignature(
        [InputSpec(InputKind.USER_INPUT, TensorArgument(n.name), None) for n in placeholders],
        [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in results],
    )
    call = ModuleCallSignature(
        inputs=[],
        outputs=[],
        in_spec=pytree.tree_structure((examples, {})),
        out_spec=pytree.tree_structure(tuple(range(len(results)))),
        forward_arg_names=[node.name for node in placeholders],
    )
    return ExportedProgram(
        root=GraphModule({}, part.graph),
        graph=part.graph,
        graph_signature=signature,
        state_dict={},
        range_constraints=dict(program.range_constraints),
        module_call_graph=[ModuleCallEntry("", call)],
        example_inputs=(examples, {}),
        constants={},
        verifiers=program.verifiers,
    )
