"""Give the whole program one compute dtype, with casts only where precision classes meet.

    before (captured from a checkpoint whose `wo` is fp32, the rest fp16):
        %h: f32 = aten.mul(...)
        %y: f32 = aten.linear(%h, %wo: f32)
        %norm: "expected scalar type Float but found Half", or an engine that ONNX Runtime refuses
        to load
    after unify-dtype{to=fp16}:
        %wo_f16: f16 = aten.to.dtype(%wo, f16)
        %y: f16 = aten.linear(%h: f16, %wo_f16)

Which value takes which dtype is decided in `dtype_classes`.  Every float-to-float cast of the
source is dropped and the casts that the classes need are put in.  Fill values that the target
cannot hold (-3.4e38 in fp16 is -inf, and a fully masked row then NaN) become its largest finite
value.  Integer paths stay as they are.

`residual=fp32` keeps the residual stream, its norms and what else is computed from it up to the
next linear in fp32, and the branches in the compute dtype:

    after unify-dtype{to=fp16 residual=fp32}:
        %branch: f16 = aten.linear(...)
        %branch_f32: f32 = aten.to.dtype(%branch, f32)
        %h: f32 = aten.add(%residual: f32, %branch_f32)
        %norm: f32 = ...
        %norm_f16: f16 = aten.to.dtype(%norm, f16)

Clamps that transformers puts around fp16 values (`inf_clamps`) are dropped: whether a program has
them depends on the dtype it was captured in.  Where values leave the range, the result is infinite
then, which verification sees, and not finite and wrong.

Must not happen, and is checked at the end: an op that reads two float dtypes, and a cast that
stands at no border (`cast_borders`).
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import PassError
from enginecast.passes.analyses.residual_stream import residual_stream
from enginecast.passes.ir.base import Pass, PassContext, Promise, Site
from enginecast.passes.ir.blocks import all_modules, all_nodes, is_structured
from enginecast.passes.ir.edit import (
    dtype_of,
    erase_dead,
    is_float,
)
from enginecast.passes.ir.effects import is_metadata_check
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.source import module_classes, module_path, source_line
from enginecast.passes.ir.text import DTYPES, dtype_text
from enginecast.passes.ir.traits import Trait, has
from enginecast.passes.lower.lift_weights import lift_weights
from enginecast.passes.precision.cast_borders import check_casts
from enginecast.passes.precision.dtype_classes import Class, classify
from enginecast.passes.precision.inf_clamps import drop_inf_clamps
from enginecast.passes.precision.retype import Retyper


@dataclass(frozen=True)
class UnifyDtype(Pass):
    """Give every float op one compute dtype."""

    name: ClassVar[str] = "unify-dtype"
    promise: ClassVar[Promise] = "precision"
    covers_blocks: ClassVar[bool] = True

    to: Literal["fp16", "bf16", "fp32", "fp64"] = "fp32"
    """The compute dtype. fp64 makes the reference program that errors are measured from."""
    keep: tuple[str, ...] = ()
    """Regular expressions (re.search) on module paths: these modules compute in fp32."""
    keep_classes: tuple[str, ...] = ()
    """Class names of modules that compute in fp32, e.g. T5LayerFF."""
    residual: Literal["same", "fp32"] = "same"
    """fp32: sums of the residual stream and their norms stay in fp32; same: they are as `to`."""

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        _drop_asserts(program)
        for clamp in drop_inf_clamps(program):
            log.done(clamp, "the source's inf-clamp dropped: it is there in fp16 alone")
        kept = self.kept(program)
        classes = classify(program, frozenset(kept))
        _clamp_fills(program, classes, DTYPES[self.to], log)
        Retyper(program, classes, DTYPES[self.to], log).run()
        lift_weights(program, SiteLog(PassContext()))
        for module in all_modules(program):
            erase_dead(module.graph)
        check_one_dtype_per_op(program)
        check_casts(program)
        return log.sites

    def ensures(self, program: ExportedProgram) -> None:
        check_casts(program)

    def kept(self, program: ExportedProgram) -> set[Node]:
        """The nodes that compute in fp32 because the options say so.

        Raises:
            PassError: an option finds nothing in this program.
        """
        kept = _kept_by_path(program, self.keep) | _kept_by_class(program, self.keep_classes)
        if self.residual == "same":
            return kept
        stream = residual_stream(program)
        if not stream:
            raise PassError(
                "residual=fp32 finds no residual sum in the program",
                hint="It is for models whose layers add to a stream; leave it out, or keep modules"
                " in fp32 by keep and keep_classes.",
            )
        return kept | stream


def check_one_dtype_per_op(program: ExportedProgram) -> None:
    """Raise PassError, naming every op that reads floats of two dtypes."""
    mixed = []
    for node in all_nodes(program):
        if node.op != "call_function" or is_structured(node):
            continue
        found = {dtype_of(s) for s in node.all_input_nodes if is_float(s)}
        if len(found) > 1:
            names = " and ".join(sorted(dtype_text(d) for d in found if d is not None))
            place = f"{module_path(node)} {source_line(node)}".strip()
            mixed.append(f"  {node.name} reads {names} ({place})")
    if mixed:
        raise PassError("ops that mix float dtypes are left:\n" + "\n".join(mixed))


def _kept_by_path(program: ExportedProgram, patterns: tuple[str, ...]) -> set[Node]:
    kept: set[Node] = set()
    for pattern in patterns:
        try:
            expression = re.compile(pattern)
        except re.error as error:
            raise PassError(f"keep={pattern!r} is not a regular expression: {error}") from error
        found = {
            node
            for node in all_nodes(program)
            if node.op == "call_function" and expression.search(module_path(node))
        }
        _require_found(found, f"keep={pattern!r}")
        kept |= found
    return kept


def _kept_by_class(program: ExportedProgram, names: tuple[str, ...]) -> set[Node]:
    kept: set[Node] = set()
    for name in names:
        found = {node for node in all_nodes(program) if name in module_classes(node)}
        _require_found(found, f"keep_classes={name!r}")
        kept |= found
    return kept


def _require_found(found: set[Node], option: str) -> None:
    if not found:
        raise PassError(
            f"{option} matches no module of the program",
            hint="--skip-modules-pattern sets keep, --skip-modules-classes sets keep_classes."
            " Module paths look like encoder.block.0.layer.1.",
        )


def _drop_asserts(program: ExportedProgram) -> None:
    """Metadata asserts pin the captured dtypes."""
    for node in list(all_nodes(program)):
        if is_metadata_check(node):
            node.graph.erase_node(node)


def _clamp_fills(
    program: ExportedProgram, classes: dict[Node, Class], to: torch.dtype, log: SiteLog
) -> None:
    """Bring literal fill values that the target cannot hold into its finite range."""
    largest = torch.finfo(to).max

    def clamp(argument: Any) -> Any:
        if isinstance(argument, float) and largest < abs(argument) < float("inf"):
            return largest if argument > 0 else -largest
        return argument

    for node in all_nodes(program):
        kind = classes.get(node, Class.ISLAND)
        # What is computed from integers keeps its literals (a rotary base of 1e6) and is clamped
        # where it meets the stream; a fill is not computed with.
        literal = has(node, Trait.FILLS if kind is Class.EXACT else Trait.LITERAL)
        if not literal or kind is Class.ISLAND:
            continue
        if has(node, Trait.FILLS):  # the only numbers among their arguments are fills
            node.args = torch.fx.node.map_aggregate(node.args, _as_float)
        args = torch.fx.node.map_aggregate(node.args, clamp)
        kwargs = torch.fx.node.map_aggregate(node.kwargs, clamp)
        if (args, kwargs) != (node.args, node.kwargs):
            node.args, node.kwargs = args, kwargs
            log.done(
                node, f"fill value clamped to {largest:.5g}, the largest finite {dtype_text(to)}"
            )


def _as_float(argument: Any) -> Any:
    return float(argument) if type(argument) is int else argument
