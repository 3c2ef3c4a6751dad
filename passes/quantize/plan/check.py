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
    recurrence_of,
)
from enginecast.passes.quantize.plan.architectures import CPU, Column, require
from enginecast.passes.quantize.plan.forms import unfit
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
        found = _layer_of(where, decision, layers)
        for field, fault in _faults(decision, found, plan):
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


def _layer_of(
    where: str, decision: LayerPlan, layers: Mapping[tuple[str, str, int], Layer]
) -> Layer:
    if decision.key in layers:
        return layers[decision.key]
    lines = [f"{s} #{o}" for module, s, o in layers if module == decision.module]
    if lines:
        raise PassError(
            f"{where}: the module is there, but not {decision.source} #{decision.ordinal}",
            hint=f"The program has it at {', '.join(lines)}: the model's code is another version.",
        )
    modules = sorted({layer.module for layer in layers.values()})
    close = difflib.get_close_matches(decision.module, modules, n=3)
    meant = f"Did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise PassError(
        f"{where}: the program has no such layer",
        hint=meant or f"It has {len(modules)}, such as {', '.join(modules[:3])}.",
    )


def _faults(layer: LayerPlan, found: Layer, plan: QuantizationPlan) -> Iterator[tuple[str, str]]:
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
    if layer.choice == "storage":
        if layer.activations is not None:
            yield "activations", f"{layer.activations!r} with storage, which rounds weights alone"
    elif (layer.kind, plan.format) in _OF_INTEGERS:
        yield from _OF_INTEGERS[layer.kind, plan.format](layer, found, plan)
    elif layer.kind != "linear":
        yield "choice", f"{layer.choice!r} of a layer that is not a linear: storage or keep"
    elif layer.activations is None:
        yield "activations", f"none with {layer.choice!r}: tensor, row or block"
    yield from _block_faults(layer)
    yield from _format_faults(layer, plan)
    if plan.format == "fp8":
        yield from _native_faults(layer, plan.arch)


def _conv_faults(
    layer: LayerPlan, found: Layer, plan: QuantizationPlan
) -> Iterator[tuple[str, str]]:
    form = (layer.choice, layer.weights, layer.activations)
    if form != ("w8a8-static", "row", "tensor"):
        wanted = "w8a8-static by row and tensor, storage or keep"
        yield "choice", f"{layer.choice!r} of a convolution: {wanted}"
    if plan.arch != CPU:
        yield "choice", f"{layer.choice!r} of a convolution, which has int8 on a CPU alone"
    if reason := unfit(found):
        yield "choice", f"{layer.choice!r} of {reason}"


def _recurrence_faults(
    layer: LayerPlan, found: Layer, plan: QuantizationPlan
) -> Iterator[tuple[str, str]]:
    form = (layer.choice, layer.weights, layer.activations)
    name = "an LSTM" if found.kind == "lstm" else "a GRU"
    if form != ("w8a8-dynamic", "row", "tensor"):
        wanted = "w8a8-dynamic by row and tensor, storage or keep"
        yield "choice", f"{layer.choice!r} of {name}: {wanted}"
    if plan.arch != CPU:
        yield "choice", f"{layer.choice!r} of {name}, which has int8 on a CPU alone"
    if recurrence_of(found.node, arguments(found.node)[2]).has_projection:
        yield "choice", f"{layer.choice!r} of an LSTM with a projection: storage or keep"


_OF_INTEGERS = {
    ("conv", "int8"): _conv_faults,
    ("conv-transpose", "int8"): _conv_faults,
    ("lstm", "int8"): _recurrence_faults,
    ("gru", "int8"): _recurrence_faults,
}
"""What besides linears is multiplied, by kind and format."""


def _format_faults(layer: LayerPlan, plan: QuantizationPlan) -> Iterator[tuple[str, str]]:
    if layer.bits == 4 and (plan.format, layer.weights) != ("int8", "block"):
        yield "bits", "4 bits are for int8 in blocks"
    if layer.bits == 4 and layer.choice != "storage":
        yield "bits", "4 bits are for storage"
    multiplies = layer.choice != "storage" and layer.weights != "block"
    if layer.bits == 7 and not (plan.format == "int8" and multiplies):
        yield "bits", "7 bits are for products of rows in int8; storage and blocks have 8"
    if layer.choice == "w8a8-static" and layer.activations != "tensor":
        yield "activations", f"{layer.activations!r}: a static scale is one for the whole tensor"
    if plan.format == "fp8" and "block" in (layer.weights, layer.activations):
        yield "weights", "'block': fp8 in blocks is not built"


def _block_faults(layer: LayerPlan) -> Iterator[tuple[str, str]]:
    blocks = "block" in (layer.weights, layer.activations)
    if blocks and (layer.weights != "block" or layer.activations not in ("block", None)):
        yield "activations", "blocks are for weight and activations alike"
    if blocks != (layer.block > 0):
        yield "block", f"{layer.block} with weights {layer.weights!r}"
    if layer.block and (layer.kind not in ("linear", "embedding") or layer.shape[-1] % layer.block):
        yield "block", f"{layer.block} does not divide K={layer.shape[-1]} of a {layer.kind}"
    if layer.block and (layer.block < 16 or layer.block & (layer.block - 1)):
        yield "block", f"{layer.block}: a power of two, 16 at least"


def _native_faults(layer: LayerPlan, arch: str) -> Iterator[tuple[str, str]]:
    """What products in fp8 demand, of an architecture and of sizes."""
    if layer.choice == "storage":
        require(arch, "storage")
        return
    assert layer.activations is not None
    if arch == CPU:
        return
    require(arch, _COLUMNS[layer.activations])
    n, k = layer.shape
    fault = off_multiple(n, k)
    if fault:
        yield "choice", f"{layer.choice!r} cannot be: {fault}"
