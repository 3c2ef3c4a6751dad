"""The walk of an ONNX file sees the graph that a runtime would see, or refuses the file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bundles
import onnx
import pytest
from faults.hostile import message, other_format
from onnx import AttributeProto, TensorProto, helper

from enginecast.errors import BundleError
from enginecast.runtime.bundle.onnx_file import KINDS, check_onnx

WIRES = {1: 1, 2: 5, 3: 0, 4: 0, 5: 0, 9: 2, 11: 2, 12: 2, 14: 0}
"""Wire type by the type of a field in a descriptor of protobuf's."""
NAMED: dict[str, Any] = {
    "TypeProto.Tensor": onnx.TypeProto.Tensor,
    "TensorShapeProto.Dimension": onnx.TensorShapeProto.Dimension,
}


@pytest.fixture
def graph(tmp_path: Path) -> bytes:
    return bundles.write_unary(tmp_path / "engine.onnx", "Neg", TensorProto.FLOAT).read_bytes()


def _refused(data: bytes, file: str = "engine.onnx") -> str:
    with pytest.raises(BundleError) as caught:
        check_onnx(data, file, {"weights.safetensors": 4096})
    return caught.value.message


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_fields_are_those_of_onnx(kind: Any) -> None:
    kinds = NAMED.get(kind.name) or getattr(onnx, kind.name)
    expected = {}
    for field in kinds.DESCRIPTOR.fields:
        expected[field.number << 3 | WIRES[field.type]] = field.is_repeated
        if field.is_repeated:
            expected[field.number << 3 | 2] = True
    assert kind.fields == expected


def test_a_file_that_is_of_another_format_as_well_is_refused(graph: bytes) -> None:
    data = other_format(graph)
    assert onnx.load_from_string(data).graph.node[0].op_type == "Neg"
    assert "b'ORTM'" in _refused(data)


def _attribute(*tensors: TensorProto) -> bytes:
    """A model with a node whose attribute has a tensor, or more, which protobuf merges."""
    content = message(1, b"value") + b"".join(
        message(5, one.SerializeToString()) for one in tensors
    )
    node = message(2, b"aside") + message(4, b"Constant") + message(5, content)
    return message(7, message(1, node))


def _initializer(content: bytes) -> bytes:
    return message(7, message(5, content))


def _model_with(**changes: Any) -> bytes:
    model = helper.make_model(helper.make_graph([], "empty", [], []))
    for name, value in changes.items():
        getattr(model, name).append(value)
    return bytes(model.SerializeToString())


TENSOR = TensorProto(data_type=1, dims=[2], raw_data=bytes(8))
FLOATS = b"\x10\x01"
"""data_type: FLOAT."""


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (_attribute(TENSOR, TensorProto(dims=[1 << 40])), "field 5 of AttributeProto once"),
        (_initializer(FLOATS + FLOATS + b"\x08\x02"), "field 2 of TensorProto once"),
        (_initializer(b"\x12\x01\x01"), "field 2 of TensorProto: expected wire type 0, got 2"),
        (_initializer(b"\x48\x08"), "field 9 of TensorProto: expected wire type 2, got 0"),
        (_initializer(b"\x70\x07"), "data_location: expected 0 to 1, got 7"),
        (b"\x0a\x03abc", "field 1 of ModelProto: expected wire type 0, got 2"),
        (message(100, b"x"), "expected a field of ModelProto (ONNX IR version 13), got field 100"),
        (message(7, b"") * 2, "field 7 of ModelProto once"),
    ],
)
def test_what_readers_skip_merge_or_cut_is_refused(data: bytes, said: str) -> None:
    assert said in _refused(data)


@pytest.mark.parametrize("domain", ["", "ai.onnx", "com.microsoft", "com.microsoft.nchwc"])
def test_functions_have_domains_of_their_own(domain: str) -> None:
    opset = helper.make_opsetid("", 20)
    function = helper.make_function(domain, "Conv", [], ["y"], [], [opset])
    assert "expected a domain of its own" in _refused(_model_with(functions=function))


@pytest.mark.parametrize("place", ["attribute", "function"])
def test_values_of_all_kinds_are_walked(place: str, tmp_path: Path) -> None:
    """What onnx itself writes is not refused: every kind of attribute, packed numbers or not."""
    make: Callable[..., AttributeProto] = helper.make_attribute
    inner = helper.make_graph([], "inner", [], [])
    sparse = helper.make_sparse_tensor(
        helper.make_tensor("", TensorProto.FLOAT, [1], [1.0]),
        helper.make_tensor("", TensorProto.INT64, [1], [0]),
        [3],
    )
    shape = helper.make_tensor_type_proto(TensorProto.FLOAT, ["batch", 3])
    values = [1.5, 7, "text", TENSOR, inner, [1.0, 2.0], [1, 2], ["a", "b"], [TENSOR, TENSOR]]
    values += [[inner, inner], sparse, [sparse], shape, [helper.make_sequence_type_proto(shape)]]
    node = helper.make_node("Constant", [], ["aside"])
    node.attribute.extend(make(f"a{number}", value) for number, value in enumerate(values))
    if place == "attribute":
        model = helper.make_model(helper.make_graph([node], "all", [], []))
    else:
        opset = helper.make_opsetid("", 20)
        function = helper.make_function("own", "F", [], ["aside"], [node], [opset])
        model = helper.make_model(helper.make_graph([], "all", [], []), functions=[function])
    check_onnx(model.SerializeToString(), "engine.onnx", {})
