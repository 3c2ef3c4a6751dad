"""The weights file: what safetensors reads back, and how much of it is in memory at once."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from enginecast.errors import LoweringError
from enginecast.exporters.weights.file import write_weights
from enginecast.passes.ir.deferred_weights import LazyWeight

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def weight(name: str, tensor: Tensor) -> LazyWeight:
    return LazyWeight(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def of_every_dtype() -> dict[str, Tensor]:
    """Odd numbers of elements, so that careless packing would misalign what follows."""
    return {
        str(dtype).removeprefix("torch."): (torch.randn(3, 5) * 4).to(dtype) for dtype in DTYPES
    }


def written(path: Path, tensors: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
    return write_weights(path, [weight(name, tensor) for name, tensor in tensors.items()])


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_torch_reads_back_every_dtype_bit_for_bit(tmp_path: Path) -> None:
    tensors = of_every_dtype()
    tensors["special"] = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-45])
    written(tmp_path / "w.safetensors", tensors)
    found = load_file(tmp_path / "w.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(found[name]) == bits(tensor), name


def test_every_tensor_lies_where_it_says_aligned_to_its_elements(tmp_path: Path) -> None:
    tensors = of_every_dtype()
    placed = written(tmp_path / "w.safetensors", tensors)
    content = (tmp_path / "w.safetensors").read_bytes()
    for name, (offset, length) in placed.items():
        assert offset % tensors[name].dtype.itemsize == 0
        assert content[offset : offset + length] == bits(tensors[name])
    assert max(map(sum, placed.values())) == len(content)


def test_bytes_depend_on_the_weights_and_not_on_their_order(tmp_path: Path) -> None:
    tensors = of_every_dtype()
    written(tmp_path / "a", tensors)
    written(tmp_path / "b", dict(reversed(tensors.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    tensors["float32"][0, 0] += 1
    written(tmp_path / "c", tensors)
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


@pytest.mark.parametrize(
    ("tensor", "said"), [(torch.zeros(2, 4), r"\[2, 4\]"), (torch.zeros(2, 3).half(), "float16")]
)
def test_weight_that_comes_out_otherwise_than_planned(
    tmp_path: Path, tensor: Tensor, said: str
) -> None:
    planned = LazyWeight("a.weight", torch.float32, (2, 3), lambda: tensor)
    with pytest.raises(LoweringError, match=f"a.weight .*computed as.*{said}"):
        write_weights(tmp_path / "w", [planned])
