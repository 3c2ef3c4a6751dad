"""The presets are pipelines that build, and what does not fit is refused."""

from dataclasses import replace
from typing import Any

import pytest

from enginecast.compiler.request import ExportRequest
from enginecast.errors import PassError, SpecError, UsageError
from enginecast.exporters.registry import target_of
from enginecast.exporters.tensorrt.options import TensorRTRTXOptions
from enginecast.passes.ir.spec import parse, render
from enginecast.passes.presets import QUANTIZED, preset
from enginecast.passes.registry import build


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "mixed"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_presets_build_and_are_canonical(precision: str, device: str) -> None:
    text = preset(precision, device=device)
    assert render(parse(text)) == text
    names = [pass_.name for pass_ in build(text)]
    assert ("unify-dtype" in names) == (precision != "fp32")
    assert ("merge-linears" in names) == (device == "cuda")


def test_what_needs_passes_does_not_fit_torchscript() -> None:
    with pytest.raises(UsageError, match="--precision int8 does not fit --target torchscript"):
        target_of("torchscript").pipeline("int8")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "mixed", *QUANTIZED])
@pytest.mark.parametrize("name", ["tensorrt", "tensorrt-rtx"])
def test_tensorrt_is_for_gpus_and_quantizes_on_fp16(name: str, precision: str, device: str) -> None:
    arch = "sm90" if precision in QUANTIZED else None
    target = target_of(name)
    text = target.pipeline(precision, device=device, arch=arch)
    assert render(parse(text)) == text
    assert text == target.pipeline(precision, device="cuda", arch=arch)
    assert "merge-linears" in [pass_.name for pass_ in build(text)]
    computed = target.computes(precision, device)
    assert computed == ("fp16" if precision in ("mixed", *QUANTIZED) else precision)
    if precision in QUANTIZED:
        assert f"unify-dtype{{to={computed}}}" in text
        assert "target=tensorrt" in text
        assert text.endswith(f",{QUANTIZED[precision].rewrites}{{scale_dtype=fp16}}")
        assert ("fold-batch-norm" in text) == (precision == "int8")


@pytest.mark.parametrize("precision", ["nvfp4-storage", "mxfp8-storage"])
@pytest.mark.parametrize("target", ["onnxruntime", "aotinductor", "openvino", "torchscript"])
def test_blocks_with_quantized_scales_are_tensorrt_s(precision: str, target: str) -> None:
    with pytest.raises(UsageError, match=f"{precision} does not fit --target {target}"):
        target_of(target).pipeline(precision, device="cpu")


def test_the_oldest_capability_decides_what_is_planned() -> None:
    options = TensorRTRTXOptions(compute=("12.0", "8.9"))
    request = ExportRequest("model", target="tensorrt-rtx", target_options=options)
    config = replace(request, precision="int8").resolve()
    assert (config.arch, "arch=sm89" in config.pipeline) == ("sm89", True)
    with pytest.raises(PassError, match="no NVFP4 weights in TensorRT"):
        replace(request, precision="nvfp4-storage").resolve()


@pytest.mark.parametrize(
    ("precision", "target", "message"),
    [
        ("fp23", "onnxruntime", "'fp23' is not a precision"),
        ("fp16", "tensor-rt", "unknown target 'tensor-rt'"),
    ],
)
def test_what_is_not_built_is_refused(precision: str, target: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        target_of(target).pipeline(precision)
    assert caught.value.message == message
    assert "onnxruntime" in caught.value.hint or "fp16" in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("preset_of", "more"),
    [
        ("fp16", {}),
        ("bf16", {"skip_modules_pattern": ("head",)}),
        ("int8", {"max_error": 0.02}),
        ("int8", {"arch": "sm90", "optimize": "size"}),
        ("fp8-storage", {"target": "tensorrt", "arch": "sm90"}),
        ("mixed", {}),
        ("int4-storage", {}),
    ],
)
def test_a_pipeline_adds_to_a_preset_of_its_target(preset_of: str, more: dict[str, Any]) -> None:
    alone = ExportRequest("model", precision=preset_of, **more).resolve()
    added = ExportRequest("model", pipeline=f"@{preset_of},canonicalize", **more).resolve()
    assert added.pipeline == f"{alone.pipeline},canonicalize"
    kinds = [(one.precision, one.quantized, one.device, one.arch) for one in (added, alone)]
    assert kinds[0] == kinds[1]
    ExportRequest("model", precision=preset_of, pipeline=f"@{preset_of}", **more).resolve()


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (
            "fuse-gelu,@fp17",
            "@fp17: 'fp17' is not a precision\n  fuse-gelu,@fp17\n            ^\nA",
        ),
        ("canonicalize,@fp16", "must come after 'unify-dtype'\n  canonicalize,@fp16\n  ^"),
        ("@fp16,typo", "unknown pass 'typo'\n  @fp16,typo\n        ^"),
        (
            "@,canonicalize",
            "expected the name of a preset in pipeline spec\n  @,canonicalize\n   ^",
        ),
        ("@fp16{to=bf16}", "expected ',' or the end in pipeline spec\n  @fp16{to=bf16}\n       ^"),
    ],
)
def test_errors_of_presets_point_at_the_place(pipeline: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        ExportRequest("model", pipeline=pipeline).resolve()
    assert message in str(caught.value)
