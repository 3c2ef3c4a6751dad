"""The options of a TensorRT build: what they mean, and what is refused before any work is done."""

from pathlib import Path

import pytest
import torch
from exports import Exports, cast

from enginecast.compiler.request import ExportRequest
from enginecast.errors import UsageError
from enginecast.exporters.tensorrt.options import TensorRTOptions, TensorRTRTXOptions

BUILD = TensorRTOptions(level=5)
TRT, RTX = "tensorrt", "tensorrt-rtx"


def given(*texts: str) -> TensorRTOptions | None:
    """What `--target-option` makes of texts."""
    made: TensorRTOptions | None
    made = ExportRequest("model", target="tensorrt", target_options=texts).target_options
    return made


def test_every_option_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert given() is None
    assert given("level=0") == TensorRTOptions(level=0)
    for text, size in (("4GiB", 4 << 30), ("4 GB", 4 << 30), ("64k", 65536)):
        assert given(f"workspace={text}") == TensorRTOptions(workspace=size)
    texts = (
        *("route=torch", "opt-shape=input_ids=1x128", "opt-shape=pixels=2x3x224x224"),
        *("workspace=512MiB", "timing-cache=caches", "refit", "strip-weights=true"),
        *("version-compatible=true", "hardware=ampere+", "level=0"),
    )
    assert given(*texts) == TensorRTOptions(
        route="torch",
        optimal={"input_ids": (1, 128), "pixels": (2, 3, 224, 224)},
        workspace=512 << 20,
        timing_cache=Path("caches"),
        refit=True,
        strip_weights=True,
        version_compatible=True,
        hardware="ampere+",
        level=0,
    )
    names = {"export": ["--profile,", "--compute,", "--strip-weights"]}
    for command, shorts in (names | {"inspect": ["--profile,", "--compute"]}).items():
        *_, target = cast(capsys, command, "--help").out.partition("--help-target")
        assert target.partition("--help-inputs")[0].split()[-len(shorts) :] == shorts
    listed = cast(capsys, "export", "--help-target").out
    assert all(f"  {text.partition('=')[0]}=" in listed for text in texts)


def test_profiles_are_the_sizes_that_are_captured() -> None:
    texts = ("profile=ids=1x1, 1x8, 2x16", "profile=ids=4x1,4x1,4x8", "compute=8.6,8.9")
    request = ExportRequest("model", target="tensorrt-rtx", target_options=texts)
    assert request.target_options == TensorRTRTXOptions(
        profiles=({"ids": ((1, 1), (1, 8), (2, 16))}, {"ids": ((4, 1), (4, 1), (4, 8))}),
        compute=("8.6", "8.9"),
    )
    assert request.options.dynamic == ("ids:0=1..4", "ids:1=1..16")


