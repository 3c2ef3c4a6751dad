"""A bundle with a plan of the fake TensorRT: y = RMSNorm(x) @ w where the mask is, and its sum.

The plan is made by tests/tensorrt/fake_tensorrt.py, so that only the fake can load it.
"""

from pathlib import Path
from typing import Any

import bundles
import msgspec
import numpy as np
import onnx
from fake_tensorrt import FakeTensorRT
from fake_tensorrt_base import Plan
from onnx import TensorProto, helper, numpy_helper

from enginecast.runtime.bundle.manifest import EngineRecord, Input, Manifest, Output, ShapeRange
from enginecast.runtime.bundle.staging import stage

WIDTH, RESULT = 4, 3
SHAPES = {"x": ("batch", "tokens", WIDTH), "mask": ("batch", "tokens")}
PROFILE = {
    "x": ((1, 2, WIDTH), (2, 4, WIDTH), (4, 6, WIDTH)),
    "mask": ((1, 2), (2, 4), (4, 6)),
}
"""Least, optimal and greatest shapes."""
STRIPPED = ("ones", "w")
"""The weights of floats."""
REQUIRES = {
    "tensorrt": "11.0.0.114+fake",
    "cuda": "13",
    "driver": "580.95.05",
    "platform": "linux x86_64",
    "gpu": "sm90",
    "gpu_name": "NVIDIA H200",
    "hardware": "none",
    "version_compatible": "no",
}
"""What tests/tensorrt/cpu_stand_in.py says it is."""


def weight() -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).standard_normal((WIDTH, RESULT)).astype(np.float32)


def wanted(x: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """y, computed by numpy."""
    scale = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    return np.asarray(((x / scale) @ weight() * mask[..., None]).astype(np.float32))


def feeds(batch: int = 2, tokens: int = 3, seed: int = 5) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, tokens, WIDTH)).astype(np.float32)
    return {"x": x, "mask": rng.integers(0, 2, (batch, tokens)).astype(bool)}


def network() -> onnx.ModelProto:
    """The ONNX model, with its weights inside."""
    nodes = [
        helper.make_node("RMSNormalization", ["x", "ones"], ["n"], "node_rms_norm"),
        helper.make_node("MatMul", ["n", "w"], ["p"], "node_linear"),
        helper.make_node("Cast", ["mask"], ["m"], "node_cast", to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["m", "last"], ["column"], "node_unsqueeze"),
        helper.make_node("Mul", ["p", "column"], ["y"], "node_mul"),
        helper.make_node("ReduceSum", ["y"], ["total"], "node_sum", keepdims=0),
    ]
    dtypes = {"x": TensorProto.FLOAT, "mask": TensorProto.BOOL}
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info(name, dtypes[name], dims) for name, dims in SHAPES.items()],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ("batch", "tokens", RESULT)),
            helper.make_tensor_value_info("total", TensorProto.FLOAT, ()),
        ],
        [
            numpy_helper.from_array(weight(), "w"),
            numpy_helper.from_array(np.ones(WIDTH, np.float32), "ones"),
            numpy_helper.from_array(np.array([-1], np.int64), "last"),
        ],
    )
    opset = helper.make_opsetid("", 23)
    return helper.make_model(graph, opset_imports=[opset], ir_version=10)


def plan(fake: FakeTensorRT, **changes: Any) -> bytes:
    """The bytes of the fake's plan; see `fake_tensorrt_base.Plan`."""
    content = {"version": fake.__version__, "network": network().SerializeToString()}
    return Plan(**{**content, "profile": PROFILE, "detailed": True, **changes}).pack()


def record(**changes: Any) -> EngineRecord:
    ranges = tuple(
        ShapeRange(name=name, least=a, optimal=b, greatest=c) for name, (a, b, c) in PROFILE.items()
    )
    made = bundles.engine(
        target="tensorrt",
        file="engine.plan",
        weights=None,
        opset=None,
        minimum_runtime="",
        providers=("tensorrt",),
        arch="sm90",
        requires=REQUIRES,
        profile=ranges,
        verdict=bundles.verdict(provider="tensorrt"),
    )
    return msgspec.structs.replace(made, **changes)


def manifest(*engines: EngineRecord, **changes: Any) -> Manifest:
    content = bundles.manifest(
        inputs=(
            Input(name="x", kind="tensor", dtype="float32", shape=SHAPES["x"]),
            Input(name="mask", kind="attention_mask", dtype="bool", shape=SHAPES["mask"]),
        ),
        symbols={"batch": (1, 4), "tokens": (2, 6)},
        outputs=(
            Output(name="y", dtype="float32", shape=("batch", "tokens", RESULT)),
            Output(name="total", dtype="float32", shape=()),
        ),
        text=None,
        engines=engines or (record(),),
    )
    return msgspec.structs.replace(content, **changes)


def publish(target: Path, files: dict[str, bytes], content: Manifest | None = None) -> Path:
    """A bundle of these files."""
    with stage(target) as staging:
        for name, data in files.items():
            (staging.folder / name).write_bytes(data)
        return staging.publish(content or manifest())
