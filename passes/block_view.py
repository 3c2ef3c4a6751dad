"""Look at one block as if it were a program, so that what edits programs edits it too."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Graph, GraphModule, Node

from enginecast.passes.base import Pass, PassContext, Site
from enginecast.passes.graph_edit import add_weight, free_name, value, weight_expressions
from enginecast.passes.sites import SiteLog
from enginecast.passes.structure import (
    Block,
    add_operand,
    blocks,
    is_structured,
    lasting_positions,
    operands,
)
from enginecast.passes.weight_values import weight_value

LEFT_ALONE = "this pass does not look into the graphs that the op runs"


@dataclass
class _Signature:
    """The part of a program's signature that graph edits read and write."""

    input_specs: list[InputSpec]
    output_specs: list[Any]


class _Lazy(dict[str, Any]):
    """Weights by name; those that are computed outside of the block are so when they are read."""

    def __init__(self, known: dict[str, Any], computed: dict[str, Callable[[], Tensor]]) -> None:
        super().__init__(known)
        self._computed = computed

    def get(self, name: str, default: Any = None) -> Any:
        if name in self._computed:
            return self._computed[name]()
        return super().get(name, default)


class _View:
    """What graph edits need of an ExportedProgram, of one block."""

    def __init__(self, program: ExportedProgram, node: Node, block: Block) -> None:
        self.graph: Graph = block.module.graph
        self.graph_module: GraphModule = block.module
        weights = weight_expressions(program)
        specs: list[InputSpec] = []
        computed: dict[str, Callable[[], Tensor]] = {}
        lasting = lasting_positions(node)
        pairs = zip(block.placeholders, operands(node), strict=True)
        for position, (placeholder, operand) in enumerate(pairs):
            own = _spec(program, operand) if position in lasting else None
            if own is None and position in lasting and operand in weights:
                own = (InputKind.PARAMETER, f"{block.way} {placeholder.name}")
                computed[own[1]] = partial(weight_value, program, operand)
            kind, target = own or (InputKind.USER_INPUT, None)
            persistent = True if kind is InputKind.BUFFER else None
            specs.append(InputSpec(kind, TensorArgument(placeholder.name), target, persistent))
        self.graph_signature = _Signature(specs, [])
        self.state_dict = self._state_dict = _Lazy(dict(program.state_dict), computed)
        self.constants: dict[str, Any] = dict(program.constants)


def view(program: ExportedProgram, node: Node, block: Block) -> ExportedProgram:
    """A block of `node` with the attributes that graph edits use of a program: its placeholders are
    weights where its operands are.

    Args:
        program: that `node` stands in: an exported program, or a view itself.
    """
    return cast(ExportedProgram, _View(program, node, block))


@contextmanager
def opened(program: ExportedProgram, node: Node, block: Block) -> Iterator[ExportedProgram]:
    """A view to edit: weights that are added become operands, and no placeholder is lost."""
    names = [placeholder.name for placeholder in block.placeholders]
    values = [value(placeholder) for placeholder in block.placeholders]
    seen = view(program, node, block)
    yield seen
    graph = block.module.graph
    there = {found.name: found for found in block.placeholders}
    added = [there[name] for name in there if name not in names]
    anchor = next(found for found in graph.nodes if found.op != "placeholder")
    for name, kept in zip(names, values, strict=True):
        found = there.get(name)
        if found is None:
            with graph.inserting_before(anchor):
                found = graph.placeholder(name)
            found.meta["val"] = kept
        anchor.prepend(found)
    for found in added:
        _hand_in(program, node, block, seen, found)
    block.module.recompile()


def _hand_in(
    program: ExportedProgram, node: Node, block: Block, seen: ExportedProgram, added: Node
) -> None:
    """Add a weight that an edit of a block needs to the program around it, and hand it in."""
    spec = next(s for s in seen.graph_signature.input_specs if s.arg.name == added.name)
    assert spec.target is not None
    tensor = seen.state_dict.get(spec.target, seen.constants.get(spec.target))
    outer = add_weight(program, free_name(program, spec.target), tensor, spec.kind)
    places = dict(zip([b.way for b in blocks(node)], add_operand(node, outer), strict=True))
    added.replace_all_uses_with(places[block.way])
    block.module.graph.erase_node(added)


def run_pass(pass_: Pass, program: ExportedProgram, context: PassContext) -> list[Site]:
    """Run a pass on a program and, where it says that it can, on every block within it."""
    sites = list(pass_.run(program, context))
    for node in list(program.graph.nodes):
        if not is_structured(node):
            continue
        if not pass_.in_blocks:
            sites += _left_alone(pass_, node, _after(sites, context))
            continue
        for block in blocks(node):
            with opened(program, node, block) as seen:
                sites += run_pass(pass_, seen, _after(sites, context))
    return sites


def _after(sites: list[Site], context: PassContext) -> PassContext:
    """The context of a graph that is looked at after others: sites are numbered through."""
    counted = Counter((site.module, site.source) for site in sites)
    return replace(context, earlier=Counter(context.earlier) + counted)


def _left_alone(pass_: Pass, node: Node, context: PassContext) -> list[Site]:
    if pass_.covers_blocks:
        return []
    log = SiteLog(context)
    log.refused(node, LEFT_ALONE)
    return log.sites


def _spec(program: ExportedProgram, operand: object) -> tuple[InputKind, str] | None:
    for spec in program.graph_signature.input_specs:
        if isinstance(operand, Node) and spec.arg.name == operand.name and spec.target:
            return spec.kind, spec.target
    return None
