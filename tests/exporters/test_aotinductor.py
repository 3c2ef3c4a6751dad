"""`--target aotinductor`: one engine that is compiled once, and what is refused of it."""

import shutil
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch
from exports import cast, reseal
from models import tiny_t5
from programs import captured, rewritten
from torch import nn
from torch.export.pt2_archive import _package

import enginecast
from enginecast.capture.refusals.explain import Refusal
from enginecast.capture.tracing.attempt import RefusedError
from enginecast.compiler.export import session
from enginecast.compiler.export.session import ExportSession, export
from enginecast.compiler.publication.bundle import Export
from enginecast.compiler.request import ExportRequest
from enginecast.errors import BundleError, CaptureError, LoweringError, MissingError
from enginecast.exporters.aotinductor.lower import lower_to_aotinductor, lowering
from enginecast.exporters.target import LoweringRequest
from enginecast.runtime.bundle.manifest import MANIFEST_NAME
from enginecast.runtime.bundle.manifest_json import decode, encode
from enginecast.runtime.bundle.reader import open_bundle
from enginecast.runtime.values.device_tensor import DeviceTensor


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """A T5 of one layer in bf16.  Compiling takes 15 s, so that this is the only one here."""
    root = tmp_path_factory.mktemp("aotinductor")
    model = tiny_t5(root / "t5", layers=1)
    done = export(ExportRequest(str(model), root / "out", "aotinductor", "bf16"))
    assert done.bundle is not None, done.report.verdict.reasons
    return done


@pytest.fixture
def copied(made: Export, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(made.folder, tmp_path / "copy"))


def test_tensors_are_taken_where_they_lie_and_not_written_to(made: Export) -> None:
    given = feeds(3, 7)
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}
    with enginecast.load(made.folder, allow_code=True) as engine:
        wanted = engine.run(given)
        found = engine.run({name: DeviceTensor(tensor) for name, tensor in tensors.items()})
    assert found.backend == "aotinductor-cpu"
    np.testing.assert_array_equal(found["last_hidden_state"], wanted["last_hidden_state"])
    assert all(torch.equal(tensors[name], torch.from_numpy(given[name])) for name in given)


