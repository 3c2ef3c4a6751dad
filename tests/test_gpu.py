"""What only a GPU can show.  Never run so far: no GPU was at hand when this was written."""

from pathlib import Path

import onnxruntime
import pytest
from models import tiny_bert, tiny_t5

import enginecast

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "CUDAExecutionProvider" not in onnxruntime.get_available_providers(),
        reason="needs onnxruntime-gpu and a CUDA GPU",
    ),
]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_t5_is_verified_on_cuda(tmp_path: Path, precision: str) -> None:
    model = tiny_t5(tmp_path / "t5")
    bundle = enginecast.compile(model, tmp_path / "out", precision=precision, device="cuda")
    verdict = bundle.manifest.engines[0].verdict
    assert (verdict.outcome, verdict.engine) == ("verified", "ran")
    assert verdict.where.provider == "CUDAExecutionProvider"


def test_verify_on_cuda_completes_a_verdict_by_emulation(tmp_path: Path) -> None:
    bundle = enginecast.compile(tiny_bert(tmp_path / "bert"), tmp_path / "out", precision="fp16")
    assert bundle.manifest.engines[0].verdict.outcome == "verified-by-emulation"
    check = enginecast.verify(tmp_path / "out", device="cuda")
    assert check.completed
    with enginecast.load(tmp_path / "out", device="cuda", require="verified") as engine:
        assert engine.verdict.where.provider == "CUDAExecutionProvider"
