"""`load(prefer=...)`: the backends are tried in their order, and no step is silent."""

import warnings
from pathlib import Path
from typing import Any

import bundles
import onnxruntime
import pytest
from bundles import CPU

from enginecast.errors import BundleError, EnginecastWarning, MissingError, UsageError
from enginecast.installation import install_command
from enginecast.runtime.bundle.staging import stage
from enginecast.runtime.engine import Engine
from enginecast.runtime.load import load
from enginecast.runtime.sessions.registry import session_class

CHAIN = ["tensorrt", "onnxruntime-cuda", "onnxruntime-cpu"]
NO_CUDA = pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(),
    reason="this ONNX Runtime has the CUDA provider",
)
PLAN = b"ftrt: bytes of no plan, written by hand"


def two_engines(tmp_path: Path, **changes: Any) -> Path:
    """A bundle with an ONNX engine, and a TensorRT record over bytes that nothing can load."""
    kind = {"target": "tensorrt", "providers": ("tensorrt",)}
    plan = bundles.engine(file="engine.plan", weights=None, **kind)
    content = bundles.manifest(engines=(plan, bundles.engine(**changes)))
    with stage(tmp_path / "out") as staging:
        bundles.write_engine(staging.folder)
        bundles.write_tokenizer(staging.folder)
        (staging.folder / "engine.plan").write_bytes(PLAN)
        return staging.publish(content)


def loaded(root: Path, prefer: list[str], **options: Any) -> tuple[Engine, list[str]]:
    """The engine, and what was warned of, each of it at this file's line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = load(root, prefer=prefer, **options)
    assert all(one.category is EnginecastWarning for one in caught)
    assert all(one.filename == __file__ for one in caught)
    return engine, [str(one.message) for one in caught]


@NO_CUDA
def test_every_step_of_the_chain_is_reported_with_its_whole_reason(tmp_path: Path) -> None:
    root = two_engines(tmp_path)
    engine, reported = loaded(root, CHAIN, allow_code=True)
    with engine:
        assert engine.backend == "onnxruntime-cpu"
        outputs = engine.run(bundles.feeds())
    first, second = reported
    assert first.startswith(f"{root}: no tensorrt: engine.plan: ")
    assert first.endswith("\ntrying onnxruntime-cuda next")
    assert "no onnxruntime-cuda: CUDAExecutionProvider: not in this ONNX Runtime" in second
    assert install_command("cuda") in second
    assert second.endswith("\ntrying onnxruntime-cpu next")
    assert outputs.backend == "onnxruntime-cpu"


def test_what_is_code_is_not_opened_without_consent(tmp_path: Path) -> None:
    engine, (reported,) = loaded(two_engines(tmp_path), ["tensorrt", "onnxruntime-cpu"])
    assert engine.record.target == "onnxruntime"
    assert "a tensorrt engine runs code when it is loaded. If you trust" in reported
    assert "--allow-code" in reported


def test_when_all_fail_one_error_lists_each_with_its_reason(tmp_path: Path) -> None:
    root = two_engines(tmp_path, precision="bf16")
    with pytest.warns(EnginecastWarning, match="no tensorrt"), pytest.raises(MissingError) as found:
        load(root, prefer=["tensorrt", "onnxruntime-cpu"], allow_code=True)
    lines = found.value.message.splitlines()
    assert lines[0] == f"{root}: none of the preferred backends is available:"
    assert lines[1].startswith("  tensorrt: engine.plan: ")
    assert lines[2].startswith("  onnxruntime-cpu: engine.onnx: a bf16 engine")
    assert "device='cuda'" in lines[2]
    assert found.value.exit_code == 3


def test_a_verdict_that_does_not_suffice_is_a_reason_too(tmp_path: Path) -> None:
    root = two_engines(tmp_path, verdict=bundles.verdict("verified-by-emulation"))
    with pytest.raises(MissingError, match="expected a verified engine, but it was verified by em"):
        load(root, prefer=["onnxruntime-cpu"], require="verified")
    _, (reported,) = loaded(root, ["onnxruntime-cpu"])
    assert reported.endswith("by emulation and has not run on its target")


@pytest.mark.parametrize("check", ["full", "size"])
def test_a_damaged_bundle_is_never_stepped_over(tmp_path: Path, check: Any) -> None:
    root = two_engines(tmp_path)
    (root / "engine.plan").write_bytes(PLAN[::-1])
    with pytest.raises(BundleError, match=r"engine\.plan has sha256"):
        load(root, prefer=["tensorrt", "onnxruntime-cpu"], allow_code=True, check=check)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefer": ["tensorrt", "npu"]}, "no backend is called 'npu'\nThere are tensorrt, "),
        ({"prefer": []}, "prefer: expected a list of backends"),
        ({"prefer": "tensorrt"}, "prefer: expected a list of backends, got 'tensorrt'"),
        ({"prefer": ["tensorrt", "tensorrt"]}, "tensorrt is listed twice"),
        ({"prefer": ["tensorrt"], "device": "cuda"}, "leave device and providers out"),
        ({"prefer": ["tensorrt"], "providers": [CPU]}, "leave device and providers out"),
    ],
)
def test_wrong_preferences(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as found:
        load(two_engines(tmp_path), **options)
    assert message in str(found.value)


def called(target: str, provider: str) -> str:
    """What a session of a target on a provider calls itself."""
    opened = type("Opened", (session_class(target),), {"provider": provider})
    backend: str = object.__new__(opened).backend
    return backend
