"""TensorRT's form of ONNX for every family: documented to be taken, and as exact as its program.

A bf16 network is run as the same one in fp32; see `tensorrt_networks`.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from exports import Exports
from family import Family
from family_models import FAMILIES
from onnx import numpy_helper
from quantized_programs import in_torch
from tensorrt_networks import op_count, require_form, run_network, save_network
from torch import Tensor
from torch.export import ExportedProgram

from enginecast.capture.inputs.examples import Case
from enginecast.capture.inputs.specs import ranges_of
from enginecast.capture.sources.open_source import open_source
from enginecast.capture.tracing.sizes.shapes import symbol_names
from enginecast.compiler.engines.lower_and_run import describe_inputs
from enginecast.compiler.prepare.program import Prepared, prepare
from enginecast.compiler.request import ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.exporters.onnx.metadata import LINE, MODULE
from enginecast.exporters.target import LoweringRequest
from enginecast.exporters.tensorrt.gate.check import check_ready
from enginecast.exporters.tensorrt.lower import NETWORK_FILE, lowering, tensorrt_onnx
from enginecast.exporters.tensorrt.target import TensorRT
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.presets import QUANTIZED
from enginecast.passes.registry import build

PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "fp8-storage")
DEFAULT = {("vit", "fp8")}
MORE = 3.0
"""How much larger the error of a network may be than that of its program: as in a verdict."""
LEAST = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""An error that any network may have beside: some roundings of the dtype, in another order."""
VERSIONS = ("10.15", "11.0")


@dataclass(frozen=True)
class Made:
    """A network, the program that it was made of, and the model before the passes."""

    network: onnx.ModelProto
    program: ExportedProgram
    prepared: Prepared


class Models:
    """Each is captured when a test first asks for it; the last one is kept."""

    def __init__(self, exports: Exports) -> None:
        self.exports = exports
        self.last: tuple[str, Prepared] | None = None

    def __call__(self, family: Family) -> Prepared:
        if self.last is None or self.last[0] != family.name:
            model = self.exports.model(f"family-{family.name}")
            with contextlib.chdir(self.exports.root):
                source = open_source(model)
                self.last = family.name, prepare(source, ModelOptions(), Steps())
        return self.last[1]


@pytest.fixture(scope="module")
def models(exports: Exports) -> Models:
    return Models(exports)


def make(prepared: Prepared, precision: str, folder: Path) -> Made:
    """Lower a family; the gate must find nothing in what is lowered."""
    text = TensorRT().pipeline(precision, arch="sm90" if precision in QUANTIZED else None)
    # Nothing that is tiny gains anything.
    text = text.replace("plan-fp8{", "plan-fp8{min_gain=0 max_error=0.9 ")
    program = structural_copy(prepared.captured.program)
    run_pipeline(build(f"{text},{lowering('onnx')}"), program, prepared.context)
    captured = prepared.captured
    names = {str(s): n for s, n in symbol_names(captured.program, captured.inputs).items()}
    order = LoweringRequest(
        program,
        folder,
        outputs=prepared.output_names,
        symbols=names,
        shapes=[spec.dims for spec in captured.outputs],
        device="cuda",
    )
    model = tensorrt_onnx(order)
    inputs, ranges = describe_inputs(captured.inputs), ranges_of(captured.inputs)
    for version in VERSIONS:
        found = check_ready(model, version=version, inputs=inputs, ranges=ranges)
        assert [str(one) for one in found] == []
    said = [node.metadata_props.keys() for node in model.graph.all_nodes()]
    assert sum(LINE in keys for keys in said) > len(said) * 0.7
    assert sum(MODULE in keys for keys in said) > len(said) * 0.5
    save_network(model, folder)
    onnx.checker.check_model(folder / NETWORK_FILE, full_check=True)
    network = onnx.load(folder / NETWORK_FILE)
    require_form(network)
    return Made(network, program, prepared)


def inputs_of(program: ExportedProgram, case: Case) -> dict[str, Tensor]:
    """In the dtypes that the program takes."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    return {
        name: case.inputs[name].to(values[name].dtype)
        for name in program.graph_signature.user_inputs
    }


def returned(program: ExportedProgram, case: Case) -> list[Tensor]:
    return list(in_torch(program, *inputs_of(program, case).values()))


def errors(made: Made) -> Iterator[tuple[float, float]]:
    """Of each output of each case: the relative error of the network and of the program, both from
    the captured fp32 program, over the rows of real tokens.
    """
    for case in made.prepared.cases[:3]:
        inputs = inputs_of(made.program, case)
        mask = inputs.get("attention_mask")
        rows = zip(
            run_network(made.network, *inputs.values()),
            returned(made.program, case),
            returned(made.prepared.captured.program, case),
            strict=True,
        )
        for found, low, exact in rows:
            real: Tensor | slice = slice(None)
            if mask is not None and exact.shape[:2] == mask.shape:
                real = mask.bool()
            size = exact[real].double().norm()
            if size > 0:
                off = [(x.double() - exact.double())[real].norm() / size for x in (found, low)]
                yield float(off[0]), float(off[1])


def worst(made: Made) -> float:
    """The largest error of an output, where 1 is what is allowed."""
    dtypes = {node.meta["val"].dtype for node in made.program.graph.nodes if is_float(node)}
    least = max(LEAST.get(dtype, 0.0) for dtype in dtypes)
    return max(found / (MORE * low + least) for found, low in errors(made))


def is_float(node: torch.fx.Node) -> bool:
    found = node.meta.get("val")
    return isinstance(found, Tensor) and found.is_floating_point()


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        pytest.param(
            family,
            precision,
            id=f"{family.name}-{precision}",
            marks=[] if (family.name, precision) in DEFAULT else [pytest.mark.slow],
        )
        for family in FAMILIES
        for precision in PRECISIONS
    ],
)
def test_its_network_is_taken_and_computes_what_the_program_does(
    models: Models, tmp_path: Path, family: Family, precision: str
) -> None:
    made = make(models(family), precision, tmp_path)
    assert worst(made) <= 1
    if precision in QUANTIZED:
        assert op_count(made.network, "DequantizeLinear") > 0
    if precision == "fp8":
        assert op_count(made.network, "QuantizeLinear") > 0
        wrong = scaled(made.network)
        assert worst(Made(wrong, made.program, made.prepared)) > 1


def scaled(network: onnx.ModelProto) -> onnx.ModelProto:
    """Every weight that is dequantized twice as large."""
    copy = onnx.ModelProto()
    copy.CopyFrom(network)
    made = {weight.name: weight for weight in copy.graph.initializer}
    names = {n.input[1] for n in copy.graph.node if n.op_type == "DequantizeLinear"}
    for scale in (made[name] for name in names if made[name].dims):
        values = numpy_helper.to_array(scale) * np.float16(2)
        scale.CopyFrom(numpy_helper.from_array(values, scale.name))
    return copy
