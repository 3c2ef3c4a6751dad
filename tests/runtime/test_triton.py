"""examples/triton_server: what is written, and that a server computes the same."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bundles
import msgspec
import numpy as np
import pytest
from exports import Exports
from triton_server import Server, TritonError, protobuf, read_config

from enginecast.errors import BundleError, UsageError
from enginecast.runtime.bundle.manifest import Manifest, Output, Text
from enginecast.runtime.bundle.reader import Bundle, open_bundle
from enginecast.runtime.load import load

ROOT = next(one for one in Path(__file__).parents if (one / "pyproject.toml").is_file())
SCRIPT = ROOT / "examples" / "triton_server" / "write_repository.py"
TEXTS = ["red fox", "blue", "green red blue fox red green blue", "", "no such word"]


def recipe() -> Any:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("write_repository", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


triton = recipe()


def write(bundle: Bundle, target: Path, **options: Any) -> Path:
    triton.write_repository(bundle, target, **options)
    return target


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return open_bundle(bundles.make_bundle(tmp_path / "tiny.bundle"))


def changed(**changes: Any) -> Manifest:
    return bundles.manifest(**changes)


def written(tmp_path: Path, content: Manifest) -> Path:
    made = bundles.make_bundle(tmp_path / "one.bundle", content)
    return write(open_bundle(made), tmp_path / "models")


def texts(*values: str) -> np.ndarray[Any, Any]:
    return np.array([[value.encode()] for value in values], dtype=object)


def test_the_repository_of_a_text_model(bundle: Bundle, tmp_path: Path) -> None:
    done = write(bundle, tmp_path / "models")
    files = {str(path.relative_to(done)) for path in done.rglob("*.*")}
    assert files == {
        "README.md",
        triton.MARKER,
        "tiny/config.pbtxt",
        "tiny/1/model.onnx",
        "tiny/1/weights.safetensors",
        "tiny_tokenizer/config.pbtxt",
        "tiny_tokenizer/1/model.py",
        "tiny_tokenizer/1/tokenizer.json",
        "tiny_text/config.pbtxt",
        "tiny_text/1/.keep",
    }
    config = read_config(done / "tiny")
    types = protobuf().DataType
    assert (config.backend, config.platform) == ("onnxruntime", "onnxruntime_onnx")
    assert config.max_batch_size == 4
    assert [(one.name, one.data_type, list(one.dims)) for one in config.input] == [
        ("input_ids", types.Value("TYPE_INT64"), [-1]),
        ("attention_mask", types.Value("TYPE_INT64"), [-1]),
    ]
    assert [(one.name, one.data_type, list(one.dims)) for one in config.output] == [
        ("hidden", types.Value("TYPE_FP32"), [-1, 3])
    ]
    assert list(config.dynamic_batching.preferred_batch_size) == [4]
    assert config.dynamic_batching.max_queue_delay_microseconds == 5000
    (group,) = config.instance_group
    assert (group.count, group.kind) == (1, group.Kind.Value("KIND_CPU"))
    marker = json.loads((done / triton.MARKER).read_text())
    assert marker["bundle"] == bundle.sha256
    readme = (done / "README.md").read_text()
    for lost in ("sequence is 2..6", "input_ids is 0..8", "NaN"):
        assert lost in readme


def test_the_server_computes_what_the_engine_does(bundle: Bundle, tmp_path: Path) -> None:
    server = Server(write(bundle, tmp_path / "models"))
    requests = [bundles.feeds(batch, 3) for batch in (1, 2, 1)]
    requests[0]["input_ids"] += 1
    with load(bundle.root) as engine:
        for one, found in zip(requests, server.batch("tiny", requests), strict=True):
            np.testing.assert_array_equal(found["hidden"], engine.run(one)["hidden"])
    with pytest.raises(TritonError, match="over 4"):
        server.infer("tiny", bundles.feeds(5, 3))


@pytest.mark.parametrize("side", ["right", "left"])
def test_texts_become_what_the_engine_makes_of_them(side: Any, tmp_path: Path) -> None:
    text = Text(padding_id=0, max_length=5, padding_side=side)
    done = written(tmp_path, changed(text=text, steps={"sequence": 3}))
    server = Server(done)
    with load(tmp_path / "one.bundle") as engine:
        for group in ([one] for one in TEXTS):
            compare(server, engine, group)
        compare(server, engine, TEXTS[:4])


def compare(server: Server, engine: Any, group: list[str]) -> None:
    found, wanted = server.infer("one_text", {"text": texts(*group)}), engine.encode(group)
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


def test_what_triton_does_not_run_is_refused() -> None:
    plan = bundles.engine(target="tensorrt", file="engine.plan", weights=None)
    stripped = msgspec.structs.replace(plan, network="network.onnx")
    compiled = bundles.engine(target="aotinductor", file="engine.pt2")
    assert triton.engine_of(changed(engines=(compiled, plan))) is plan
    with pytest.raises(UsageError, match="no engine of aotinductor, tensorrt") as refused:
        triton.engine_of(changed(engines=(compiled, stripped)))
    assert "--also onnxruntime" in refused.value.hint
    output = (Output(name="hidden", dtype="bfloat16", shape=("batch", 3)),)
    with pytest.raises(UsageError, match="'hidden' is bfloat16"):
        triton.engine_of(changed(outputs=output))
    assert triton.engine_of(changed(outputs=output, engines=(plan,))) is plan


def test_a_target_that_exists_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    target = tmp_path / "models"
    target.mkdir()
    command = [sys.executable, str(SCRIPT), str(bundle.root), "-o", str(target)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert f"{target}: exists and is not a Triton repository" in ran.stderr
    target.rmdir()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    with pytest.raises(BundleError, match="a Triton repository already exists"):
        write(bundle, target)
    assert (write(bundle, target, name="b", overwrite=True) / "b_text").is_dir()
    assert not (target / "tiny").exists()


@pytest.mark.parametrize(
    ("precision", "quantized", "level", "arena"),
    [("fp32", "", 0, ""), ("fp16", "", 1, "0"), ("fp32", "int8", -1, ""), ("fp16", "fp8", -1, "")],
)
def test_options_that_an_engine_needs_are_in_the_config(
    precision: Any, quantized: str, level: int, arena: str, tmp_path: Path
) -> None:
    record = bundles.engine(precision=precision, quantized=quantized)
    config = read_config(written(tmp_path, changed(engines=(record,))) / "one")
    assert config.optimization.graph.level == level
    assert config.parameters["enable_mem_arena"].string_value == arena


@pytest.mark.parametrize(
    "precision",
    [
        "fp32",
        pytest.param("fp16", marks=pytest.mark.slow),
        pytest.param("int8-storage", marks=pytest.mark.slow),
    ],
)
def test_exported_engines_compute_the_same_in_the_server(
    precision: str, exports: Exports, tmp_path: Path
) -> None:
    made = exports("words-clip" if precision != "int8-storage" else "t5", precision)
    opened = open_bundle(made.folder)
    done = write(opened, tmp_path / "models", name="m")
    server = Server(done)
    prompts = ["a photo of a fox", "red"]
    outcome: Any = opened.manifest.engines[0].verdict.outcome
    with load(made.folder, require=outcome) as engine:
        wanted = engine.encode(prompts)
        found = server.infer("m_text", {"text": texts(*prompts)})
        for name, value in wanted.items():
            limit = 1e-5 if precision != "fp16" else 2e-3
            np.testing.assert_allclose(
                found[name].astype(np.float64), value.astype(np.float64), atol=limit, rtol=limit
            )
