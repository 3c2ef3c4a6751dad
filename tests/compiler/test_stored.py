"""What a weights file holds is read from its header; a damaged one is an error."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from enginecast.errors import BundleError
from enginecast.runtime.bundle.tensor_files import StoredDtype, stored_dtypes


def test_tensors_and_bytes_by_dtype(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    tensors = {
        "a": torch.zeros(3, 5),
        "b": torch.zeros(100, dtype=torch.float16),
        "c": torch.zeros(2, dtype=torch.float16),
    }
    save_file(tensors, file, metadata={"format": "pt"})
    assert stored_dtypes(file) == (StoredDtype("F16", 2, 204), StoredDtype("F32", 1, 60))


@pytest.mark.parametrize("content", [b"", b"\x02" + b"\x00" * 7 + b"[]", b"\xff" * 9, b"\x05{"])
def test_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "w.safetensors"
    file.write_bytes(content)
    with pytest.raises(BundleError, match=r"w\.safetensors cannot be read as safetensors"):
        stored_dtypes(file)


@pytest.mark.parametrize(
    "header",
    [b"[" * 100_000, b'{"a": {"dtype": "F32", "data_offsets": [0, 1e999]}}', b'{"a": 1}'],
)
def test_a_hostile_header_is_refused(header: bytes, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(BundleError, match="cannot be read as safetensors"):
        stored_dtypes(file)
