"""Loading: which engine, on what verdict, and without torch."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import bundles
import numpy as np
import pytest
from bundles import CPU
from onnx import TensorProto

from enginecast.errors import BundleError, EnginecastWarning, InputError, MissingError, UsageError
from enginecast.runtime.load import load
from enginecast.runtime.sessions.onnxruntime import OrtSession

CUDA = "CUDAExecutionProvider"
EMULATED = bundles.verdict("verified-by-emulation")


def bundle(tmp_path: Path, *engines: Any) -> Path:
    return bundles.make_bundle(tmp_path / "out", bundles.manifest(engines=engines))


def test_a_verified_engine_loads_without_a_word(tmp_path: Path) -> None:
    root = bundle(tmp_path, bundles.engine())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with load(root) as engine:
            assert engine.run(bundles.feeds())["hidden"].shape == (2, 3, bundles.WIDTH)
        load(root, require="verified").close()


def test_emulation_is_accepted_or_refused_on_demand(tmp_path: Path) -> None:
    root = bundle(tmp_path, bundles.engine(verdict=EMULATED))
    load(root, require="verified-by-emulation").close()
    with pytest.raises(
        BundleError, match=r"expected a verified engine, but .* emulation"
    ) as caught:
        load(root, require="verified")
    assert "enginecast verify" in caught.value.hint


def test_a_verdict_from_another_provider_is_warned_of_or_refused(tmp_path: Path) -> None:
    root = bundle(tmp_path, bundles.engine(verdict=bundles.verdict(provider=CUDA)))
    message = f"verified on {CUDA}, not on {CPU}"
    for require in (None, "verified-by-emulation"):
        with pytest.warns(EnginecastWarning, match=message):
            load(root, require=require)
    with pytest.raises(BundleError, match=message):
        load(root, require="verified")


@pytest.mark.parametrize("engines", [(), (bundles.engine(verdict=bundles.verdict("rejected")),)])
def test_a_rejected_engine_does_not_load(tmp_path: Path, engines: tuple[Any, ...]) -> None:
    root = bundle(tmp_path, *engines)
    with pytest.raises(BundleError, match="holds no engine that was verified"):
        load(root, require="verified-by-emulation")


@pytest.mark.parametrize("target", ["torchscript", "aotinductor", "tensorrt"])
def test_engines_that_are_code_need_consent(tmp_path: Path, target: str) -> None:
    root = bundle(tmp_path, bundles.engine(target=target))
    with pytest.raises(BundleError, match=f"an? {target} engine runs code when") as caught:
        load(root)
    assert "--allow-code" in caught.value.hint


@pytest.mark.parametrize(("target", "title"), [("tensorrt", ""), ("tensorrt-rtx", "-RTX")])
def test_tensorrt_engines_run_on_a_gpu_alone(tmp_path: Path, target: str, title: str) -> None:
    root = bundle(tmp_path, bundles.engine(target=target))
    with pytest.raises(UsageError, match=f"{CPU}: TensorRT{title} engines run on a GPU") as caught:
        load(root, device="cpu", allow_code=True)
    assert "device='cuda'" in caught.value.hint
    with pytest.raises(MissingError) as lacking:  # the device that nobody named is a GPU
        load(root, allow_code=True)
    # That of TensorRT-RTX was perhaps made on this machine.
    assert ("export the model on this machine" in lacking.value.hint) == (target == "tensorrt")


def test_damage_is_found_before_the_runtime_sees_a_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = bundle(tmp_path, bundles.engine())
    data = bytearray((root / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    (root / "weights.safetensors").write_bytes(data)

    def opened(*_: Any) -> None:
        pytest.fail("the runtime was called")

    with monkeypatch.context() as patch:
        patch.setattr(OrtSession, "open", opened)
        with pytest.raises(BundleError, match=r"weights\.safetensors has sha256"):
            load(root)
    load(root, check="size").close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device: expected cpu or cuda, got 'tpu'"),
        ({"threads": 0}, "threads: expected 1..4096, got 0"),
        ({"providers": []}, "providers: expected a list"),
        ({"providers": CPU}, "providers: expected a list"),
        ({"require": "rejected"}, "require: expected one of verified"),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(bundle(tmp_path, bundles.engine()), **options)


SCRIPT = """
import sys
from pathlib import Path
from enginecast.runtime.bundle.tensor_files import read_tensors, write_tensors
from enginecast.runtime.load import load
from enginecast.runtime.prompts import encode_prompts

folder = Path(sys.argv[1])
with load(folder / "out") as engine:
    prompts = encode_prompts(engine.folder, engine.manifest, ["red fox", ""])
    result = engine.run(prompts.batches[0])
    write_tensors(folder / "result.safetensors", result)
    read_tensors(folder / "result.safetensors")
heavy = [name for name in ("torch", "transformers", "onnx") if name in sys.modules]
sys.exit(f"imported {heavy}" if heavy else 0)
"""


def test_load_and_run_import_neither_torch_nor_transformers(tmp_path: Path) -> None:
    bundle(tmp_path, bundles.engine())
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "result.safetensors").is_file()


def test_an_engine_is_called_and_shown(tmp_path: Path) -> None:
    root = bundles.make_bundle(tmp_path / "out")
    engine = load(root)
    shown = (
        f"Engine({str(root)!r}, onnxruntime-cpu, fp32, verified:"
        " input_ids int64 [batch 1..4, sequence 2..6],"
        " attention_mask int64 [batch 1..4, sequence 2..6] ->"
        " hidden float32 [batch 1..4, sequence 2..6, 3])"
    )
    assert repr(engine) == shown
    feeds = bundles.feeds()
    wanted = engine.run(feeds)["hidden"]
    np.testing.assert_array_equal(engine(**feeds)["hidden"], wanted)
    np.testing.assert_array_equal(engine(feeds)["hidden"], wanted)
    ids = feeds.pop("input_ids")
    np.testing.assert_array_equal(engine(feeds, input_ids=ids)["hidden"], wanted)
    with pytest.raises(InputError, match="'attention_mask' was given twice"):
        engine(feeds, input_ids=ids, attention_mask=ids)
    engine.close()
    assert "verified, closed: input_ids" in repr(engine)


def test_an_engine_of_no_text_encodes_none(tmp_path: Path) -> None:
    content = bundles.unary_manifest("float32")
    made = bundles.make_unary_bundle(tmp_path / "out", content, "Neg", TensorProto.FLOAT)
    with load(made) as engine, pytest.raises(InputError, match="a bundle of a text model"):
        engine.encode("red")
