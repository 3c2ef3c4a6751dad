"""Long sums in the order of kernels, and the op that an error is blamed on."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from enginecast.verification.eager.kernel_noise import place_of_loss
from enginecast.verification.eager.other_kernels import output_terms
from enginecast.verification.eager.sequence import LANES, in_sequence


def onnx_mean(x: Tensor) -> Tensor:
    """The mean over an image, by ONNX Runtime's CPU provider."""
    floats, ints, helper = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.helper
    graph = helper.make_graph(
        [helper.make_node("ReduceMean", ["x", "axes"], ["y"], keepdims=0)],
        "mean",
        [helper.make_tensor_value_info("x", floats, None)],
        [helper.make_tensor_value_info("y", floats, None)],
        [helper.make_tensor("axes", ints, [2], [2, 3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def errors(found: Tensor, exact: Tensor) -> np.ndarray:
    off: np.ndarray = np.abs((found.double() / exact - 1).numpy())
    return off


def test_orders_cover_onnx_runtime_on_a_blank_image() -> None:
    x = torch.linspace(0.1, 0.9, 8).reshape(1, 8, 1, 1).expand(1, 8, 96, 96).contiguous()
    exact = x.double().mean((2, 3))
    runtime, own = (errors(found, exact) for found in (onnx_mean(x), x.mean((2, 3))))
    orders = []
    for lanes in LANES:
        with in_sequence(lanes):
            orders.append(errors(x.mean((2, 3)), exact))
    assert runtime.max() > 10 * own.max()
    assert (runtime <= 1.05 * np.max(orders, axis=0) + 2.0**-23).all()


@pytest.mark.parametrize("dims", [(0, 1, 2), (1,), (0,), ()])
def test_sums_are_sums(dims: tuple[int, ...]) -> None:
    x = torch.randn(5, 6, 7, generator=torch.Generator().manual_seed(0))
    for of in (torch.sum, torch.mean, torch.var, torch.std, torch.linalg.vector_norm):
        wanted = of(x.double(), dim=dims or None)
        with in_sequence(4):
            found = of(x, dim=dims or None)
        assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-6)


class Differs(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, ::2].mean(1) - x[:, 1::2].mean(1), x.tanh().sum(1)


def test_terms_and_the_place_of_a_loss() -> None:
    x = 3 + 1e-2 * torch.randn(1, 512, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(Differs(), (x,))
    [terms] = output_terms(program, [{"x": x}], ["difference", "total"])
    assert terms["difference"] == pytest.approx(6.0, rel=1e-2)
    assert terms["total"] == pytest.approx(float(x.tanh().sum()), rel=1e-3)
    assert place_of_loss(program, {"x": x}, 0).startswith("sub at ")
    assert place_of_loss(program, {"x": x}, 1).startswith(("sum at ", "tanh at "))
