"""The graph that is made for TensorRT, of every family and precision, held against the gate."""

import contextlib
from pathlib import Path

import onnx_ir as ir
import pytest
from exports import Exports
from family import Family
from family_models import FAMILIES

from enginecast.capture.shapes import symbol_names
from enginecast.describe import describe_inputs
from enginecast.exporters.onnx_metadata import LINE
from enginecast.exporters.order import Order
from enginecast.exporters.tensorrt_gate import check_ready
from enginecast.exporters.tensorrt_gate_shapes import unknown_sizes
from enginecast.exporters.tensorrt_onnx import tensorrt_onnx
from enginecast.exporters.tensorrt_options import TensorRTOptions
from enginecast.exporters.tensorrt_profiles import profile_of
from enginecast.passes.graph_edit import structural_copy
from enginecast.passes.pipeline import build, run_pipeline
from enginecast.passes.presets import preset
from enginecast.prepare import ModelOptions, Prepared, open_model, prepare
from enginecast.steps import Steps

LONGEST = 4096
"""Of a dimension whose greatest size the model does not say."""
WIDE = {
    "fp32": ir.DataType.FLOAT,
    "fp16": ir.DataType.FLOAT16,
    "bf16": ir.DataType.BFLOAT16,
    "fp8": ir.DataType.FLOAT16,
}
"""What all else is computed in, by precision."""
DEFAULT = {("vit", "fp8")}
each = pytest.mark.parametrize(
    ("family", "precision"),
    [
        pytest.param(
            family,
            precision,
            id=f"{family.name}-{precision}",
            marks=[pytest.mark.slow] * ((family.name, precision) not in DEFAULT),
        )
        for family in FAMILIES
        for precision in WIDE
    ],
)


@pytest.fixture(scope="module")
def prepared() -> dict[str, Prepared]:
    """Captured families, each when a test first asks for it."""
    return {}


def graph_of(made: Prepared, precision: str, folder: Path) -> ir.Model:
    """The graph in memory, after the passes of a precision."""
    arch = "sm90" if precision == "fp8" else None
    text = preset(precision, "tensorrt", device="cuda", arch=arch)
    text = text.replace("plan-fp8{", "plan-fp8{min_gain=0 ")  # tiny layers gain nothing
    program = structural_copy(made.captured.program)
    run_pipeline(build(text), program, made.context)
    names = symbol_names(made.captured.program, made.captured.inputs)
    order = Order(
        program,
        folder,
        outputs=made.output_names,
        symbols={str(symbol): name for symbol, name in names.items()},
        shapes=[spec.dims for spec in made.captured.outputs],
        device="cuda",
    )
    return tensorrt_onnx(order).model


def ranges_of(made: Prepared) -> dict[str, tuple[int, int]]:
    dims = [dim for spec in made.captured.inputs for dim in spec.dims if dim.name]
    return {str(dim.name): (dim.minimum, dim.maximum or LONGEST) for dim in dims}


@each
def test_its_graph_is_one_that_the_parser_is_documented_to_take(
    exports: Exports,
    tmp_path: Path,
    prepared: dict[str, Prepared],
    family: Family,
    precision: str,
) -> None:
    if family.name not in prepared:
        model = exports.model(f"family-{family.name}")
        with contextlib.chdir(exports.root):
            source = open_model(model, ModelOptions())
            prepared[family.name] = prepare(source, ModelOptions(), Steps())
    made = prepared[family.name]
    graph = graph_of(made, precision, tmp_path)
    ranges = ranges_of(made)
    inputs = describe_inputs(made.captured.inputs)
    profile = profile_of(inputs, ranges, TensorRTOptions())
    for version in ("10.15", "11.0"):
        found = check_ready(graph, version=version, inputs=inputs, ranges=ranges, profile=profile)
        assert found == []
    assert unknown_sizes(graph.graph, ranges) == 0
    nodes = list(graph.graph.all_nodes())
    types = {value.dtype for node in nodes for value in node.outputs}
    assert WIDE[precision] in types
    assert ("DequantizeLinear" in {node.op_type for node in nodes}) == (precision == "fp8")
    lines = [node.metadata_props.get(LINE) for node in nodes]
    assert any(lines), "the gate could not say where a node comes from"
