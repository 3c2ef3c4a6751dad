"""Present a control-flow subgraph as a program, so that edits of programs work on it, too."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import Graph, GraphModule, Node

from enginecast.passes.ir.base import GraphPass, Pass, PassContext, ProgramView, Site
from enginecast.passes.ir.blocks import (
    Block,
    add_operand,
    blocks,
    is_structured,
    lasting_positions,
    operands,
)
from enginecast.passes.ir.edit import (
    add_weight,
    free_name,
    value,
    weight_expressions,
    weight_tensor,
    weight_value,
)
from enginecast.passes.ir.sites import SiteLog

LEFT_ALONE = "this pass does not look into the graphs that the op runs"


class _Lazy(dict[str, Any]):
    """Weights by name; those computed outside of the block are evaluated when they are read."""

    def __init__(self, known: dict[str, Any], computed: dict[str, Callable[[], Tensor]]) -> None:
        super().__init__(known)
        self._computed = computed

    def get(self, name: str, default: Any = None) -> Any:
        if name in self._computed:
            return self._computed[name]()
        return super().get(name, default)


class BlockView:
    """A block of a node as a `ProgramView`: its placeholders are weights where its operands are.

    Args:
        program: the program that contains `node`.
    """

    def __init__(self, program: ProgramView, node: Node, block: Block) -> None:
        self.graph: Graph = block.module.graph
        self.graph_module: GraphModule = block.module
        weights = weight_expressions(program)
        specs: list[InputSpec] = []
        computed: dict[str, Callable[[], Tensor]] = {}
        lasting = lasting_positions(node)
        stored = {s.arg.name: s for s in program.graph_signature.input_specs if s.target}
        pairs = zip(block.placeholders, operands(node), strict=True)
        for position, (placeholder, operand) in enumerate(pairs):
            own: tuple[InputKind, str] | None = None
            if position in lasting and isinstance(operand, Node):
                spec = stored.get(operand.name)
                own = None if spec is None else (spec.kind, str(spec.target))
                if own is None and operand in weights:
                    own = (InputKind.PARAMETER, f"{block.path} {placeholder.name}")
                    computed[own[1]] = partial(weight_value, program, operand)
            kind, target = own or (InputKind.USER_INPUT, None)
            persistent = True if kind is InputKind.BUFFER else None
            specs.append(InputSpec(kind, TensorArgument(placeholder.name), target, persistent))
        self.graph_signature = ExportGraphSignature(specs, [])
        self.state_dict: dict[str, Any] = _Lazy(dict(program.state_dict), computed)
        self.constants: dict[str, Any] = dict(program.constants)


@contextmanager
def opened(program: ProgramView, node: Node, block: Block) -> Iterator[BlockView]:
    """Yield a view to edit: added weights become operands, and placeholders are kept."""
    names = [placeholder.name for placeholder in block.placeholders]
    values = [value(placeholder) for placeholder in block.placeholders]
    seen = BlockView(program, node, block)
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
    for found in added:  # weights that the enclosing program is to pass in
        spec = next(s for s in seen.graph_signature.input_specs if s.arg.name == found.name)
        assert spec.target is not None
        tensor = weight_tensor(seen, spec)
        outer = add_weight(program, free_name(program, spec.target), tensor, spec.kind)
        found.replace_all_uses_with(add_operand(node, outer)[block.path])
        graph.erase_node(found)
    block.module.recompile()


def run_pass(pass_: Pass, program: ExportedProgram, context: PassContext) -> list[Site]:
    """Run a pass on a program and, for a `GraphPass`, on every block within it."""
    if isinstance(pass_, GraphPass):
        return _run_within(pass_, program, context)
    sites = list(pass_.run(program, context))
    if not pass_.covers_blocks:
        log = SiteLog(_after(sites, context))
        for node in filter(is_structured, program.graph.nodes):
            log.refused(node, LEFT_ALONE)
        sites += log.sites
    return sites


def _run_within(pass_: GraphPass, program: ProgramView, context: PassContext) -> list[Site]:
    sites = list(pass_.run(program, context))
    for node in list(program.graph.nodes):
        for block in blocks(node):
            with opened(program, node, block) as seen:
                sites += _run_within(pass_, seen, _after(sites, context))
    return sites


def _after(sites: list[Site], context: PassContext) -> PassContext:
    """The context for a later graph, in which the numbering of sites continues."""
    counted = Counter((site.module, site.source) for site in sites)
    return replace(context, earlier=Counter(context.earlier) + counted)
