"""The options of a TensorRT build: what they mean, and what is refused before any work is done."""

from pathlib import Path

import pytest
from exports import Exports, cast

from enginecast.cli_tensorrt import tensorrt_options
from enginecast.errors import UsageError
from enginecast.exporters.tensorrt_options import TensorRTOptions
from enginecast.plan import make_plan

BUILD = TensorRTOptions(level=5)


def test_nothing_given_is_nothing() -> None:
    assert tensorrt_options(None, None, None, None) is None
    assert tensorrt_options(None, [], None, None) is None


def test_every_option_is_taken() -> None:
    given = tensorrt_options(
        "torch",
        ["input_ids=1x128", "pixels=2x3x224x224"],
        "512MiB",
        Path("caches"),
        refit=True,
        strip_weights=True,
        version_compatible=True,
        hardware="ampere+",
        level=0,
    )
    assert given == TensorRTOptions(
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


@pytest.mark.parametrize(("text", "size"), [("4GiB", 4 << 30), ("4 GB", 4 << 30), ("64k", 65536)])
def test_sizes(text: str, size: int) -> None:
    given = tensorrt_options(workspace=text)
    assert given is not None
    assert given.workspace == size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"route": "onyx"}, "--trt-route onyx: expected onnx or torch"),
        ({"workspace": "4"}, "--trt-workspace 4: expected a size such as 4GiB"),
        ({"workspace": "0GiB"}, "--trt-workspace 0GiB: expected a size"),
        ({"hardware": "turing"}, "--trt-hardware turing: expected one of none, ampere+"),
        ({"level": 6}, "--trt-level 6: expected 0 to 5"),
        ({"opt_shapes": ["input_ids"]}, "--opt-shape input_ids: expected NAME=1x128"),
        ({"opt_shapes": ["=1x2"]}, "--opt-shape =1x2: expected NAME=1x128"),
        ({"opt_shapes": ["x=1x"]}, "--opt-shape x=1x: expected NAME=1x128"),
        ({"opt_shapes": ["x=1x2", "x=1x3"]}, "--opt-shape x=1x3: x has a shape already, 1x2"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        tensorrt_options(**options)  # type: ignore[arg-type]
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("onnxruntime", {"tensorrt": BUILD}, "--target onnxruntime takes no options of a TensorRT"),
        ("torchscript", {"tensorrt": BUILD}, "--target torchscript takes no options of a TensorRT"),
        ("onnxruntime", {"also": ("onnxruntime",)}, "--also onnxruntime does not fit --target onn"),
        ("tensorrt", {"also": ("aotinductor",)}, "--also aotinductor: expected onnxruntime"),
        ("tensorrt", {"also": ("onnxruntime",) * 2}, "--also onnxruntime: given twice"),
        ("tensorrt", {"precision": "int8"}, "--precision int8 does not fit --target tensorrt"),
        ("tensorrt", {"device": "cpu"}, "--device cpu does not fit --target tensorrt"),
    ],
)
def test_plans_that_cannot_be(target: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_plan(target, **options)  # type: ignore[arg-type]
    assert caught.value.message.startswith(message)


def test_the_second_engine_runs_where_the_first_does_not() -> None:
    first, second = make_plan("tensorrt", "fp16", also=("onnxruntime",)).engines
    assert (first.target, first.device, first.engine_providers) == (
        "tensorrt",
        "cuda",
        ("tensorrt",),
    )
    assert (second.target, second.also) == ("onnxruntime", ())
    assert second.runs_here
    (_, second) = make_plan("tensorrt", "bf16", also=("onnxruntime",)).engines
    assert second.device == "cuda"


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
