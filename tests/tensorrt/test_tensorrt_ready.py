"""The graph that is made for TensorRT, of every family and precision, checked by the gate."""

import contextlib
from pathlib import Path

import onnx_ir as ir
import pytest
from exports import Exports
from family import Family
from family_models import FAMILIES

from enginecast.capture.sources.open_source import open_source
from enginecast.capture.tracing.sizes.shapes import symbol_names
from enginecast.compiler.engines.lower_and_run import describe_inputs
from enginecast.compiler.prepare.program import Prepared, prepare
from enginecast.compiler.request import ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.exporters.onnx.metadata import LINE
from enginecast.exporters.target import LoweringRequest
from enginecast.exporters.tensorrt.gate.check import check_ready
from enginecast.exporters.tensorrt.gate.shape_rules import unknown_sizes
from enginecast.exporters.tensorrt.lower import lowering, tensorrt_onnx
from enginecast.exporters.tensorrt.target import TensorRT
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.registry import build

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
    text = TensorRT().pipeline(precision, device="cuda", arch=arch)
    text = text.replace("plan-fp8{", "plan-fp8{min_gain=0 ")  # tiny layers gain nothing
    program = structural_copy(made.captured.program)
    run_pipeline(build(f"{text},{lowering('onnx')}"), program, made.context)
    names = symbol_names(made.captured.program, made.captured.inputs)
    order = LoweringRequest(
        program,
        folder,
        outputs=made.output_names,
        symbols={str(symbol): name for symbol, name in names.items()},
        shapes=[spec.dims for spec in made.captured.outputs],
        device="cuda",
    )
    return tensorrt_onnx(order)


def ranges_of(made: Prepared) -> dict[str, tuple[int, int]]:
    dims = [dim for spec in made.captured.inputs for dim in spec.dims if dim.name]
    return {str(dim.name): (dim.minimum, dim.maximum or LONGEST) for dim in dims}


@each
@pytest.mark.slow
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
            source = open_source(model)
            prepared[family.name] = prepare(source, ModelOptions(), Steps())
    made = prepared[family.name]
    graph = graph_of(made, precision, tmp_path)
    ranges = ranges_of(made)
    inputs = describe_inputs(made.captured.inputs)
    for plugins in (False, True):
        assert check_ready(graph, plugins=plugins, inputs=inputs, ranges=ranges) == []
    assert unknown_sizes(graph.graph, ranges) == 0
    nodes = list(graph.graph.all_nodes())
    types = {value.dtype for node in nodes for value in node.outputs}
    assert WIDE[precision] in types
    assert ("DequantizeLinear" in {node.op_type for node in nodes}) == (precision == "fp8")
    lines = [node.metadata_props.get(LINE) for node in nodes]
    assert any(lines), "the gate could not say where a node comes from"
