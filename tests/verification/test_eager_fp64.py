"""The fp64 reference of a model without a program."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from enginecast.capture.inputs.examples import Case
from enginecast.verification.eager.outputs import fp64_outputs, in_fp64


class Upcasts(nn.Module):
    """Asks for fp32 in three ways."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 1 / 3))

    def forward(self, x: Tensor) -> Tensor:
        mean = (x.float() * self.scale).mean(-1, dtype=torch.float32)
        return mean + torch.arange(3, dtype=torch.float32) / 3


def forward(module: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"y": module(**inputs)}


def test_the_reference_computes_in_fp64_where_the_code_asks_for_fp32() -> None:
    x = torch.linspace(0, 1, 12).reshape(3, 4) / 7
    outputs, note = fp64_outputs(
        lambda dtype: Upcasts().to(dtype), [Case("one", {"x": x})], forward
    )
    assert note is None
    exact = (x.double() * Upcasts().scale.double()).mean(-1) + torch.arange(3).double() / 3
    np.testing.assert_allclose(np.asarray(outputs["one"]["y"], float), exact.numpy(), rtol=1e-15)
    assert outputs["one"]["y"].dtype == np.float64


def test_the_default_dtype_is_left_as_it_was() -> None:
    with in_fp64():
        assert torch.ones(2).dtype == torch.float64
    assert torch.ones(2).dtype == torch.float32
