"""Lowering is passes: specs of targets, what passes change, and a wrong one that is caught."""

from pathlib import Path

import golden
import pytest
import torch
from programs import Function, captured, ir_diff, rewritten
from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.compiler.export.session import export
from enginecast.compiler.request import ExportRequest
from enginecast.exporters.onnx import lower
from enginecast.exporters.registry import target_of
from enginecast.exporters.tensorrt.options import TensorRTOptions
from enginecast.passes import registry
from enginecast.passes.ir.deferred_weights import deferred_weights
from enginecast.passes.ir.edit import with_weights
from enginecast.passes.ir.interpret import interpret
from enginecast.passes.ir.options import spec_from_pass
from enginecast.passes.ir.spec import render
from enginecast.passes.registry import build

LOWERINGS = {
    "onnxruntime on cpu": ("onnxruntime", "cpu", None, None),
    "onnxruntime on cuda": ("onnxruntime", "cuda", None, None),
    "onnxruntime on sm90": ("onnxruntime", "cuda", "sm90", None),
    "tensorrt by onnx": ("tensorrt", "cuda", None, None),
    "tensorrt by torch": ("tensorrt", "cuda", None, TensorRTOptions(route="torch")),
    "aotinductor on cpu": ("aotinductor", "cpu", None, None),
    "aotinductor on cuda": ("aotinductor", "cuda", None, None),
}


class Block(nn.Module):
    """A norm of groups, and a linear whose weight is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)
        self.wide = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.wide(self.norm(x))
        return found


def program_and_input(module: nn.Module | None = None) -> tuple[ExportedProgram, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6)
    return captured(module or Block(), x), x


@pytest.mark.parametrize("name", LOWERINGS)
def test_every_lowering_is_a_spec(name: str) -> None:
    target, device, arch, options = LOWERINGS[name]
    text = target_of(target).lowering(device, arch=arch, options=options)
    passes = build(text)
    again = render([spec_from_pass(pass_) for pass_ in passes])
    assert build(again) == passes
    assert {"drop-assertions", "hoist-weights"} <= {pass_.name for pass_ in passes}


@pytest.mark.parametrize(
    ("earlier", "last"), [("", "legalize-onnx"), ("legalize-onnx,lift-weights", "hoist-weights")]
)
def test_golden_diffs(earlier: str, last: str) -> None:
    program, _ = program_and_input()
    before = rewritten(program, earlier)[0] if earlier else program
    after, sites = rewritten(before, last)
    assert any(site.rewritten for site in sites)
    golden.check(f"{last.replace('-', '_')}.diff", ir_diff(before, after))


def test_golden_diff_of_taking_fused_ops_apart() -> None:
    def norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = torch.ops.enginecast.skip_rms_norm(x, x, weight, 1e-6)
        return found

    program = captured(Function(norm), torch.randn(2, 3, 4), torch.randn(4))
    after, sites = rewritten(program, "decompose-fused")
    assert [site.rewritten for site in sites] == [True]
    golden.check("decompose_fused.diff", ir_diff(program, after))


def test_a_lowered_program_computes_the_same_with_its_weights_or_without() -> None:
    program, x = program_and_input()
    after, _ = rewritten(program, target_of("onnxruntime").lowering("cpu"))
    weights = deferred_weights(after)
    assert {weight.name for weight in weights.values()} >= {"wide.weight", "wide.bias"}
    (wanted,) = interpret(program, {"x": x}).values()
    for ready in (after, with_weights(after)):
        (found,) = interpret(ready, {"x": x}).values()
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert not deferred_weights(with_weights(after))


@pytest.mark.parametrize("drop_guilty", [False])
def test_a_wrong_lowering_pass_is_caught_by_name_before_an_engine_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, drop_guilty: bool
) -> None:
    monkeypatch.setitem(registry.PASSES, "merge-equal", "wrong_pass:WrongMerge")
    built: list[object] = []
    monkeypatch.setattr(lower, "convert", lambda program, **_: built.append(program))
    torch.manual_seed(0)
    request = ExportRequest(
        Block(), tmp_path / "out", example={"x": torch.randn(2, 4, 6)}, drop_guilty=drop_guilty
    )
    done = export(request)
    assert done.bundle is None
    assert not built
    (reason, *_) = done.report.verdict.reasons
    assert "'merge-equal' promises 'exact'" in reason
    assert done.bisection is not None
    (culprit,) = done.bisection.culprits
    assert culprit.name == "merge-equal"
    assert [guilty.site.module for guilty in culprit.sites] == ["norm", "wide"]
    log = (done.folder / "build.log").read_text(encoding="utf-8")
    assert "merge-equal: 2 rewritten" in log
