"""Packages for CUDA.  Never run so far: no GPU was at hand when this was written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import tiny_bert, tiny_t5

import enginecast
from enginecast.compiler.export.session import export
from enginecast.compiler.publication.bundle import Export
from enginecast.compiler.request import ExportRequest
from enginecast.errors import MissingError
from enginecast.runtime.engine import Engine
from enginecast.runtime.sessions.aotinductor import AOTInductorSession

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs torch with a CUDA GPU"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Export:
    root = tmp_path_factory.mktemp("cuda")
    model = tiny_t5(root / "t5")
    done = export(ExportRequest(str(model), root / "out", "aotinductor", "bf16", device="cuda"))
    assert done.bundle is not None, done.report.verdict.reasons
    return done


def feeds(batch: int, tokens: int) -> dict[str, Any]:
    ids = np.random.default_rng(batch * tokens).integers(2, 90, (batch, tokens))
    return {"input_ids": ids, "attention_mask": np.ones((batch, tokens), np.int64)}


def session_of(engine: Engine) -> AOTInductorSession:
    session = engine._session
    assert isinstance(session, AOTInductorSession)
    return session


def test_t5_is_verified_on_cuda(made: Export) -> None:
    assert made.bundle is not None
    record = made.bundle.manifest.engines[0]
    major, minor = torch.cuda.get_device_capability()
    assert record.verdict.where.provider == "torch-cuda"
    assert record.arch == record.requires["gpu"] == f"sm{major}{minor}"


def test_another_gpu_is_refused(tmp_path: Path) -> None:
    model = str(tiny_bert(tmp_path / "bert"))
    request = ExportRequest(
        model, tmp_path / "out", "aotinductor", "fp32", device="cuda", arch="sm12"
    )
    with pytest.raises(MissingError, match="--arch sm12: the GPU here is sm"):
        export(request)


def test_runs_that_repeat_are_replayed_with_the_same_result(made: Export) -> None:
    load = {"allow_code": True, "device": "cuda"}
    with (
        enginecast.load(made.folder, **load) as graphs,  # type: ignore[arg-type]
        enginecast.load(made.folder, cuda_graphs=False, **load) as plain,  # type: ignore[arg-type]
    ):
        assert session_of(plain).graphs is None
        cache = session_of(graphs).graphs
        assert cache is not None
        for _ in range(5):
            for shape in ((2, 16), (4, 9)):
                found = graphs.run(feeds(*shape))["last_hidden_state"]
                wanted = plain.run(feeds(*shape))["last_hidden_state"]
                assert np.array_equal(found, wanted)
        assert cache.refused == ""
        assert len(cache.recorded) == 2


def test_a_replay_reads_the_inputs_that_it_is_given(made: Export) -> None:
    with enginecast.load(made.folder, allow_code=True, device="cuda") as engine:
        for _ in range(4):
            first = engine.run(feeds(2, 16))["last_hidden_state"]
        other = feeds(2, 16)
        other["input_ids"] = other["input_ids"][::-1].copy()
        found = engine.run(other)["last_hidden_state"]
        np.testing.assert_array_equal(found.astype(np.float32), first[::-1].astype(np.float32))


def test_fp8_products_are_verified_on_cuda(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8 products")
    model = str(tiny_bert(tmp_path / "bert"))
    request = ExportRequest(
        model, tmp_path / "out", "aotinductor", "fp8", device="cuda", max_error=0.3
    )
    done = export(request)
    assert done.bundle is not None, done.report.verdict.reasons
