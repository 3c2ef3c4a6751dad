"""Our ops as ONNX Runtime computes them: within 3x of torch's own error against float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lowering import error, lower, noise, run
from programs import Function, captured
from torch import Tensor

import enginecast.ops  # noqa: F401 - registers our ops
from enginecast.exporters.onnx.ops.registry import onnxruntime_on
from enginecast.exporters.target import Artifact

ops = torch.ops.enginecast
rms_norm = torch.nn.functional.rms_norm
LIMIT = 3.0
HEADS, SIZE, WIDTH = 4, 8, 32
Case = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    heads: tuple[int, int] = (HEADS, HEADS),
    *,
    causal: bool = False,
) -> Tensor:
    result: Tensor = ops.attention(q, k, v, bias, *heads, 0.3, causal)
    return result


def flat(tokens: int, width: int = WIDTH) -> Tensor:
    return torch.randn(2, tokens, width)


def heads_first(tokens: int, heads: int = HEADS, size: int = SIZE) -> Tensor:
    return torch.randn(2, heads, tokens, size)


def cases() -> dict[str, Case]:
    """Name -> a function and its inputs; all go into one engine for each dtype and device."""
    torch.manual_seed(1)
    x, weight = flat(5) * 3, torch.randn(WIDTH)
    # Outliers: without fp32 statistics, fp16 would overflow at 256.
    large = x.clone()
    large[..., 3] = 400.0
    fewer: dict[str, Any] = {"heads": (HEADS, 2)}
    return {
        "norm": (lambda x, w: rms_norm(x, (WIDTH,), w, 1e-6), (x, weight)),
        "norm of outliers": (lambda x, w: rms_norm(x, (WIDTH,), w, 1e-6), (large, weight)),
        "norm of nearly nothing": (lambda x, w: rms_norm(x, (WIDTH,), w, 1e-5), (x / 999, weight)),
        "norm, default epsilon": (lambda x, w: rms_norm(x, (WIDTH,), w), (x, weight)),
        "norm without weight": (lambda x: rms_norm(x, (WIDTH,), None, 1e-6), (x,)),
        "norm without anything": (lambda x: rms_norm(x, (WIDTH,)), (x,)),
        "norm of two dims": (
            lambda x, w: rms_norm(x, (5, WIDTH), w, 1e-6),
            (x, torch.randn(5, WIDTH)),
        ),
        "skip, norm": (lambda x, r, w: ops.skip_rms_norm(x, r, w, 1e-6)[0], (x, flat(5), weight)),
        "skip, sum": (lambda x, r, w: ops.skip_rms_norm(x, r, w, 1e-6)[1], (x, flat(5), weight)),
        "skip of outliers": (
            lambda x, r, w: ops.skip_rms_norm(x, r, w, 1e-6)[0],
            (large, flat(5), weight),
        ),
        "attention": (attend, (flat(5), flat(5), flat(5))),
        "attention, longer keys": (attend, (flat(5), flat(7), flat(7))),
        "attention, one token": (attend, (flat(1), flat(1), flat(1))),
        "attention, wide values": (attend, (flat(5), flat(5), flat(5, 2 * WIDTH))),
        "attention, bias": (attend, (flat(5), flat(5), flat(5), torch.randn(2, 1, 5, 5))),
        "attention, bias per head": (
            attend,
            (flat(5), flat(7), flat(7), torch.randn(1, HEADS, 5, 7)),
        ),
        "attention, causal": (lambda *a: attend(*a, causal=True), (flat(5), flat(5), flat(5))),
        "attention, causal, longer keys": (
            lambda *a: attend(*a, causal=True),
            (flat(5), flat(7), flat(7)),
        ),
        "grouped": (lambda *a: attend(*a, **fewer), (flat(5), flat(5, 16), flat(5, 16))),
        "grouped, bias, causal mask": (
            lambda *a: attend(*a, **fewer),
            (flat(5), flat(5, 16), flat(5, 16), torch.full((5, 5), -1e4).triu(1)),
        ),
        "heads first": (attend, (heads_first(5), heads_first(5), heads_first(5))),
        "heads first, bias": (
            attend,
            (heads_first(5), heads_first(7), heads_first(7), torch.randn(2, 1, 5, 7)),
        ),
        "heads first, causal": (
            lambda *a: attend(*a, causal=True),
            (heads_first(5), heads_first(5), heads_first(5)),
        ),
        "heads first, grouped": (
            lambda *a: attend(*a, **fewer),
            (heads_first(5), heads_first(5, 2), heads_first(5, 2, 16)),
        ),
    }


NAMES = list(cases())


def together(*inputs: Tensor) -> list[Tensor]:
    given, results = iter(inputs), []
    for function, needed in cases().values():
        results.append(function(*(next(given) for _ in needed)))
    return results


def all_inputs(dtype: torch.dtype) -> list[Tensor]:
    return [tensor.to(dtype) for _, inputs in cases().values() for tensor in inputs]


@pytest.fixture(scope="module", params=["fp32 cpu", "fp32 cuda", "fp16 cpu", "fp16 tensorrt"])
def engine(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, Any]:
    precision, device = request.param.split()
    reader: Any = "tensorrt" if device == "tensorrt" else onnxruntime_on(device)
    inputs = all_inputs({"fp32": torch.float32, "fp16": torch.float16}[precision])
    folder: Path = tmp_path_factory.mktemp("ops")
    lowered = lower(captured(Function(together), *inputs), folder, NAMES, reader=reader)
    # fp64 inputs of equal value: the exact result of the rounded inputs.
    exact = together(*(tensor.double() for tensor in inputs))
    rows = zip(NAMES, run(folder, *inputs), together(*inputs), exact, strict=True)
    return lowered, {name: row for name, *row in rows}


@pytest.mark.parametrize("name", NAMES)
def test_engine_is_as_exact_as_torch(engine: tuple[Artifact, Any], name: str) -> None:
    found, torchs, exact = engine[1][name]
    assert (found.dtype, found.shape) == (torchs.dtype, torchs.shape)
    if name in ("norm, default epsilon", "norm without anything"):
        exact = torchs.double()  # the default epsilon is the dtype's own
    assert error(found, exact) <= LIMIT * noise(exact, torchs)


def test_every_op_is_fused(engine: tuple[Artifact, Any]) -> None:
    lowered = engine[0].ops
    # Equal calls, of which one test reads the norm and another the sum, are one node.
    skips = lowered.get("com.microsoft::SkipSimplifiedLayerNormalization", 0)
    assert (skips, lowered["RMSNormalization"]) in [
        (3, 7),
        (0, 9),
    ]  # the norm that no test reads is gone
    assert (skips == 0) == (list(engine[0].domains) == [""])
    fused = lowered["Attention"] + lowered.get("com.microsoft::MultiHeadAttention", 0)
    assert fused == sum("attention" in n or "grouped" in n or "heads" in n for n in NAMES)
    assert "Softmax" not in lowered
    assert "ReduceMean" not in lowered
    # The one node beside: the ones that stand in for a norm's weight.
    assert lowered["ConstantOfShape"] <= 2
