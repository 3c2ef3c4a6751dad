"""Whether a plan from a file fits the program, and can be carried out at all."""

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping

from msgspec.structs import replace
from torch.export import ExportedProgram

from enginecast.errors import PassError
from enginecast.passes.ir.edit import arguments
from enginecast.passes.ir.quantization_plan import LayerPlan, QuantizationPlan
from enginecast.passes.quantize.measure.quantizable import (
    Layer,
    find_layers,
    is_static_conv,
    recurrence_of,
)
from enginecast.passes.quantize.plan.architectures import CPU, Column, require, tensorrt_column
from enginecast.passes.quantize.plan.forms import MXFP8_BLOCK, NVFP4_BLOCK, TENSORRT_BLOCKS, unfit
from enginecast.passes.quantize.plan.options import PlanOptions
from enginecast.passes.quantize.plan.scaled_mm_rules import off_multiple

_COLUMNS: dict[str, Column] = {"tensor": "tensorwise", "row": "rowwise", "block": "blockwise"}


def check_plan(
    program: ExportedProgram, plan: QuantizationPlan, options: PlanOptions
) -> QuantizationPlan:
    """The plan for a program, with a note on layers that it does not mention: those are kept.

    Raises:
        PassError: it is for another format or architecture, names a layer that the program does not
            have, or demands what cannot be done; names the layer and the field.
    """
    for field, got, wanted in (
        ("format", plan.format, options.format),
        ("arch", plan.arch, options.arch),
    ):
        if got != wanted:
            raise PassError(
                f"plan: {field}: it is for {got}, and {wanted} is asked for",
                hint="Make a plan of its own for each format and architecture.",
            )
    layers = {layer.key: layer for layer in find_layers(program)}
    for place, decision in enumerate(plan.layers):
        where = f"plan: layers[{place}] ({decision.module})"
        if decision.key not in layers:
            raise _unknown(where, decision, layers)
        for field, fault in _faults(decision, layers[decision.key], plan, options):
            raise PassError(f"{where}: {field}: {fault}")
    counts = Counter(decision.key for decision in plan.layers)
    for key, count in counts.items():
        if count > 1:
            raise PassError(f"plan: {key[0]} {key[1]} #{key[2]} is there {count} times")
    left = [layer.module for key, layer in layers.items() if key not in counts]
    if not left:
        return plan
    shown = ", ".join(left[:3]) + (" ..." if len(left) > 3 else "")
    note = f"{len(left)} layers of the program are not in the plan, and are kept: {shown}"
    return plan if note in plan.notes else replace(plan, notes=(*plan.notes, note))


def _unknown(
    where: str, decision: LayerPlan, layers: Mapping[tuple[str, str, int], Layer]
) -> PassError:
    lines = [f"{s} #{o}" for module, s, o in layers if module == decision.module]
    if lines:
        return PassError(
            f"{where}: the module is there, but not {decision.source} #{decision.ordinal}",
            hint=f"The program has it at {', '.join(lines)}: the model's code is another version.",
        )
    modules = sorted({layer.module for layer in layers.values()})
    close = difflib.get_close_matches(decision.module, modules, n=3)
    meant = f"Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return PassError(
        f"{where}: the program has no such layer",
        hint=meant or f"It has {len(modules)}, such as {', '.join(modules[:3])}.",
    )


