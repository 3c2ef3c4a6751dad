"""Rounding and single ops of the emulator: against arithmetic written another way, and torch's
own half-precision kernels."""

from collections.abc import Callable

import pytest
import torch
from programs import captured
from torch import Tensor, nn
from torch.nn import functional

from enginecast.verification.emulate.kernels import round_to
from enginecast.verification.emulate.profiles import get_profile
from enginecast.verification.emulate.run import emulate

FORMATS = {
    torch.float16: (10, -14, False),
    torch.bfloat16: (7, -126, False),
    torch.float8_e4m3fn: (3, -6, True),
    torch.float8_e5m2: (2, -14, False),
}
"""Stored bits of the fraction, least normal exponent, whether overflow saturates."""


def by_arithmetic(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest even in fp64, from the definition of the format alone."""
    bits, least, saturates = FORMATS[dtype]
    exact = x.double()
    exponent = torch.frexp(exact).exponent.clamp(min=least + 1) - 1
    step = torch.ldexp(torch.ones_like(exact), exponent - bits)
    found = torch.where(torch.isfinite(exact), (exact / step).round() * step, exact)
    limit = torch.finfo(dtype).max
    if saturates:
        return found.clamp(-limit, limit)
    return torch.where(found.abs() > limit, torch.inf * found.sign(), found)


def every(dtype: torch.dtype) -> Tensor:
    """All values of a 16-bit dtype, as fp32."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    return bits.view(dtype).float()


def midpoints(dtype: torch.dtype) -> Tensor:
    """Halfway between neighbors of a dtype, where rounding to even decides, and a hair beside."""
    bits = torch.arange(1 << (8 * torch.empty(0, dtype=dtype).element_size()))
    whole = bits.to(torch.uint8 if dtype in FORMATS and bits.numel() == 256 else torch.int32)
    stored = whole if whole.dtype is torch.uint8 else whole.to(torch.int16)
    values = stored.view(dtype).double()
    values = values[torch.isfinite(values)].sort().values.unique()
    middle = (values[1:] + values[:-1]) / 2
    middle = middle[middle.float().double() == middle].float()
    up = torch.full_like(middle, torch.inf)
    return torch.cat([middle, middle.nextafter(up), middle.nextafter(-up)])


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_16_bit_value_and_every_tie_is_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    given = torch.cat([every(torch.float16), every(torch.bfloat16), midpoints(dtype)])
    assert len(given) > 130_000
    found, wanted = round_to(given, dtype).double(), by_arithmetic(given, dtype)
    wrong = (found != wanted) & ~(found.isnan() & wanted.isnan())
    assert not wrong.any(), (given[wrong][:4], found[wrong][:4], wanted[wrong][:4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_torchs_cast_where_that_one_is_the_same_everywhere(dtype: torch.dtype) -> None:
    given = torch.cat([every(torch.float16), every(torch.bfloat16)])
    assert torch.equal(round_to(given, dtype).view(torch.int16), given.to(dtype).view(torch.int16))


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


ELEMENTWISE: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "exp": lambda x, y: torch.exp(x),
    "tanh": lambda x, y: torch.tanh(x),
    "gelu": lambda x, y: functional.gelu(x),
    "silu": lambda x, y: functional.silu(x),
    "where": lambda x, y: torch.where(x > 0, x, y * 2),
}
SUMS: dict[str, Callable[..., Tensor]] = {
    "matmul": lambda x, y: x @ y.mT,
    "linear": functional.linear,
    "softmax": lambda x, y: torch.softmax(x, -1),
    "layer_norm": lambda x, y: functional.layer_norm(x, (64,), y[0], y[1]),
    "rms_norm": lambda x, y: functional.rms_norm(x, (64,), y[0], 1e-6),
    "mean": lambda x, y: x.mean(-1),
    "attention": lambda x, y: functional.scaled_dot_product_attention(x[None], y[None], x[None]),
}


def both(function: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the emulator (as torch-cpu) and torch's kernel make of the same halves."""
    x, y = (torch.randn(32, 64).mul(3).to(dtype) for _ in range(2))
    exported = captured(Call(function), x, y)
    names = exported.graph_signature.user_inputs
    inputs = dict(zip(map(str, names), (x, y), strict=True))
    [found], _ = emulate(exported, {"one": inputs}, get_profile("torch-cpu"))
    return found["output_0"], function(x, y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_ops_are_bit_equal_with_torchs_kernels(name: str, dtype: torch.dtype) -> None:
    found, wanted = both(ELEMENTWISE[name], dtype)
    assert found.dtype is dtype
    same = (found == wanted).float().mean()
    # torch's vectorized exp and erf are not exact in fp32: a tie may fall the other way.
    assert same == 1.0 if name in ("add", "mul", "div", "maximum", "where") else same > 0.9
    least = 5e-7  # GELU's tail is a difference of numbers near 1
    assert ((found - wanted).abs() <= torch.finfo(dtype).eps * wanted.abs() + least).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SUMS)
def test_sums_agree_with_torchs_kernels_to_a_rounding(name: str, dtype: torch.dtype) -> None:
    found, wanted = both(SUMS[name], dtype)
    assert found.dtype is dtype
    step = torch.finfo(dtype).eps * float(wanted.abs().max())
    assert float((found - wanted).abs().max()) <= step
    # torch keeps attention's weights in the storage dtype, the others give nearly the same bits.
    assert (found == wanted).float().mean() > (0.5 if name == "attention" else 0.9)
