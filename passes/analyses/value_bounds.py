"""How large values are over the calibration inputs, and how large one can get for any input at all,
from the weights alone.

A root-mean-square norm gives a row no longer than sqrt(size), whatever it reads; a linear gives no
element longer than a row of its weight times that; attention averages the values; a gate is at most
what goes through it.  So what a block writes into the stream has a bound, and the stream that of
their sum.  No input comes near it: every step is taken at its worst.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import PassError
from enginecast.passes.analyses.norms import is_statistic, normalized
from enginecast.passes.ir.edit import aten, first_input, value, weight_value
from enginecast.passes.ir.interpret import interpret_cases
from enginecast.passes.ir.match import is_call
from enginecast.passes.ir.source import module_path, source_line
from enginecast.passes.ir.traits import Trait, has


@dataclass(frozen=True)
class Bound:
    """Of all rows of a value along its last dimension."""

    largest: float
    """No element has a larger magnitude."""
    length: float
    """No row has a larger L2 norm."""


def largest_for_any_input(
    program: ExportedProgram, weights: set[Node], nodes: Iterable[Node]
) -> float | None:
    """A magnitude that no element of these values exceeds; None where some op has no bound.

    Weights are read one at a time.

    Args:
        program: its norms spelled out or fused.
        weights: every weight expression of the program.
        nodes: the values.
    """
    bounds = _Bounds(program, weights)
    found = [bounds.of(node) for node in nodes]
    known = [bound.largest for bound in found if bound is not None]
    return max(known) if len(known) == len(found) and known else None


class _Bounds:
    """Bounds by node, computed once each."""

    def __init__(self, program: ExportedProgram, weights: set[Node]) -> None:
        self._program = program
        self._weights = weights
        self._known: dict[Node, Bound | None] = {}
        self._norms: set[Node] = set()
        for node in program.graph.nodes:
            if is_statistic(node) and (found := normalized.find(node)) is not None:
                self._norms.add(found.root)

    def of(self, node: Node) -> Bound | None:
        """The bound of a value; None where nothing is known."""
        for source in _sources_first(node, self._known, self._norms, self._weights):
            self._known[source] = self._bound(source)
        return self._known[node]

    def _bound(self, node: Node) -> Bound | None:
        if not isinstance(value(node), Tensor) or not value(node).ndim:
            return None
        width = value(node).shape[-1]
        if not isinstance(width, int):
            return None
        if node in self._weights:
            return _of_rows(self._weight(node))
        if node in self._norms or is_call(node, aten.rms_norm.default):
            return self._of_norm(node, width)
        found = self._of_call(node)
        if found is None:
            return None
        # Two bounds of one row: the elements bound its length, and its length the elements.
        length = min(found.length, found.largest * math.sqrt(width))
        return Bound(min(found.largest, length), length)

    def _of_norm(self, node: Node, width: int) -> Bound | None:
        whole = Bound(math.sqrt(width), math.sqrt(width))
        weight = (
            node.args[2] if is_call(node, aten.rms_norm.default) and len(node.args) > 2 else None
        )
        if weight is None:
            return whole
        return self._scaled(whole, weight) if isinstance(weight, Node) else None

    def _of_call(self, node: Node) -> Bound | None:
        target = node.target
        if has(node, Trait.BOUNDED):
            return Bound(1.0, math.inf)
        if has(node, Trait.CASTS, Trait.IDENTITY):
            return self._known.get(first_input(node))
        if has(node, Trait.NOT_LARGER) and not has(node, Trait.GATHERS, Trait.JOINS):
            found = self._known.get(first_input(node))
            if found is None or not has(node, Trait.MOVES):
                return found
            return Bound(found.largest, math.inf)  # rows may be cut otherwise
        rules: dict[Any, Callable[[Node], Bound | None]] = {
            aten.linear.default: self._of_linear,
            aten.embedding.default: self._of_embedding,
            aten.mul.Tensor: self._of_product,
            aten.add.Tensor: self._of_sum,
            aten.scaled_dot_product_attention.default: self._of_attention,
            aten.matmul.default: self._of_average,
            aten.cat.default: self._of_join,
        }
        rule = rules.get(target)
        return None if rule is None else rule(node)

    def _of_linear(self, node: Node) -> Bound | None:
        source, weight = self._known.get(first_input(node)), node.args[1]
        if source is None or not isinstance(weight, Node) or weight not in self._weights:
            return None
        rows = self._weight(weight).float().norm(dim=-1)
        bias = node.args[2] if len(node.args) > 2 else None
        added = 0.0
        if isinstance(bias, Node):
            if bias not in self._weights:
                return None
            added = float(self._weight(bias).float().abs().max())
        return Bound(float(rows.max()) * source.length + added, math.inf)

    def _of_embedding(self, node: Node) -> Bound | None:
        table = node.args[0]
        if not isinstance(table, Node) or table not in self._weights:
            return None
        return _of_rows(self._weight(table))

    def _of_product(self, node: Node) -> Bound | None:
        left, right = node.args[:2]
        for one, other in ((left, right), (right, left)):
            if isinstance(other, int | float) and isinstance(one, Node):
                return _times(self._known.get(one), abs(other))
            if isinstance(other, Node) and other in self._weights and isinstance(one, Node):
                found = self._known.get(one)
                return None if found is None else self._scaled(found, other)
        if not (isinstance(left, Node) and isinstance(right, Node)):
            return None
        first, second = self._known.get(left), self._known.get(right)
        if first is None or second is None:
            return None
        length = min(first.largest * second.length, second.largest * first.length)
        return Bound(first.largest * second.largest, length)

    def _of_sum(self, node: Node) -> Bound | None:
        if node.kwargs.get("alpha", 1) != 1:
            return None
        total = Bound(0.0, 0.0)
        for term in node.args[:2]:
            if isinstance(term, Node):
                found = self._known.get(term)
            else:
                found = Bound(abs(term), math.inf) if isinstance(term, int | float) else None
            if found is None:
                return None
            total = Bound(total.largest + found.largest, total.length + found.length)
        return total

    def _of_attention(self, node: Node) -> Bound | None:
        values = node.args[2]
        return self._known.get(values) if isinstance(values, Node) else None

    def _of_average(self, node: Node) -> Bound | None:
        """Attention that is spelled out: rows of a softmax add up to one."""
        weights, values = node.args[:2]
        while isinstance(weights, Node) and has(weights, Trait.CASTS, Trait.IDENTITY):
            weights = first_input(weights)
        if not is_call(weights, aten.softmax.int) or not isinstance(values, Node):
            return None
        return self._known.get(values)

    def _of_join(self, node: Node) -> Bound | None:
        found = [self._known.get(source) for source in node.all_input_nodes]
        known = [bound.largest for bound in found if bound is not None]
        return Bound(max(known), math.inf) if known and len(known) == len(found) else None

    def _scaled(self, found: Bound, weight: Node) -> Bound | None:
        if weight not in self._weights:
            return None
        return _times(found, float(self._weight(weight).float().abs().max()))

    def _weight(self, node: Node) -> Tensor:
        found = weight_value(self._program, node)
        assert isinstance(found, Tensor)
        return found


def _of_rows(weight: Tensor) -> Bound:
    if not weight.numel():
        return Bound(0.0, 0.0)
    rows = weight.float().reshape(-1, weight.shape[-1])
    return Bound(float(rows.abs().max()), float(rows.norm(dim=-1).max()))


def _times(found: Bound | None, factor: float) -> Bound | None:
    return None if found is None else Bound(found.largest * factor, found.length * factor)


def _sources_first(
    node: Node, known: dict[Node, Bound | None], ends: set[Node], weights: set[Node]
) -> list[Node]:
    """The node and what its bound needs, in graph order; norms need nothing before them."""
    needed: set[Node] = set()
    waiting = [node]
    while waiting:
        here = waiting.pop()
        if here in known or here in needed:
            continue
        needed.add(here)
        if here in ends or here in weights or is_call(here, aten.rms_norm.default):
            continue
        waiting += here.all_input_nodes
    return sorted(needed)


def largest_values(
    program: ExportedProgram, cases: Sequence[Mapping[str, Tensor]], watched: Set[Node]
) -> dict[Node, float]:
    """Run the program over all cases and keep the largest magnitude of each watched value.

    Rows that a mask leaves out count as well: an infinity there is a NaN once attention multiplies
    it by zero.

    Args:
        program: computes in fp32, so that nothing is cut off.
        cases: inputs by name.
        watched: nodes; those that give no tensor are left out of the result.

    Raises:
        PassError: a watched value is not finite.
    """
    found: dict[Node, float] = {}

    def keep(_: int, node: Node, tensor: Tensor) -> None:
        if node not in watched or not tensor.numel():
            return
        low, high = (float(bound) for bound in torch.aminmax(tensor))
        size = max(-low, high)
        if not math.isfinite(size):
            place = f"{module_path(node) or 'the model itself'} {source_line(node)}".strip()
            raise PassError(
                f"values at {place} are not finite in fp32 already",
                hint="Look for inputs that the model cannot take: no precision holds these.",
            )
        found[node] = max(found.get(node, 0.0), size)

    interpret_cases(program, cases, watch=keep)
    return found
