"""A program as a module that can be edited and captured again: what is shrunk."""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule, Interpreter, Node

from enginecast.passes.ir.traits import Trait, has
from enginecast.testing import Captured, capture

CHECKS = ("_assert", "sym_constrain")
"""Ops that compute nothing."""


@dataclass(frozen=True, eq=False)
class Specimen:
    """A module whose graph holds ops alone, and inputs for it."""

    module: GraphModule
    """Its placeholders are the inputs, and it returns a tuple of tensors; what it holds are its own
    attributes, without modules between."""
    inputs: tuple[Tensor, ...]
    dynamic: bool
    """Whether it is captured for other sizes, too."""

    def capture(self) -> Captured:
        """Its program, as a pass sees it."""
        return capture(self.module, *self.inputs, dynamic=self.dims)

    @property
    def dims(self) -> list[dict[int, Any]] | None:
        """The dimensions of each input that may vary."""
        if not self.dynamic:
            return None
        return [
            {dim: Dim.AUTO for dim, size in enumerate(tensor.shape) if size > 1}
            for tensor in self.inputs
        ]

    @property
    def calls(self) -> list[Node]:
        """Its ops, in order."""
        return [node for node in self.module.graph.nodes if node.op == "call_function"]

    @property
    def placeholders(self) -> list[Node]:
        """Its inputs, in order."""
        return list(self.module.graph.find_nodes(op="placeholder"))

    def weights(self) -> dict[str, Tensor]:
        """The tensors that its ops read, by attribute."""
        names = [str(node.target) for node in self.module.graph.find_nodes(op="get_attr")]
        held = {name: getattr(self.module, name) for name in names}
        return {name: each.detach() for name, each in held.items() if isinstance(each, Tensor)}

    def values(self) -> dict[str, Any]:
        """What every node gives for the inputs."""
        found: dict[str, Any] = {}

        class Recorder(Interpreter):
            def run_node(self, n: Node) -> Any:
                found[n.name] = super().run_node(n)
                return found[n.name]

        with torch.no_grad():
            Recorder(self.module).run(*self.inputs)
        return found

    def returning(self, name: str) -> "Specimen":
        """Only this node is computed and returned."""
        graph, nodes = self._copied()
        graph.output_node().args = ((nodes[name],),)
        return self._pruned(graph)

    def cut(self, names: Iterable[str], values: Mapping[str, Any]) -> "Specimen | None":
        """Without some nodes; None: what others read of them is not a tensor, so not an input."""
        graph, nodes = self._copied()
        gone, inputs = set(names), list(self.inputs)
        first = next(iter(graph.nodes))
        last = max((n for n in graph.nodes if n.op == "placeholder"), default=None)
        for name in [name for name in nodes if name in gone]:
            node = nodes[name]
            if all(user.name in gone for user in node.users):
                continue
            if not isinstance(values[name], Tensor):
                return None
            with graph.inserting_before(first) if last is None else graph.inserting_after(last):
                last = graph.placeholder(f"in_{name}")
            node.replace_all_uses_with(last, delete_user_cb=lambda user: user.name not in gone)
            inputs.append(values[name].clone())
        return self._pruned(graph, inputs)

    def bypassing(self, name: str, source: str) -> "Specimen":
        """Without one node, in whose place stands what it reads."""
        graph, nodes = self._copied()
        nodes[name].replace_all_uses_with(nodes[source])
        return self._pruned(graph)

    def with_tensors(self, tensors: Mapping[str, Tensor], inputs: Iterable[Tensor]) -> "Specimen":
        """The same ops on other weights and inputs."""
        graph, _ = self._copied()
        names = [str(node.target) for node in graph.find_nodes(op="get_attr")]
        held = {name: tensors.get(name, getattr(self.module, name)) for name in names}
        return Specimen(GraphModule(held, graph), tuple(inputs), self.dynamic)

    def _copied(self) -> tuple[Graph, dict[str, Node]]:
        graph, known = Graph(), dict[Node, Node]()
        result = graph.graph_copy(self.module.graph, known)
        graph.output(result)
        return graph, {old.name: new for old, new in known.items()}

    def _pruned(self, graph: Graph, inputs: Iterable[Tensor] | None = None) -> "Specimen":
        kept = list(self.inputs if inputs is None else inputs)
        _drop_dead(graph)
        placeholders = list(graph.find_nodes(op="placeholder"))
        used = [bool(node.users) for node in placeholders]
        for node in placeholders:
            if not node.users:
                graph.erase_node(node)
        given = tuple(t for t, wanted in zip(kept, used, strict=True) if wanted)
        return Specimen(GraphModule(self.module, graph), given, self.dynamic)


def specimen_of(
    program: ExportedProgram, inputs: Mapping[str, Tensor], *, dynamic: bool
) -> Specimen:
    """A program, taken out of its modules.

    Args:
        inputs: by the names that the program has for them.
    """
    module = program.module(check_guards=False)
    graph, known = Graph(), dict[Node, Node]()
    result = graph.graph_copy(module.graph, known)
    leaves = [one for one in torch.utils._pytree.tree_leaves(result) if isinstance(one, Node)]
    graph.output(tuple(dict.fromkeys(leaves)))
    held: dict[str, Any] = {}
    for node in reversed(list(graph.nodes)):
        path = str(node.target)
        computes = not has(node, Trait.WRITES) and not any(one in path for one in CHECKS)
        if node.op == "get_attr":
            node.target = path.replace(".", "_")
            held[node.target] = operator.attrgetter(path)(module)
        elif node.op == "call_function" and not node.users and not computes:
            graph.erase_node(node)
    given = tuple(inputs[node.name] for node in module.graph.find_nodes(op="placeholder"))
    return Specimen(GraphModule(held, graph), given, dynamic)._pruned(graph)


def _drop_dead(graph: Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
