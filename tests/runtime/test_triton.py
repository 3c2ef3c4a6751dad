"""Model repositories for Triton: what is written, and that a server computes the same."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bundles
import msgspec
import numpy as np
import pytest
import signing_keys
import torch
from exports import Exports, cast
from onnx import TensorProto
from triton_server import Server, TritonError, protobuf, read_config

from enginecast.errors import BundleError, UsageError
from enginecast.runtime.bundle.manifest import (
    EngineRecord,
    Guard,
    Input,
    Manifest,
    Output,
    ShapeRange,
    SizeCheck,
    Text,
)
from enginecast.runtime.bundle.reader import Bundle, open_bundle
from enginecast.runtime.bundle.staging import stage
from enginecast.runtime.load import load
from enginecast.serving.backends import backend_of, choose, require_servable
from enginecast.serving.batching import batching
from enginecast.serving.repository import MARKER, Repository, write_repository
from enginecast.serving.text_format import Name, text_format

Capture = pytest.CaptureFixture[str]
TEXTS = ["red fox", "blue", "green red blue fox red green blue", "", "no such word"]


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return open_bundle(bundles.make_bundle(tmp_path / "tiny.bundle"))


def changed(**changes: Any) -> Manifest:
    return bundles.manifest(**changes)


def written(tmp_path: Path, content: Manifest, **options: Any) -> Repository:
    made = bundles.make_bundle(tmp_path / "one.bundle", content)
    return write_repository(open_bundle(made), tmp_path / "models", **options)


def texts(*values: str) -> np.ndarray[Any, Any]:
    return np.array([[value.encode()] for value in values], dtype=object)


def config_of(repository: Repository, name: str) -> Any:
    return read_config(repository.folder / name)


def test_the_repository_of_a_text_model(bundle: Bundle, tmp_path: Path) -> None:
    done = write_repository(bundle, tmp_path / "models")
    files = {str(path.relative_to(done.folder)) for path in done.folder.rglob("*.*")}
    assert files == {
        "README.md",
        MARKER,
        "tiny/config.pbtxt",
        "tiny/1/model.onnx",
        "tiny/1/weights.safetensors",
        "tiny_tokenizer/config.pbtxt",
        "tiny_tokenizer/1/model.py",
        "tiny_tokenizer/1/tokenizer.json",
        "tiny_text/config.pbtxt",
        "tiny_text/1/.keep",
    }
    config = config_of(done, "tiny")
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
    marker = json.loads((done.folder / MARKER).read_text())
    assert marker["bundle"] == bundle.sha256
    assert marker["models"] == ["tiny", "tiny_tokenizer", "tiny_text"]
    readme = (done.folder / "README.md").read_text()
    for lost in ("sequence 2..6", "input_ids 0..8", "NaN"):
        assert lost in readme


def test_the_server_computes_what_the_engine_does(bundle: Bundle, tmp_path: Path) -> None:
    server = Server(write_repository(bundle, tmp_path / "models").folder)
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
    server = Server(done.folder)
    with load(tmp_path / "one.bundle") as engine:
        for group in ([one] for one in TEXTS):
            compare(server, engine, group)
        compare(server, engine, TEXTS[:4])


def compare(server: Server, engine: Any, group: list[str]) -> None:
    found, wanted = server.infer("one_text", {"text": texts(*group)}), engine.encode(group)
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


def test_a_wrong_text_gets_its_own_error(bundle: Bundle, tmp_path: Path) -> None:
    server = Server(write_repository(bundle, tmp_path / "models").folder)
    wrong = np.array([[b"red \xff"]], dtype=object)
    with pytest.raises(TritonError, match="text: expected UTF-8"):
        server.infer("tiny_text", {"text": wrong})
    assert server.infer("tiny_text", {"text": texts("red")})["hidden"].shape == (1, 2, 3)


def test_without_batches_requests_have_every_dimension(bundle: Bundle, tmp_path: Path) -> None:
    done = write_repository(bundle, tmp_path / "models", max_batch=0)
    server = Server(done.folder)
    config = server.configs["tiny"]
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    assert [list(one.dims) for one in (*config.input, *config.output)] == [
        [-1, -1],
        [-1, -1],
        [-1, -1, 3],
    ]
    with load(bundle.root) as engine:
        found = server.infer("tiny_text", {"text": texts("red fox", "blue").reshape(-1)})
        np.testing.assert_array_equal(found["hidden"], engine.encode(["red fox", "blue"])["hidden"])
    with pytest.raises(TritonError, match=r"expected 1\.\.4 texts, got 5"):
        server.infer("tiny_text", {"text": texts(*TEXTS).reshape(-1)})


def test_a_guard_is_an_output_and_stops_batches(tmp_path: Path) -> None:
    guard = Guard(output="guard_0", place="m.py:3", code="if x.sum() > 0", value="True")
    done = written(tmp_path, changed(guards=(guard,)))
    config = config_of(done, "one")
    assert config.max_batch_size == 0
    output = config.output[1]
    assert (output.name, list(output.dims), list(output.reshape.shape)) == ("guard_0", [1], [])
    assert output.HasField("reshape")
    assert any("'guard_0' has to be true" in note for note in done.notes)
    assert not config_of(done, "one_text").output[1].HasField("reshape")


def test_inputs_with_the_batch_alone_are_reshaped(tmp_path: Path) -> None:
    content = bundles.unary_manifest("float32")
    shape = {"shape": ("batch",)}
    content = msgspec.structs.replace(
        content,
        inputs=tuple(msgspec.structs.replace(one, **shape) for one in content.inputs),
        outputs=tuple(msgspec.structs.replace(one, **shape) for one in content.outputs),
    )
    with stage(tmp_path / "rows.bundle") as staging:
        write_rows(staging.folder)
        made = staging.publish(content)
    done = write_repository(open_bundle(made), tmp_path / "models")
    assert done.models == ("rows",)
    rows = np.array([[1.0], [-2.0]], dtype=np.float32)
    np.testing.assert_array_equal(Server(done.folder).infer("rows", {"x": rows})["y"], -rows)


def write_rows(folder: Path) -> None:
    from onnx import helper

    kinds = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ("batch",)) for name in ("x", "y")
    ]
    node = helper.make_node("Neg", ["x"], ["y"])
    bundles.save_model(
        helper.make_graph([node], "rows", kinds[:1], kinds[1:]), folder / "engine.onnx"
    )


OTHER = Input(name="scale", kind="tensor", dtype="float32", shape=(3,))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"inputs": (*bundles.manifest().inputs, OTHER)}, "dimension 0 of input 'scale'"),
        (
            {"outputs": (Output(name="mean", dtype="float32", shape=(3,)),)},
            "dimension 0 of output 'mean'",
        ),
        (
            {"outputs": (Output(name="far", dtype="float32", shape=("batch", "batch")),)},
            "has 'batch' twice",
        ),
        ({"inputs": (OTHER,)}, "does not vary"),
    ],
)
def test_without_a_common_batch_there_are_no_batches(changes: Any, reason: str) -> None:
    content = changed(**changes)
    assert reason in (found := batching(content, content.engines[0], None)).why
    assert (found.most, found.preferred) == (0, ())
    assert batching(content, content.engines[0], 0).most == 0
    with pytest.raises(UsageError, match=r"--max-batch: expected 0, got 2: .*" + reason):
        batching(content, content.engines[0], 2)


def test_batches_follow_the_ranges() -> None:
    record = bundles.engine()
    content = changed(symbols={"batch": (2, 30), "sequence": (2, 6)}, steps={"batch": 4})
    found = batching(content, record, None)
    assert (found.most, found.preferred) == (28, (28,))
    assert len(found.notes) == 2
    tuned = ShapeRange(name="input_ids", least=(2, 2), optimal=(8, 4), greatest=(30, 6))
    planned = bundles.engine(target="tensorrt", profile=(tuned,))
    assert batching(content, planned, None).preferred == (8, 28)
    assert batching(content, planned, 8).preferred == (8,)
    for wrong in (1, 31):
        with pytest.raises(UsageError, match=r"expected 0 or 2\.\.30"):
            batching(content, record, wrong)
    check = SizeCheck(condition="batch * sequence != 12")
    found = batching(changed(size_checks=(check,)), record, None)
    assert (found.most, found.preferred) == (4, ())
    assert "batch * sequence != 12" in found.why


def test_backends() -> None:
    content = changed()
    plan = bundles.engine(
        target="tensorrt",
        file="engine.plan",
        weights=None,
        requires={"tensorrt": "10.15", "arch": "sm90"},
    )
    backend = backend_of(content, plan)
    assert (backend.platform, backend.file) == ("tensorrt_plan", "model.plan")
    assert "arch sm90, tensorrt 10.15" in backend.notes[0]
    stripped = msgspec.structs.replace(plan, network="network.onnx")
    with pytest.raises(UsageError, match="the plan has no weights"):
        backend_of(content, stripped)
    compiled = bundles.engine(target="aotinductor", file="engine.pt2")
    with pytest.raises(UsageError, match="no backend that runs it") as refused:
        choose(changed(engines=(compiled,)))
    assert "--also onnxruntime" in refused.value.hint
    assert choose(changed(engines=(compiled, bundles.engine())))[0].target == "onnxruntime"
    with pytest.raises(UsageError, match=r"aotinductor.*; .*the plan has no weights"):
        choose(changed(engines=(compiled, stripped)))
    with pytest.raises(UsageError, match="--target: expected onnxruntime, got openvino"):
        choose(content, "openvino")
    openvino = backend_of(content, bundles.engine(target="openvino", file="openvino.onnx"))
    assert (openvino.name, openvino.weights) == ("openvino", True)
    assert batching(content, plan, None, reason=openvino.batch_reason).most == 0
    require_servable(["aotinductor", "onnxruntime"])
    with pytest.raises(UsageError, match="--triton: an engine of aotinductor"):
        require_servable(["aotinductor"])


def test_bfloat16_goes_to_tensorrt_alone() -> None:
    content = changed(outputs=(Output(name="hidden", dtype="bfloat16", shape=("batch", 3)),))
    with pytest.raises(UsageError, match="output 'hidden' is bfloat16"):
        choose(content)
    plan = bundles.engine(target="tensorrt", file="engine.plan", weights=None)
    assert choose(changed(engines=(plan,)))[0] is plan


def test_names_of_torchscript_end_in_numbers(tmp_path: Path) -> None:
    table = torch.from_numpy(bundles.table())

    class Masked(torch.nn.Module):
        def forward(
            self, input_ids: torch.Tensor, attention_mask: torch.Tensor
        ) -> tuple[torch.Tensor]:
            return (table[input_ids] * attention_mask[..., None],)

    given = tuple(torch.from_numpy(value) for value in bundles.feeds().values())
    record = bundles.engine(
        target="torchscript",
        file="model.ts.pt",
        weights=None,
        providers=("torch-cpu",),
        verdict=bundles.verdict(provider="torch-cpu"),
    )
    with stage(tmp_path / "one.bundle") as staging:
        bundles.write_tokenizer(staging.folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.trace(Masked(), given).save(str(staging.folder / "model.ts.pt"))
        made = staging.publish(changed(engines=(record,)))
    done = write_repository(open_bundle(made), tmp_path / "models")
    config = config_of(done, "one")
    assert (config.backend, config.default_model_filename) == ("pytorch", "model.pt")
    names = [one.name for one in (*config.input, *config.output)]
    assert names == ["input_ids__0", "attention_mask__1", "hidden__0"]
    found = Server(done.folder).infer("one_text", {"text": texts("red fox", "blue")})
    assert list(found) == ["hidden", "attention_mask"]
    with load(made, allow_code=True) as engine:
        wanted = engine.encode(["red fox", "blue"])
    np.testing.assert_allclose(found["hidden"], wanted["hidden"], rtol=1e-6)


def test_gpu_engines_get_a_gpu(tmp_path: Path) -> None:
    record = bundles.engine(verdict=bundles.verdict(provider="CUDAExecutionProvider"))
    done = written(tmp_path, changed(engines=(record,)))
    (group,) = config_of(done, "one").instance_group
    assert group.kind == group.Kind.Value("KIND_GPU")
    emulated = msgspec.structs.replace(bundles.verdict(), arithmetic="ort-cuda")
    assert backend_of(changed(), bundles.engine(verdict=emulated)).on_gpu
    assert not backend_of(changed(), record, "cpu").on_gpu
    with pytest.raises(UsageError, match="--device: expected cpu or cuda, got gpu"):
        choose(changed(), device="gpu")
    plan = msgspec.structs.replace(record, target="tensorrt", file="engine.plan", weights=None)
    with pytest.raises(UsageError, match=r"--device: engine\.plan runs on cuda alone, got cpu"):
        choose(changed(engines=(plan,)), device="cpu")


def test_a_target_that_exists_is_refused(bundle: Bundle, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "models"
    target.mkdir()
    ran = cast(capsys, "triton", bundle.root, "-o", target)
    assert (ran.code, ran.out) == (2, "")
    assert f"{target}: exists and is not a Triton repository" in ran.err
    assert cast(capsys, "triton", bundle.root, "-o", target, "--overwrite").code == 2
    target.rmdir()
    assert cast(capsys, "triton", bundle.root, "-o", target).code == 0
    ran = cast(capsys, "triton", bundle.root, "-o", target, "--name", "b")
    assert ran.code == 2
    assert f"{target}: a Triton repository already exists\nReplace it with --overwrite." in ran.err
    assert (target / "tiny").is_dir()
    ran = cast(capsys, "triton", bundle.root, "-o", target, "--name", "b", "--overwrite", "--json")
    assert ran.json["models"] == ["b", "b_tokenizer", "b_text"]
    assert ran.json["max_batch_size"] == 4
    assert not (target / "tiny").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b"])
def test_names_that_are_no_folders_are_refused(name: str, bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--name"):
        write_repository(bundle, tmp_path / "models", name=name)
    assert not (tmp_path / "models").exists()


def test_a_damaged_bundle_is_refused(bundle: Bundle, tmp_path: Path, capsys: Capture) -> None:
    weights = bundle.root / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    ran = cast(capsys, "triton", bundle.root, "-o", tmp_path / "models")
    assert ran.code == 2
    assert "weights.safetensors" in ran.err
    with pytest.raises(BundleError):  # changed after it was opened
        write_repository(bundle, tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_a_bundle_that_nobody_signed_is_refused(
    bundle: Bundle, tmp_path: Path, capsys: Capture
) -> None:
    private, public = signing_keys.keys(tmp_path)
    target = tmp_path / "models"
    wanted = ("triton", bundle.root, "-o", target, "--trust", public)
    assert cast(capsys, *wanted).code == 2
    assert not target.exists()
    assert cast(capsys, "sign", bundle.root, "--key", private).code == 0
    assert cast(capsys, *wanted).code == 0


def test_a_file_instead_of_a_folder(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    assert cast(capsys, "triton", file, "-o", tmp_path / "models").code == 2


def test_text_format_escapes() -> None:
    message = {
        "name": 'a "b" \\ \n é',
        "backend": "x",
        "input": [{"name": "x", "data_type": Name("TYPE_BOOL"), "dims": (), "optional": True}],
        "dynamic_batching": {},
    }
    from google.protobuf import text_format as protobuf_format

    found = protobuf_format.Parse(text_format(message), protobuf().ModelConfig())
    assert found.name == message["name"]
    assert found.input[0].optional
    assert found.HasField("dynamic_batching")


def engines() -> Iterator[EngineRecord]:
    for precision in ("fp32", "fp16"):
        for quantized in ("", "int8", "fp8"):
            yield bundles.engine(precision=precision, quantized=quantized)


def test_options_that_an_engine_needs_are_in_the_config() -> None:
    found = {(one.precision, one.quantized): backend_of(changed(), one) for one in engines()}
    assert found["fp32", ""].level is None
    assert found["fp16", ""].level == 1
    assert found["fp16", ""].parameters == {"enable_mem_arena": "0"}
    assert {found[key].level for key in found if key[1]} == {-1}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8-storage"])
def test_exported_engines_compute_the_same_in_the_server(
    precision: str, exports: Exports, tmp_path: Path
) -> None:
    made = exports("words-clip" if precision != "int8-storage" else "t5", precision)
    opened = open_bundle(made.folder)
    done = write_repository(opened, tmp_path / "models", name="m", device="cpu")
    server = Server(done.folder)
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


def test_export_writes_a_repository_too(
    exports: Exports, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = exports.model("plain")
    monkeypatch.chdir(exports.root)
    wanted = ("export", model, "-o", tmp_path / "p.bundle", "--no-speed", "--json")
    ran = cast(capsys, *wanted, "--triton", tmp_path / "p.bundle" / "..")
    assert ran.code == 2  # it is there
    ran = cast(capsys, *wanted, "--triton", tmp_path / "models", "--target", "aotinductor")
    assert (ran.code, ran.json["error"]) == (2, "UsageError")
    assert not (tmp_path / "p.bundle").exists()
    ran = cast(capsys, *wanted, "--triton", tmp_path / "models")
    assert ran.code == 0
    assert ran.json["triton"]["models"] == ["p"]
    Server(tmp_path / "models")
