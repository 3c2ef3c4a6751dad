"""The parts of benchmarks/gpu_*.py that need no GPU; what they measure, only a GPU can show."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

from enginecast.exporters.aotinductor import lower as aotinductor
from enginecast.exporters.target import LoweringRequest
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.registry import build

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def part(name: str) -> Any:
    """A file of benchmarks/, which is not a package: its scripts import by bare names."""
    return importlib.import_module(f"gpu_{name}")


@pytest.fixture(autouse=True)
def beside_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture
def tiny_t5() -> tuple[torch.nn.Module, Any]:
    models = part("models")
    case = models.texts("t5-tiny", 2, 16, "cpu")
    return models.make_t5(models.T5_SMALL["t5-tiny"], "cpu", torch.bfloat16), case


def options(**more: Any) -> argparse.Namespace:
    given = {"only": "", "engines": "", "rounds": 1, "budget_s": None, "cpu": True}
    return argparse.Namespace(**{**given, "commit": "abc", "out": None, **more})


def test_the_plan_becomes_scaled_products(
    tiny_t5: tuple[torch.nn.Module, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything of the fp8 engine but the compiler."""
    model, case = tiny_t5
    ours, peers = part("ours"), part("peers")
    program = peers.captured(model, case)
    bench = peers.Bench(case, model, "cpu", torch.bfloat16, lambda: program)
    run_pipeline(build(ours._fp8_pipeline(bench)), program, PassContext())
    run_pipeline(build(aotinductor.lowering("cpu")), program, PassContext())
    given: list[dict[str, ExportedProgram]] = []
    monkeypatch.setattr(aotinductor, "compile_package", lambda found, *_, **__: given.append(found))
    lowered = aotinductor.lower_to_aotinductor(LoweringRequest(program, tmp_path, ["hidden"]))
    assert lowered.ops["aten::_scaled_mm"] == 7 * 2
    assert "aten::linear" not in lowered.ops
    [[whole]] = [pieces.values() for pieces in given]
    products = whole.graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default)
    scales = [product.args[3].meta["val"] for product in products]
    assert all(scale.is_contiguous() and scale.shape[0] == 1 for scale in scales)


def run_small(tmp_path: Path, **more: Any) -> tuple[int, dict[str, Any]]:
    """Run the T5 benchmark in this process on engines that take no compiler."""
    out = tmp_path / "out.json"
    given = options(out=out, engines="eager bf16,torchao fp8", **more)
    code = part("run").main("gpu-t5", given, part("t5").models(small=True))
    return code, json.loads(out.read_text(encoding="utf-8"))


@pytest.fixture
def no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The floor takes a compiler."""
    monkeypatch.setattr(part("run"), "measure_products", lambda bench, found: {})


@pytest.mark.usefixtures("no_products")
def test_a_run_writes_a_row_for_every_engine(tmp_path: Path) -> None:
    code, found = run_small(tmp_path)
    assert (code, found["finished"]) == (0, True)
    assert found["smoke"]
    assert found["machine"]["commit"] == "abc"
    rows = found["cases"]["t5-tiny 2x16"]["engines"]
    assert rows["torchao fp8"]["absent"]
    assert rows["eager bf16"]["rounds"] == 1
    assert 1e-4 < rows["eager bf16"]["error"] < 0.03
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.usefixtures("no_products")
def test_an_engine_that_fails_is_a_row_and_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(bench: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(part("run"), "torchao_fp8", refuse)
    code, found = run_small(tmp_path)
    assert code == 1
    assert found["cases"]["t5-tiny 2x16"]["engines"]["torchao fp8"]["failed"] == (
        "RuntimeError: no such kernel"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "vit"])
def test_the_script_runs_from_end_to_end(tmp_path: Path, name: str) -> None:
    out = tmp_path / "out.json"
    script = BENCHMARKS / f"gpu_{name}.py"
    subprocess.run(
        [sys.executable, script, "--cpu", "--rounds", "2", "--out", out],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["finished"]
    for case in found["cases"].values():
        rows = case["engines"]
        assert {name for name, row in rows.items() if "ms" not in row} == {"torchao fp8"}
        assert rows["enginecast bf16"]["error"] < 1.5 * rows["eager bf16"]["error"]
        assert 0.02 < rows["enginecast fp8"]["error"] < 0.3
        assert all(product["bf16_ms"] > 0 for product in case["products"])
        assert any(row["choice"] == "w8a8-dynamic" for row in rows["enginecast fp8"]["plan"])
