"""bf16 and mixed engines of the families whose precision people fight with; fp32 and fp16 are in
test_families.
"""

import contextlib
from pathlib import Path

import pytest
from exports import Exports
from family import Family
from family_models import FAMILIES

from enginecast.compiler.export.session import export
from enginecast.compiler.request import ExportRequest

NAMES = (
    "t5",
    "umt5",
    "clip-text",
    "clip-vision",
    "llama",
    "gemma2",
    "gemma3-text",
    "vit",
    "dinov2",
)
CHOSEN = [family for family in FAMILIES if family.name in NAMES]


@pytest.mark.slow
def test_mixed_t5_loads_runs_and_keeps_its_fusions(exports: Exports) -> None:
    done = exports("t5", "mixed")
    verdict = done.report.verdict
    assert verdict.outcome == "verified-by-emulation"
    assert "the engine ran on CPUExecutionProvider" in verdict.reasons[0]
    counts = {f.kind: (f.expected, f.engine, f.runtime) for f in done.report.fusions}
    assert counts == {
        "rms-norm": (5, 5, 5),
        "residual+norm": (4, 4, 4),
        "attention": (2, 2, 2),
    }
    assert "residual=fp32" in done.report.pipeline


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "mixed"])
@pytest.mark.parametrize("family", CHOSEN, ids=lambda family: family.name)
def test_its_engine_is_verified(
    exports: Exports, tmp_path: Path, family: Family, precision: str
) -> None:
    assert len(CHOSEN) == len(NAMES)
    model = exports.model(f"family-{family.name}")
    with contextlib.chdir(exports.root):
        done = export(ExportRequest(model, tmp_path / "bundle", precision=precision))
    verdict = done.report.verdict
    assert verdict.outcome == "verified-by-emulation", verdict.reasons
    assert all(o.ratio is not None and o.ratio <= 3.0 for o in verdict.outputs)
    program = {f.kind: f.program for f in done.report.fusions}
    fused = dict(family.fused)
    if precision == "bf16" and family.name.startswith("gemma"):
        fused["residual+norm"] = 0  # its norm computes in fp32 on a stream that is bf16
    assert {kind: program[kind] for kind in fused} == fused
