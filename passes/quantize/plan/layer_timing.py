"""What a product in fp8 gains, measured on the GPU at hand: used where a plan is for that GPU.

Both sides are compiled, as the engine will be, so that scaling and rounding of the activations are
one kernel and count in the time.  Each distinct size is timed once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.nn import functional

from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.edit import first_input, value
from enginecast.passes.ir.quantization_plan import LayerPlan
from enginecast.passes.quantize.measure.simulate import FLOOR
from enginecast.passes.quantize.plan.scaled_mm_rules import fp8_dtype

ROUNDS, WARM = 20, 5


@dataclass(frozen=True)
class Product:
    """A product whose time is wanted: x [rows, k] by a weight [n, k]."""

    rows: int
    n: int
    k: int
    per_row: bool
    static: bool
    """Whether the scale of x is known before."""
    arch: str = ""


Timing = Callable[[Product], tuple[float, float]]
"""Time of a product in bf16, and in fp8 with the rounding of x; in one unit."""


def device_arch() -> str | None:
    """The row of the architecture matrix that the GPU at hand is; None without one."""
    if not torch.cuda.is_available():
        return None
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(0).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


def timing_on(arch: str) -> Timing | None:
    """How to time products for an architecture; None where this machine is another."""
    return time_product if arch == device_arch() else None


def with_measured_gains(
    program: ExportedProgram,
    context: PassContext,
    forms: Mapping[Node, Sequence[LayerPlan]],
    timing: Timing,
    arch: str,
) -> dict[Node, list[LayerPlan]]:
    """The forms with what was measured in place of the model's gain.

    Args:
        context: sizes are those of its largest calibration case, else those of the example.
        forms: of fp8; what is not a product keeps its gain.
    """
    names = program.graph_signature.user_inputs
    leaves = torch.utils._pytree.tree_leaves(program.example_inputs)
    case = max(
        context.calibration or [dict(zip(names, leaves, strict=False))],
        key=lambda case: sum(t.numel() for t in case.values() if isinstance(t, Tensor)),
    )
    symbols = {
        size.node.expr: actual
        for node in program.graph.find_nodes(op="placeholder")
        if isinstance(given := case.get(node.name), Tensor)
        for size, actual in zip(value(node).shape, given.shape, strict=True)
        if not isinstance(size, int) and size.node.expr.is_Symbol
    }
    known: dict[Product, float] = {}
    found = {node: list(some) for node, some in forms.items()}
    for node, some in found.items():
        for place, form in enumerate(some):
            if form.activations is None:
                continue
            sizes = value(first_input(node)).shape[:-1]
            counts = [s if isinstance(s, int) else s.node.expr.subs(symbols) for s in sizes]
            if not all(isinstance(count, int) or count.is_Integer for count in counts):
                continue
            n, k = form.shape
            static = form.choice == "w8a8-static"
            rows = prod(map(int, counts))
            product = Product(rows, n, k, form.activations == "row", static, arch)
            if product not in known:
                plain, quantized = timing(product)
                known[product] = round(plain / quantized, 2)
            some[place] = replace(form, gain=known[product], gain_from="measured")
    return found


def quantized_product(
    x: Tensor, weight: Tensor, weight_scale: Tensor, x_scale: Tensor | None, per_row: bool
) -> Tensor:
    """x by a weight in fp8, its own rounding to fp8 included: what is timed.

    Args:
        x: [rows, k], bf16.
        weight: [n, k], fp8.
        weight_scale: fp32, [1, n] by rows, else [].
        x_scale: fp32, [], where it is static.

    Returns:
        [rows, n], bf16.
    """
    limit = torch.finfo(weight.dtype).max
    scale = x_scale
    if scale is None:
        largest = x.abs().amax(1, keepdim=True) if per_row else x.abs().amax()
        scale = (largest.float() / limit).clamp(min=FLOOR)
    rounded = (x.float() / scale).clamp(-limit, limit).to(weight.dtype)
    found: Tensor = torch._scaled_mm(
        rounded, weight.t(), scale_a=scale, scale_b=weight_scale, out_dtype=torch.bfloat16
    )
    return found


def operands(product: Product, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """x and weight in bf16, the weight in fp8 with its scale, and the static scale of x."""
    make = torch.Generator(device).manual_seed(0)
    x = torch.randn(product.rows, product.k, device=device, generator=make).bfloat16()
    weight = torch.randn(product.n, product.k, device=device, generator=make).bfloat16()
    dtype = fp8_dtype(product.arch)
    limit = torch.finfo(dtype).max
    sizes = weight.abs().float()
    scale = (sizes.amax(1, keepdim=True) if product.per_row else sizes.amax()) / limit
    rounded = (weight.float() / scale).clamp(-limit, limit).to(dtype)
    static = (x.abs().amax().float() / limit) if product.static else None
    return x, weight, rounded, scale.t() if product.per_row else scale, static


def time_product(product: Product) -> tuple[float, float]:
    """Milliseconds in bf16 and in fp8, on the current CUDA device."""
    x, weight, rounded, scale, static = operands(product, "cuda")
    plain = torch.compile(functional.linear, dynamic=False)
    quantized = torch.compile(quantized_product, dynamic=False)
    return (
        _milliseconds(lambda: plain(x, weight)),
        _milliseconds(lambda: quantized(x, rounded, scale, static, product.per_row)),
    )


def _milliseconds(call: Callable[[], object]) -> float:
    """The median over some rounds, by CUDA events."""
    for _ in range(WARM):
        call()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return float(median(times))
