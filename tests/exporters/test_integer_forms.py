"""Ops that ONNX has not of integers, booleans or complex numbers: the engine is eager, bit by bit
for integers.
"""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lowering import lower, run
from programs import captured
from torch import Tensor, nn
from torch.nn import functional

from enginecast.exporters.onnx.passes.integer_forms import FORMS
from enginecast.exporters.onnx.passes.integer_windows import (
    OF_INT64,
    RANKS,
    max_pool_with_indices,
)

aten = torch.ops.aten
OF_INTEGERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "conv1d": lambda x, w: functional.conv1d(x.flatten(2), w[:, :, 0], stride=2, padding=1),
    "conv2d": lambda x, w: functional.conv2d(x, w, w[:, 0, 0, 0], (2, 1), (1, 2), (1, 2)),
    "conv2d-no-batch": lambda x, w: functional.conv2d(x[0], w),
    "conv-transpose": lambda x, w: functional.conv_transpose2d(x, w, None, 2, (2, 1), 1),
    "average-1d": lambda x, w: functional.avg_pool1d(x.flatten(2), 3),
    "average": lambda x, w: functional.avg_pool2d(x, 3, 2, 1, True, False),
    "max-places": lambda x, w: functional.max_pool2d(x, 3, 2, 1, 1, True, True)[1],
    "response-norm": lambda x, w: functional.local_response_norm(x, 2).double(),
    "einsum-total": lambda x, w: torch.einsum("bchw->", x.int()),
    "einsum-wraps": lambda x, w: torch.einsum("bchw,bchw->bc", x.int() * 99999999, x.int()),
    "einsum-bytes": lambda x, w: torch.einsum("bchw,bdhw->cd", x.byte(), x.byte()),
    "lower-bytes": lambda x, w: torch.tril(x.byte()),
    "upper-bytes": lambda x, w: torch.triu(x.char(), 1),
    "trace-int32": lambda x, w: torch.trace(x[0, 0].int() * 2**27),
    "trace-bytes": lambda x, w: torch.trace(x[0, 0].byte()),
    "close-booleans": lambda x, w: torch.isclose(x > 0, x.flip(0) > 1),
    "all-close-booleans": lambda x, w: torch.isclose(x > 0, x.flip(0) > 1, atol=1.0),
    "heaviside-booleans": lambda x, w: torch.heaviside(x > 0, x > 5),
    "addr-booleans": lambda x, w: torch.addr(x[0, 0] > 5, x[0, 0, 0] > 0, x[0, 0, 1] > 0),
    "addr-nothing": lambda x, w: torch.addr(x[0, 0] > 5, x[0, 0, 0] > 0, x[0, 0, 1] > 0, beta=0),
    "gcd-bytes": lambda x, w: torch.gcd(x[0].byte(), x[1, 0].byte()),
    "gcd-of-two-types": lambda x, w: torch.gcd(x.char(), x.flip(0).byte()),
    "lcm-bytes": lambda x, w: torch.lcm(x[0].char(), x[1].char() | 1),
    "places": lambda x, w: torch.nonzero_static(x // 5, size=90),
    "places-filled": lambda x, w: torch.nonzero_static(x[0, 0] > 3, size=60, fill_value=7),
    "bilinear-bytes": lambda x, w: functional.bilinear(
        x.byte()[0, 0], x.byte()[1, 0], x.byte()[1, 0, :3, :, None].expand(3, 7, 7).contiguous()
    ),
}
OF_COMPLEX: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda a, b: torch.mm(a, b.T),
    "addmm": lambda a, b: torch.addmm(a[:, :4], a, b.T, beta=2 + 3j, alpha=1 - 2j),
    "addmm-nothing": lambda a, b: torch.addmm(a[:, :4] / 0, a, b.T, beta=0),
    "addmv": lambda a, b: torch.addmv(a[:, 0], a, b[0], alpha=0.5j),
    "addbmm": lambda a, b: torch.addbmm(
        a[:4, :4], a[None].repeat(3, 1, 1), b[None].repeat(3, 1, 1).mT, beta=1j
    ),
    "baddbmm": lambda a, b: torch.baddbmm(a[None, :, :4], a[None], b[None].mT),
    "addr": lambda a, b: torch.addr(a[:, :4], a[:, 0], b[:, 1]),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, a + 3, value=2 - 1j),
    "exp2": lambda a, b: torch.exp2(a),
    "expm1": lambda a, b: torch.expm1(a * 1e-4),
    "split-copy": lambda a, b: aten.split_with_sizes_copy.default(a, [1, 3], 0)[1],
    "squeeze-copy": lambda a, b: torch.squeeze_copy(a[:1]),
    "unfold": lambda a, b: a.unfold(1, 2, 2),
    "to-real": lambda a, b: a.to(torch.float64),
    "to-wide": lambda a, b: a.to(torch.complex128),
    "to-whole": lambda a, b: a.to(torch.int32),
    "add-times": lambda a, b: torch.add(a, b, alpha=2j),
    "add-real-times": lambda a, b: torch.add(a.real, b, alpha=2j),
    "sub-times": lambda a, b: torch.sub(a, b, alpha=2j),
    "divide": lambda a, b: a / b,
    "divide-by-zeros": lambda a, b: a / (b * 0),
    "divide-by-tiny": lambda a, b: a / (b * 1e-30),
    "divide-by-huge": lambda a, b: a * 1e30 / (b * 1e30),
    "divide-by-infinity": lambda a, b: a / (b / (b.real > 0)),
    "reciprocal": lambda a, b: torch.reciprocal(b * 1e-25),
    "divide-number": lambda a, b: (2 - 1j) / b,
    "sub-number": lambda a, b: torch.sub(a, 2.0, alpha=1 - 2j),
}


