"""Small models of packages that enginecast does not depend on, and their table."""

import json
from pathlib import Path

import pytest
import torch
from vision.examine import Row, examine
from vision.models import ENTRIES, made, settled
from vision.page import PAGE, merge, read, render

import enginecast
from enginecast.errors import EnginecastError

pytestmark = pytest.mark.filterwarnings("ignore")  # those packages warn of much
"""Families whose models take one size: their batch is one."""
MISSING = "no dependency of this project: install it to run this"


def test_the_page_is_made_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(read())


def test_the_results_name_versions_and_no_folders() -> None:
    found = read()
    assert {"torch", "torchvision", "timm", "onnxruntime"} <= set(found["versions"])
    assert set(found["models"]) <= set(ENTRIES)
    assert len(found["models"]) > 15
    for name, row in found["models"].items():
        assert row["family"] == ENTRIES[name].family
        assert "/tmp" not in json.dumps(row)
        assert row["fp32"] not in ("silently wrong", "crashed"), name
        assert row["fp32"] == "verified" or row["reason"], name


def test_rows_are_merged_and_rendered(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    merge([Row("b", "x", fp32="verified"), Row("a", "y", fp32="refused", reason="1|2")], file)
    merge([Row("a", "y", fp32="verified", sizes="fixed; 1 compared")], file)
    page = render(read(file))
    assert "2 models: 2 verified." in page
    assert page.index("| `b` |") < page.index("| `a` |")  # by family


def test_models_are_settled() -> None:
    """Scales of almost nothing hide what they scale, and so do norms without statistics."""
    norm = torch.nn.BatchNorm2d(4)
    with torch.no_grad():
        norm.weight.fill_(1e-6)
    settled(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), norm), {"input": torch.ones(2, 3, 8, 8)})
    assert norm.weight.abs().min() > 1e-3
    assert norm.running_mean is not None
    assert norm.running_mean.abs().max() > 1e-2
    assert not norm.training


FAMILIES = {
    "classification": "vision_transformer",
    "detection": "fcos",
    "lightning": "lightning_checkpoint",
    "open_clip": "clip_text",
    "optical flow": "raft_small",
    "regions": "regions_align",
    "segmentation": "lraspp_mobilenet_v3_large",
    "timm": "timm_vit_tiny_patch16_224",
    "video": "r3d_18",
}
"""One model of each."""


def test_each_family_is_tested() -> None:
    assert {ENTRIES[name].family: name for name in FAMILIES.values()} == FAMILIES
    assert {entry.family for entry in ENTRIES.values()} == FAMILIES.keys()


@pytest.fixture(scope="module", params=list(FAMILIES.values()), ids=list(FAMILIES))
def row(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Row:
    """What became of a model; it is exported once for all tests."""
    name: str = request.param
    pytest.importorskip(ENTRIES[name].package, reason=MISSING, exc_type=ImportError)
    return examine(name, tmp_path_factory.mktemp("vision"))


@pytest.mark.slow
def test_a_model_of_each_family_is_verified(row: Row) -> None:
    assert row.fp32 == "verified", row.reason
    assert row.engine in ("engine.onnx", "model.ts.pt")


@pytest.mark.slow
def test_a_lightning_module_in_train_mode_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason=MISSING, exc_type=ImportError)
    module, example = made("lightning_checkpoint")
    module.train()
    try:
        with pytest.raises(EnginecastError, match="train mode"):
            enginecast.compile(module, example=example, output=tmp_path / "b")
    finally:
        module.eval()
