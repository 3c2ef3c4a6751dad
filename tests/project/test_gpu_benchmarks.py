"""The parts of benchmarks/gpu_*.py that need no GPU; what they measure, only a GPU can show."""

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

from enginecast.exporters.aotinductor import lower as aotinductor
from enginecast.exporters.target import LoweringRequest
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.ir.quantization_plan import LayerPlan, QuantizationPlan
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


def test_weights_are_those_of_their_seed(tiny_t5: tuple[torch.nn.Module, Any]) -> None:
    model, _ = tiny_t5
    torch.manual_seed(123)  # somebody else's draws
    models = part("models")
    again = models.make_t5(models.T5_SMALL["t5-tiny"], "cpu", torch.bfloat16)
    weights, others = model.state_dict(), again.state_dict()
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())
    norm = weights["model.encoder.final_layer_norm.weight"].float()
    assert norm[list(models.OUTLIERS)].abs().min() > 8 > 2 > norm[20:].abs().max()
    assert model.model.shared.weight is model.model.encoder.embed_tokens.weight  # type: ignore[union-attr]


def test_prompts_are_ragged_and_end(tiny_t5: tuple[torch.nn.Module, Any]) -> None:
    _, case = tiny_t5
    assert case.name == "t5-tiny 2x16"
    assert case.valid.sum(1).tolist() == [16, 8]
    ids = case.inputs["input_ids"]
    assert ids[~case.valid].unique().tolist() == [0]
    assert ids[[0, 1], [15, 7]].tolist() == [1, 1]


def test_every_product_of_a_text_encoder_is_found(tiny_t5: tuple[torch.nn.Module, Any]) -> None:
    model, case = tiny_t5
    products = part("products")
    product, heads = products.Product, 2 * 4
    assert products.products_of(model, case.inputs) == {
        product(32, 64, 64): 8,  # q, k, v and o of two layers
        product(32, 64, 160): 4,
        product(32, 160, 64): 2,
        product(16, 16, 16, heads): 4,  # of two layers: the scores, and what they weigh
    }


@pytest.mark.parametrize(("name", "rows"), [("vit-tiny", 25), ("sapiens-tiny", 24)])
def test_every_product_of_an_image_encoder_is_found(name: str, rows: int) -> None:
    models, products = part("models"), part("products")
    model = models.make_vit(name, models.VIT_SMALL[name], (32, 48), 8, "cpu", torch.bfloat16)
    case = models.images(name, 2, (32, 48), rows, "cpu")
    with torch.no_grad():
        assert model(**case.inputs).shape[:2] == case.valid.shape
    found = products.products_of(model, case.inputs)
    product = products.Product
    assert found[product(2 * 24, 3 * 8 * 8, 64)] == 1  # the patches
    assert found[product(2 * rows, 64, 128)] == found[product(2 * rows, 128, 64)] == 2
    assert found[product(rows, 16, rows, 8)] == found[product(rows, rows, 16, 8)] == 2
    linears = [(p, n) for p, n in found.items() if p.m == 2 * rows and p.k != 3 * 8 * 8]
    layer = 2 * rows * 64 * (4 * 64 + 2 * 128)  # q, k, v and o, merged or not; feed-forward
    assert sum(p.m * p.k * p.n * n for p, n in linears) == 2 * layer


def test_a_floor_takes_the_form_that_a_product_has() -> None:
    products = part("products")
    linear, head = products.Product(8, 32, 32), products.Product(8, 16, 8, batch=4)
    timed = [
        products.Timed(linear, 3, bf16=2.0, fp8_row=1.0, fp8_tensor=0.5, quantize_row=0.25),
        products.Timed(head, 2, bf16=0.1),
    ]
    assert products.floors(timed) == {"bf16": 6.2, "fp8_row": 3.2, "fp8_tensor": 1.7}
    assert [each.gain for each in timed] == [1.6, None]
    assert not head.fits_fp8
    assert not products.Product(8, 24, 32).fits_fp8


@pytest.mark.parametrize("by_row", [True, False])
def test_what_is_timed_in_fp8_is_the_product(by_row: bool) -> None:
    products = part("products")
    product = products.Product(16, 64, 32)
    plain = products._plain(product, "cpu")[0]().float()
    scaled = products._scaled(product, "cpu", by_row=by_row)[0]().float()
    error = (scaled - plain).norm() / plain.norm()
    assert 0.02 < error < 0.05  # as fp8 rounds two Gaussian operands


def test_rounds_are_interleaved_and_turn_around() -> None:
    timing = part("timing")
    seen: list[str] = []
    runs = {name: (lambda name=name: seen.append(name)) for name in "abc"}
    found = timing.interleaved(runs, 2, "cpu", 60.0)
    assert "".join(seen) == "cbaabccbaabccba"
    assert {name: len(rounds) for name, rounds in found.items()} == {"a": 2, "b": 2, "c": 2}
    assert timing.summary([4.0, 1.0, 3.0, 2.0, 50.0]) == {
        "ms": 3.0,
        "ms_low": 2.0,
        "ms_high": 4.0,
        "rounds": 5,
    }


