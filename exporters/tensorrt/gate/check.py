"""Check, without TensorRT, whether its parser is documented to accept an ONNX model.

Nothing here was seen to build: the rules are what NVIDIA and the parser's project publish, with
their sources in `operators.json` and in the files of the rules.
"""

from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from enginecast.errors import LoweringError
from enginecast.exporters.tensorrt.gate.operator_rules import check_form, check_opset
from enginecast.exporters.tensorrt.gate.operators import MX, ONNX, table, unsupported
from enginecast.exporters.tensorrt.gate.shape_rules import (
    check_inputs,
    check_ranges,
    check_volumes,
)
from enginecast.exporters.tensorrt.gate.type_rules import check_borders, check_node, check_quantized
from enginecast.exporters.tensorrt.gate.violations import Violation, at
from enginecast.runtime.bundle.manifest import Input

__all__ = ["Violation", "check_ready", "refusal_of"]
SHOWN = 10
"""Violations that an error lists."""


def check_ready(
    model: ir.Model,
    *,
    version: str = "11.0",
    inputs: Sequence[Input] = (),
    ranges: Mapping[str, tuple[int, int]] | None = None,
) -> list[Violation]:
    """Everything in a model that TensorRT's parser is documented not to accept.

    Args:
        model: in memory; its weights may be lazy: only scales, zero points, indices and sizes are
            read.
        version: of TensorRT.
        inputs: as the manifest has them; empty: as the graph has them.
        ranges: least and greatest size of each symbol; None: there are none.

    Raises:
        UsageError: the version is older than all that are known.
    """
    ranges = ranges or {}
    return [
        *check_opset(model, version),
        *check_borders(model.graph),
        *_check_nodes(model, version),
        *check_inputs(model.graph, inputs),
        *check_ranges(model.graph, ranges),
        *check_volumes(model.graph, ranges),
    ]


def refusal_of(found: Sequence[Violation], version: str, *, shown: int = SHOWN) -> LoweringError:
    """The error that reports the violations; `details` has all of them.

    Args:
        found: at least one violation.
        version: of TensorRT.
        shown: how many of them its message has; 0: they were shown.
    """
    lines = [f"  {violation}" for violation in found[:shown]]
    if len(found) > shown > 0:
        lines.append(f"  and {len(found) - shown} more")
    count = "1 violation" if len(found) == 1 else f"{len(found)} violations"
    error = LoweringError(
        "\n".join([f"TensorRT {version} does not take this network: {count}", *lines]),
        hint="`enginecast inspect --target tensorrt` lists them all." if shown else "",
    )
    error.details["violations"] = [str(violation) for violation in found]
    return error


def _check_nodes(model: ir.Model, version: str) -> Iterator[Violation]:
    """Branches and bodies of loops included, and functions of the model."""
    functions = [node for function in model.functions.values() for node in function.all_nodes()]
    for node in (*model.graph.all_nodes(), *functions):
        if (node.domain, node.op_type) == MX:
            continue
        reason = unsupported(node.domain, node.op_type, version)
        if reason:
            if node.domain not in ONNX:
                yield at(node, "domain", "operators of ONNX's own domain", reason)
            else:
                yield at(node, "operator", f"an operator that TensorRT {version} takes", reason)
            continue
        operator = table().operators[node.op_type]
        yield from check_form(node, operator)
        quantized = list(check_quantized(node))
        yield from quantized
        if not quantized:  # they are of types, too, and say more
            yield from check_node(node, operator)
