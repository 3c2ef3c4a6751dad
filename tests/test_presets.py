"""The presets are pipelines that build, and what is not built yet is refused."""

import pytest

from enginecast.errors import UsageError
from enginecast.passes.pipeline import build
from enginecast.passes.presets import preset
from enginecast.passes.spec import parse, render


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "mixed"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_presets_build_and_are_canonical(precision: str, device: str) -> None:
    text = preset(precision, device=device)
    assert render(parse(text)) == text
    names = [pass_.name for pass_ in build(text)]
    assert ("unify-dtype" in names) == (precision != "fp32")
    assert ("merge-linears" in names) == (device == "cuda")


@pytest.mark.parametrize(
    ("precision", "target", "message"),
    [
        ("fp8", "onnxruntime", "'fp8' is not built yet"),
        ("int8", "onnxruntime", "'int8' is not built yet"),
        ("fp23", "onnxruntime", "'fp23' is not a precision"),
        ("fp16", "tensorrt", "target 'tensorrt' is not built yet"),
    ],
)
def test_what_is_not_built_is_refused(precision: str, target: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        preset(precision, target)
    assert caught.value.message == message
    assert "Available: " in caught.value.hint
    assert caught.value.exit_code == 2
