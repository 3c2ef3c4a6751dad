"""Graphs within a graph: the blocks that cond, while_loop and scan run.

    %true_graph_0 = attribute "true_graph_0"
        %h: f32[s0, 8] = input                  a block: its placeholders take the operands
        %w: f32[8, 8] = input
        %linear: f32[s0, 8] = aten.linear.default(%h, %w)
        return %linear
    %false_graph_0 = attribute "false_graph_0"
        ...
    %cond = higher_order.cond(%p, %true_graph_0, %false_graph_0, [%h, %w])
    %getitem = operator.getitem(%cond, 0)

All blocks of a node take the same operands.  A weight that a block reads is an operand too.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from enginecast.errors import VerificationError
from enginecast.library_names import aten, higher_order
from enginecast.passes.ir.source import source_line

COND = higher_order("cond")
WHILE_LOOP = higher_order("while_loop")
SCAN = higher_order("scan")
_PATHS: dict[Any, tuple[tuple[int, str], ...]] = {
    COND: ((1, "true"), (2, "false")),
    WHILE_LOOP: ((0, "condition"), (1, "body")),
    SCAN: ((0, "step"),),
}
"""For each op, the argument positions of its blocks, and the blocks' names in reports."""

_FIRST: dict[Any, int] = {COND: 3, WHILE_LOOP: 2, SCAN: 1}
"""Argument position at which the operands begin."""

MOST_ROUNDS = 1 << 16
"""Most iterations of an interpreted loop; a longer one counts as endless."""
Apply = Callable[..., Any]
"""Calls an op on values of the run; `verification.emulate.run` uses its own kind of values."""


@dataclass(frozen=True)
class Block:
    """One graph that a node runs."""

    path: str
    """"true", "false", "condition", "body" or "step"."""
    attribute: Node
    """The `get_attr` node that names it."""
    module: GraphModule

    @property
    def placeholders(self) -> list[Node]:
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    @property
    def results(self) -> tuple[Any, ...]:
        """The returned values, in order."""
        values: Any = self.module.graph.output_node().args[0]
        return tuple(values) if isinstance(values, list | tuple) else (values,)


