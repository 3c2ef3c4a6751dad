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

from enginecast.passes.analyses.padding.facts import (
    ONE,
    UNSURE,
    ZERO,
    Fact,
    Side,
    Unproved,
    alike,
)
from enginecast.passes.analyses.padding.rules import Facts, Labels, Rules
from enginecast.passes.ir.edit import arguments, value, weight_specs, weight_tensor
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
    labels = _labels(program, mask_input)
    if isinstance(labels, str):
        return Proof(None, dict.fromkeys(names, labels))
    anywhere = _reasons(program, mask_input, labels, "any", names)
    right = _reasons(program, mask_input, labels, "right", names)
    proved = {name for name in names if not right[name]}
    if proved and proved == {name for name in names if not anywhere[name]}:
        return Proof("any", anywhere)
    return Proof("right" if proved else None, right)


def _labels(program: ExportedProgram, mask_input: str) -> Labels | str:
    """Sizes of the mask; or why nothing can be proved."""
    places = program.graph.find_nodes(op="placeholder")
    shape = next((value(node).shape for node in places if node.name == mask_input), None)
    if shape is None:
        return f"input {mask_input!r} is not in the program"
    if len(shape) != 2:
        return f"input {mask_input!r} has {len(shape)} dimensions, expected two"
    batch, tokens = shape
    if not isinstance(tokens, torch.SymInt):
        return f"input {mask_input!r} always has {tokens} tokens"
    if not isinstance(batch, torch.SymInt) and batch != 1:
        return f"input {mask_input!r} always has {batch} rows, expected one or any number"
    names = {tokens.node.expr: "t"}
    if isinstance(batch, torch.SymInt):
        rows = batch.node.expr
        names = {rows * tokens.node.expr: "bt", rows: "b", **names}
    upper = tokens.node.shape_env.bound_sympy(tokens.node.expr).upper
    return Labels(names, float(upper) if upper.is_finite else 2.0**24)


def _reasons(
    program: ExportedProgram, mask_input: str, labels: Labels, side: Side, names: tuple[str, ...]
) -> dict[str, str]:
    """For each output why it may change; empty: it does not."""
    known: dict[Node, Facts] = {}
    reasons: dict[Node, str] = {}
    rules = Rules(labels, side, known)
    weights = weight_specs(program)
    for node in program.graph.nodes:
        if node.op == "output" or not isinstance(value(node), Tensor | tuple | list):
            continue
        unproved = next((reasons[n] for n in node.all_input_nodes if n in reasons), None)
        try:
            if node.name == mask_input:
                of_columns = labels.of(value(node))
                pads = tuple(ZERO if "t" in label else UNSURE for label in of_columns)
                known[node] = Fact(of_columns, ONE, pads, UNSURE)
            elif node.op == "placeholder":
                spec, bounds = weights.get(node.name), None
                if spec is not None and spec.kind is not InputKind.PARAMETER:
                    bounds = _bounds(weight_tensor(program, spec))
                known[node] = alike(labels.of(value(node)), bounds)
            elif node.target is operator.getitem:
                source, index = arguments(node)
                several = known.get(source)
                if isinstance(several, tuple):
                    known[node] = several[index]
                else:
                    reasons[node] = reasons.get(source, "it is not a tensor")
            elif unproved is not None and not has(node, Trait.METADATA):
                reasons[node] = unproved
            elif isinstance(node.target, torch._ops.OpOverload):
                known[node] = rules.of(node)
            else:
                raise Unproved(f"{op_name(node)} runs a block")
        except (Unproved, LookupError, TypeError, ValueError, AttributeError) as error:
            # A form of an op that no rule knows must not keep a model from its engine.
            unknown = "it is called in a form that is not known"
            reason = error if isinstance(error, Unproved) else unknown
            place = f"{module_path(node)} {source_line(node)}".strip()
            reasons[node] = f"{reason} ({op_name(node)}{', ' + place if place else ''})"

    def of_output(result: Any) -> str:
        fact = known.get(result) if isinstance(result, Node) else None
        if not isinstance(fact, Fact):
            return reasons.get(result, "it is not a tensor")
        one_row = "b" not in labels.names.values()
        if value(result).shape[:1] != (1,) if one_row else fact.labels[:1] != ("b",):
            return "its first dimension is not the batch"
        if any(fact.labels[2:]) or fact.labels[1:2] not in ((), ("",), ("t",)):
            return "its tokens are not its second dimension"
        try:
            rules.require_still(fact)
        except Unproved as reason:
            return str(reason)
        return ""

    given: Any = program.graph.output_node().args[0]
    specs = program.graph_signature.output_specs
    results = [
        node for node, spec in zip(given, specs, strict=True) if spec.kind is OutputKind.USER_OUTPUT
    ]
    return {name: of_output(result) for name, result in zip(names, results, strict=True)}


def _bounds(tensor: Tensor) -> tuple[float, float] | None:
    if not tensor.numel() or tensor.numel() > LARGEST_TABLE or tensor.is_complex():
        return None
    low, high = torch.aminmax(tensor.to(torch.float64 if tensor.ndim == 0 else tensor.dtype))
    return float(low), float(high)
