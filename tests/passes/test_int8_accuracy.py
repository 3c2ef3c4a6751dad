"""int8 engines on the CPU that the rigs' outlier channels do not break, and their size.

Weights are seeded random ones with planted outliers: they show what an engine does with outliers,
and not what a trained model loses.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import BASE, Rig, Sizes, prompts

from enginecast import compile as compile_model
from enginecast import load
from enginecast.passes.presets import PrecisionName
from enginecast.verification.metrics import Metrics, measure, row_mask

SMALL = Sizes(width=128, inner=256, heads=2, head_size=64, vocabulary=512)
LARGEST = 0.3
"""Part of the fp32 weights that model and weights may take."""

SLOW = (pytest.mark.slow, pytest.mark.timeout(3600))
TINY, WHOLE = Rig(layers=2, sizes=SMALL), Rig(layers=12, sizes=BASE)
CASES = [
    pytest.param(TINY, "int8", 0.998, id="small-int8", marks=pytest.mark.slow),
    pytest.param(TINY, "int8-storage", 0.9995, id="small-storage", marks=pytest.mark.slow),
    pytest.param(WHOLE, "int8", 0.997, id="base-int8", marks=SLOW),
    pytest.param(WHOLE, "int8-storage", 0.999, id="base-storage", marks=SLOW),
]


@pytest.mark.parametrize(("rig", "precision", "lowest"), CASES)
def test_outliers_do_not_break_int8(
    rig: Rig, precision: PrecisionName, lowest: float, tmp_path: Path
) -> None:
    """`lowest` is the cosine of the worst valid token."""
    rig.make().save_pretrained(tmp_path / "model")
    bundle = tmp_path / "engine"
    compile_model(tmp_path / "model", bundle, precision=precision, threads=1)
    found = error(rig, bundle)
    assert found.cosine >= lowest
    assert found.relative > 1e-3  # it is int8 all the same
    files = [bundle / "engine.onnx", *bundle.glob("weights*.safetensors")]
    whole = 4 * sum(weight.numel() for weight in rig.make().parameters())
    assert sum(file.stat().st_size for file in files) <= LARGEST * whole
    layers = plan_of(bundle)
    table = next(layer for layer in layers if layer["kind"] == "embedding")
    assert table["shape"] == [rig.sizes.vocabulary, rig.sizes.width]
    assert table["choice"] == "storage"
    if precision == "int8":
        linears = [layer["choice"] for layer in layers if layer["kind"] == "linear"]
        assert linears.count("w8a8-dynamic") > len(linears) / 2


def error(rig: Rig, bundle: Path) -> Metrics:
    """Over the valid tokens of prompts that the export did not see."""
    given = prompts(6, tokens=64, seed=9, vocabulary=rig.sizes.vocabulary)
    with torch.no_grad():
        wanted = rig.make()(**given).last_hidden_state.numpy()
    feeds = {name: tensor.numpy() for name, tensor in given.items()}
    with load(bundle, threads=1) as engine:
        found = engine.run(feeds)["last_hidden_state"]
    return measure(found, wanted, row_mask(wanted.shape, feeds["attention_mask"]))


def plan_of(bundle: Path) -> list[dict[str, Any]]:
    layers: list[dict[str, Any]] = json.loads((bundle / "plan.json").read_text("utf-8"))["layers"]
    return layers
