"""Simplify a graph of torch.onnx by rules that are exact: no result changes by a bit.

onnxscript's `optimize_ir` compares constants with tolerances (1e-8 counts as zero, 1.00001 as one)
and drops a ScatterND whatever its reduction, so that an epsilon of 1e-8 vanishes.  What its other
rules gain, such as a batch norm folded into a convolution, ONNX Runtime does when it opens a file.
"""

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.optimizer import fold_constants
from onnxscript.rewriter import RewriteRuleSet
from onnxscript.rewriter.rules.common import (
    no_op_cast_rule,
    no_op_expand_rule,
    no_op_transpose_rule,
    squeeze_reshape_1d_rule,
    transpose_transpose_rule,
    unsqueeze_unsqueeze_rule,
)

ROUNDS = 2
"""Constants that were folded make shapes known, and known shapes make nodes redundant."""

_MOVES = RewriteRuleSet(
    [
        no_op_cast_rule,
        no_op_expand_rule,
        no_op_transpose_rule,
        transpose_transpose_rule,
        unsqueeze_unsqueeze_rule,
        squeeze_reshape_1d_rule,
    ]
)
"""Rules that drop or join ops that only move values; none of them compares a constant."""


def simplify(model: ir.Model) -> None:
    """Inline functions, fold constants, drop what is redundant or unused; in place."""
    common.InlinePass()(model)
    for _ in range(ROUNDS):
        fold_constants(model, onnx_shape_inference=True)
        _MOVES.apply_to_model(model)
        common.RemoveUnusedNodesPass()(model)
    ir.passes.Sequential(
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)
