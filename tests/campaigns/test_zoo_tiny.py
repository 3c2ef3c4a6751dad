"""The zoo's own parts: tiny configs, the judge, the table."""

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from exports import Exports
from torch import nn
from transformers import CONFIG_MAPPING, T5EncoderModel
from zoo.entries import ENTRIES
from zoo.given import GIVEN
from zoo.judge import difference, judge
from zoo.overrides import OVERRIDES
from zoo.shrink import VOCABULARY, Plan, shrink
from zoo.table import counts, merge, page, read, share_verified
from zoo.tiny import LARGEST, PACKAGES, NotBuiltError, build, missing_package, model_types

from enginecast.capture.sources.open_source import open_source
from enginecast.runtime.load import load


@pytest.mark.parametrize("model_type", ["bart", "deepseek_v3", "clip", "swin", "wav2vec2"])
def test_a_tiny_model_of_a_type_builds(model_type: str) -> None:
    model = next(build(model_type))
    assert 0 < sum(parameter.numel() for parameter in model.parameters()) < LARGEST / 3
    assert not model.training


def test_a_type_whose_package_is_missing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.tiny.find_spec", lambda name: None)
    assert missing_package("gemma3n") == "timm"
    assert missing_package("bert") == ""
    monkeypatch.setattr("zoo.tiny.find_spec", lambda name: name)
    assert missing_package("gemma3n") == ""


def test_what_is_said_of_types_is_said_of_types_there_are() -> None:
    types = set(model_types())
    assert {name for names in PACKAGES.values() for name in names} <= types
    assert set(ENTRIES) <= types & set(GIVEN)
    assert set(OVERRIDES) <= types


@pytest.mark.skipif(find_spec("timm") is not None, reason="it is built where timm is installed")
def test_a_type_that_does_not_build_says_why() -> None:
    with pytest.raises(NotBuiltError, match="requires the timm library"):
        next(build("timm_backbone"))


def test_shrinking_keeps_what_must_agree() -> None:
    small = shrink(CONFIG_MAPPING["qwen2_moe"]().to_dict(), Plan(16))
    assert small["hidden_size"] % small["num_attention_heads"] == 0
    assert small["num_hidden_layers"] == len(small["layer_types"]) == 2
    assert small["num_experts_per_tok"] <= small["num_experts"] <= 8
    assert small["vocab_size"] == VOCABULARY
    pair = shrink(CONFIG_MAPPING["clip"]().to_dict(), Plan(8))
    assert pair["vision_config"]["image_size"] % pair["vision_config"]["patch_size"] == 0
    assert pair["text_config"]["hidden_size"] == 64


def test_special_tokens_stay_distinct_and_inside_the_vocabulary() -> None:
    plan = Plan(16)
    assert plan.token(3) == 3
    assert plan.token(151655) == plan.token(151655) != plan.token(151656)
    assert max(plan.tokens.values()) < VOCABULARY


def test_every_type_of_transformers_is_in_the_zoo() -> None:
    types = model_types()
    assert len(types) > 400
    assert {"bert", "t5", "vit"} <= set(types)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (1.0 + 1e-6, ""),
        (1.0 + 2e-3, "relative L2"),
        (float("nan"), "not finite"),
    ],
)
def test_the_measure_can_fail(found: float, reason: str) -> None:
    wanted = np.linspace(-1, 1, 60, dtype=np.float32).reshape(3, 4, 5)
    assert reason in difference(wanted * np.float32(found), wanted, None)
    assert bool(difference(wanted * np.float32(found), wanted, None)) == bool(reason)


def test_one_value_that_is_off_is_seen_among_many() -> None:
    wanted = np.ones((1, 100000), dtype=np.float32)
    found = wanted.copy()
    found[0, 7] = 1.1
    assert difference(found, wanted, None).startswith("off by")


def test_padding_is_not_compared_and_rows_are() -> None:
    wanted = np.ones((2, 3, 4), dtype=np.float32)
    found = wanted.copy()
    found[1, 2] = 9
    rows = np.array([[True, True, True], [True, True, False]])
    assert difference(found, wanted, rows) == ""
    assert difference(found, wanted, ~rows)
    assert difference(found[:1], wanted, None).startswith("shape")
    assert difference(np.array([1, 2]), np.array([1, 3]), None) == "1 of 2 values differ"


class Off(nn.Module):
    """A model that is not the one that was exported: its output is a little larger."""

    def __init__(self, model: nn.Module, by: float) -> None:
        super().__init__()
        self.model, self.by = model, by

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"last_hidden_state": self.model(**inputs).last_hidden_state * self.by}


def test_a_wrong_bundle_is_found_out(exports: Exports) -> None:
    done = exports("t5")
    source = open_source(exports.model("t5"))
    model = T5EncoderModel.from_pretrained(exports.model("t5")).eval()
    with load(done.folder, threads=1) as engine:
        right = judge(engine, Off(model, 1.0), source.inputs())
        wrong = judge(engine, Off(model, 1.003), source.inputs())
    assert right.wrong == ()
    assert right.compared >= 3
    assert len(wrong.wrong) == wrong.compared
    assert "last_hidden_state: relative L2 0.003" in wrong.wrong[0]


def test_the_share_counts_what_runs_in_eager() -> None:
    models = {
        "a": {"outcome": "verified"},
        "b": {"outcome": "refused"},
        "c": {"outcome": "not built"},
    }
    assert counts(models) == Counter({"verified": 1, "refused": 1, "not built": 1})
    assert share_verified(models) == 0.5


def test_results_are_merged_by_type(tmp_path: Path) -> None:
    from zoo.examine import Row

    merge([Row("b", outcome="verified"), Row("a", outcome="refused", reason="x|y")], tmp_path / "r")
    merge([Row("a", outcome="verified")], tmp_path / "r")
    assert list(read(tmp_path / "r")["models"]) == ["a", "b"]
    said = "2 run in eager with these inputs; 2 of those (100.0%) are verified"
    assert said in page(read(tmp_path / "r"))
