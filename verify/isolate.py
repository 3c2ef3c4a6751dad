"""Tells where an error arises from where it is only handed on: every module of a rewritten program
is run on the values that the program had before the pass.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.interpret import interpret_cases
from enginecast.passes.source import module_path, source_line
from enginecast.verify.boundaries import Snapshot, leaving, snapshots


def isolated(
    before: ExportedProgram,
    after: ExportedProgram,
    cases: Sequence[Mapping[str, Tensor]],
    *,
    names: tuple[str, ...] | None = None,
    masks: Sequence[Tensor | None] | None = None,
) -> list[Snapshot]:
    """Run every module of `after` on what `before` feeds to it: one run tells of all modules.

    A value that leaves a module is kept as the module computed it; what reads it gets the value of
    `before`.  A value that `before` does not have, such as the inner sum of a fused norm, is handed
    on as it is.

    Args:
        before: a program before one pass.
        after: a copy of it after that pass: what the pass left alone has kept its FX name.
        cases: inputs by placeholder name.
        names: of the outputs.
        masks: as in `snapshots`.
    """
    counterparts = _counterparts(before, after)
    wanted = set(counterparts.values())
    values: list[dict[str, Tensor]] = [{} for _ in cases]

    def keep(case: int, node: Node, tensor: Tensor) -> None:
        # Nodes within a block have names of their own.
        if node.name in wanted and node.graph is before.graph:
            values[case][node.name] = tensor.clone()  # a later op may write into it

    def feed(case: int, node: Node, tensor: Tensor) -> Tensor:
        given = values[case].get(counterparts.get(node.name, ""))
        if given is None or given.shape != tensor.shape:
            return tensor
        return given.to(tensor.dtype)

    interpret_cases(before, cases, names=names, watch=keep)
    return snapshots(after, cases, names=names, masks=masks, feed=feed)


def _counterparts(before: ExportedProgram, after: ExportedProgram) -> dict[str, str]:
    """For the values that leave modules after a pass, the names of the same values before it.

    A name that both programs have is the same place: fx never gives a name twice in one graph.
    What a pass put in the place of something else stands in the same module and on the same line.
    """
    old = {node.name: node for node in leaving(before) if node.graph is before.graph}
    new = {node.name: node for node in leaving(after) if node.graph is after.graph}
    every = {node.name for node in before.graph.nodes}
    found = {name: name for name in new if name in every}
    gone = _by_place(node for name, node in old.items() if name not in new)
    made = _by_place(node for name, node in new.items() if name not in found)
    for place, nodes in made.items():
        if len(nodes) == len(gone.get(place, ())):
            found |= {n.name: o.name for n, o in zip(nodes, gone[place], strict=True)}
    return found


def _by_place(nodes: Iterable[Node]) -> dict[tuple[str, str], list[Node]]:
    found: dict[tuple[str, str], list[Node]] = defaultdict(list)
    for node in nodes:
        found[module_path(node), source_line(node)].append(node)
    return found
