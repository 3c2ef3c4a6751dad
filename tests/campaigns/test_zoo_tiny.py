"""The zoo's own parts: tiny configs, the judge, the table."""

from importlib.util import find_spec

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
