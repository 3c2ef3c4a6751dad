"""Programs in pieces: they give what the whole gives, and what is compiled once is equal."""

import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exports import cast
from programs import captured, outputs, rewritten
from test_regions import BATCH, Mixer, Stack
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

import enginecast
from enginecast.compiler.request import ExportRequest
from enginecast.errors import BundleError, UsageError
from enginecast.exporters.aotinductor import regional
from enginecast.exporters.aotinductor.lower import lowering, names_of
from enginecast.exporters.aotinductor.options import AOTInductorOptions
from enginecast.exporters.aotinductor.regional import Split, split
from enginecast.passes.ir.deferred_weights import deferred_weights
from enginecast.runtime.sessions.aotinductor import Pieces


@pytest.fixture(autouse=True)
def _small_regions_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regional, "LEAST_SAVED", 1)


INPUTS = torch.randn(2, 4, 8), torch.randn(2, 8)


def lowered(module: nn.Module, passes: str = "canonicalize,fuse-gelu") -> ExportedProgram:
    program = captured(module, *INPUTS, dynamic=BATCH)
    return rewritten(program, f"{passes},{lowering('cpu')}")[0]


def run(program: ExportedProgram, found: Split, *inputs: Tensor) -> list[Tensor]:
    """As a session runs it, with the graph of each piece in place of its code."""

    def stand_in(piece: ExportedProgram) -> Any:
        module = GraphModule({}, piece.graph)

        def boxed_run(given: list[Tensor]) -> tuple[Tensor, ...]:
            metas = [node.meta["val"] for node in piece.graph.nodes if node.op == "placeholder"]
            for tensor, meta in zip(given, metas, strict=True):
                assert tensor.is_contiguous()
                assert tensor.dtype == meta.dtype
            return tuple(module(*given))

        return SimpleNamespace(loader=SimpleNamespace(boxed_run=boxed_run))

    weights = deferred_weights(program)
    names = names_of(program, ["y"], weights, found)
    stored = {weight.name: weight.compute() for weight in weights.values()}
    given = {name: stored[weight] for name, weight in names["weights"].items()}
    pieces = {name: stand_in(piece) for name, piece in found.pieces.items()}
    with torch.no_grad():
        return Pieces(pieces, given, names, "cpu")(inputs)


def require_same(module: nn.Module, **how: str) -> Split:
    program = lowered(module, **how)
    found = split(program)
    assert isinstance(found, Split), found
    plain = captured(module, *INPUTS, dynamic=BATCH)
    for batch in (1, 2, 5):
        torch.manual_seed(batch)
        inputs = torch.randn(batch, 4, 8), torch.randn(batch, 8)
        wanted = outputs(plain, *inputs)
        for result, expected in zip(run(program, found, *inputs), wanted, strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    return found


def mixers(count: int, **options: Any) -> list[Mixer]:
    return [Mixer(**options) for _ in range(count)]


def test_equal_blocks_are_one_piece() -> None:
    found = require_same(Stack(*mixers(3)))
    [(piece, modules)] = found.regions.items()
    assert modules == tuple(f"mixers.{number}" for number in range(3))
    assert [call.piece for call in found.calls] == ["glue0", *[piece] * 3]
    assert len({call.takes for call in found.calls}) == 4


def test_what_lies_between_blocks_is_compiled_once() -> None:
    class Shifted(Stack):
        def forward(self, x: Tensor, condition: Tensor) -> Tensor:
            for mixer in self.mixers:
                x = mixer(x, condition).transpose(1, 2).relu().transpose(1, 2) + 1.0
            return x

    found = require_same(Shifted(*mixers(3)))
    assert len(found.calls) == 7
    assert len(found.pieces) < 6


def test_shared_weights_are_given_to_each() -> None:
    block = Mixer()
    found = require_same(Stack(*[block] * 3))
    [modules] = found.regions.values()
    assert len(modules) == 3
    assert len({call.takes[-6:] for call in found.calls[1:]}) == 1


def test_what_is_not_split_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    alike = lowered(Stack(Mixer(), Mixer()))
    assert isinstance(split(alike), Split)
    monkeypatch.setattr(regional, "LEAST_SAVED", 48)
    assert split(alike) == "it would save nothing: no large parts of it are equal"


def test_other_targets_do_not_take_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    request = ExportRequest("model", target_options=AOTInductorOptions(regional=True))
    with pytest.raises(UsageError, match="takes no options of --target aotinductor") as refused:
        request.resolve()
    assert refused.value.hint == "Use --regional with --target aotinductor alone."
    both = ("--target", "aotinductor", "--regional", "--trt-level", "1")
    done = cast(capsys, "export", "model", "-o", "out", *both)
    assert done.code == 2


@pytest.mark.slow
def test_a_compiled_engine_is_verified_wherever_it_lies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = Stack(*mixers(3)).eval()
    bundle = enginecast.compile(
        model,
        tmp_path / "out",
        example={"x": INPUTS[0], "condition": INPUTS[1]},
        target="aotinductor",
        target_options=AOTInductorOptions(regional=True),
    )
    [record] = bundle.manifest.engines
    assert record.verdict.outcome == "verified"
    assert record.regions == {"mixers.0": 3}
    assert {file.name for file in bundle.manifest.files} >= {record.file, record.weights}
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    with zipfile.ZipFile(moved / record.file) as package:
        content = b"".join(package.read(name) for name in package.namelist())
    for path in (str(Path(torch.__file__).parent), str(Path.home()), "/tmp/", str(tmp_path)):
        assert path.encode() not in content
    assert cast(capsys, "verify", moved, "--allow-code").code == 0
    inputs = torch.randn(5, 4, 8), torch.randn(5, 8)
    with torch.no_grad(), enginecast.load(moved, allow_code=True) as engine:
        feeds = dict(zip(("x", "condition"), (each.numpy() for each in inputs), strict=True))
        [found] = engine.run(feeds).values()
        torch.testing.assert_close(torch.from_numpy(found), model(*inputs), rtol=1e-5, atol=1e-5)
    damaged = bytearray((moved / record.file).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (moved / record.file).write_bytes(damaged)
    with pytest.raises(BundleError, match=r"engine\.pt2 has sha256"):
        enginecast.load(moved, allow_code=True)
