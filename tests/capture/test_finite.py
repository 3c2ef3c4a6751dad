"""Weights that are not numbers are refused by name, and masks of -inf are not."""

from pathlib import Path

import models
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import T5ForConditionalGeneration

from enginecast.capture.sources.open_source import open_source
from enginecast.capture.sources.weights.checkpoint import sha256_of_weights
from enginecast.capture.sources.weights.finite import Lost, lost_in, lost_of
from enginecast.compiler.export.session import export
from enginecast.compiler.request import ExportRequest
from enginecast.errors import SourceError

NAME = "encoder.block.1.layer.0.SelfAttention.k.weight"


def spoil(folder: Path, name: str, value: float, file: str = "model.safetensors") -> Path:
    tensors = load_file(folder / file)
    tensors[name].view(-1)[3] = value
    save_file(tensors, folder / file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_bits_are_counted_as_torch_counts_them(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    tensor = torch.tensor([0.0, -0.0, 1.0, largest, -largest, torch.finfo(dtype).tiny], dtype=dtype)
    names = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
    name = names.get(dtype, "F64")

    def counted(values: Tensor) -> Lost:
        data = values.view(torch.uint8).numpy().tobytes()
        assert lost_in(data, name) == lost_of(values)
        return lost_in(data, name)

    assert not counted(tensor)
    inf, nan = float("inf"), float("nan")
    more = torch.tensor([inf, -inf, nan, -nan, nan], dtype=dtype)
    assert counted(torch.cat([tensor, more])) == Lost(nan=3, infinite=2)
    assert not lost_in(b"\xff" * 8, "I64")


@pytest.mark.parametrize(
    ("dtype", "value", "what"),
    [
        (torch.float32, float("nan"), "1 NaN"),
        pytest.param(torch.bfloat16, float("-inf"), "1 infinite", marks=pytest.mark.slow),
    ],
)
def test_weight_that_is_not_a_number_is_named_with_its_file(
    tmp_path: Path, dtype: torch.dtype, value: float, what: str
) -> None:
    folder = spoil(models.tiny_t5(tmp_path, dtype=dtype), NAME, value)
    message = f"{folder / 'model.safetensors'}: {NAME} has non-finite elements: {what}"
    with pytest.raises(SourceError) as caught:
        export(ExportRequest(str(folder), tmp_path / "bundle"))
    assert caught.value.message == message
    assert not (tmp_path / "bundle").exists()


def test_what_the_class_leaves_out_may_be_anything(tmp_path: Path) -> None:
    config = models.t5_config()
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    spoil(tmp_path, "decoder.block.0.layer.0.SelfAttention.q.weight", float("nan"))
    assert len(sha256_of_weights(tmp_path)[1]) == 1
    source = open_source(str(tmp_path))
    assert source.fingerprint() == source.fingerprint()
    spoil(tmp_path, NAME, float("nan"))
    with pytest.raises(SourceError, match="non-finite"):
        open_source(str(tmp_path)).fingerprint()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), 0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.linear(x) + self.mask, -1)


def test_mask_of_infinities_is_a_buffer_and_stays(tmp_path: Path) -> None:
    done = export(ExportRequest(Masked(), tmp_path / "good", example={"x": torch.randn(4, 4)}))
    assert done.bundle is not None
    spoiled = Masked()
    with torch.no_grad():
        spoiled.linear.bias[1] = float("inf")
    with pytest.raises(SourceError, match=r"linear\.bias has non-finite elements: 1 infinite"):
        export(ExportRequest(spoiled, tmp_path / "bad", example={"x": torch.randn(4, 4)}))
