"""`--target openvino`: what is refused without it, and engines where it is installed."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from exports import cast
from lowering import lower
from programs import captured, rewritten
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

import enginecast
from enginecast.errors import InputError, LoweringError, MissingError, UsageError
from enginecast.exporters.onnx.lower import GRAPH_FILE
from enginecast.exporters.openvino.lower import lowering
from enginecast.exporters.openvino.numbers import require_numbers
from enginecast.exporters.registry import target_of
from enginecast.exporters.target import LoweringRequest
from enginecast.installation import install_command
from enginecast.runtime.bundle.manifest import Input
from enginecast.runtime.sessions.openvino import computes_bf16

Capture = pytest.CaptureFixture[str]


class Block(nn.Module):
    """Attention of two heads that does not see tokens below 4, which may be all of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.norm = nn.RMSNorm(16)
        self.out = nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        heads = self.norm(hidden).unflatten(-1, (2, 8)).transpose(1, 2)
        seen = (ids > 3)[:, None, None, :]
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=seen)
        joined: Tensor = self.norm(self.out(mixed.transpose(1, 2).flatten(2)) + hidden)
        return joined


def block() -> Block:
    torch.manual_seed(0)
    return Block().eval()


def tokens(batch: int = 2, length: int = 5) -> dict[str, Tensor]:
    torch.manual_seed(length)
    ids = torch.randint(40, (batch, length))
    ids[0] %= 4
    return {"ids": ids}


def test_without_openvino_an_export_says_how_to_get_it(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    done = cast(
        capsys, "export", "torch.nn:Identity", "-o", tmp_path / "out", "--target", "openvino"
    )
    assert done.code == 3
    assert "--target openvino needs openvino, which is not installed" in done.err
    assert install_command("openvino") in done.err


def test_an_old_openvino_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(__version__="2025.1.0-18503"))
    with pytest.raises(MissingError, match=r"needs openvino>=2026\.4, found openvino 2025\.1\.0"):
        target_of("openvino").require(None)


@pytest.mark.parametrize("precision", ["fp16", "mixed", "int8", "fp8-storage"])
def test_it_computes_in_fp32_and_bf16(precision: str) -> None:
    with pytest.raises(UsageError, match=f"--precision {precision} does not fit --target openvino"):
        target_of("openvino").pipeline(precision)


def test_the_graph_has_ops_of_onnx_alone(tmp_path: Path) -> None:
    given = tuple(tokens().values())
    program, _ = rewritten(captured(block(), *given), "canonicalize,fuse-rms-norm,fuse-attention")
    lower(program, tmp_path, reader="openvino")
    onnx.checker.check_model(tmp_path / GRAPH_FILE, full_check=True)
    graph = onnx.load(tmp_path / GRAPH_FILE)
    assert {node.domain for node in graph.graph.node} == {""}
    assert [node.op_type for node in graph.graph.node].count("Attention") == 1


class Numbers(nn.Module):
    def __init__(self, compute: Any) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.compute(ids)
        return found


@pytest.mark.parametrize(
    ("compute", "wrong"),
    [
        (lambda ids: ids * 31 + 7, ""),
        (lambda ids: (ids > 3).cumsum(1) * 1000, ""),
        (lambda ids: ids.clamp(0, 9) * 100_000_000, "int64 in int32"),
        (lambda ids: (ids * 2654435761) % 1000, "-2.654e+12..2.654e+12 at aten.mul"),
        (lambda ids: ids**4 + ids, "-1e+12..1e+12 at aten.pow"),
        (lambda ids: (ids * 1_000_000).sum(1), "at aten.sum"),
        (lambda ids: ids << 22, "at aten.__lshift__"),
        (lambda ids: ids.masked_fill(ids > 5, 2**40).amin(1), "at aten.masked_fill"),
        (lambda ids: torch.cat([ids - 2**31, ids], 1) + 1, "at aten.sub"),
        (lambda ids: (ids.double() + 1e-12).float(), "OpenVINO computes fp64 in fp32"),
    ],
)
def test_numbers_that_openvino_would_cut_are_refused(
    compute: Any, wrong: str, tmp_path: Path
) -> None:
    program = captured(Numbers(compute), torch.arange(12).reshape(3, 4))
    ready, _ = rewritten(program, lowering())
    spec = Input(
        name="ids", kind="tensor", dtype="int64", shape=(3, 4), minimum=-1000, maximum=1000
    )
    request = LoweringRequest(ready, tmp_path, ["out"], inputs=[spec])
    if not wrong:
        return require_numbers(request)
    with pytest.raises(LoweringError) as caught:
        require_numbers(request)
    assert wrong in caught.value.message
    return None


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("openvino", reason="OpenVINO is an optional package")
    folder = tmp_path_factory.mktemp("openvino") / "block"
    enginecast.compile(
        block(), folder, example=tokens(), target="openvino", threads=1, dynamic=["ids:1=1..32"]
    )
    return folder


def test_an_engine_is_verified_and_runs_at_other_sizes(made: Path) -> None:
    with enginecast.load(made, require="verified", threads=1) as engine:
        assert (engine.backend, engine.provider) == ("openvino", "openvino-cpu")
        assert "openvino" in engine.verdict.where.versions
        assert all(" in bf16" not in layer for layer in engine.layers())
        for given in (tokens(), tokens(1, 2), tokens(4, 17)):
            found = engine.run({name: tensor.numpy() for name, tensor in given.items()})
            wanted = block()(**given).detach()
            torch.testing.assert_close(
                torch.from_numpy(found["output_0"]), wanted, rtol=1e-5, atol=1e-5
            )


def test_an_engine_in_bf16_computes_in_it(made: Path, tmp_path: Path) -> None:
    layer = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    x = torch.randn(4, 32)
    folder = tmp_path / "low"
    enginecast.compile(
        layer, folder, example={"input": x}, target="openvino", precision="bf16", threads=1
    )
    if not computes_bf16():
        with pytest.raises(MissingError, match="OpenVINO computes in f32 on this CPU"):
            enginecast.load(folder, require="verified-by-emulation")
        return
    with enginecast.load(folder, require="verified") as engine:
        assert any(" in bf16" in layer for layer in engine.layers())
        given = {
            spec.name: x if spec.dtype == "float32" else x.bfloat16() for spec in engine.inputs
        }
        found = engine.run(given)["output_0"]
        lent = engine.run(given, as_dlpack=True)["output_0"]
    assert found.dtype == ml_dtypes.bfloat16
    torch.testing.assert_close(
        from_dlpack(lent).float(), torch.from_numpy(found.astype(np.float32))
    )


def test_what_is_no_int32_is_refused_where_it_is_fed(made: Path) -> None:
    from enginecast.runtime.sessions.openvino import _require_int32

    _require_int32("ids", np.array([2**31 - 1, -(2**31)]))
    with pytest.raises(InputError, match=r"input 'ids': expected values within int32"):
        _require_int32("ids", np.array([2**31]))


def test_an_op_that_openvino_lacks_is_named_with_its_line(made: Path, tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match=r"Det \(module '', test_openvino\.py:\d+\)"):
        enginecast.compile(
            Numbers(torch.det),
            tmp_path / "out",
            example={"ids": torch.randn(3, 3)},
            target="openvino",
        )
