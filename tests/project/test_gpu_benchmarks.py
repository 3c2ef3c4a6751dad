"""The parts of benchmarks/gpu_*.py that need no GPU; what they measure, only a GPU can show."""

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def part(name: str) -> Any:
    """A file of benchmarks/, which is not a package: its scripts import by bare names."""
    return importlib.import_module(f"gpu_{name}")


@pytest.fixture(autouse=True)
def beside_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def options(**more: Any) -> argparse.Namespace:
    given = {"only": "", "engines": "", "rounds": 1, "budget_s": None, "cpu": True}
    return argparse.Namespace(**{**given, "commit": "abc", "out": None, **more})


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
