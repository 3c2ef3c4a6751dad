"""Sort every float value of a program by the precision it needs, from its source and its use.

The program may be captured in fp32 (where the source's upcasts are no-op casts, still in the graph)
or in a mix.  The classes:

* `WEIGHT`: a parameter, or an expression of parameters alone. Has no dtype of its own; it is cast
  where it is used.
* `INPUT`: a float input of the user, cast where it is used.
* `STREAM`: takes the compute dtype.
* `RAISED`: a stream value that the source raised to fp32. Because an fp32 capture's cast is a
  no-op, torch.export may show *later* uses of the value through the cast as well (T5's residual
  add reads it): so each user decides which one it reads.
* `PRECISE`: stays in fp32: statistics of norms, totals and lengths (they outgrow fp16), what
  follows from a raised value up to where the source casts back, what comes from inputs alone and is
  read so, complex numbers and ops that torch has no 16-bit kernel for, with their results.
* `EXACT`: stays in fp32: computed from integers and buffers alone (positions, rotary angles,
  masks). No cast of the source lowers it; the stream op that reads it gets it cast.
* `ISLAND`: EXACT, and ends in integers or booleans only (T5's position buckets): no target dtype
  may touch it.

Values that may alias one that some op mutates are of one class.  So is every value that crosses the
border of a block, whichever branch runs: operands bring their class in, a result is precise where
every branch gives it so, else stream, and what a loop carries has one class in all iterations.
"""

from collections.abc import Callable, Mapping
from enum import Enum, auto

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node

from enginecast.passes.ir.blocks import (
    Block,
    blocks,
    carried,
    is_result,
    is_structured,
    lasting_positions,
    operands,
)
from enginecast.passes.ir.edit import (
    arguments,
    aten,
    dtype_of,
    first_input,
    is_complex,
    is_float,
    same_size,
    shape_of,
    weight_specs,
)
from enginecast.passes.ir.match import is_call, is_float_cast
from enginecast.passes.ir.traits import Trait, has


class Class(Enum):
    """How much precision a float value needs; see the module's text."""

    WEIGHT = auto()
    INPUT = auto()
    STREAM = auto()
    RAISED = auto()
    PRECISE = auto()
    EXACT = auto()
    ISLAND = auto()


KEPT_HIGH = frozenset({Class.PRECISE, Class.EXACT, Class.ISLAND})


ROOTS = (aten.rsqrt.default, aten.sqrt.default)
SQUARES = (aten.pow.Tensor_Scalar, aten.mul.Tensor, aten.square.default)


def classify(program: ExportedProgram, kept: frozenset[Node] = frozenset()) -> dict[Node, Class]:
    """The class of every float-valued node.

    Args:
        program: on the export IR, source casts still in place.
        kept: nodes that must compute in fp32 because the user said so.
    """
    kinds = weight_specs(program)
    given: dict[Node, Class] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        if not (is_float(node) or is_complex(node)):
            continue
        if node.name in kinds:
            is_parameter = kinds[node.name].kind is InputKind.PARAMETER
            given[node] = Class.WEIGHT if is_parameter else Class.EXACT
        else:
            given[node] = Class.PRECISE if is_complex(node) else Class.INPUT
    return _classify(program.graph, given, kept)


def _classify(
    graph: Graph, given: Mapping[Node, Class], kept: frozenset[Node]
) -> dict[Node, Class]:
    """The classes in one graph and in those within it; `given`: of its placeholders."""
    pinned = kept | _statistics(graph)
    classes: dict[Node, Class] = dict(given)
    for node in graph.nodes:
        if is_structured(node):
            classes |= block_classes(node, classes, lambda g, known: _classify(g, known, kept))
        elif not (is_float(node) or is_complex(node)) or node in given:
            continue
        elif node.op == "placeholder":  # a complex one of a block
            classes[node] = Class.PRECISE
        elif is_result(node):
            found = result_classes(first_input(node), classes)[arguments(node)[1]]
            classes[node] = Class.PRECISE if found is None else found  # None: it is complex
        elif node in pinned:
            classes[node] = Class.PRECISE
        elif node.op == "call_function":
            classes[node] = _call_class(node, classes)
    _keep_inputs_precise(graph, classes)
    for node in reversed(list(graph.nodes)):
        is_exact = classes.get(node) is Class.EXACT and node.op == "call_function"
        if is_exact and node.users and all(_ends_in_integers(u, classes) for u in node.users):
            classes[node] = Class.ISLAND
    return classes


