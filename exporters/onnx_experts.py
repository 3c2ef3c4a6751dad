"""Mixtures of experts in ONNX: rows that are sorted by expert, times the weights of their expert.

transformers computes the experts of all its mixtures with one grouped product, an op of its own
where it is captured.  ONNX has none.  The number of experts is known, so it is one product for
each expert over the rows that were routed to it, which may be none.
"""

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset23 as op


def _grouped_mm(rows: Any, weight: Any, offs: Any) -> Any:
    """`rows` [rows, in], `weight` [experts, in, out]; `offs` [experts]: where the rows of each
    expert end.
    """
    experts = weight.shape[0]
    zero = op.Constant(value_ints=[0])
    ends = op.Cast(offs, to=7)
    weights = op.Split(weight, axis=0, num_outputs=experts) if experts > 1 else [weight]
    stops = op.Split(ends, axis=0, num_outputs=experts) if experts > 1 else [ends]
    starts = [zero, *stops[: experts - 1]]
    products = [
        op.MatMul(op.Slice(rows, starts[i], stops[i], zero), op.Squeeze(weights[i], zero))
        for i in range(experts)
    ]
    return op.Concat(*products, axis=0)


def expert_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The grouped product, where transformers has registered it: that is, where a model has it."""
    found = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return {} if found is None else {found.default: _grouped_mm}
