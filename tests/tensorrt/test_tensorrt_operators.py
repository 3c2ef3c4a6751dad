"""The table of what TensorRT's parser takes: its words are known, and each entry has a source."""

import onnx
import pytest

from enginecast.errors import UsageError
from enginecast.exporters.tensorrt.gate.operators import (
    numbers,
    opsets,
    table,
    unsupported,
)


def schemas() -> dict[str, onnx.defs.OpSchema]:
    """The newest of each operator of ONNX's own domain, those without a newer form included."""
    found: dict[str, onnx.defs.OpSchema] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        old = found.get(schema.name)
        if schema.domain == "" and (old is None or old.since_version < schema.since_version):
            found[schema.name] = schema
    return found


def test_every_entry_is_an_operator_with_a_source() -> None:
    known = schemas()
    for name, operator in table().operators.items():
        assert name in known, name
        assert set(operator.source.split()) <= set(table().sources), name
        if operator.since:
            assert numbers(operator.since) >= (10, 14), name
    assert set(table().refused.operators) <= set(known)
    assert not set(table().refused.operators) & set(table().operators)
    used = {key for entry in table().operators.values() for key in entry.source.split()}
    used |= {found.source for found in table().versions.values()} | {table().refused.source}
    assert used == set(table().sources)
    assert all(url.startswith("https://") for url in table().sources.values())


@pytest.mark.parametrize(
    ("version", "found"), [("10.15.1.29", (9, 24)), ("11.0.0.114+fake", (9, 24)), ("12.0", (9, 25))]
)
def test_opsets_by_version(version: str, found: tuple[int, int]) -> None:
    assert opsets(version) == found


def test_support_by_version() -> None:
    assert unsupported("", "Swish", "10.15") == "documented since TensorRT 11.0"
    assert unsupported("ai.onnx", "Swish", "11.0") == ""
    assert unsupported("", "RMSNormalization", "10.15") == ""
    assert unsupported("", "Compress", "11.0") == "documented as not taken"
    assert unsupported("", "BitCast", "11.0") == "not documented"
    assert unsupported("trt", "TRT_Attention", "11.0") == "an operator of the domain trt"
    assert unsupported("trt", "TRT_MXFP8DequantizeLinear", "11.0") == ""
    with pytest.raises(UsageError, match="expected a version such as 11"):
        numbers("11")
