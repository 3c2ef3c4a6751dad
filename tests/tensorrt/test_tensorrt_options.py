"""The options of a TensorRT build: what they mean, and what is refused before any work is done."""

from pathlib import Path

import pytest
import typer
from exports import Exports, cast

from enginecast.cli.options.from_fields import grouped
from enginecast.compiler.request import ExportRequest
from enginecast.errors import UsageError
from enginecast.exporters.tensorrt.options import TensorRTOptions

BUILD = TensorRTOptions(level=5)


@grouped
def export(tensorrt: TensorRTOptions | None) -> None:
    """Stands for the command."""
    FOUND.append(tensorrt)


FOUND: list[TensorRTOptions | None] = []


def given(*words: str) -> TensorRTOptions | None:
    """What a command line makes of the options."""
    app = typer.Typer()
    app.command()(export)
    app(args=list(words), standalone_mode=False)
    return FOUND[-1]


def test_every_option_is_taken() -> None:
    assert given("--trt-level", "0") == TensorRTOptions(level=0)
    assert given(
        *("--trt-route", "torch", "--opt-shape", "input_ids=1x128"),
        *("--opt-shape", "pixels=2x3x224x224", "--trt-workspace", "512MiB"),
        *("--trt-timing-cache", "caches", "--trt-refit", "--trt-strip-weights"),
        *("--trt-version-compatible", "--trt-hardware", "ampere+", "--trt-level", "0"),
    ) == TensorRTOptions(
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--trt-route", "onyx"), "--trt-route onyx: expected onnx or torch"),
        (("--trt-workspace", "4"), "--trt-workspace 4: expected a size such as 4GiB"),
        (("--trt-workspace", "0GiB"), "--trt-workspace 0GiB: expected a size"),
        (("--trt-hardware", "turing"), "--trt-hardware turing: expected one of none, ampere+"),
        (("--trt-level", "6"), "--trt-level 6: expected 0 to 5"),
        (("--opt-shape", "input_ids"), "--opt-shape input_ids: expected NAME=1x128"),
        (("--opt-shape", "=1x2"), "--opt-shape =1x2: expected NAME=1x128"),
        (("--opt-shape", "x=1x"), "--opt-shape x=1x: expected NAME=1x128"),
        (
            ("--opt-shape", "x=1x2", "--opt-shape", "x=1x3"),
            "--opt-shape x=1x3: x already has a shape, 1x2",
        ),
    ],
)
def test_what_does_not_fit_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        given(*words)
    assert caught.value.message.startswith(message)


OF_TENSORRT = "--target {} takes no options of --target tensorrt"


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("onnxruntime", {"target_options": BUILD}, OF_TENSORRT),
        ("torchscript", {"target_options": BUILD}, OF_TENSORRT),
        ("onnxruntime", {"also": ("onnxruntime",)}, "--also onnxruntime does not fit --target onn"),
        (
            "tensorrt",
            {"also": ("aotinductor",)},
            "--also aotinductor: expected onnxruntime or openvino",
        ),
        ("tensorrt", {"also": ("onnxruntime",) * 2}, "--also onnxruntime: given twice"),
        ("tensorrt", {"precision": "int8"}, "--precision int8 does not fit --target tensorrt"),
        ("tensorrt", {"device": "cpu"}, "--device cpu does not fit --target tensorrt"),
    ],
)
def test_plans_that_cannot_be(target: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        ExportRequest("model", "", target, **options).resolve()  # type: ignore[arg-type]
    assert caught.value.message.startswith(message.format(target))


def test_an_export_says_at_once_what_is_missing(
    exports: Exports, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = cast(
        capsys, "export", exports.model("t5"), "-o", tmp_path / "out", "--target", "tensorrt"
    )
    assert ran.code == 3
    assert "needs tensorrt, which is not installed" in ran.err
    assert "capture" not in ran.err
    assert list(tmp_path.iterdir()) == []
