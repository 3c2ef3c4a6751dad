"""Every family, in every precision: its network passes the gate, and TensorRT-RTX builds it."""

import contextlib
from pathlib import Path

import pytest
import rtx
from exports import Exports
from family import Family
from family_models import FAMILIES

from enginecast.capture.sources.open_source import open_source
from enginecast.compiler.engines.lower_and_run import lowering_request
from enginecast.compiler.prepare.program import Prepared, prepare
from enginecast.compiler.request import ExportRequest, ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.exporters.registry import target_of
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.registry import build

PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "fp8-storage")


@pytest.fixture(scope="module")
def prepared() -> dict[str, Prepared]:
    """Captured families, each when a test first asks for it."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_parsed_and_built(
    exports: Exports,
    tmp_path: Path,
    prepared: dict[str, Prepared],
    family: Family,
    precision: str,
) -> None:
    if family.name not in prepared:
        model = exports.model(f"family-{family.name}")
        with contextlib.chdir(exports.root):
            prepared[family.name] = prepare(open_source(model), ModelOptions(), Steps())
    made, arch = prepared[family.name], "sm89" if "fp8" in precision else None
    request = ExportRequest("model", "", "tensorrt-rtx", precision, arch=arch)
    (config,) = request.resolve().engines
    text = config.pipeline.replace("plan-fp8{", "plan-fp8{min_gain=0 ")  # tiny layers gain nothing
    program = structural_copy(made.captured.program)
    run_pipeline(
        build(f"{text},{config.lowering}" if text else config.lowering), program, made.context
    )
    lowered = target_of(config.target).lower(lowering_request(made, config, program, tmp_path))
    assert lowered.record["built_by"] == f"TensorRT-RTX {rtx.trt.__version__}"
    assert lowered.quantized == ("fp8" if arch else "")