@pytest.mark.parametrize(
    ("target", "texts", "message"),
    [
        (TRT, "route=onyx", "route=onyx: expected onnx or torch"),
        (TRT, "workspace=4", "workspace=4: expected a size such as 4GiB"),
        (TRT, "workspace=0GiB", "workspace=0GiB: expected a size"),
        (TRT, "hardware=turing", "hardware=turing: expected one of none, ampere+"),
        (TRT, "level=6", "level=6: expected 0 to 5"),
        (TRT, "level=high", "level=high: expected 0..5"),
        (TRT, "level=1 level=2", "level=2: level is given twice"),
        (TRT, "refit=yes", "refit=yes: expected true or false"),
        (TRT, "opt-shape=x", "opt-shape=x: expected NAME=1x128"),
        (TRT, "opt-shape==1x2", "opt-shape==1x2: expected NAME=1x128"),
        (TRT, "opt-shape=x=1x", "opt-shape=x=1x: expected NAME=1x128"),
        (TRT, "opt-shape=x=1x2 opt-shape=x=1x3", "opt-shape=x=1x3: x already has a shape, 1x2"),
        (TRT, "levle=3", "levle=3: --target tensorrt has no option 'levle'\nIt has opt-shape, "),
        (RTX, "compute=sm89", "--compute sm89: expected compute capabilities, such as 8.6,8.9"),
        (RTX, "compute=8.9,8.9", "--compute 8.9,8.9: expected compute capabilities"),
        (RTX, "level=3", "level=3: --target tensorrt-rtx has no option 'level'"),
        (RTX, "profile=x", "--profile x: expected NAME=1x16,4x64,8x256"),
        (RTX, "profile=x=1,1,2 opt-shape=x=1", "opt-shape and profile do not go together"),
        (RTX, "profile=x=1x64,1x32,1x8", "--profile x=1x64,1x32,1x8: expected three shapes of one"),
        (RTX, "profile=x=1x8,1x8,1x8x3", "--profile x=1x8,1x8,1x8x3: expected three shapes of one"),
        (
            *(RTX, "profile=x=1,1,2 profile=x=1x8,1x8,1x8"),
            "--profile x=1x8,1x8,1x8: expected rank 1, as in its first profile",
        ),
        (TRT, "compute=8.6", "--compute 8.6: --target tensorrt has no option 'compute'"),
        (
            "onnxruntime",
            "profile=x=1,1,2",
            "--profile x=1,1,2: --target onnxruntime has no options",
        ),
        ("onnxruntime", "strip-weights=true", "--strip-weights: --target onnxruntime has no opt"),
        (RTX, "strip-weights=no", "strip-weights=no: expected true or false"),
        ("aotinductor", "level=3", "level=3: --target aotinductor has no options"),
        ("onnxruntime", "level=3", "level=3: --target onnxruntime has no options"),
    ],
)
def test_what_does_not_fit_is_refused(target: str, texts: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        ExportRequest("model", target=target, target_options=texts.split())
    assert str(caught.value).removeprefix("--target-option ").startswith(message)


OF_TENSORRT = "--target {} takes no options of --target tensorrt"


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("onnxruntime", {"target_options": BUILD}, OF_TENSORRT),
        ("torchscript", {"target_options": BUILD}, OF_TENSORRT),
        ("onnxruntime", {"also": ("onnxruntime",)}, "--also onnxruntime does not fit --target onn"),
        (TRT, {"also": ("aotinductor",)}, "--also aotinductor: expected onnxruntime or openvino"),
        (TRT, {"also": ("onnxruntime",) * 2}, "--also onnxruntime: given twice"),
        (TRT, {"device": "cpu"}, "--device cpu does not fit --target tensorrt"),
    ],
)
def test_plans_that_cannot_be(target: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        ExportRequest("model", "", target, **options).resolve()  # type: ignore[arg-type]
    assert caught.value.message.startswith(message.format(target))


def test_the_second_engine_runs_where_the_first_does_not() -> None:
    first, second = ExportRequest("m", "", TRT, "fp16", also=("onnxruntime",)).resolve().engines
    assert (first.target, first.device, first.engine_providers) == (TRT, "cuda", (TRT,))
    assert (second.target, second.also, second.runs_here) == ("onnxruntime", (), True)
    _, second = ExportRequest("m", "", TRT, "bf16", also=("onnxruntime",)).resolve().engines
    assert second.device == "cuda"


def test_an_export_says_at_once_what_is_missing(
    exports: Exports, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = cast(capsys, "export", exports.model("t5"), "-o", tmp_path / "out", "--target", TRT)
    assert ran.code == 3
    assert "needs tensorrt, which is not installed" in ran.err
    assert "capture" not in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("target", "named"), [("tensorrt", "sm90"), ("tensorrt-rtx", "sm120")])
def test_gpus_are_named_that_the_target_has(target: str, named: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("it takes the GPU here")
    with pytest.raises(UsageError, match="depends on its architecture") as refused:
        ExportRequest("model", target=target, precision="fp8").resolve()
    assert f"--arch {named} (" in refused.value.hint
