"""Tensors on a GPU, fed where they lie.  Never run so far: no GPU was at hand."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bundles
import numpy as np
import onnxruntime
import pytest
import torch
import torch.utils.dlpack as dlpack
from exports import Exports
from onnxruntime import OrtValue
from transformers import CLIPTextModel

from enginecast.errors import EnginecastWarning, InputError, VerificationError
from enginecast.pipelines.attach import attach
from enginecast.runtime.engine import Engine
from enginecast.runtime.load import load
from enginecast.runtime.sessions.onnxruntime import CUDA_PROVIDER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        CUDA_PROVIDER not in onnxruntime.get_available_providers() or not torch.cuda.is_available(),
        reason="needs onnxruntime-gpu, torch for CUDA, and a CUDA GPU",
    ),
]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    with pytest.warns(EnginecastWarning, match="verified on CPUExecutionProvider"):
        return load(bundles.make_bundle(tmp_path / "out"), prefer=["onnxruntime-cuda"])


def on_gpu(feeds: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array).cuda() for name, array in feeds.items()}


def expected(feeds: dict[str, Any]) -> Any:
    return bundles.table()[feeds["input_ids"]] * feeds["attention_mask"][..., None]


def test_tensors_stay_on_the_gpu(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    feeds = bundles.feeds()
    given = on_gpu(feeds)

    def copied(*_: Any, **__: Any) -> Any:
        pytest.fail("a tensor went through the host")

    with monkeypatch.context() as patch:
        patch.setattr(OrtValue, "ortvalue_from_numpy", copied)
        patch.setattr(type(engine._session), "to_host", copied)
        found = engine.run(given, as_dlpack=True)
    assert found.backend == "onnxruntime-cuda"
    tensor = dlpack.from_dlpack(found["hidden"])
    assert tensor.is_cuda
    np.testing.assert_array_equal(tensor.cpu().numpy(), expected(feeds))


def test_what_is_still_being_computed_is_waited_for(engine: Engine) -> None:
    """The ids are written behind a long product on torch's stream, each time others."""
    feeds = bundles.feeds(4, 6)
    busy = torch.randn(8192, 8192, device="cuda")
    given = on_gpu(feeds)
    wanted = given["input_ids"].clone()
    for _ in range(20):
        given["input_ids"].zero_()
        torch.cuda.synchronize()
        for _ in range(4):
            busy = (busy @ busy).clamp(-1, 1)
        given["input_ids"].copy_(wanted)
        found = engine.run(given, check_finite=False)["hidden"]
        np.testing.assert_array_equal(found, expected(feeds))


def test_wrong_values_are_found_on_the_gpu(engine: Engine) -> None:
    given = on_gpu(bundles.feeds())
    given["input_ids"][1, 2] = 9
    with pytest.raises(InputError, match=r"in 0\.\.8, got 9 at \[1, 2\]"):
        engine.run(given)


def test_tensors_on_the_wrong_device_are_refused(engine: Engine, tmp_path: Path) -> None:
    root = bundles.make_bundle(tmp_path / "cpu")
    with (
        load(root) as on_cpu,
        pytest.raises(InputError, match="expected a tensor on cpu, where the engine runs, got"),
    ):
        on_cpu.run(on_gpu(bundles.feeds()))


def test_infinite_outputs_are_found_on_the_gpu(tmp_path: Path) -> None:
    content = bundles.unary_manifest("float32")
    root = bundles.make_unary_bundle(tmp_path / "u", content, "Sqrt", 1)
    with pytest.warns(EnginecastWarning):
        engine = load(root, device="cuda")
    with pytest.raises(VerificationError, match=r"got 1 of 3 .* at \[0, 1\]"):
        engine.run({"x": torch.tensor([[1.0, -1.0, 4.0]]).cuda()}, as_dlpack=True)


def test_an_attached_engine_reads_and_gives_tensors_of_the_gpu(exports: Exports) -> None:
    encoder = CLIPTextModel.from_pretrained(exports.model("words-clip")).eval().cuda()
    pipe = SimpleNamespace(components={"text_encoder": encoder}, text_encoder=encoder)
    ids = torch.arange(18, device="cuda").reshape(2, 9)
    with torch.no_grad():
        expected = encoder(ids).last_hidden_state
    with pytest.warns(EnginecastWarning, match="verified on CPUExecutionProvider"):
        eager = attach(pipe, {"text_encoder": exports("words-clip").folder})
    found = pipe.text_encoder(ids).last_hidden_state
    assert found.device == pipe.text_encoder.device == ids.device
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    pipe.text_encoder.to("cpu")
    assert pipe.text_encoder(ids.cpu()).last_hidden_state.device.type == "cpu"
    eager.put_back()
