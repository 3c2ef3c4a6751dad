"""Carry out a quantisation plan: what `fp8-matmul` and `int8-matmul` share.

    storage   %w: bf16[128, 64] = enginecast.dequantize(%q, %s, bf16)
              %y = aten.linear(%x, %w, %bias)
    blocks    %y = enginecast.blockwise_linear(%x, %q, %s, %bias, 4, False)
    w8a8      %y = enginecast.quantized_linear(%xq, %xs, %q, %s, %bias, bf16)
    rows of a table
              %y = enginecast.dequantize(aten.embedding(%q, %ids), aten.embedding(%s, %ids), bf16)

`%q` and `%s` are weight expressions (`quantized_weights`); `%xq` and `%xs` are shared by all
linears that read one value (`quantized_activations`).  Biases stay as they are.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from msgspec import structs
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import PassError
from enginecast.passes.ir.base import Pass, PassContext, Promise, Site
from enginecast.passes.ir.edit import (
    SCALE,
    aten,
    drop_unused_weights,
    dtype_of,
    erase_dead,
    first_input,
    insert,
    shape_of,
)
from enginecast.passes.ir.effects import own
from enginecast.passes.ir.quantization_plan import (
    Format,
    LayerPlan,
    QuantizationPlan,
    attach_plan,
    plan_of,
)
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.quantize.activations import Activations, origin
from enginecast.passes.quantize.measure.quantizable import Layer, find_layers, products_as_linears
from enginecast.passes.quantize.measure.simulate import activation_ranges
from enginecast.passes.quantize.plan.check import check_plan
from enginecast.passes.quantize.plan.options import PlanOptions
from enginecast.passes.quantize.plan.planning import make_plan
from enginecast.passes.quantize.weights import ScaleDtype, WeightForms, not_finite

DEFAULT_BLOCK = 32
DONE = "enginecast_quantized"
"""Where a program says which layers of its plan were carried out: in the metadata of its graph
module, as keys of `QuantizationPlan.by_site`."""

Chosen = tuple[Layer, LayerPlan]


@dataclass(frozen=True)
class QuantizeLayers(Pass):
    """Rewrite the layers that a plan quantises."""

    promise: ClassVar[Promise] = "precision"
    after: ClassVar[frozenset[str]] = frozenset(
        {"rescale-residual", "unify-dtype", "canonicalize", "fuse-rms-norm", "fuse-attention"}
        | {
            "fuse-gelu",
            "fuse-skip-norm",
            "merge-linears",
            "smooth-outliers",
            "plan-fp8",
            "plan-int8",
        }
    )
    format: ClassVar[Format]

    scale_dtype: ScaleDtype = "fp32"

    @property
    @abstractmethod
    def options(self) -> PlanOptions:
        """What to ask for where nobody planned."""

    @abstractmethod
    def dtype(self, arch: str) -> torch.dtype:
        """Of quantised values."""

    @abstractmethod
    def native_refusal(self, layer: Layer, plan: LayerPlan, arch: str) -> str:
        """Why an architecture has no product of quantised values for a layer; empty: it has."""

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        products_as_linears(program)
        plan = self._plan(program, context)
        layers = find_layers(program)
        _check_known(program, plan, layers)
        log = SiteLog(context)
        chosen = self._chosen(program, plan, layers, log)
        chosen, ranges = _static_ranges(program, context, chosen, log)
        dtype = self.dtype(plan.arch)
        weights = WeightForms(program.graph, dtype, self.scale_dtype)
        read = [
            (layer, found.activations, found.choice == "w8a8-static")
            for layer, found in chosen
            if found.activations in ("tensor", "row")
        ]
        writer = _Writer(
            program, weights, Activations(program, dtype, read, ranges, self.scale_dtype)
        )
        for layer, found in chosen:
            writer.rewrite(layer, found)
            log.done(layer.node, _described(found))
        erase_dead(program.graph)
        drop_unused_weights(program)
        done = program.graph_module.meta.get(DONE, frozenset())
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
            found = _with_block(decisions.get(layer.key))
            reason = self._refusal(layer, found, plan.arch) or not_finite(program, layer)
            if found is None or reason:
                log.refused(layer.node, reason)
            else:
                chosen.append((layer, found))
        return chosen

    def _refusal(self, layer: Layer, plan: LayerPlan | None, arch: str) -> str:
        if plan is None:
            return "the plan does not name it"
        if plan.choice == "keep":
            return f"kept: {plan.reason}" if plan.reason else "kept"
        if layer.kind != "linear" and plan.choice != "storage":
            return f"{plan.choice}: of {layer.kind}s, only storage exists"
        if layer.kind == "conv" and plan.weights == "block":
            return "storage by block: a conv has scales for each output channel"
        reason = self._unfit_scales(layer, plan)
        if reason or plan.choice == "storage" or plan.weights == "block":
            return reason
        return self.native_refusal(layer, plan, arch)

    def _unfit_scales(self, layer: Layer, plan: LayerPlan) -> str:
        if plan.weights == "block":
            return self._unfit_blocks(layer, plan)
        if plan.bits != 8:
            return f"{plan.bits} bits want a scale for each block"
        if plan.choice == "storage":
            return "" if plan.activations is None else "what is only stored has no scale to read by"
        if plan.activations in (None, "block"):
            return f"{plan.choice} with weights by {plan.weights} wants a scale for x, or its rows"
        if plan.choice == "w8a8-static" and plan.activations != "tensor":
            return "a static scale is one for all rows"
        return ""

    def _unfit_blocks(self, layer: Layer, plan: LayerPlan) -> str:
        if self.format != "int8":
            return f"{self.format} has no scales by block here"
        if plan.choice == "w8a8-static" or plan.activations not in _BLOCKED[plan.choice]:
            return f"{plan.choice} with weights by block and x by {plan.activations}: no such form"
        if plan.bits != 8 and plan.choice != "storage":
            return f"{plan.bits} bits are for storage only"
        if layer.shape[1] % plan.block:
            return f"K={layer.shape[1]} has no whole blocks of {plan.block}"
        return ""


_BLOCKED = {"storage": (None,), "w8a8-dynamic": ("block",)}
"""What shares a scale in the activations of a linear with blocks, by choice."""


@dataclass(frozen=True)
class _Writer:
    """Makes the nodes of each form."""

    program: ExportedProgram
    weights: WeightForms
    activations: Activations

    def rewrite(self, layer: Layer, plan: LayerPlan) -> None:
        """Change the node of a layer; it stays the same node, with its name."""
        values, scale = self.weights.of(layer, plan)
        if layer.kind == "embedding":
            self._pick(layer, plan, values, scale)
        elif plan.weights == "block":
            self._multiply_blocks(layer, plan, values, scale)
        elif plan.choice != "storage":
            self._multiply(layer, values, scale)
        else:
            args = (values, scale, dtype_of(layer.weight))
            layer.node.update_arg(1, self._insert(own.dequantize.default, args, layer))

    def _pick(self, layer: Layer, plan: LayerPlan, values: Node, scale: Node) -> None:
        _, ids, *_ = layer.node.args
        picked = self._insert(aten.embedding.default, (values, *layer.node.args[1:]), layer)
        if shape_of(scale):
            scale = self._insert(aten.embedding.default, (scale, ids), layer)
        dtype = dtype_of(layer.weight)
        if plan.weights != "block":
            _change(layer.node, own.dequantize.default, (picked, scale, dtype))
            return
        blocks = self._insert(aten.unflatten.int, (picked, -1, [-1, plan.block]), layer)
        scale = self._insert(aten.unsqueeze.default, (scale, -1), layer)
        rows = self._insert(own.dequantize.default, (blocks, scale, dtype), layer)
        _change(layer.node, aten.flatten.using_ints, (rows, -2))

    def _multiply(self, layer: Layer, values: Node, scale: Node) -> None:
        read = self.activations.of(layer)
        args = (*read, values, scale, _bias(layer), dtype_of(layer.node))
        _change(layer.node, own.quantized_linear.default, args)

    def _multiply_blocks(self, layer: Layer, plan: LayerPlan, values: Node, scale: Node) -> None:
        both = plan.activations is not None
        args = (first_input(layer.node), values, scale, _bias(layer), plan.bits, both)
        _change(layer.node, own.blockwise_linear.default, args)

    def _insert(self, target: object, args: tuple[object, ...], layer: Layer) -> Node:
        assert callable(target)
        with self.program.graph.inserting_before(layer.node):
            node = insert(self.program.graph, target, args, like=layer.node)
        node.meta.pop(SCALE, None)
        return node


def _change(node: Node, target: Any, args: tuple[Any, ...]) -> None:
    node.target, node.args, node.kwargs = target, args, {}


def _bias(layer: Layer) -> object:
    return layer.node.args[2] if len(layer.node.args) > 2 else None


def _with_block(plan: LayerPlan | None) -> LayerPlan | None:
    if plan is None or plan.weights != "block" or plan.block:
        return plan
    return structs.replace(plan, block=DEFAULT_BLOCK)


def _static_ranges(
    program: ExportedProgram, context: PassContext, chosen: list[Chosen], log: SiteLog
) -> tuple[list[Chosen], Mapping[Node, float]]:
    """Ranges of what layers with static scales read, and the layers without those whose range is
    none.
    """
    static = {origin(layer) for layer, found in chosen if found.choice == "w8a8-static"}
    ranges = activation_ranges(program, context, static)
    left = []
    for layer, found in chosen:
        largest = ranges.get(origin(layer), 0.0) if found.choice == "w8a8-static" else 0.0
        if largest < float("inf"):  # NaN is not
            left.append((layer, found))
        else:
            log.refused(layer.node, "what it reads is not finite on the calibration inputs")
    return left, ranges


def _check_known(program: ExportedProgram, plan: QuantizationPlan, layers: list[Layer]) -> None:
    """A layer that a pass after the plan took away would be quantised by nobody."""
    done = program.graph_module.meta.get(DONE, frozenset())
    known = {layer.key for layer in layers} | done
    missing = [f"{p.module} {p.source}" for key, p in plan.by_site().items() if key not in known]
    if missing:
        raise PassError(
            f"the plan names {len(missing)} layers that the program does not have: "
            + ", ".join(missing[:5]),
            hint="Plan after all passes that merge or replace linears.",
        )


def _described(plan: LayerPlan) -> str:
    """The form: "w8a8-dynamic, rows"; "storage, 4 bits, blocks of 32"."""
    words = {"tensor": "one scale", "row": "rows", "block": f"blocks of {plan.block}"}
    parts = [plan.choice, *([f"{plan.bits} bits"] if plan.bits != 8 else []), words[plan.weights]]
    if plan.activations not in (None, plan.weights):
        parts.append(f"x: {words[plan.activations]}")
    return ", ".join(parts)