def is_structured(node: object) -> TypeGuard[Node]:
    """Whether a node runs subgraphs."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in _PATHS


def is_result(node: object) -> TypeGuard[Node]:
    """Whether a node is one of the results of a control-flow op."""
    return (
        isinstance(node, Node) and node.target is operator.getitem and is_structured(node.args[0])
    )


def blocks(node: Node) -> tuple[Block, ...]:
    """The graphs that a node runs; none for an op."""
    if not is_structured(node):
        return ()
    inner = []
    for position, path in _PATHS[node.target]:
        attribute = node.args[position]
        assert isinstance(attribute, Node)
        owner = attribute.graph.owning_module
        assert owner is not None
        module = owner.get_submodule(str(attribute.target))
        assert isinstance(module, GraphModule)
        inner.append(Block(path, attribute, module))
    return tuple(inner)


def operands(node: Node) -> tuple[Any, ...]:
    """The values for the placeholders of a node's blocks; for a scan's `xs`, a slice of each."""
    return tuple(value for group in operand_groups(node) for value in group)


def operand_groups(node: Node) -> tuple[tuple[Any, ...], ...]:
    """The operands as the node groups them: `[operands]` of cond, `[carried, additional]` of
    while_loop, `[init, xs, additional]` of scan.
    """
    first = _FIRST[node.target]
    groups: Any = node.args[first:]
    return tuple(map(tuple, groups))


def carried(node: Node) -> int:
    """How many operands are carried from one iteration to the next."""
    return 0 if node.target is COND else len(operand_groups(node)[0])


def set_operand(node: Node, position: int, value: Any) -> None:
    """Replace one operand by another value."""
    first = _FIRST[node.target]
    groups = [list(group) for group in operand_groups(node)]
    for group in groups:
        if position < len(group):
            group[position] = value
            break
        position -= len(group)
    node.args = (*node.args[:first], *(tuple(group) for group in groups))


def lasting_positions(node: Node) -> range:
    """Positions of the loop-invariant operands that are passed whole."""
    groups = operand_groups(node)
    count = sum(map(len, groups))
    return range(count - len(groups[-1]), count)


def drop_operand(node: Node, position: int) -> None:
    """Remove a loop-invariant operand that no block reads."""
    last = list(operand_groups(node)[-1])
    del last[position - lasting_positions(node).start]
    placeholders = [block.placeholders[position] for block in blocks(node)]
    node.args = (*node.args[:-1], tuple(last))
    for placeholder, block in zip(placeholders, blocks(node), strict=True):
        block.module.graph.erase_node(placeholder)
        block.module.recompile()


def add_operand(node: Node, value: Node) -> dict[str, Node]:
    """Pass one more value to every block of a node; returns its placeholders by block path."""
    groups: Any = list(node.args)
    groups[-1] = (*groups[-1], value)
    node.args = tuple(groups)
    added = {}
    for block in blocks(node):
        graph = block.module.graph
        behind = block.placeholders
        first = next(iter(graph.nodes))
        point = graph.inserting_after(behind[-1]) if behind else graph.inserting_before(first)
        with point:
            placeholder: Node = graph.placeholder(value.name)
        placeholder.target = placeholder.name  # two may be asked for by one name
        placeholder.meta["val"] = value.meta["val"]
        added[block.path] = placeholder
        block.module.recompile()
    return added


def inner_modules(module: GraphModule) -> Iterator[GraphModule]:
    """Every subgraph that the nodes of a graph run, outermost first."""
    for node in module.graph.nodes:
        for block in blocks(node):
            yield block.module
            yield from inner_modules(block.module)


def all_modules(program: ExportedProgram) -> Iterator[GraphModule]:
    """The graph module of a program, and of every subgraph."""
    yield program.graph_module
    yield from inner_modules(program.graph_module)


def all_nodes(program: ExportedProgram) -> Iterator[Node]:
    """All nodes of a program, including those in blocks."""
    for module in all_modules(program):
        yield from module.graph.nodes


def all_blocks(program: ExportedProgram) -> Iterator[tuple[Node, Block]]:
    """Every block of a program with the node that runs it, outermost first."""
    for module in all_modules(program):
        for node in module.graph.nodes:
            for block in blocks(node):
                yield node, block


def has_structure(program: ExportedProgram) -> bool:
    return any(map(is_structured, program.graph.nodes))


def block_name(node: Node, block: Block) -> str:
    """The name of a block in reports: "cond[true]"."""
    return f"{node.name}[{block.path}]"


def run_structured(
    node: Node,
    args: Sequence[Any],
    run: Callable[[Block, list[Any]], list[Any]],
    apply: Apply,
) -> tuple[Any, ...]:
    """Compute a control-flow node.

    Args:
        node: cond, while_loop or scan.
        run: runs one block on the values of its placeholders.
        apply: calls an op on values.

    Returns:
        The results, as `getitem` reads them.
    """
    if node.target is COND:
        true, false = blocks(node)
        return tuple(run(true if truth(args[0], apply) else false, list(args[3])))
    if node.target is WHILE_LOOP:
        condition, body = blocks(node)
        state, additional = list(args[2]), list(args[3])
        rounds = 0
        while truth(run(condition, [*state, *additional])[0], apply):
            state = run(body, [*state, *additional])
            rounds += 1
            if rounds > MOST_ROUNDS:
                raise VerificationError(
                    f"the loop at {source_line(node) or node.name} has not ended after"
                    f" {MOST_ROUNDS} rounds"
                )
        return tuple(state)
    [step] = blocks(node)
    state, xs, additional = list(args[1]), list(args[2]), list(args[3])
    count = apply(aten.sym_size.int, xs[0], 0)
    rows: list[list[Any]] = []
    for index in range(count):
        slices = [apply(aten.select.int, value, 0, index) for value in xs]
        results = run(step, [*state, *slices, *additional])
        state, row = results[: len(state)], results[len(state) :]
        rows.append(row)
    stacked = [apply(aten.stack.default, list(column)) for column in zip(*rows, strict=True)]
    return (*state, *stacked)


def truth(value: Any, apply: Apply) -> bool:
    """Whether a predicate of one element holds."""
    return bool(apply(bool, value))


def copy_module(module: GraphModule) -> GraphModule:
    """Copy a graph module with the subgraphs that its nodes run."""
    graph = Graph()
    mapping: dict[Node, Node] = {}
    for node in module.graph.nodes:
        mapping[node] = graph.node_copy(node, lambda n: mapping[n])
        # fx renames what is called like a Python builtin; the signature goes by names.
        mapping[node].name = node.name
    made = GraphModule(module, graph)
    made.meta.update(module.meta)
    for node in module.graph.nodes:
        for block in blocks(node):
            made.set_submodule(str(block.attribute.target), copy_module(block.module))
    return made