def _keep_inputs_precise(graph: Graph, classes: dict[Node, Class]) -> None:
    """Keep what comes from inputs alone, and is read in fp32 alone, in fp32: a timestep that goes
    through fp16 before its sine is taken has lost its phase.
    """
    light: set[Node] = set()
    for node in graph.nodes:
        sources = [s for s in node.all_input_nodes if s in classes]
        if has(node, Trait.MOVES, Trait.CASTS, Trait.ARITHMETIC) and all(
            classes[source] is Class.INPUT or source in light for source in sources
        ):
            light.add(node)
    for node in reversed(list(graph.nodes)):
        if node in light and classes.get(node) in (Class.STREAM, Class.RAISED):
            readers = {classes[user] for user in node.users if user in classes}
            if readers == {Class.PRECISE}:
                classes[node] = Class.PRECISE


def _call_class(node: Node, classes: Mapping[Node, Class]) -> Class:
    sources = [s for s in node.all_input_nodes if s in classes]
    kinds = {classes[s] for s in sources}
    if not kinds:
        return Class.EXACT
    if is_float_cast(node):
        return _cast_class(node, classes)
    if kinds <= {Class.EXACT}:
        return Class.EXACT
    if is_wide(node):
        return Class.WEIGHT if kinds <= {Class.WEIGHT, Class.EXACT} else Class.PRECISE
    if has(node, Trait.HEAVY):
        return Class.STREAM
    if kinds <= {Class.WEIGHT, Class.EXACT}:
        return Class.WEIGHT
    if has(node, Trait.MOVES) or (len(sources) == 1 and has(node, Trait.EXACT)):
        first = classes[sources[0]]  # expand_as reads the shape of another
        return Class.STREAM if first is Class.INPUT else first
    if has(node, Trait.JOINS) and len(kinds) == 1:
        return kinds.pop()
    if len(sources) > 1:
        return _pair_class(node, sources, classes)
    source = kinds.pop()
    if source is Class.PRECISE:
        return Class.PRECISE
    explicit = torch.float32 in (*node.args[1:], *node.kwargs.values())
    raised = source is Class.RAISED and has(node, Trait.SENSITIVE)
    return Class.PRECISE if explicit or raised else Class.STREAM


def is_wide(node: Node) -> bool:
    """Whether torch computes an op in 32 bits or more only: that has the trait, or that reads or
    gives complex numbers.
    """
    return has(node, Trait.WIDE) or is_complex(node) or any(map(is_complex, node.all_input_nodes))


def _cast_class(node: Node, classes: Mapping[Node, Class]) -> Class:
    before = classes[first_input(node)]
    if is_binding_cast(node):
        return before
    raises = dtype_of(node) in (torch.float32, torch.float64)
    if before in (Class.EXACT, Class.RAISED):
        return before
    if before is Class.WEIGHT:
        return Class.PRECISE if raises else Class.WEIGHT
    if before is Class.PRECISE:
        return Class.STREAM
    return Class.RAISED if raises else Class.STREAM


def _pair_class(node: Node, sources: list[Node], classes: Mapping[Node, Class]) -> Class:
    """A precise operand wins over a raised one and over a stream that it only scales row by row."""
    kinds = {classes[s] for s in sources}
    if kinds == {Class.RAISED, Class.EXACT} and node.target is aten.mul.Tensor:
        return Class.PRECISE  # rotary angles over raised queries
    if Class.PRECISE not in kinds or not has(node, Trait.ARITHMETIC):
        return Class.STREAM
    if Class.WEIGHT in kinds:
        return Class.STREAM  # T5 and Llama cast back before they multiply by the weight
    precise = [s for s in sources if classes[s] is Class.PRECISE]
    if all(_is_statistic(source, node) for source in precise):
        return Class.PRECISE
    # A residual may be read through a cast of its own norm; adding to it is not an fp32 step of the
    # source.
    high = kinds <= {Class.PRECISE, Class.EXACT} or (
        kinds <= {Class.PRECISE, Class.EXACT, Class.RAISED} and node.target is not aten.add.Tensor
    )
    return Class.PRECISE if high else Class.STREAM


def _is_statistic(source: Node, node: Node) -> bool:
    """One number a row: the last dim is 1 where the result's is not."""
    while is_call(source, aten.expand.default, aten.expand_as.default):
        source = first_input(source)
    shape = shape_of(source)
    return bool(shape) and same_size(shape[-1], 1) and not same_size(shape_of(node)[-1], 1)


