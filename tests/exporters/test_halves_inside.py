"""Models in fp32 that compute in 16 bits by themselves: their engines round where they do."""

from pathlib import Path

import numpy as np
import pytest
import torch
from programs import captured, rewritten
from torch import Tensor, nn

from enginecast.api import compile as export
from enginecast.compiler.steps import Steps
from enginecast.errors import LoweringError
from enginecast.exporters.aotinductor.lower import lower_to_aotinductor, lowering
from enginecast.exporters.target import LoweringRequest
from enginecast.runtime.load import load
from enginecast.verification.eager.captured import _other_than


class HalvesInside(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        first, second = (x.to(self.dtype) * 1.001).chunk(2, -1)
        return (first * second).float() + 1


@pytest.mark.parametrize("dtype", [torch.float16])
def test_an_engine_rounds_where_the_model_does(dtype: torch.dtype, tmp_path: Path) -> None:
    module, steps = HalvesInside(dtype), Steps()
    export(module, tmp_path / "bundle", example={"x": torch.randn(3, 8)}, steps=steps)
    assert any("computes in 16 bits itself" in line for line in steps.lines)
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    with load(tmp_path / "bundle") as engine:
        found = engine.run({"x": x.numpy()})
    assert np.array_equal(found["output_0"], module(x).numpy())


class Halves(nn.Module):
    """Linears in 16 bits around a norm in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64).half(), nn.Linear(64, 8).half()
        self.n = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.n(self.a(x.half()).float()).half()).float()
        return found


class Attention(nn.Module):
    """Attention in bf16, whose kernel rounds more often than to its result."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.bfloat16() for each in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v).float()


HEADS = {name: torch.randn(2, 4, 6, 16) for name in "qkv"}


@pytest.mark.parametrize(
    ("module", "example", "loss"),
    [(Halves(), {"x": torch.randn(3, 32)}, 2**-10), (Attention(), HEADS, 2**-7)],
    ids=["linears", "attention"],
)
def test_what_a_model_computes_in_16_bits_is_its_own_rounding(
    module: nn.Module, example: dict[str, Tensor], loss: float, tmp_path: Path
) -> None:
    export(module.eval(), tmp_path / "bundle", example=example)
    with load(tmp_path / "bundle", require="verified") as engine:
        found = torch.from_numpy(engine.run({n: t.numpy() for n, t in example.items()})["output_0"])
    with torch.no_grad():
        wanted = module(**example)
    assert (found - wanted).norm() < loss * wanted.norm()


def test_a_program_that_rounds_elsewhere_is_not_the_model() -> None:
    """What a model computes in 16 bits allows three roundings, and no more."""
    plain = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    near, far = plain * np.float32(1 + 2**-9), plain * np.float32(1.02)
    exact = plain.astype(np.float64)
    assert not _other_than(near, plain, exact, "bf16")
    assert _other_than(near, plain, near.astype(np.float64), "fp32")
    assert _other_than(far, plain, far.astype(np.float64), "bf16")


def test_inductor_rounds_where_the_source_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bool] = []

    def stop(*_: object, inductor_configs: dict[str, object], **__: object) -> None:
        given.append(bool(inductor_configs["emulate_precision_casts"]))
        raise RuntimeError("enough")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", stop)
    for module in (HalvesInside(torch.bfloat16), nn.Linear(8, 8)):
        program, _ = rewritten(captured(module, torch.randn(3, 8)), "unify-dtype{to=fp32}")
        program, _ = rewritten(program, lowering("cpu"))
        with pytest.raises(LoweringError):
            lower_to_aotinductor(LoweringRequest(program, tmp_path, ("out",)))
    assert given == [True, False]