def test_a_spent_budget_stops_what_is_running() -> None:
    timing = part("timing")

    def swallows() -> None:  # as compilers do
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    budget = timing.Budget(0.2)
    start = time.monotonic()
    with pytest.raises(timing.BudgetSpent), budget.limit(0.1):
        swallows()
    assert time.monotonic() - start < 5
    with pytest.raises(timing.BudgetSpent), budget.limit(0.2):
        pytest.fail("nothing is left")
    with timing.Budget(None).limit(5.0):
        pass


def test_the_error_is_over_valid_rows_alone() -> None:
    results = part("results")
    reference = torch.randn(2, 3, 64)
    valid = torch.tensor([[True, True, True], [True, False, False]])
    output = reference.clone()
    output[1, 1:] = torch.nan
    assert results.distance(output, reference, valid) == (0.0, pytest.approx(1.0))
    output[0, 1] *= -1
    error, cosine = results.distance(output, reference, valid)
    share = reference[0, 1].norm() / reference[valid].norm()
    assert error == pytest.approx(2 * share.item(), rel=1e-3)
    assert cosine == pytest.approx(-1.0)


def test_rows_are_compared_with_compiled_and_with_their_own_floor() -> None:
    results = part("results")
    rows: dict[str, dict[str, Any]] = {
        "torch.compile bf16": {"ms": 4.0},
        "enginecast fp8": {"ms": 2.0},
        "torchao fp8": {"absent": "torchao is not installed"},
    }
    results.compare(rows, {"bf16": 3.0, "fp8_row": 1.5, "fp8_tensor": 1.0})
    assert rows["torch.compile bf16"] == {"ms": 4.0, "over_compiled": 1.0, "of_floor": 0.75}
    assert rows["enginecast fp8"] == {"ms": 2.0, "over_compiled": 2.0, "of_floor": 0.75}
    assert rows["torchao fp8"] == {"absent": "torchao is not installed"}


def test_no_layer_stays_in_fp8_that_was_measured_to_be_slower() -> None:
    ours, products = part("ours"), part("products")

    def layer(n: int) -> LayerPlan:
        return LayerPlan(
            module=f"l{n}",
            source="m.py:1",
            kind="linear",
            weight=f"l{n}.weight",
            shape=(n, 64),
            choice="w8a8-dynamic",
            activations="row",
            gain=1.3,
            gain_from="model",
        )

    plan = QuantizationPlan(
        format="fp8", arch="sm90", max_error=0.15, layers=tuple(map(layer, (32, 48, 80)))
    )
    measured = {
        (n, 64): products.Timed(
            products.Product(8, 64, n), 1, bf16=bf16, fp8_row=1.0, quantize_row=0.25
        )
        for n, bf16 in ((32, 1.0), (48, 2.0))
    }
    slow, fast, unknown = ours.with_measured(plan, measured).layers
    assert (slow.choice, slow.activations, slow.gain, slow.gain_from) == (
        "keep",
        None,
        0.8,
        "measured",
    )
    assert slow.reason == "slower in fp8: measured at 0.80 of its speed in bf16"
    assert (fast.choice, fast.gain, fast.gain_from) == ("w8a8-dynamic", 1.6, "measured")
    assert (unknown.gain, unknown.gain_from) == (1.3, "model")


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
    given: list[ExportedProgram] = []
    monkeypatch.setattr(aotinductor, "compile_package", lambda found, *_, **__: given.append(found))
    lowered = aotinductor.lower_to_aotinductor(LoweringRequest(program, tmp_path, ["hidden"]))
    assert lowered.ops["aten::_scaled_mm"] == 7 * 2
    assert "aten::linear" not in lowered.ops
    [whole] = given
    products = whole.graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default)
    scales = [product.args[3].meta["val"] for product in products]
    assert all(scale.is_contiguous() and scale.shape[0] == 1 for scale in scales)


def test_cases_are_chosen_by_model_and_size() -> None:
    run, t5, vit = part("run"), part("t5"), part("vit")
    names = [case.name for model in t5.models(small=True) for case in model.cases]
    assert names == ["t5-tiny 2x16"]
    models = [*t5.models(small=True), *vit.models(small=True)]
    found = run.wanted(models, "sapiens-tiny,2x32x48")
    assert [case.name for model in found for case in model.cases] == ["sapiens-tiny 2x32x48"]
    with pytest.raises(SystemExit, match="there are t5-tiny 2x16, vit-tiny"):
        run.wanted(models, "t5-xxl")


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


@pytest.mark.usefixtures("no_products")
@pytest.mark.slow
def test_a_spent_budget_leaves_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part("run"), "torchao_fp8", lambda bench: time.sleep(60))
    code, found = run_small(tmp_path, budget_s=6.0)
    assert (code, found["finished"]) == (0, False)
    rows = found["cases"]["t5-tiny 2x16"]["engines"]
    assert rows["torchao fp8"] == {"stopped": "the budget was spent while it was made"}
    assert rows["eager bf16"]["ms"] > 0


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
