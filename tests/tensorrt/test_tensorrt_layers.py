"""Reading what TensorRT's engine inspector tells.  The texts are written by hand, in its format."""

import json
from typing import Any

import pytest

from enginecast.errors import BundleError
from enginecast.runtime.sessions.tensorrt.layers import Layers, parse_layers


def layer(name: str, kind: str, nodes: str, given: str, made: str, **more: Any) -> dict[str, Any]:
    origins = "\x1e".join(f"[ONNX Layer: {node}]" for node in nodes.split())
    return {
        "Name": name,
        "LayerType": kind,
        "Inputs": [{"Name": "i", "Dimensions": [2, 4], "Format/Datatype": given}],
        "Outputs": [{"Name": "o", "Dimensions": [2, 4], "Format/Datatype": made}],
        "Metadata": origins,
        **more,
    }


LAYERS = [
    layer("copy", "Reformat", "node_rms_norm", "Float", "Half"),
    layer("norm", "kgen", "node_rms_norm node_mul", "Half", "FP8", TacticName="__myl_Norm"),
    layer("q", "gemm", "node_linear", "Row major linear FP8 format", "Half", StreamId=0),
    layer("mha", "kgen", "node_attention", "Half", "Half", Unknown=[1, {"a": 2}]),
    layer("split1", "kgen", "node_attention_1", "Half", "BFloat16"),
    layer("split2", "kgen", "node_attention_1", "BFloat16", "Half"),
    layer("plain", "gemm", "node_matmul_1", "Half", "Something new"),
    layer("norm2", "kgen", "node_skip_rms_norm_2__1", "Half", "Half"),
]


def layers(*found: Any) -> Layers:
    return parse_layers(json.dumps({"Layers": list(found or LAYERS), "Bindings": ["x"]}))


def test_counts_by_kind_and_dtype() -> None:
    found = layers()
    assert len(found) == 8
    assert found.by_kind == {"kgen": 5, "gemm": 2, "Reformat": 1}
    assert found.output_dtypes == {"fp16": 5, "bf16": 1, "fp8": 1, "unknown": 1}
    assert [one.name for one in found.fused] == ["norm"]
    assert found.layers[1].origins == ("node_rms_norm", "node_mul")


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("Row major linear FP32", "fp32"),
        ("Float", "fp32"),
        ("Channel major FP16 format where channel % 8 == 0", "fp16"),
        ("Row major INT8 format", "int8"),
        ("BFloat16", "bf16"),
        ("FP8E4M3", "fp8"),
        ("Bool", "bool"),
        ("", "unknown"),
    ],
)
def test_dtypes(text: str, dtype: str) -> None:
    assert layers(layer("a", "kgen", "n", "Half", text)).output_dtypes == {dtype: 1}


@pytest.mark.parametrize("text", ["", "no layers", "[]", '{"Bindings": []}', '{"Layers": "a"}'])
def test_what_is_not_a_list_of_layers_is_refused(text: str) -> None:
    with pytest.raises(BundleError, match=r"engine\.plan: expected .*, got '"):
        parse_layers(text, "engine.plan")