def _named(name: str, said: str) -> str:
    return f"{name}: {said}"


class Every(nn.Module):
    def forward(self, x: Tensor, weight: Tensor, one: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        found = [form(x, weight) for form in OF_INTEGERS.values()]
        a, b = torch.view_as_complex(one), torch.view_as_complex(other)
        found += [form(a, b) for form in OF_COMPLEX.values()]
        return tuple(torch.view_as_real(v) if v.is_complex() else v.clone() for v in found)


@pytest.mark.filterwarnings("ignore:Casting complex values:UserWarning")
def test_engines_are_eager_for_integers_booleans_and_complex_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)

    def inputs(most: int) -> tuple[Tensor, ...]:
        whole = torch.randint(-most, most, (2, 3, 7, 7)), torch.randint(-9, 9, (3, 3, 2, 3))
        return *whole, torch.randn(4, 5, 2), torch.randn(4, 5, 2)

    names = [*OF_INTEGERS, *OF_COMPLEX]
    lower(captured(Every(), *inputs(9)), tmp_path, [f"out_{name}" for name in names])
    for given in (inputs(9), inputs(2**40), inputs(1)):
        for name, found, eager in zip(names, run(tmp_path, *given), Every()(*given), strict=True):
            is_exact = not eager.is_floating_point()
            torch.testing.assert_close(
                *(found, eager),
                rtol=0 if is_exact else 3e-6,
                atol=0 if is_exact else 3e-6 * float(eager.nan_to_num(0, 0, 0).abs().max()),
                equal_nan=True,
                msg=partial(_named, name),
            )


class _Divisor(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.gcd(x, y)


@pytest.mark.slow
def test_an_engine_divides_numbers_that_fp64_does_not_hold(tmp_path: Path) -> None:
    torch.manual_seed(2)
    x, y = torch.randint(-(2**62), 2**62, (2, 40)) // 30 * 30
    lower(captured(_Divisor(), x, y), tmp_path, ["divisor"])
    assert torch.equal(run(tmp_path, x, y)[0], torch.gcd(x, y))


def test_divisors_of_all_integers_are_those_of_torch() -> None:
    torch.manual_seed(1)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        numbers = [0, 1]
        while numbers[-1] + numbers[-2] <= most:  # of Fibonacci: the most steps
            numbers.append(numbers[-1] + numbers[-2])
        edges = torch.tensor([*numbers, least, most], dtype=dtype)
        drawn = torch.randint(least, most, (60,)).to(dtype)
        x = torch.cat([edges, drawn, drawn % 12])
        gcd, lcm = (FORMS[op][1] for op in (aten.gcd.default, aten.lcm.default))
        assert torch.equal(gcd(x[:, None], x), torch.gcd(x[:, None], x)), dtype
        lcm(x[:, None], x)  # torch itself divides the lowest number by -1, and dies
        x = x[x != least] if least else x
        assert torch.equal(lcm(x[:, None], x), torch.lcm(x[:, None], x)), dtype


_CONVS = (functional.conv1d, functional.conv2d, functional.conv3d)
_TRANSPOSED = (
    *(functional.conv_transpose1d, functional.conv_transpose2d),
    functional.conv_transpose3d,
)
_MEANS = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)
_MAXIMA: dict[int, Any] = {
    2: aten.max_pool2d_with_indices.default,
    3: aten.max_pool3d_with_indices.default,
}


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_windows_of_integers_are_those_of_torch(rank: int) -> None:
    """Random sizes, strides, margins, groups and dilations, those that torch takes."""
    choose = random.Random(rank)
    forms = {str(op).split(".")[1]: OF_INT64[op] for op in OF_INT64 if RANKS[op] == rank}
    compared = 0

    def several(least: int, most: int) -> list[int]:
        return [choose.randint(least, most) for _ in range(rank)]

    def compare(eager: Callable[..., Any], form: Callable[..., Any], *given: Any) -> None:
        nonlocal compared
        try:
            expected = eager(*given)
        except RuntimeError:  # torch takes no such margins or sizes
            return
        found = form(*given)
        pairs = (
            zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
        )
        for one, other in pairs:
            assert torch.equal(one, other), given
            compared += 1

    for _ in range(60):
        groups = choose.choice([1, 1, 2])
        channels, made = 2 * groups, groups * choose.choice([1, 3])
        kernel, stride, dilation = several(1, 3), several(1, 3), several(1, 2)
        x = torch.randint(-9, 9, [*choose.choice([(), (1,), (3,)]), channels, *several(3, 8)])
        bias = choose.choice([None, torch.randint(-9, 9, (made,))])
        weight = torch.randint(-9, 9, (made, channels // groups, *kernel))
        options = (stride, several(0, 2), dilation, groups)
        compare(_CONVS[rank - 1], forms[f"conv{rank}d"], x, weight, bias, *options)
        turned = torch.randint(-9, 9, (channels, made // groups, *kernel))
        more = [choose.randint(0, max(one) - 1) for one in zip(stride, dilation, strict=True)]
        given = (stride, options[1], more, groups, dilation)
        compare(_TRANSPOSED[rank - 1], forms[f"conv_transpose{rank}d"], x, turned, bias, *given)
        margins = [choose.randint(0, width // 2) for width in kernel]
        rounds_up, counts = choose.random() < 0.5, choose.random() < 0.5
        divisor = (choose.choice([None, 2, -3]),) if rank > 1 else ()
        pool = (x, kernel, stride, margins, rounds_up)
        compare(_MEANS[rank - 1], forms[f"avg_pool{rank}d"], *pool, counts, *divisor)
        if rank > 1:
            pooled = (x // 4, kernel, stride, margins, dilation, rounds_up)
            compare(_MAXIMA[rank], partial(max_pool_with_indices, rank=rank), *pooled)
    assert compared > 60
