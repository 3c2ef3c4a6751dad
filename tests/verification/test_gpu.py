"""What only a GPU can show.  Never run so far: no GPU was at hand when this was written."""

import copy
from pathlib import Path

import onnxruntime
import pytest
import torch
from lowering import lower
from models import tiny_bert, tiny_t5
from test_emulate import relative, run, t5, text

import enginecast
from enginecast.exporters.onnx.lower import GRAPH_FILE
from enginecast.passes.presets import PrecisionName, preset

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "CUDAExecutionProvider" not in onnxruntime.get_available_providers(),
        reason="needs onnxruntime-gpu and a CUDA GPU",
    ),
]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_t5_is_verified_on_cuda(tmp_path: Path, precision: PrecisionName) -> None:
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


@pytest.mark.parametrize("peak", [0.0, 1.4e5])
def test_emulation_says_what_cuda_computes(tmp_path: Path, peak: float) -> None:
    module, program = t5(peak, preset("fp16", device="cuda").removeprefix("rescale-streams,"))
    ids, mask = text()
    lower(program, tmp_path / "engine", device="cuda")
    session = onnxruntime.InferenceSession(
        tmp_path / "engine" / GRAPH_FILE,
        providers=["CUDAExecutionProvider", "CPUExecutionProvider"],
    )
    feeds = {i.name: x.numpy() for i, x in zip(session.get_inputs(), (ids, mask), strict=True)}
    wanted = torch.from_numpy(session.run(None, feeds)[0])
    found, reported = run(program, "ort-cuda", ids, mask)
    assert torch.equal(found[mask != 0].isfinite(), wanted[mask != 0].isfinite())
    assert (reported.overflow is None) == bool(wanted[mask != 0].isfinite().all())
    if peak:
        assert reported.overflow is not None
        return
    exact = copy.deepcopy(module).double()(ids, mask)
    assert 0.6 < relative(found, exact, mask) / relative(wanted, exact, mask) < 1.6