def _statistics(graph: Graph) -> set[Node]:
    """Totals, and the chain from a square to a root over a mean: what a norm divides by, whatever
    the source says of dtypes.
    """
    statistics: set[Node] = {
        n for n in graph.nodes if has(n, Trait.ACCUMULATES) and is_float(n.args[0])
    }
    for node in graph.nodes:
        chain = _to_mean(node) if is_call(node, *ROOTS) and is_float(node) else []
        statistics.update(chain)
        square = chain[-1].args[0] if chain else None
        if is_call(square, *SQUARES) and statistics.issuperset(square.users):
            statistics.add(square)
    return statistics


def _to_mean(root: Node) -> list[Node]:
    """From a root back to the mean that it is of, by steps with one operand; or nothing."""
    chain = [root]
    while not has(chain[-1], Trait.REDUCES | Trait.SENSITIVE):
        floats = [source for source in chain[-1].all_input_nodes if is_float(source)]
        if len(floats) != 1 or floats[0] is not chain[-1].args[0] or len(chain) > 6:
            return []
        if floats[0].op != "call_function":
            return []
        chain += floats
    return chain


def _ends_in_integers(user: Node, classes: Mapping[Node, Class]) -> bool:
    if user.op != "call_function" or is_structured(user):
        return False
    return classes.get(user) is Class.ISLAND or not (is_float(user) or is_complex(user))


def is_binding_cast(node: Node) -> bool:
    """The cast that capture puts behind a weight stored in another dtype; it stands in no module of
    the user's.
    """
    source = node.args[0] if node.args else None
    return (
        is_call(node, aten.to.dtype)
        and isinstance(source, Node)
        and source.op == "placeholder"
        and not node.meta.get("nn_module_stack")
        and not node.meta.get("stack_trace")
    )


Sort = Callable[[Graph, Mapping[Node, Class]], dict[Node, Class]]
"""The classes in a graph, from those of its placeholders."""
_KEPT = frozenset({Class.PRECISE, Class.EXACT})
_AS_VALUE = {Class.ISLAND: Class.EXACT, Class.PRECISE: Class.PRECISE, Class.EXACT: Class.EXACT}


def block_classes(node: Node, classes: Mapping[Node, Class], sort: Sort) -> dict[Node, Class]:
    """The class of every float in the blocks of a node, their placeholders included.

    Args:
        node: cond, while_loop or scan.
        classes: of the graph that it stands in, its operands among them.
    """
    lasting = lasting_positions(node)
    given: dict[int, Class] = {}  # of each float operand within the blocks, by position
    for position, operand in enumerate(operands(node)):
        if not is_float(operand):
            continue
        kind = classes[operand]
        keeps = position in lasting and kind in (Class.WEIGHT, Class.RAISED)
        given[position] = kind if keeps else _AS_VALUE.get(kind, Class.STREAM)
    while True:
        inner: dict[Node, Class] = {}
        for block in blocks(node):
            known = {p: given[i] for i, p in enumerate(block.placeholders) if i in given}
            inner |= known
            inner |= sort(block.module.graph, known)
        # What a loop carries has the class that holds its start and what an iteration gives.
        settled = dict(given)
        results = _returned(blocks(node)[-1], inner)[: carried(node)]
        for position, result in enumerate(results):
            both = _joined((given.get(position), result))
            if both is not None:
                settled[position] = both
        if settled == given:
            return inner
        given = settled


def result_classes(node: Node, classes: Mapping[Node, Class]) -> tuple[Class | None, ...]:
    """The class of each result of a structured node; None for what is not a float.

    Args:
        classes: holds those of its blocks.
    """
    count = carried(node)
    giving = [b for b in blocks(node) if b.path != "condition"]
    state = [classes.get(placeholder) for placeholder in giving[0].placeholders[:count]]
    columns = zip(*(_returned(block, classes)[count:] for block in giving), strict=True)
    return (*state, *(_joined(column) for column in columns))


def _returned(block: Block, classes: Mapping[Node, Class]) -> list[Class | None]:
    return [classes.get(result) if is_float(result) else None for result in block.results]


def _joined(kinds: tuple[Class | None, ...]) -> Class | None:
    """The class of a value that may come from several places."""
    if None in kinds:
        return None
    joined = {_AS_VALUE.get(kind, Class.STREAM) for kind in kinds if kind is not None}
    if len(joined) == 1:
        return joined.pop()
    return Class.PRECISE if joined <= _KEPT else Class.STREAM
