"""Sums of int8 products hold on every CPU, those that add two products in 16 bits included.

A machine with VNNI judges by emulation, one without by running: a guard that is taken out fails
these tests on both.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from bundles import engine, unary_manifest
from lowering import run
from onnx import TensorProto, helper
from pair_sums import PAIRS
from programs import calibrated, captured, relative_error, rewritten
from safetensors.numpy import save_file
from torch import Tensor, nn

import enginecast
from enginecast.cli.app import main
from enginecast.errors import MissingError
from enginecast.exporters.onnx.lower import lower_to_onnx, lowering
from enginecast.exporters.target import LoweringRequest
from enginecast.passes.ir.quantization_plan import plan_of
from enginecast.runtime.bundle.staging import stage
from enginecast.runtime.sessions import integer_sums
from enginecast.runtime.sessions.integer_sums import (
    ANY_CPU,
    EXACT,
    SUMS,
    products_saturate,
)
from enginecast.verification.emulate import run as emulation
from enginecast.verification.emulate.kernels import Twin, quantized
from enginecast.verification.emulate.profiles import get_profile
from enginecast.verification.emulate.run import emulate

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes", "ignore:Using padding")


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)[0]
        return found


def extreme(make: Callable[[], nn.Module]) -> nn.Module:
    """A module whose weights for one output have one sign and nearly one size: with inputs above
    zero, its sums are as large as they can be.
    """
    torch.manual_seed(0)
    module = make()
    for weight in module.parameters():
        if weight.dim() > 1:
            outputs = 1 if isinstance(module, nn.ConvTranspose2d) else 0
            signs = torch.where(torch.arange(weight.shape[outputs]) % 2 == 0, 1.0, -1.0)
            size = (1 + 0.1 * torch.rand_like(weight)) / weight[0].numel()
            weight.data = (size.movedim(outputs, -1) * signs).movedim(-1, outputs)
    return module.eval().requires_grad_(False)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(64, 16), (3, 64)),
    "conv": (lambda: nn.Conv2d(16, 8, 3, padding=1), (2, 16, 6, 5)),
    "conv, transposed": (lambda: nn.ConvTranspose2d(16, 8, 4, 2), (1, 16, 4, 4)),
    "lstm": (lambda: Recurrent(nn.LSTM(16, 12, 2, bidirectional=True)), (4, 2, 16)),
}


def in_pairs(node: Any, low: Any, plain: Any) -> Twin:
    """As on a CPU without VNNI."""
    found = quantized(node, low, plain)
    return Twin(PAIRS[node.target](*low), found.plain) if node.target in PAIRS else found


@pytest.mark.parametrize("name", LAYERS)
def test_engines_of_extreme_weights_hold_on_every_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, sizes = LAYERS[name]
    x = 1 + torch.rand(sizes, generator=torch.Generator().manual_seed(1))
    before = captured(extreme(make), x)

    def lowered(options: str) -> tuple[Any, str, Tensor, Tensor]:
        spec = f"plan-int8{{integers=true heads=true max_error=0.45 {options}}},int8-matmul"
        after, _ = rewritten(before, spec, calibrated(before, x))
        plan = plan_of(after)
        assert plan is not None
        assert [layer.choice[:4] for layer in plan.layers] == ["w8a8"]
        ready, _ = rewritten(after, lowering("onnxruntime-cpu"))
        folder = tmp_path / (options or "default")
        folder.mkdir()
        made = lower_to_onnx(LoweringRequest(ready, folder, ("out",), {}), "onnxruntime-cpu")
        inputs = {"one": dict(zip(ready.graph_signature.user_inputs, [x], strict=True))}
        exact = emulate(ready, inputs, get_profile("ort-cuda"), names=["out"])[0][0]["out"]
        with monkeypatch.context() as patched:
            patched.setattr(emulation, "quantized", in_pairs)
            without = emulate(ready, inputs, get_profile("ort-cuda"), names=["out"])[0][0]["out"]
        return made, made.requires[SUMS], exact, without

    made, needs, exact, without = lowered("")
    assert needs == ANY_CPU
    assert relative_error(without, exact) < 1e-6
    found = run(tmp_path / "default", x)[0]
    assert relative_error(found, exact) < 0.01  # a step of an unsigned value may go either way
    assert made.quantized == "int8"
    # What the guard is for: with 8 bits the same layer is lost.
    _, needs, exact, without = lowered("any_cpu=false")
    assert needs == EXACT
    assert relative_error(without, exact) > 0.1


MICROSOFT = "com.microsoft"
"""What ONNX Runtime 1.31.1 gave under `qemu-x86_64 -cpu Haswell` (qemu 7.2), which has no VNNI."""


def test_this_cpu_is_asked_with_a_product() -> None:
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["a", "b"], ["y"])],
        "g",
        [
            helper.make_tensor_value_info("a", TensorProto.UINT8, [16, 64]),
            helper.make_tensor_value_info("b", TensorProto.INT8, [64, 16]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [16, 16])],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 10)], ir_version=7, producer_name=""
    )
    assert model.SerializeToString() == integer_sums._PRODUCT
    assert isinstance(products_saturate(), bool)


def stage_products(folder: Path, target: str) -> None:
    """y = x @ 127, one way as int8 products, or as floats of a stored weight."""
    node = helper.make_node
    weight = np.full((3, 3), 127, np.int8)
    held = {"w": weight, "s": np.ones(3, np.float32)}
    if target == "products":
        nodes = [node("DynamicQuantizeMatMul", ["x", "w", "s"], ["y"], domain=MICROSOFT)]
    else:
        nodes = [
            node("DequantizeLinear", ["w", "one"], ["wide"]),
            node("MatMul", ["x", "wide"], "y"),
        ]
        held = {"w": weight, "one": np.float32(1)}
    tensors = [onnx.numpy_helper.from_array(np.asarray(value), key) for key, value in held.items()]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ("batch", 3)) for name in ("x", "y")
    ]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    domains = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    onnx.save(helper.make_model(graph, opset_imports=domains, ir_version=8), folder)


def bundle_of(path: Path, *engines: tuple[str, dict[str, str]]) -> Path:
    """A bundle of engines of `stage_products`, with what they require."""
    records = []
    with stage(path) as staging:
        for kind, requires in engines:
            file = f"{kind}.onnx"
            stage_products(staging.folder / file, kind)
            records.append(engine(file=file, weights=None, quantized="int8", requires=requires))
        return staging.publish(unary_manifest("float32", engines=tuple(records)))


@pytest.fixture
def saturating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide as on a CPU without VNNI."""
    monkeypatch.setattr(integer_sums, "products_saturate", lambda: True)


X = {"x": np.full((2, 3), 3, np.float32)}


@pytest.mark.usefixtures("saturating")
@pytest.mark.parametrize("requires", [{SUMS: EXACT}, {}, {SUMS: "64 bits"}])
def test_an_engine_is_refused_where_its_sums_saturate(
    tmp_path: Path, requires: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What an older bundle needs is not known."""
    path = bundle_of(tmp_path / "b", ("products", requires))
    with pytest.raises(MissingError, match=r"adds int8 products in 16 bits") as refused:
        enginecast.load(path)
    assert "Export it again with --precision int8" in refused.value.hint
    save_file(X, tmp_path / "x.safetensors")
    read, written = str(tmp_path / "x.safetensors"), str(tmp_path / "y")
    for command, *options in (["run", "--inputs", read, "-o", written], ["verify"]):
        with pytest.raises(SystemExit) as ended:
            main([command, str(path), *options])
        assert ended.value.code == 3
        assert "where they saturate" in capsys.readouterr().err
