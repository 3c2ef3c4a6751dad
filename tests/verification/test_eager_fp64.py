"""The fp64 reference of a model without a program."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from enginecast.capture.inputs.examples import Case, verification_inputs
from enginecast.capture.inputs.specs import DimSpec, InputSpec
from enginecast.verification.eager.make_reference import make_reference
from enginecast.verification.eager.outputs import fp64_outputs, in_fp64
from enginecast.verification.metrics import Outputs


class Upcasts(nn.Module):
    """Asks for fp32 in three ways."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 1 / 3))

    def forward(self, x: Tensor) -> Tensor:
        mean = (x.float() * self.scale).mean(-1, dtype=torch.float32)
        return mean + torch.arange(3, dtype=torch.float32) / 3


class Only32(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("fp32 only")
        return x * 2


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


def test_a_model_that_does_not_run_in_fp64_is_measured_by_fp32() -> None:
    cases = [Case("one", {"x": torch.ones(3, 4)})]
    outputs, note = fp64_outputs(lambda dtype: Only32().to(dtype), cases, forward)
    assert note is not None
    assert "fp32 only" in note
    assert outputs["one"]["y"].dtype == np.float32
    assert outputs["one"]["y"].tolist() == [[2.0] * 4] * 3


class Alone(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() @ torch.linspace(0, 1, 12, dtype=x.dtype).reshape(4, 3)


class Together(nn.Module):
    """Rows know of each other."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize(("module", "alone"), [(Alone(), True), (Together(), False)])
def test_a_batch_is_computed_by_its_rows_where_it_comes_to_the_same(
    module: nn.Module, alone: bool
) -> None:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    one, batch = Case("one", {"x": x[:1]}), Case("batch", {"x": x}, ({"x": x[:1]}, {"x": x[1:]}))
    asked: list[list[int]] = []

    def exact(cases: Sequence[Case]) -> Outputs:
        asked.append([len(case.inputs["x"]) for case in cases])
        return fp64_outputs(lambda dtype: module, cases, forward)[0]

    reference = make_reference(
        None,
        lambda dtype: module,
        [one, batch],
        dtype="fp32",
        names=(),
        forward=forward,
        exact=exact,  # type: ignore[arg-type]  # cases have singles, too
        singles={"batch": batch.singles},
    )
    assert asked == [[1], [1], *([] if alone else [[2]])]
    whole = fp64_outputs(lambda dtype: module, [batch], forward)[0]["batch"]["y"]
    found = torch.from_numpy(reference.cases[1].reference["y"])
    torch.testing.assert_close(found, torch.from_numpy(whole), rtol=1e-12, atol=1e-15)


def test_a_heavy_batch_begins_with_the_smallest_case() -> None:
    image = (DimSpec("batch", 2, 1, 8), *(DimSpec(None, n, n, n) for n in (3, 64, 64)))
    specs = [InputSpec("pixel_values", "image", torch.float32, image)]
    smallest, batch = verification_inputs(specs, 0, parameters=10**9)
    assert [len(case.inputs["pixel_values"]) for case in (smallest, batch)] == [1, 2]
    assert not smallest.singles
    first, second = (single["pixel_values"] for single in batch.singles)
    assert torch.equal(first, smallest.inputs["pixel_values"])
    assert torch.equal(torch.cat([first, second]), batch.inputs["pixel_values"])
    assert second.std() > 4  # scaled
    light = verification_inputs(specs, 0, parameters=1000)
    assert not any(case.singles for case in light)


def test_costly_images_are_fewer_where_nothing_but_the_batch_varies() -> None:
    image = (DimSpec("batch", 2, 1, 8), *(DimSpec(None, n, n, n) for n in (3, 64, 64)))
    fixed = [InputSpec("pixel_values", "image", torch.float32, image)]
    wide = (*image[:3], DimSpec("width", 64, 32, 96))
    varying = [InputSpec("pixel_values", "image", torch.float32, wide)]

    def sizes(specs: list[InputSpec], parameters: int) -> dict[str, int]:
        cases = verification_inputs(specs, 0, parameters=parameters)
        return {case.name: len(case.inputs["pixel_values"]) for case in cases}

    assert sizes(fixed, 10**8) == {
        "smallest": 1,
        "several": 2,
        "constant image": 1,
        "scaled image": 1,
    }
    light = {"smallest": 1, "odd sizes": 2, "several": 5, "constant image": 2, "scaled image": 2}
    assert sizes(fixed, 10**6) == light
    mask = InputSpec("mask", "attention_mask", torch.int64, (image[0], DimSpec(None, 8, 8, 8)))
    assert "ragged masks" in sizes([*fixed, mask], 10**8)
    floats = [InputSpec("pixel_values", "tensor", torch.float32, image)]
    assert sizes(floats, 10**8) == {"smallest": 1, "odd sizes": 2, "several": 5}
    assert not any(case.singles for case in verification_inputs(floats, 0, parameters=10**8))
    assert sizes(varying, 10**7).items() >= {"odd sizes": 2, "several": 5}.items()
