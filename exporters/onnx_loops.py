"""while_loop in ONNX: torch's own translation, with its one wrong number put right.

It calls the condition before the loop as a function of opset 23's version, and all other calls have
version 1.  torch's inliner refuses a model whose loop holds a branch or another loop then ("Opset
mismatch when inlining function", torch 2.13).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def loop_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """For the translation table; empty where torch keeps its translation elsewhere."""
    try:
        from torch.onnx._internal.exporter._torchlib.ops import hop
    except ImportError:
        return {}

    def while_loop(
        condition: Any, body: Any, carried: Sequence[Any], additional: Sequence[Any]
    ) -> Sequence[Any]:
        results = hop.higher_order_while_loop(condition, body, carried, additional)
        loop = results[0].producer()
        loop.inputs[1].producer().version = None
        return results

    return {torch.ops.higher_order.while_loop: while_loop}
