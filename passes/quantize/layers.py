"""Carry out a quantization plan: what `fp8-matmul` and `int8-matmul` share.

    storage   %w: bf16[128, 64] = enginecast.dequantize(%q, %s, bf16)
              %y = aten.linear(%x, %w, %bias)
    blocks    %y = enginecast.blockwise_linear(%x, %q, %s, %bias, 4, False)
    w8a8      %y = enginecast.quantized_linear(%xq, %xs, %q, %s, %bias, bf16)
    rows of a table
              %y = enginecast.dequantize(aten.embedding(%q, %ids), aten.embedding(%s, %ids), bf16)

Biases stay as they are.  Weights are expressions, quantized while the engine is written:

    %s: f32[128, 1] = enginecast.dynamic_scale(%w, fp8, True)
    %q: fp8[128, 64] = enginecast.quantize(%w, %s, fp8)

A convolution in int8 reads and gives unsigned integers, whose scale and zero come from the
calibration inputs; a rectifier behind it is a limit of what it gives.  Values that are held so stay
so up to the next convolution, through pools, views and sums, and are floats for anything else:

    %q: u8[2, 64, 9, 9] = enginecast.quantize_affine(%x, %xs, 117, u8)
    %c: u8[2, 64, 9, 9] = enginecast.quantized_conv(%q, %xs, 117, %w, %ws, %b, ..., %ys, 0, 0.0)
    %relu: f32[2, 64, 9, 9] = enginecast.dequantize_affine(%c, %ys, 0, f32)

For TensorRT it reads floats that are whole steps, and gives floats (`LayerPlan.signed`):

    %q: s8[2, 64, 9, 9] = enginecast.quantize(%x, %xs, s8)
    %d: f16[2, 64, 9, 9] = enginecast.dequantize(%q, %xs, f16)
    %c: f16[2, 64, 9, 9] = aten.conv2d(%d, enginecast.dequantize(%w, %ws, f16), %b, ...)

An LSTM or a GRU reads floats and rounds them itself, at each step anew:

    %r = enginecast.quantized_lstm(%x, %h, %c, %w, %ws, %u, %us, %b)
    %r = enginecast.quantized_gru(%x, %h, %w, %ws, %u, %us, %b, %c, False)

A scale that a backend holds in fp16 or bf16 is rounded up to that dtype: rounded down, the largest
value of a row would no longer fit.  What linears read is quantized once for all that read one
value, or views of one (x and x.view(-1, 64)):

    %norm = aten.rms_norm(...)
    %xs: f32[2, 7, 1] = enginecast.dynamic_scale(%norm, fp8, True)     right after the producer, so
    %xq: fp8[2, 7, 64] = enginecast.quantize(%norm, %xs, fp8)          that a backend can fuse them
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import PassError
from enginecast.passes.ir.base import PassContext, Promise, Site
from enginecast.passes.ir.edit import drop_unused_weights, erase_dead, first_input, weight_value
from enginecast.passes.ir.match import behind_casts
from enginecast.passes.ir.quantization_plan import (
    LayerPlan,
    QuantizationPlan,
    attach_plan,
    plan_of,
)
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.quantize.dynamic import Inputs, origin_of, quantize_recurrence
from enginecast.passes.quantize.measure.quantizable import (
    RECURRENT,
    Layer,
    find_layers,
    is_product_of_integers,
    origin_in_order,
    products_as_linears,
    tail_of,
)
from enginecast.passes.quantize.measure.spans import Span, static_spans
from enginecast.passes.quantize.plan.check import check_plan
from enginecast.passes.quantize.plan.options import BEFORE, QuantizingPass
from enginecast.passes.quantize.plan.planning import make_plan
from enginecast.passes.quantize.static import Integers
from enginecast.passes.quantize.storage import Chosen, ScaleDtype, Weights, quantize_weight

DONE = "enginecast_quantized"
"""Where a program says which layers of its plan were carried out: in the metadata of its graph
module, as keys of `QuantizationPlan.by_site`."""


@dataclass(frozen=True)
class QuantizeLayers(QuantizingPass):
    """Rewrite the layers that a plan quantizes."""

    promise: ClassVar[Promise] = "precision"
    after: ClassVar[frozenset[str]] = BEFORE | {"plan-fp8", "plan-int8"}
    carries_out_plan: ClassVar[bool] = True

    scale_dtype: ScaleDtype = "fp32"

    @abstractmethod
    def dtype(self, arch: str) -> torch.dtype:
        """Of quantized values."""

    def native_refusal(self, layer: Layer, plan: LayerPlan, arch: str) -> str:
        """Why an architecture has no product of quantized values for a layer; empty: it has."""
        return ""

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        products_as_linears(program)
        plan = self._plan(program, context)
        layers = find_layers(program)
        done = program.graph_module.meta.get(DONE, frozenset())
        known = {layer.key for layer in layers} | done
        missing = [
            f"{p.module} {p.source}" for key, p in plan.by_site().items() if key not in known
        ]
        if missing:  # a pass after the plan took it away: nobody would quantize it
            raise PassError(
                f"the plan names {len(missing)} layers that the program does not have: "
                + ", ".join(missing[:5]),
                hint="Plan after all passes that merge or replace linears.",
            )
        log = SiteLog(context)
        chosen = self._chosen(program, plan, layers, log)
        chosen, spans = _static_spans(program, context, chosen, log)
        weights = Weights(program, self.dtype(plan.arch), self.scale_dtype, context.scales)
        inputs = Inputs(program, weights, chosen, spans)
        integers = Integers(program, weights, chosen, spans)
        for layer, decision in chosen:
            log.done(layer.node, _described(decision))
            if layer.kind in RECURRENT or is_product_of_integers(decision):
                continue
            if decision.choice == "storage" or decision.weights == "block":
                quantize_weight(program, weights, layer, decision)
            elif decision.signed:
                inputs.quantize_convolution(layer, decision)
            else:
                inputs.quantize(layer, decision)
        integers.rewrite()
        # Last: it puts other nodes in the place of those that it gives, by which the others know
        # what they read.
        for layer, decision in chosen:
            if layer.kind in RECURRENT:
                quantize_recurrence(program, weights, layer, decision)
        erase_dead(program.graph)
        drop_unused_weights(program)
        program.graph_module.meta[DONE] = done | {layer.key for layer, _ in chosen}
        return log.sites

    def _plan(self, program: ExportedProgram, context: PassContext) -> QuantizationPlan:
        plan = plan_of(program)
        if plan is None and context.plan is not None:
            plan = check_plan(program, context.plan, self.options)
        plan = plan or make_plan(program, context, self.options)
        if plan.format != self.format:
            raise PassError(
                f"the plan is for {plan.format}, and {self.name} carries out {self.format}",
                hint=f"Use {plan.format}-matmul, or make another plan.",
            )
        attach_plan(program, plan)
        return plan

    def _chosen(
        self, program: ExportedProgram, plan: QuantizationPlan, layers: list[Layer], log: SiteLog
    ) -> list[Chosen]:
        """The layers to rewrite; of the others, the log has the reason."""
        decisions = plan.by_site()
        chosen = []
        for layer in layers:
            if log.skipped(layer.node):
                continue
            decision = decisions.get(layer.key)
            if decision is None:
                reason = "the plan does not name it"
            elif decision.choice == "keep":
                reason = f"kept: {decision.reason}" if decision.reason else "kept"
            elif decision.choice == "storage" or decision.weights == "block":
                reason = _not_finite(program, layer)
            else:
                reason = self.native_refusal(layer, decision, plan.arch) or _not_finite(
                    program, layer
                )
            if reason:
                log.refused(layer.node, reason)
            elif decision is not None:
                chosen.append((layer, decision))
        return chosen


def _static_spans(
    program: ExportedProgram, context: PassContext, chosen: Sequence[Chosen], log: SiteLog
) -> tuple[list[Chosen], Mapping[Node, Span]]:
    """Least and largest elements of what layers with static scales read, and of convolutions what
    they give; and the layers without those where one of them is not finite.
    """
    plans = ((layer.node, decision) for layer, decision in chosen)
    spans = static_spans(program, context, plans, origin_of)
    left = []
    for layer, decision in chosen:
        values = []
        if is_product_of_integers(decision):
            values = [origin_in_order(first_input(layer.node)), tail_of(layer.node).node]
        elif decision.choice == "w8a8-static":
            source = first_input if decision.signed else origin_of
            values = [source(layer.node)]
        if not all(spans[value].is_finite for value in values):
            log.refused(layer.node, "what it reads is not finite on the calibration inputs")
        else:
            left.append((layer, decision))
    return left, spans


def _not_finite(program: ExportedProgram, layer: Layer) -> str:
    """Why a weight cannot be quantized: it holds infinities or NaN; empty when it does not."""
    weight = weight_value(program, behind_casts(layer.weight))
    if bool(weight.abs().amax().isfinite()):
        return ""
    bad = (~weight.flatten(1).isfinite().all(1)).nonzero()
    first = int(bad[0])
    return f"{layer.name} is not finite in {len(bad)} of {len(weight)} rows (the first is {first})"


def _described(plan: LayerPlan) -> str:
    """The form: "w8a8-dynamic, rows"; "storage, 4 bits, blocks of 32"."""
    words = {"tensor": "one scale", "row": "rows", "block": f"blocks of {plan.block}"}
    parts = [plan.choice, *([f"{plan.bits} bits"] if plan.bits != 8 else []), words[plan.weights]]
    if plan.activations not in (None, plan.weights):
        parts.append(f"x: {words[plan.activations]}")
    return ", ".join(parts)
