"""Which values stay in fp32: small modules, one idiom each, against fp64."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from programs import (
    LOW,
    TOKENS,
    Function,
    captured,
    outputs,
    prompts,
    relative_error,
    rewritten,
    values,
)
from torch import Tensor, nn
from torch.export import ExportedProgram

WIDTH = 16


class Net(Function):
    """Two linears and an embedding for a function to use."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.places = nn.Embedding(40, WIDTH)

    def forward(self, *inputs: Tensor) -> Tensor:
        found: Tensor = self.function(self, *inputs)
        return found


def spelled_layer_norm(net: Net, x: Tensor) -> Any:
    hidden = net.a(x)
    centered = hidden - hidden.mean(-1, keepdim=True)
    variance = centered.pow(2).mean(-1, keepdim=True)
    return net.b(centered / torch.sqrt(variance + 1e-5) * net.a.bias)


def split_and_cat(net: Net, x: Tensor) -> Any:
    left, right = net.a(x).chunk(2, -1)
    third, fourth = right.split(4, -1)
    raised = left.float().exp().to(x.dtype)
    return net.b(torch.cat([raised, third, fourth], -1))


def positions_from_mask(net: Net, x: Tensor, mask: Tensor) -> Any:
    return net.a(x + net.places(torch.cumsum(mask, 1) * mask))


def rotary_in_fp32(net: Net, x: Tensor) -> Any:
    scale = 1.0 / (1e6 ** (torch.arange(0, WIDTH, 2).float() / WIDTH))
    angles = torch.arange(x.shape[1])[:, None] * scale
    angles = torch.cat([angles, angles], -1)
    query = net.a(x).float()
    turned = torch.cat([-query[..., 8:], query[..., :8]], -1)
    return net.b((query * angles.cos() + turned * angles.sin()).to(x.dtype))


def additive_mask(net: Net, x: Tensor, mask: Tensor) -> Any:
    hidden = net.a(x)
    bias = (1.0 - mask[:, None].to(hidden.dtype)) * torch.finfo(hidden.dtype).min
    return torch.softmax(hidden @ x.transpose(1, 2) + bias, -1) @ hidden


def filled_with_an_integer(net: Net, x: Tensor, mask: Tensor) -> Any:
    scores = net.a(x) @ x.transpose(1, 2)
    return torch.softmax(scores.masked_fill(mask[:, None] == 0, -60000), -1) @ x


def written_in_place(net: Net, x: Tensor) -> Any:
    hidden = net.a(x)
    total = torch.zeros(x.shape[0], x.shape[1], WIDTH, dtype=x.dtype)
    total[..., :8] = hidden[..., :8]
    first = net.b(total)
    total[..., 8:] = hidden[..., 8:]
    return first + net.b(total)


IDIOMS = [
    spelled_layer_norm,
    split_and_cat,
    positions_from_mask,
    rotary_in_fp32,
    additive_mask,
    written_in_place,
]


def inputs_for(function: Callable[..., Any], batch: int, tokens: int) -> tuple[Tensor, ...]:
    x = torch.randn(batch, tokens, WIDTH) * 2
    return (x,) if function.__code__.co_argcount == 2 else (x, prompts(batch, tokens)[1])


def net_of(function: Callable[..., Any]) -> Net:
    torch.manual_seed(0)
    return Net(function).eval().requires_grad_(False)


def program_of(function: Callable[..., Any]) -> ExportedProgram:
    return captured(net_of(function), *inputs_for(function, 3, 7), dynamic=TOKENS)


@pytest.mark.parametrize(
    "function",
    IDIOMS,
)
def test_error_is_that_of_eager_in_the_low_dtype(function: Callable[..., Any]) -> None:
    program, net = program_of(function), net_of(function)
    reference, _ = rewritten(program, "unify-dtype{to=fp64}")
    for name in ("fp16", "bf16", "fp32"):
        after, _ = rewritten(program, f"unify-dtype{{to={name}}}")
        found_error, eager_error = [], []
        for shape in ((2, 5), (4, 30)):
            inputs = inputs_for(function, *shape)
            (expected,) = outputs(reference, *inputs)
            low = deepcopy(net).to(LOW[name])
            with torch.no_grad():
                eager = low(*(t.to(LOW[name]) if t.is_floating_point() else t for t in inputs))
            (found,) = outputs(after, *inputs)
            values(after, *inputs)
            assert found.dtype == LOW[name]
            found_error.append(relative_error(found, expected))
            eager_error.append(relative_error(eager, expected))
        assert max(found_error) <= 1.5 * max(eager_error), name


