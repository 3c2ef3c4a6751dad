"""What our ops become in a network: the layers, and that they compute the same.

The network is a fake one; the layers that it was given are computed in torch here.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import fake_torch_tensorrt
import pytest
import torch
from fake_tensorrt import FakeTensorRT, fake_tensorrt
from fake_torch_tensorrt import FakeTorchTensorRT
from torch import Tensor

from enginecast.errors import LoweringError
from enginecast.exporters.tensorrt.torch_converters import CONVERTERS, Layers
from enginecast.passes.ir.effects import own

FP8 = torch.float8_e4m3fn
VERSIONS = {"10.15.1.29+fake": "2.11.0+fake", "11.0.0.114+fake": "2.13.0+fake"}
DTYPES = {name: dtype for dtype, name in fake_torch_tensorrt.DTYPES.items()}
OPERATIONS: dict[str, Any] = {"PROD": torch.mul, "SUM": torch.add, "DIV": torch.div}


@pytest.fixture(params=VERSIONS)
def trt(request: pytest.FixtureRequest) -> FakeTensorRT:
    return fake_tensorrt(request.param)


class Network:
    """A fake network, the values that are fed to it, and a converter of ours for each op."""

    def __init__(self, trt: FakeTensorRT) -> None:
        self.fake = FakeTorchTensorRT(VERSIONS[trt.__version__], trt)
        self.fake.network = trt._new("INetworkDefinition", 0, None)
        self._constant = fake_torch_tensorrt.constant_of(self.fake)
        self._fed: dict[int, Tensor] = {}

    def feed(self, value: Tensor) -> Any:
        made = self.fake.tensor("x", value.dtype, (-1, *value.shape[1:]))
        self._fed[id(made)] = value
        return made

    def convert(self, op: Any, *args: Any) -> Any:
        context = SimpleNamespace(net=self.fake.network)
        return CONVERTERS[op](Layers(self.fake.trt, context, self._constant), "layer", *args)

    def value(self, tensor: Any) -> Tensor:
        """What the layers compute, in torch."""
        known = self.fake.constants | self._fed
        if id(tensor) in known:
            return known[id(tensor)]
        layer = next(one for one in self.fake.network._layers if one._output is tensor)
        given = {
            name: self.value(found) if type(found).__name__ == "ITensor" else found
            for name, found in layer._arguments.items()
        }
        return COMPUTED[layer._kind](layer, given)


def _scales(layer: Any, given: Mapping[str, Any]) -> Tensor:
    scale: Tensor = given["scale"]
    assert scale.gt(0).all(), "TensorRT takes no scale of 0"
    if not scale.dim():
        assert layer.axis is None
        return scale
    assert scale.dim() == 1
    sizes = [1] * given["input"].dim()
    sizes[layer.axis] = -1
    return scale.reshape(sizes)


def _quantized(layer: Any, given: Mapping[str, Any]) -> Tensor:
    assert given["output_type"].name == "FP8"
    assert given["input"].dtype == given["scale"].dtype
    scaled: Tensor = given["input"].float() / _scales(layer, given).float()
    return scaled.clamp(-448, 448).to(FP8)


def _dequantized(layer: Any, given: Mapping[str, Any]) -> Tensor:
    assert given["input"].dtype == FP8
    assert given["scale"].dtype == DTYPES[given["output_type"].name]
    wide: Tensor = given["input"].float() * _scales(layer, given).float()
    return wide.to(DTYPES[given["output_type"].name])


def _product(layer: Any, given: Mapping[str, Any]) -> Tensor:
    left, right = given["input0"], given["input1"]
    assert (given["op0"].name, given["op1"].name) == ("NONE", "TRANSPOSE")
    assert left.dtype == right.dtype, "TensorRT mixes no dtypes"
    assert left.dim() == right.dim(), "TensorRT broadcasts sizes, not ranks"
    product: Tensor = left.float() @ right.float().transpose(-1, -2)
    return product.to(left.dtype)


def _elementwise(layer: Any, given: Mapping[str, Any]) -> Tensor:
    left, right = given["input1"], given["input2"]
    assert left.dtype == right.dtype, "TensorRT mixes no dtypes"
    assert left.dim() == right.dim(), "TensorRT broadcasts sizes, not ranks"
    found: Tensor = OPERATIONS[given["op"].name](left, right)
    return found


def _mean(layer: Any, given: Mapping[str, Any]) -> Tensor:
    assert given["op"].name == "AVG"
    dims = [dim for dim in range(given["input"].dim()) if given["axes"] >> dim & 1]
    found: Tensor = given["input"].mean(dims, keepdim=given["keep_dims"])
    return found


def _root(layer: Any, given: Mapping[str, Any]) -> Tensor:
    assert given["op"].name == "SQRT"
    found: Tensor = given["input"].sqrt()
    return found


def _cast(layer: Any, given: Mapping[str, Any]) -> Tensor:
    found: Tensor = given["input"].to(DTYPES[given["to_type"].name])
    return found


def _gathered(layer: Any, given: Mapping[str, Any]) -> Tensor:
    assert given["mode"].name == "ELEMENT"
    found: Tensor = given["input"].gather(layer.axis, given["indices"])
    return found


COMPUTED = {
    "add_gather_v2": _gathered,
    "add_quantize": _quantized,
    "add_dequantize": _dequantized,
    "add_matrix_multiply": _product,
    "add_elementwise": _elementwise,
    "add_reduce": _mean,
    "add_unary": _root,
    "add_cast": _cast,
}


def quantized(rows: int, size: int, *, exact: bool) -> tuple[Tensor, Tensor]:
    """A weight and a scale for each of its rows: of which fp16 holds each, or not even the
    smallest.
    """
    weight = torch.randn(rows, size) * torch.logspace(-1 if exact else -6, 0, rows).unsqueeze(1)
    scale = weight.abs().amax(1, keepdim=True) / 448
    if exact:
        scale = torch.exp2(scale.log2().ceil())
    return (weight / scale).to(FP8), scale


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_a_linear(trt: FakeTensorRT, rank: int, has_bias: bool, exact: bool) -> None:
    torch.manual_seed(rank)
    network = Network(trt)
    x = torch.randn(*[3, 2, 4][: rank - 1], 32).half()
    weight, scale = quantized(16, 32, exact=exact)
    bias = torch.randn(16).half() if has_bias else None
    x_scale = torch.tensor(2.0**-6 if exact else 0.01)
    read = network.convert(own.quantize.default, network.feed(x), x_scale, FP8)
    read._start(read.name, trt.DataType.FP8, (-1, *x.shape[1:]))  # the fake infers no shapes
    args = (weight, scale, bias, torch.float16)
    found = network.convert(own.quantized_linear.default, read, x_scale, *args)
    wanted = own.quantized_linear(own.quantize(x, x_scale, FP8), x_scale, *args)
    torch.testing.assert_close(network.value(found), wanted, rtol=3e-3, atol=3e-3)
    of_x, of_weight = network.fake.layers("add_dequantize")
    assert of_x.axis is None
    assert of_weight.axis == rank - 2
    assert network.fake.value(of_weight._arguments["input"]).dtype == FP8
    product = network.fake.layers("add_matrix_multiply")[0]
    assert (product._arguments["input1"] is of_weight._output) == exact, "nothing between the two"
    assert len(network.fake.layers("add_cast")) == (0 if exact else 3)
    assert all(layer.name for layer in network.fake.network._layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_weight", [True, False])
def test_a_norm(trt: FakeTensorRT, dtype: torch.dtype, has_weight: bool) -> None:
    torch.manual_seed(1)
    network = Network(trt)
    x = (torch.randn(2, 5, 24) * 300).to(dtype)  # its squares are beyond fp16
    weight = torch.randn(24).to(dtype) if has_weight else None
    found = network.convert(own.whole_rms_norm.default, network.feed(x), 1, weight, 1e-6)
    wanted = torch.nn.functional.rms_norm(x, [24], weight, 1e-6)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(network.value(found), wanted, rtol=4 * eps, atol=eps)
    casts = network.fake.layers("add_cast")
    assert len(casts) == (0 if dtype == torch.float32 else 2)
    assert network.fake.layers("add_reduce")[0]._arguments["axes"] == 0b100


def test_a_layer_that_tensorrt_refuses(trt: FakeTensorRT) -> None:
    network = Network(trt)
    network.fake.network = SimpleNamespace(add_quantize=lambda *args: None)
    with pytest.raises(LoweringError, match="TensorRT makes no layer for layer"):
        network.convert(own.quantize.default, network.feed(torch.ones(2, 4)), torch.ones(()), FP8)
