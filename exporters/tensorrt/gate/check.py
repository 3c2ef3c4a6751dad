"""Check whether TensorRT takes an ONNX model: by its own parser where it is installed, elsewhere by
what TensorRT-RTX answered of each operator.
"""

from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from enginecast.errors import LoweringError
from enginecast.exporters.tensorrt.gate.operators import (
    BUILDER,
    check_operator,
    table,
    unsupported,
)
from enginecast.exporters.tensorrt.gate.shape_rules import (
    check_inputs,
    check_orders,
    check_ranges,
    check_volumes,
)
from enginecast.exporters.tensorrt.gate.type_rules import (
    check_blocks,
    check_quantized,
    check_values,
)
from enginecast.exporters.tensorrt.gate.violations import Violation, at
from enginecast.runtime.bundle.manifest import Input

__all__ = ["Violation", "check_ready", "refusal_of"]
SHOWN = 10
"""Violations that an error lists."""


def check_ready(
    model: ir.Model,
    *,
    plugins: bool = False,
    parsed: bool = False,
    inputs: Sequence[Input] = (),
    ranges: Mapping[str, tuple[int, int]] | None = None,
) -> list[Violation]:
    """Everything in a model that TensorRT is not known to take.

    Args:
        model: in memory; its weights may be lazy: only scales, zero points, indices and sizes are
            read.
        plugins: the library is TensorRT, which has plugins, a builder of its own, and is documented
            to take no tensor of more than 2^31 - 1 elements; TensorRT-RTX builds with larger ones.
        parsed: the parser takes the model; what is left are the builder and the bundle.
        inputs: as the manifest has them; empty: as the graph has them.
        ranges: least and greatest size of each symbol; None: there are none.
    """
    ranges = ranges or {}
    return [
        *check_values(model.graph),
        *(() if plugins and parsed else _check_nodes(model, plugins=plugins, parsed=parsed)),
        *check_inputs(model.graph, inputs),
        *check_ranges(model.graph, ranges),
        *check_orders(model.graph, ranges),
        *(check_volumes(model.graph, ranges) if plugins else ()),
    ]


def refusal_of(
    found: Sequence[Violation], library: str, target: str, *, shown: int = SHOWN
) -> LoweringError:
    """The error that reports the violations; `details` has all of them.

    Args:
        found: at least one violation.
        library: what answered, with its version, such as "TensorRT-RTX 1.7.1.116".
        target: as a user names it.
        shown: how many of them its message has; 0: they were shown.
    """
    lines = [f"  {violation}" for violation in found[:shown]]
    if len(found) > shown > 0:
        lines.append(f"  and {len(found) - shown} more")
    count = "1 violation" if len(found) == 1 else f"{len(found)} violations"
    error = LoweringError(
        "\n".join([f"--target {target}: {library} does not take this network: {count}", *lines]),
        hint=f"`enginecast inspect --target {target}` lists them all." if shown else "",
    )
    error.details["violations"] = [str(violation) for violation in found]
    return error


def _check_nodes(model: ir.Model, *, plugins: bool, parsed: bool) -> Iterator[Violation]:
    """Branches and bodies of loops included, and functions of the model."""
    functions = [node for function in model.functions.values() for node in function.all_nodes()]
    for node in (*model.graph.all_nodes(), *functions):
        reason = unsupported(node.domain, node.op_type, plugins=plugins)
        if reason:
            if not parsed or reason.startswith(BUILDER):
                expected = f"an operator that {table().library} takes"
                yield at(node, "operator", expected, reason)
            continue
        yield from check_operator(node, parsed=parsed)
        yield from check_blocks(node)
        if not parsed:
            yield from check_quantized(node)
