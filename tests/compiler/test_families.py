"""Each family that users export: derived inputs, fp32 engine, other shapes, and one thing changed.

With `FAMILY_ROWS=FILE` the results are written there, for docs/results/models.md (`make models`).
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import Exports
from family import Family, Sizes
from family_models import FAMILIES
from mutations import change_epsilon, outcome, perturb_weight, weights
from numpy.typing import NDArray
from torch import Tensor, nn

from enginecast.capture.outputs.flatten import name_result
from enginecast.compiler.export.session import export
from enginecast.compiler.request import ExportRequest
from enginecast.runtime.bundle.manifest import Manifest
from enginecast.runtime.load import load

FARTHEST = 2e-5
"""Largest relative error that an fp32 engine may have in a shape that nothing has looked at."""

each = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.name, marks=[pytest.mark.slow] * family.is_slow)
        for family in FAMILIES
    ],
)
Rows = dict[str, dict[str, object]]


@pytest.fixture(scope="module")
def rows() -> Iterator[Rows]:
    """What docs/results/models.md says of each family, as the tests find it."""
    found: Rows = {family.name: {} for family in FAMILIES}
    yield found
    target = os.environ.get("FAMILY_ROWS")
    if target:
        file = Path(target)
        earlier: Rows = json.loads(file.read_text()) if file.exists() else {}
        kept = {name: earlier.get(name, {}) | row for name, row in found.items()}
        file.write_text(json.dumps(kept, indent=1) + "\n")


def manifest_of(exports: Exports, family: Family) -> Manifest:
    bundle = exports(f"family-{family.name}").bundle
    assert bundle is not None
    return bundle.manifest


@each
def test_its_fp32_engine_is_verified(exports: Exports, family: Family, rows: Rows) -> None:
    done = exports(f"family-{family.name}")
    verdict = done.report.verdict
    assert verdict.outcome == "verified"
    ratios = [output.ratio for output in verdict.outputs]
    assert all(ratio is not None and ratio <= 3.0 for ratio in ratios)
    manifest = manifest_of(exports, family)
    assert ranges(manifest) == dict(family.inputs)
    fused = {found.kind: found.engine for found in manifest.fusion if found.engine}
    assert fused == dict(family.fused)
    rows[family.name] |= {
        "class": family.model_class.__name__,
        "inputs": {name: list(sizes) for name, sizes in ranges(manifest).items()},
        "outcome": verdict.outcome,
        "nodes": done.nodes,
        "fusions": {f.kind: [f.engine, f.expected] for f in manifest.fusion},
        "ratio": rounded(max(ratio for ratio in ratios if ratio is not None)),
    }


def rounded(value: float) -> float:
    """Two digits: what a table shows, and what another run is likely to find again."""
    return float(f"{value:.2g}")


def ranges(manifest: Manifest) -> dict[str, Sizes]:
    """Each dimension as a number, or as a name with its range."""
    return {
        declared.name: tuple(
            size if isinstance(size, int) else f"{size} {'..'.join(map(str, symbols[size]))}"
            for size in declared.shape
        )
        for symbols in [manifest.symbols]
        for declared in manifest.inputs
    }


@each
def test_another_shape_agrees_with_eager(exports: Exports, family: Family, rows: Rows) -> None:
    inputs = draw(family, manifest_of(exports, family))
    with torch.no_grad():
        expected = name_result(eager(exports, family)(**inputs)).tensors
    bundle = exports(f"family-{family.name}").folder
    with load(bundle) as engine:
        outputs = engine.run({name: value.numpy() for name, value in inputs.items()})
    mask = inputs.get("attention_mask")
    errors = {
        name: relative(outputs[name], value.numpy(), mask) for name, value in expected.items()
    }
    assert outputs.keys() == errors.keys()
    assert max(errors.values()) <= FARTHEST, errors
    rows[family.name]["other shape"] = rounded(max(errors.values()))


def draw(family: Family, manifest: Manifest) -> dict[str, Tensor]:
    """Inputs of the family's other sizes, with ragged rows of text."""
    inputs: dict[str, Tensor] = {}
    for declared in manifest.inputs:
        shape = [s if isinstance(s, int) else family.other[s] for s in declared.shape]
        if declared.kind == "attention_mask":
            lengths = torch.tensor([shape[1], shape[1] // 2 + 1, 2])[: shape[0]]
            inputs[declared.name] = (torch.arange(shape[1]) < lengths[:, None]).long()
        elif declared.dtype.startswith("int"):
            assert declared.minimum is not None
            assert declared.maximum is not None
            low, high = int(declared.minimum), int(declared.maximum)
            inputs[declared.name] = torch.randint(low, high + 1, shape)
        else:
            inputs[declared.name] = torch.randn(shape)
    return inputs


def eager(exports: Exports, family: Family) -> nn.Module:
    """The model as its user has it, without anything of ours."""
    if family.factory is not None:
        from small_unet import make

        return make()[0]
    model_class: Any = family.model_class
    model: Any = model_class.from_pretrained(exports.model(f"family-{family.name}"))
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    module: nn.Module = model.eval()
    return module


def relative(got: NDArray[np.generic], wanted: NDArray[np.generic], mask: Tensor | None) -> float:
    """Relative L2 error over the rows of real tokens."""
    assert got.shape == wanted.shape
    if mask is not None and wanted.shape[:2] == tuple(mask.shape):
        got, wanted = got[mask.bool().numpy()], wanted[mask.bool().numpy()]
    left, right = got.astype(np.float64), wanted.astype(np.float64)
    return float(np.linalg.norm(left - right) / np.linalg.norm(right))


@each
def test_one_changed_weight_is_found(
    exports: Exports, tmp_path: Path, family: Family, rows: Rows
) -> None:
    bundle = exports(f"family-{family.name}").folder
    (name,) = [name for name in weights(bundle) if name.endswith(family.weight)]
    found = outcome(bundle, tmp_path, perturb_weight(name, family.growth))
    rows[family.name] |= {"weight": name, "weight changed": found}
    assert found == "rejected"


@each
def test_another_epsilon_is_found(
    exports: Exports, tmp_path: Path, family: Family, rows: Rows
) -> None:
    bundle = exports(f"family-{family.name}").folder
    found = outcome(bundle, tmp_path, change_epsilon(0, 1e-2))
    rows[family.name]["epsilon changed"] = found
    assert found == "rejected"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_its_fp16_engine_is_verified_or_refused_with_a_reason(
    exports: Exports, tmp_path: Path, family: Family, rows: Rows
) -> None:
    model = exports.model(f"family-{family.name}")
    with contextlib.chdir(exports.root):
        verdict = export(ExportRequest(model, tmp_path / "bundle", precision="fp16")).report.verdict
    reason = f": {verdict.reasons[0]}" if verdict.outcome == "rejected" else ""
    rows[family.name]["fp16"] = f"{verdict.outcome}{reason}"
    assert verdict.outcome == family.half, verdict.reasons
    assert (verdict.outcome == "rejected") == bool(reason)