def test_convolutions_and_their_norms() -> None:
    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.batch = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
            self.group, self.second = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, stride=2)
            self.head = nn.Linear(8, 4)
            for statistic in (self.batch.running_mean, self.batch.running_var):
                assert statistic is not None
                statistic.copy_(torch.rand(8) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.group(self.batch(self.first(x)).relu())
            x = nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear")
            pooled = nn.functional.adaptive_avg_pool2d(self.second(x), 1).flatten(1)
            result: Tensor = self.head(pooled)
            return result

    with torch.no_grad():
        net = Convolutions().eval().requires_grad_(False)
    program = captured(net, torch.randn(3, 3, 16, 16), dynamic={0: TOKENS[0]})
    reference, _ = rewritten(program, "unify-dtype{to=fp64}")
    x = torch.randn(2, 3, 16, 16)
    (expected,) = outputs(reference, x)
    for name in ("fp16", "bf16"):
        after, _ = rewritten(program, f"unify-dtype{{to={name}}}")
        values(after, x)
        with torch.no_grad():
            eager = deepcopy(net).to(LOW[name])(x.to(LOW[name]))
        error = relative_error(outputs(after, x)[0], expected)
        assert error <= 1.5 * relative_error(eager, expected)


def test_totals_do_not_overflow_in_fp16() -> None:
    def pooled(net: Net, x: Tensor, mask: Tensor) -> Any:
        weights = mask[..., None].float()
        return ((x * weights).sum(1) / weights.sum(1)).to(x.dtype)

    after, _ = rewritten(program_of(pooled), "unify-dtype{to=fp16}")
    x = torch.full((2, 32, WIDTH), 4000.0)
    (found,) = outputs(after, x, torch.ones(2, 32, dtype=torch.int64))
    assert torch.equal(found, torch.full((2, WIDTH), 4000.0, dtype=torch.float16))


@pytest.mark.parametrize("function", [additive_mask, filled_with_an_integer])
@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_masks_are_finite_in_the_target(function: Callable[..., Any], to: str) -> None:
    program = program_of(function)
    after, _ = rewritten(program, f"unify-dtype{{to={to}}}")
    x, mask = torch.randn(2, 5, WIDTH), torch.zeros(2, 5, dtype=torch.int64)
    for name, found in values(after, x, mask).items():
        if isinstance(found, Tensor) and found.dtype == LOW[to]:
            assert found.isfinite().all(), name


def test_factor_beyond_fp16_is_left_as_it_is() -> None:
    program = program_of(lambda net, x: net.a(x) * 1e-3 * 1e6)
    after, _ = rewritten(program, "unify-dtype{to=fp16}")
    x = torch.randn(2, 5, WIDTH) * 0.01
    assert relative_error(outputs(after, x)[0], outputs(program, x)[0]) < 2e-3


def test_an_input_that_is_read_in_fp32_alone_is_not_rounded() -> None:
    class Timestep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            phase = t.to(x.dtype)[:, None].float() * torch.arange(1.0, WIDTH + 1) * 1000.0
            embedded: Tensor = self.linear(x) * torch.sin(phase).to(x.dtype)
            return embedded

    torch.manual_seed(0)
    inputs = (torch.randn(2, WIDTH), torch.tensor([0.3127, 0.7713]))
    program = captured(Timestep().eval().requires_grad_(False), *inputs)
    after, _ = rewritten(program, "unify-dtype{to=fp16}")
    (wanted,), (found,) = outputs(program, *inputs), outputs(after, *inputs)
    assert found.dtype == torch.float16
    assert float((found.float() - wanted).abs().max()) < 2e-3  # 2 if t went through fp16
