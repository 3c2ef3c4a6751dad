"""The matrix products of a model: which there are, and how long they take alone.

The sum of their times is a floor: no engine that computes the same products by the same library is
faster.  Products of linears and of patch convolutions are measured in bf16 and in fp8, those of
attention in bf16.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from gpu_peers import SMOKE
from gpu_timing import copies, repeated
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_SCALE = 2.0**-40
MULTIPLE = 16
"""K and N of `_scaled_mm`."""

aten = torch.ops.aten


@dataclass(frozen=True, order=True)
class Product:
    """[batch, m, k] times [batch, k, n]."""

    m: int
    k: int
    n: int
    batch: int = 1
    """Above 1: heads of attention."""

    @property
    def of_weight(self) -> bool:
        return self.batch == 1

    @property
    def fits_fp8(self) -> bool:
        return self.of_weight and self.k % MULTIPLE == 0 and self.n % MULTIPLE == 0

    @property
    def operations(self) -> int:
        return 2 * self.batch * self.m * self.k * self.n

    def __str__(self) -> str:
        head = f"{self.batch} of " if self.batch > 1 else ""
        return f"{head}{self.m}x{self.k}x{self.n}"


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Product] = Counter()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        for product in _products(op, args, result):
            self.found[product] += 1
        return result


def _products(op: Any, args: tuple[Any, ...], result: Any) -> Iterable[Product]:
    """What one operator multiplies."""
    packet = op.overloadpacket
    if packet in (aten.mm, aten.addmm):
        left, right = args[-2:]
        return [Product(left.shape[0], left.shape[1], right.shape[1])]
    if packet in (aten.bmm, aten.baddbmm):
        left, right = args[-2:]
        return [Product(left.shape[1], left.shape[2], right.shape[2], left.shape[0])]
    if packet is aten.convolution:
        weight, size = args[1], result.shape
        return [Product(size[0] * size[2:].numel(), weight[0].numel(), weight.shape[0])]
    if "scaled_dot_product" in str(packet):
        query, key, value = args[:3]
        batch, rows, width = query.shape[:-2].numel(), query.shape[-2], query.shape[-1]
        columns = key.shape[-2]
        return [
            Product(rows, width, columns, batch),
            Product(rows, columns, value.shape[-1], batch),
        ]
    return []


def products_of(model: nn.Module, inputs: Mapping[str, Tensor]) -> Counter[Product]:
    """Every product of one run, and how often; those of attention whatever kernel does them."""
    with torch.no_grad(), _Counting() as counting:
        model(**inputs)
    return counting.found


@dataclass(frozen=True)
class Timed:
    """Milliseconds of one product in each form; None: that form does not take its sizes here."""

    product: Product
    count: int
    bf16: float
    fp8_row: float | None = None
    fp8_tensor: float | None = None
    quantize_row: float | None = None
    """Scales by row and the cast of what the product reads, as one compiled kernel alone."""

    @property
    def gain(self) -> float | None:
        """Time in bf16 over that in fp8 by row and of a quantizing that is fused into nothing."""
        if self.fp8_row is None or self.quantize_row is None:
            return None
        return self.bf16 / (self.fp8_row + self.quantize_row)

    def to_json(self) -> dict[str, Any]:
        gain = self.gain
        shape = {"m": self.product.m, "k": self.product.k, "n": self.product.n}
        times = {
            "bf16_ms": self.bf16,
            "fp8_row_ms": self.fp8_row,
            "fp8_tensor_ms": self.fp8_tensor,
            "quantize_row_ms": self.quantize_row,
        }
        return {
            **shape,
            "batch": self.product.batch,
            "count": self.count,
            **{name: None if ms is None else round(ms, 5) for name, ms in times.items()},
            "gain_with_quantize": None if gain is None else round(gain, 3),
            "bf16_tflops": round(self.product.operations / self.bf16 / 1e9, 1),
        }


def floors(timed: Iterable[Timed]) -> dict[str, float]:
    """Milliseconds of all products of a model, by the form of those that have a weight."""
    found = list(timed)
    return {
        "bf16": round(sum(t.count * t.bf16 for t in found), 4),
        "fp8_row": round(sum(t.count * (t.fp8_row or t.bf16) for t in found), 4),
        "fp8_tensor": round(sum(t.count * (t.fp8_tensor or t.bf16) for t in found), 4),
    }


def time_product(product: Product, count: int, device: str) -> Timed:
    """Measure one product in every form that takes it."""
    bf16 = repeated(_plain(product, device), device)
    if not product.fits_fp8:
        return Timed(product, count, bf16)
    quantize = repeated(_quantizing(product, device), device)
    row = tensor = None
    with suppress(RuntimeError):  # this GPU has no fp8, or not by row
        row = repeated(_scaled(product, device, by_row=True), device)
    with suppress(RuntimeError):
        tensor = repeated(_scaled(product, device, by_row=False), device)
    return Timed(product, count, bf16, row, tensor, quantize)


def _operands(product: Product, device: str) -> Iterable[tuple[Tensor, Tensor]]:
    """Copies of activations and of a weight as a linear stores it, [n, k]."""
    size = 2 * product.batch * product.k * (product.m + product.n)
    generator = torch.Generator(device).manual_seed(0)
    for _ in range(copies(size)):
        yield tuple(
            torch.randn(
                *((product.batch,) if product.batch > 1 else ()),
                rows,
                product.k,
                device=device,
                dtype=torch.bfloat16,
                generator=generator,
            )
            for rows in (product.m, product.n)
        )


def _plain(product: Product, device: str) -> list[Callable[[], object]]:
    multiply = torch.bmm if product.batch > 1 else torch.mm
    return [
        lambda left=left, right=right: multiply(left, right.mT)
        for left, right in _operands(product, device)
    ]


def _scaled(product: Product, device: str, *, by_row: bool) -> list[Callable[[], object]]:
    found: list[Callable[[], object]] = []
    for left, right in _operands(product, device):
        x, x_scale = quantized(left, by_row=by_row)
        w, w_scale = quantized(right, by_row=by_row)
        column = w_scale.mT.contiguous() if by_row else w_scale

        def call(
            x: Tensor = x, w: Tensor = w, x_scale: Tensor = x_scale, column: Tensor = column
        ) -> Tensor:
            return torch._scaled_mm(
                x,
                w.mT,
                scale_a=x_scale,
                scale_b=column,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,  # the fastest there is, for a floor
            )

        found.append(call)
    return found


def _quantizing(product: Product, device: str) -> list[Callable[[], object]]:
    torch._dynamo.reset()  # of one function, few sizes are compiled; the rest would run as it is
    how: dict[str, Any] = {} if device == "cuda" else SMOKE
    compiled = torch.compile(quantized, dynamic=False, **how)
    return [lambda left=left: compiled(left, by_row=True) for left, _ in _operands(product, device)]


def quantized(x: Tensor, *, by_row: bool) -> tuple[Tensor, Tensor]:
    """fp8 values and their fp32 scale, [m, 1] or []; clamped, for the cast alone gives NaN in torch
    2.12 and older.
    """
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True) if by_row else wide.abs().amax()
    scale = (largest / LARGEST).clamp(min=SMALLEST_SCALE)
    return (wide / scale).clamp(-LARGEST, LARGEST).to(FP8), scale