def feeds(batch: int, tokens: int) -> dict[str, Any]:
    drawn = np.random.default_rng(batch * tokens)
    mask = np.ones((batch, tokens), np.int64)
    mask[-1, tokens // 2 + 1 :] = 0
    return {"input_ids": drawn.integers(2, 90, (batch, tokens)), "attention_mask": mask}


def edited(bundle: Path, **changes: Any) -> Path:
    """The bundle as if its engine had been published so."""
    path = bundle / MANIFEST_NAME
    content = decode(path.read_bytes())
    record = msgspec.structs.replace(content.engines[0], **changes)
    path.write_bytes(encode(msgspec.structs.replace(content, engines=(record,))))
    return bundle


def test_it_runs_in_bf16_on_the_cpu_and_is_verified(made: Export) -> None:
    verdict = made.report.verdict
    assert (verdict.outcome, verdict.engine) == ("verified", "ran")
    assert verdict.where.provider == "torch-cpu"
    # A T5 in fp32 would be 1000 times better than this floor: it is true bf16.
    assert verdict.outputs[0].error is not None
    assert verdict.outputs[0].error > 1e-3
    assert {f.kind: (f.program, f.engine, f.missing) for f in made.report.fusions} == {
        "rms-norm": (3, 3, ()),
        "residual+norm": (2, 2, ()),
        "attention": (1, 1, ()),
    }


def test_the_package_holds_neither_sources_nor_weights_nor_paths(made: Export) -> None:
    with zipfile.ZipFile(made.folder / "engine.pt2") as package:
        names = package.namelist()
        content = b"".join(package.read(name) for name in names)
    assert [name for name in names if name.endswith(".so")]
    assert not [name for name in names if name.endswith((".cpp", ".h", ".o"))]
    for path in (str(Path(torch.__file__).parent), str(Path.home()), "/tmp/", str(made.folder)):
        assert path.encode() not in content
    assert len(content) < 3 << 20


@pytest.mark.parametrize("shape", [(1, 2), (3, 7), (5, 64)])
def test_several_shapes_are_right(made: Export, shape: tuple[int, int]) -> None:
    from transformers import T5EncoderModel

    eager = T5EncoderModel.from_pretrained(made.folder.parent / "t5").eval()
    given = feeds(*shape)
    with enginecast.load(made.folder, allow_code=True, require="verified") as engine:
        found = engine.run(given)["last_hidden_state"].astype(np.float32)
    with torch.no_grad():
        wanted = eager(**{k: torch.from_numpy(v) for k, v in given.items()}).last_hidden_state
    keep = given["attention_mask"] != 0
    error = np.linalg.norm((found - wanted.numpy())[keep]) / np.linalg.norm(wanted.numpy()[keep])
    assert 1e-4 < error < 0.05


def test_it_is_code_and_needs_leave_to_run(
    made: Export, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BundleError, match="an aotinductor engine runs code when it is loaded"):
        enginecast.load(made.folder)
    assert cast(capsys, "verify", made.folder).code == 2
    ran = cast(capsys, "verify", made.folder, "--allow-code", "--json")
    assert (ran.code, ran.json["verdict"]["outcome"]) == (0, "verified")


def test_a_changed_byte_is_refused_before_it_is_loaded(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = copied / "engine.pt2"
    content = bytearray(package.read_bytes())
    content[len(content) // 2] ^= 1
    package.write_bytes(content)
    monkeypatch.setattr(_package, "load_pt2", lambda *_, **__: pytest.fail("ran"))
    for check in ("full", "size"):
        with pytest.raises(BundleError, match=r"engine\.pt2 has sha256"):
            enginecast.load(copied, allow_code=True, check=check)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("torch", "2.9", r"made for torch 2\.9, and here is 2\.\d+"),
        ("platform", "linux s390x", "made for platform linux s390x, and here is"),
        ("cpu", "avx512 amx_fp99", "made for a CPU with avx512 amx_fp99, and this one lacks"),
        ("moon", "full", "asks for moon full, which this enginecast does not know"),
    ],
)
def test_code_for_another_machine_is_refused(
    copied: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str, said: str
) -> None:
    requires = open_bundle(copied).manifest.engines[0].requires
    edited(copied, requires={**requires, key: value})
    monkeypatch.setattr(_package, "load_pt2", lambda *_, **__: pytest.fail("ran"))
    with pytest.raises(MissingError, match=said) as refused:
        enginecast.load(copied, allow_code=True)
    assert refused.value.exit_code == 3
    assert refused.value.message.count(";") == 0


def test_missing_weights_are_refused(made: Export, copied: Path) -> None:
    (copied / "weights.safetensors").unlink()
    with pytest.raises(BundleError, match=r"weights\.safetensors is missing"):
        enginecast.load(copied, allow_code=True)
    shutil.copyfile(made.folder / "weights.safetensors", copied / "weights.safetensors")
    edited(copied, weights=None)
    (copied / "weights.safetensors").unlink()
    reseal(copied)
    with pytest.raises(BundleError, match="its code reads weights, and the bundle has no such"):
        enginecast.load(copied, allow_code=True)


def test_what_is_not_a_package_is_refused(copied: Path) -> None:
    (copied / "engine.pt2").write_bytes(b"no archive" * 50)
    reseal(copied)
    with pytest.raises(BundleError, match=r"engine\.pt2: torch refuses the package"):
        enginecast.load(copied, allow_code=True)


def test_there_is_no_fall_back_to_another_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = Refusal(
        kind="data-dependent-branch",
        file="model.py",
        line=7,
        code="if x.sum() > 0:",
        reason="a branch on values",
        hint="",
        detail="",
    )

    def refuse(*_: object) -> None:
        raise RefusedError(refusal)

    monkeypatch.setattr(session, "prepare", refuse)
    goes_on = LoweringError("went on")
    monkeypatch.setattr(ExportSession, "_of_script", Mock(side_effect=goes_on))
    example = {"input": torch.rand(2, 3)}
    with pytest.raises(CaptureError, match="TorchScript does not help: went on"):
        export(ExportRequest(nn.Linear(3, 3), tmp_path / "a", example=example))
    with pytest.raises(RefusedError):
        export(ExportRequest(nn.Linear(3, 3), tmp_path / "b", "aotinductor", example=example))


def test_a_machine_without_compiler_misses_it(tmp_path: Path) -> None:
    program, _ = rewritten(captured(nn.Linear(3, 3), torch.rand(2, 3)), lowering("cpu"))
    with (
        torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}),
        pytest.raises(MissingError, match=r"no C\+\+ compiler here") as refused,
    ):
        lower_to_aotinductor(LoweringRequest(program, tmp_path, ("out",)))
    assert "g++" in refused.value.hint
    assert list(tmp_path.iterdir()) == []