def _faults(
    layer: LayerPlan, found: Layer, plan: QuantizationPlan, options: PlanOptions
) -> Iterator[tuple[str, str]]:
    """(field, what is another layer's or cannot be done)."""
    for field, got, wanted in (
        ("kind", layer.kind, found.kind),
        ("shape", list(layer.shape), list(found.shape)),
        ("weight", layer.weight, found.name),
    ):
        if got != wanted:
            yield field, f"the program has {wanted}, the plan {got}"
    if layer.choice == "keep":
        return
    integers = plan.format == "int8"
    multiplies = layer.choice != "storage"
    wants_signed = integers and is_static_conv(layer) and options.on_tensorrt
    if layer.signed != wants_signed:
        yield "signed", f"{layer.signed}, expected {wants_signed} of this layer on this target"
    if not multiplies:
        if layer.activations is not None:
            yield "activations", f"{layer.activations!r} with storage, which rounds weights alone"
    elif integers and layer.kind in ("conv", "conv-transpose", "lstm", "gru"):
        is_conv = layer.kind.startswith("conv")
        names = {"lstm": "an LSTM", "gru": "a GRU"}
        name, choice = names.get(layer.kind, "a convolution"), f"{layer.choice!r} of"
        wanted = "w8a8-static" if is_conv else "w8a8-dynamic"
        if (layer.choice, layer.weights, layer.activations) != (wanted, "row", "tensor"):
            yield "choice", f"{choice} {name}: {wanted} by row and tensor, storage or keep"
        if plan.arch != CPU and not (is_conv and options.on_tensorrt):
            yield "choice", f"{choice} {name}, which has int8 on a CPU alone"
        if is_conv and not layer.signed and (reason := unfit(found)):
            yield "choice", f"{choice} {reason}"
        if not is_conv and recurrence_of(found.node, arguments(found.node)[2]).has_projection:
            yield "choice", f"{choice} an LSTM with a projection: storage or keep"
    elif layer.kind != "linear":
        yield "choice", f"{layer.choice!r} of a layer that is not a linear: storage or keep"
    elif layer.activations is None:
        yield "activations", f"none with {layer.choice!r}: tensor, row or block"

    blocks = "block" in (layer.weights, layer.activations)
    if blocks and (layer.weights != "block" or layer.activations not in ("block", None)):
        yield "activations", "blocks are for weight and activations alike"
    if blocks != (layer.block > 0):
        yield "block", f"{layer.block} with weights {layer.weights!r}"
    if layer.block and (layer.kind not in ("linear", "embedding") or layer.shape[-1] % layer.block):
        yield "block", f"{layer.block} does not divide K={layer.shape[-1]} of a {layer.kind}"
    if layer.block and (layer.block < 16 or layer.block & (layer.block - 1)):
        yield "block", f"{layer.block}: a power of two, 16 at least"

    if layer.bits == 4 and layer.weights != "block":
        yield "bits", "4 bits are for blocks"
    if layer.bits == 4 and multiplies:
        yield "bits", "4 bits are for storage"
    if layer.bits == 7 and not (integers and multiplies and layer.weights != "block"):
        yield "bits", "7 bits are for products of rows in int8; storage and blocks have 8"
    if layer.choice == "w8a8-static" and layer.activations != "tensor":
        yield "activations", f"{layer.activations!r}: a static scale is one for the whole tensor"
    if options.on_tensorrt:
        yield from _faults_for_tensorrt(layer, plan)
    if integers:
        return
    if blocks and (not options.on_tensorrt or multiplies):
        yield "weights", "'block': fp8 in blocks is for weights in TensorRT alone"
    if not multiplies:
        require(plan.arch, "storage")
    elif plan.arch != CPU:
        assert layer.activations is not None
        require(plan.arch, _COLUMNS[layer.activations])
        if fault := off_multiple(*layer.shape):
            yield "choice", f"{layer.choice!r} cannot be: {fault}"


def _faults_for_tensorrt(layer: LayerPlan, plan: QuantizationPlan) -> Iterator[tuple[str, str]]:
    if layer.choice == "w8a8-dynamic":
        yield "choice", f"{layer.choice!r}: TensorRT has static scales, w8a8-static"
    sizes = {("int8", 4): TENSORRT_BLOCKS, ("fp8", 4): (NVFP4_BLOCK,), ("fp8", 8): (MXFP8_BLOCK,)}
    allowed = sizes.get((plan.format, layer.bits), ())
    if layer.block and layer.kind != "linear":
        yield "block", f"{layer.block} of a {layer.kind}: TensorRT has blocks of linears"
    if layer.block and layer.block not in allowed:
        wanted = f"blocks of {' or '.join(map(str, allowed))}" if allowed else "rows"
        yield "block", f"{layer.block}: TensorRT has {plan.format} of {layer.bits} bits in {wanted}"
    require(plan.arch, tensorrt_column(plan.format, layer.bits, layer.block))
