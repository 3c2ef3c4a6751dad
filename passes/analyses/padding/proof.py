"""Prove which outputs keep their values at valid tokens when padding is cut off.

Every value is followed through the program with what is known of it where a token is valid and
where it is padding (`facts`, `rules`).  Taken for granted: what the model computes is finite, and
no score of attention is larger than 1e8; a mask holds zeros and ones; each row has a valid token.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from enginecast.passes.analyses.padding.facts import ONE, ZERO, Fact, Side, Unproved
from enginecast.passes.analyses.padding.rules import Found, Labels, Rules
from enginecast.passes.ir.edit import value, weight_specs, weight_tensor
from enginecast.passes.ir.match import op_name
from enginecast.passes.ir.source import module_path, source_line
from enginecast.passes.ir.traits import Trait, has

LARGEST_TABLE = 1 << 24
"""Elements of a buffer up to which its bounds are looked up."""


@dataclass(frozen=True)
class Proof:
    """What is known of outputs without padding.

    Args:
        side: where padding may be; None: nothing was proved of any output.
        outputs: why each output may change, in words; empty: it does not.
    """

    side: Side | None
    outputs: Mapping[str, str]


def prove_padding(program: ExportedProgram, mask_input: str, names: tuple[str, ...]) -> Proof:
    """Which outputs do not depend on tokens that the mask leaves out, nor on how many there are.

    Args:
        mask_input: holds ones for valid tokens, zeros for padding: [batch, tokens].
        names: of the outputs, in order.
    """
    try:
        labels = _labels(program, mask_input)
    except Unproved as reason:
        return Proof(None, dict.fromkeys(names, str(reason)))
    found = {side: _Walk(program, mask_input, labels, side).reasons(names) for side in _SIDES}
    anywhere, right = found["any"], found["right"]
    if not all(anywhere.values()) and _proved(anywhere) == _proved(right):
        return Proof("any", anywhere)
    return Proof("right" if _proved(right) else None, right)


_SIDES: tuple[Side, ...] = ("any", "right")


def _proved(reasons: Mapping[str, str]) -> set[str]:
    return {name for name, reason in reasons.items() if not reason}


def _labels(program: ExportedProgram, mask_input: str) -> Labels:
    places = (n for n in program.graph.nodes if n.op == "placeholder" and n.name == mask_input)
    mask = next(places, None)
    if mask is None:
        raise Unproved(f"input {mask_input!r} is not in the program")
    shape = value(mask).shape
    if len(shape) != 2:
        raise Unproved(f"input {mask_input!r} has {len(shape)} dimensions, expected two")
    batch, tokens = shape
    if not isinstance(tokens, torch.SymInt):
        raise Unproved(f"input {mask_input!r} always has {tokens} tokens")
    if not isinstance(batch, torch.SymInt) and batch != 1:
        raise Unproved(f"input {mask_input!r} always has {batch} rows, expected one or any number")
    upper = tokens.node.shape_env.bound_sympy(tokens.node.expr).upper
    return Labels(
        tokens.node.expr,
        batch.node.expr if isinstance(batch, torch.SymInt) else None,
        float(upper) if upper.is_finite else 2.0**24,
    )


class _Walk:
    """One walk through a program."""

    def __init__(
        self, program: ExportedProgram, mask_input: str, labels: Labels, side: Side
    ) -> None:
        self._program, self._mask, self._labels = program, mask_input, labels
        self._known: dict[Node, Found] = {}
        self._reasons: dict[Node, str] = {}
        self._rules = Rules(labels, side, self._known)
        self._weights = weight_specs(program)

    def reasons(self, names: tuple[str, ...]) -> dict[str, str]:
        """For each output why it may change; empty: it does not."""
        given: Any = ()
        for node in self._program.graph.nodes:
            if node.op == "output":
                given = node.args[0]
            elif isinstance(value(node), Tensor | tuple | list):
                self._visit(node)
        specs = self._program.graph_signature.output_specs
        results = [
            node
            for node, spec in zip(given, specs, strict=True)
            if spec.kind is OutputKind.USER_OUTPUT
        ]
        return {n: self._of_output(result) for n, result in zip(names, results, strict=True)}

    def _of_output(self, result: Any) -> str:
        fact = self._known.get(result) if isinstance(result, Node) else None
        if not isinstance(fact, Fact):
            return self._reasons.get(result, "it is not a tensor")
        if self._labels.batch is not None and fact.labels[:1] != ("b",):
            return "its first dimension is not the batch"
        if any(fact.labels[2:]) or fact.labels[1:2] not in ((), ("",), ("t",)):
            return "its tokens are not its second dimension"
        if self._labels.batch is None and value(result).shape[:1] != (1,):
            return "its first dimension is not the batch"
        try:
            self._rules.require_still(fact)
        except Unproved as reason:
            return str(reason)
        return ""

    def _visit(self, node: Node) -> None:
        bad = next((n for n in node.all_input_nodes if n in self._reasons), None)
        try:
            if node.op == "placeholder":
                self._known[node] = self._placeholder(node)
            elif node.target is operator.getitem:
                self._item(node)
            elif bad is not None and not has(node, Trait.METADATA):
                self._reasons[node] = self._reasons[bad]
            elif isinstance(node.target, torch._ops.OpOverload):
                self._known[node] = self._rules.of(node)
            else:
                raise Unproved(f"{op_name(node)} runs a block")
        except (Unproved, LookupError, TypeError, ValueError, AttributeError) as error:
            # A form of an op that no rule knows must not keep a model from its engine.
            unknown = "it is called in a form that is not known"
            reason = error if isinstance(error, Unproved) else unknown
            place = f"{module_path(node)} {source_line(node)}".strip()
            self._reasons[node] = f"{reason} ({op_name(node)}{', ' + place if place else ''})"

    def _item(self, node: Node) -> None:
        source = node.args[0]
        assert isinstance(source, Node)
        found = self._known.get(source)
        if isinstance(found, tuple):
            self._known[node] = found[node.args[1]]  # type: ignore[index]
        else:
            self._reasons[node] = self._reasons.get(source, "it is not a tensor")

    def _placeholder(self, node: Node) -> Fact:
        labels = self._labels.of(value(node))
        count = sum("t" in label for label in labels)
        if node.name == self._mask:
            return Fact(labels, ONE, (ZERO,), (0.0, 1.0))
        bounds = None
        spec = self._weights.get(node.name)
        if spec is not None and spec.kind is not InputKind.PARAMETER:
            bounds = _bounds(weight_tensor(self._program, spec))
        return Fact(labels, bounds, (bounds,) * count, bounds)


def _bounds(tensor: Tensor) -> tuple[float, float] | None:
    if not tensor.numel() or tensor.numel() > LARGEST_TABLE or tensor.is_complex():
        return None
    low, high = torch.aminmax(tensor.to(torch.float64 if tensor.ndim == 0 else tensor.dtype))
    return float(low), float(high)
