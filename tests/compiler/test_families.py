"""Each family that users export: derived inputs, fp32 engine, other shapes, and one thing changed.

With `FAMILY_ROWS=FILE` the results are written there, for docs/results/models.md (`make models`).
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports import Exports
from family import Family, Sizes
from family_models import FAMILIES
from numpy.typing import NDArray
from torch import Tensor, nn

from enginecast.runtime.bundle.manifest import Manifest

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
@pytest.mark.slow
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
