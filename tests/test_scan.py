"""What the scan of a model's source finds, without running it."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from control_flow import ROWS, Row
from models import bert_config, llama_config, t5_config, vit_config
from torch import Tensor, nn
from torch._export.db.examples import all_examples
from transformers import (
    BertModel,
    CLIPConfig,
    CLIPModel,
    Dinov2Config,
    Dinov2Model,
    LlamaModel,
    MixtralConfig,
    MixtralModel,
    ModernBertConfig,
    ModernBertModel,
    Qwen2Config,
    Qwen2Model,
    T5EncoderModel,
    ViTModel,
)

from enginecast.capture import taint_walk
from enginecast.capture.findings import Finding
from enginecast.capture.scan import scan

TEXT = ("input_ids", "attention_mask")
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_kind_of_control_flow_is_found_at_its_line(row: Row) -> None:
    found = scan(row.module(), row.a().keys())
    here = [f for f in found if (f.file, f.line) == (row.file, row.line)]
    if not row.kind:
        assert found == []
        return
    assert [(f.kind, f.decides) for f in here] == [(row.kind, row.decides)]
    is_harmless = row.kind in ("item", "index", "mask-index", "nonzero", "print")
    is_guard = row.kind == "if" and row.decides in ("shapes", "dtypes")
    assert here[0].is_blocking == (not is_harmless and not is_guard)
    assert here[0].witnesses == ("scan",)
    assert here[0].code.endswith("# HERE")


def clip() -> nn.Module:
    vision = {**SMALL, "image_size": 16, "patch_size": 4}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    made: nn.Module = CLIPModel(CLIPConfig(text_config={**SMALL, **ends}, vision_config=vision))
    return made


def dinov2_config() -> Dinov2Config:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Dinov2Config(**sizes, image_size=32, patch_size=8)


def modernbert_config() -> ModernBertConfig:
    """Two kinds of layers, each with its own rotary frequencies."""
    return ModernBertConfig(**SMALL, pad_token_id=0, cls_token_id=1, sep_token_id=2)


HEALTHY: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "t5": (lambda: T5EncoderModel(t5_config(layers=12)), TEXT),
    "bert": (lambda: BertModel(bert_config(layers=12)), TEXT),
    "llama": (lambda: LlamaModel(llama_config(layers=12)), TEXT),
    "vit": (lambda: ViTModel(vit_config()), ("pixel_values",)),
    "clip": (clip, (*TEXT, "pixel_values")),
    "qwen2": (lambda: Qwen2Model(Qwen2Config(**SMALL, num_key_value_heads=2)), TEXT),
    "dinov2": (lambda: Dinov2Model(dinov2_config()), ("pixel_values",)),
    "modernbert": (lambda: ModernBertModel(modernbert_config()), TEXT),
    "mixtral": (lambda: MixtralModel(MixtralConfig(**SMALL, num_key_value_heads=2)), TEXT),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_have_nothing_that_blocks(name: str) -> None:
    make, tensors = HEALTHY[name]
    with torch.device("meta"):
        model = make().eval()
    start = time.process_time()
    found = scan(model, tensors)
    assert time.process_time() - start < 2  # 0.2 s here
    assert [f for f in found if f.is_blocking or f.kind == "not-scanned"] == []
    assert len(found) < 8
    assert {f.action for f in found} <= {"none: captured"}


def test_the_scan_reaches_the_layers_of_a_healthy_model() -> None:
    """Nothing would block in a model that is not looked at."""
    with torch.device("meta"):
        model = T5EncoderModel(t5_config(layers=3)).eval()
    found = {(f.code, f.decides): f for f in scan(model, TEXT)}
    clamp = found["if hidden_states.dtype == torch.float16:", "dtypes"]
    assert (clamp.count, clamp.module) == (3, "encoder.block.0")


def test_dynamic_rope_is_found_in_a_decorator() -> None:
    config = llama_config()
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with torch.device("meta"):
        model = LlamaModel(config).eval()
    found = [f for f in scan(model, TEXT) if f.is_blocking]
    growth = next(f for f in found if f.tensor == "seq_len > max_seq_len_cached")
    assert Path(growth.file).name == "modeling_rope_utils.py"
    assert (growth.kind, growth.module) == ("if", "rotary_emb")
    assert any(f.kind == "state" and "register_buffer" in f.code for f in found)


def test_the_examples_that_torch_ships_are_models() -> None:
    case = all_examples()["constrain_as_value_example"]
    found = scan(case.model, ["x", "y"])
    assert [(f.kind, f.decides) for f in found if f.is_blocking] == [("if", "inputs")]


def noisy(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(self: nn.Module, x: Tensor) -> Any:
        if x.isnan().any():  # HERE
            return x
        return function(self, x)

    return wrapper


class Attention(nn.Module):
    @noisy
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_decorator_around_many_forwards_is_one_culprit() -> None:
    found = scan(Stack(19), ["x"])
    assert len(found) == 1
    assert found[0].count == 19
    assert (found[0].module, found[0].function) == ("layers.0", "noisy.<locals>.wrapper")


class Gated(nn.Module):
    gate: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gate", torch.ones(()))
        self.limit = 5
        self.history: list[Tensor] = []

    @property
    def is_open(self) -> Tensor:
        return self.gate > 0

    def forward(self, x: Tensor, mask: Tensor | None = None, deep: bool = False) -> Tensor:
        if self.training or mask is not None or deep or self.limit > 9:
            x = x if x.sum() > 0 else -x
        if self.is_open:
            x = x + 1
        helpers: list[Callable[[Tensor], Tensor]] = [lambda y: y * 2 if y.max() > 3 else y]
        self.history.append(x)
        if len(self.history) > 9:
            raise ValueError("too many")
        while len(self.history) > 3:
            self.history.pop()
        return helpers[0](x)


def by_code(found: list[Finding]) -> dict[str, Finding]:
    return {f.tensor: f for f in found}


def test_what_weights_decide_is_told_apart_and_branches_not_taken_are_not_looked_at() -> None:
    found = by_code(scan(Gated().eval(), ["x"]))
    assert {f.tensor for f in found.values() if f.decides == "state"} == {
        "self.history.append(x)",
        "self.history.pop()",
        "len(self.history) > 3",
    }
    assert found["self.is_open"].decides == "weights"
    assert found["self.is_open"].action.startswith("baked")
    assert found["y.max() > 3"].function.endswith("<lambda>")
    assert found["self.history.append(x)"].kind == "state"
    assert "x.sum() > 0" not in found
    assert "x.sum() > 0" in by_code(scan(Gated().eval(), ["x", "mask"]))


class Recursive(nn.Module):
    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        if x.norm() > 1:
            return self.forward(x / 2, depth + 1)
        return self(x, depth - 1) if depth else x


def test_recursion_ends() -> None:
    found = scan(Recursive(), ["x"])
    assert [f.tensor for f in found if f.is_blocking] == ["x.norm() > 1"]


def test_code_without_source_is_named_and_not_fatal() -> None:
    names: dict[str, Any] = {"nn": nn}
    exec("class Made(nn.Module):\n    def forward(self, x):\n        return x * 2\n", names)
    found = scan(names["Made"](), ["x"])
    assert [(f.kind, f.is_blocking) for f in found] == [("not-scanned", False)]
    assert "source is not available" in found[0].action


def test_too_much_code_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taint_walk, "MOST_NODES", 20)
    found = scan(Stack(3), ["x"])
    assert [f.kind for f in found] == ["not-scanned"]
    assert "too much code" in found[0].action


def test_a_defect_of_the_scan_does_not_stop_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(taint_walk, "evaluate", broken)
    found = scan(Stack(1), ["x"])
    assert [f.action for f in found] == ["not looked into: the scan failed: ValueError: broken"]


class Written(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.table = self.table.to(x.device)
        row = self.table[1:]
        row.copy_(x)
        return self.table + x


def test_a_write_through_a_view_is_state_and_a_write_of_itself_is_not() -> None:
    assert [f.tensor for f in scan(Written(), ["x"])] == ["row.copy_(x)"]
