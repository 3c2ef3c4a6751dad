"""Eager in fp32 over 16-bit weights: bit-equal with a widened model, without its memory."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from models import bert_config, llama_config, perturb, t5_config
from torch import Tensor, nn
from transformers import (
    BertModel,
    LlamaModel,
    PreTrainedConfig,
    PreTrainedModel,
    T5EncoderModel,
)

from enginecast.capture.sources.huggingface.transformers_folder import open_folder
from enginecast.capture.sources.weights.empty import buffers_to_meta
from enginecast.capture.sources.weights.widened import WidenedWeight, fill_widened


def widened(module: "Mixed", dtype: torch.dtype) -> tuple["Mixed", nn.Module]:
    """The module in fp32 with weights rounded to `dtype`, plainly and over stored weights."""
    stored = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in module.state_dict().items()
    }
    plain = copy.deepcopy(module)
    plain.load_state_dict({n: t.float() if t.is_floating_point() else t for n, t in stored.items()})
    empty = copy.deepcopy(module)
    for owner in empty.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[name] = nn.Parameter(parameter.to("meta"), False)
    return plain, fill_widened(buffers_to_meta(empty), stored)


class Mixed(nn.Module):
    """Reads weights in every way: through modules, directly, in expressions, as buffers."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, 8, padding_idx=0)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.gate = nn.Parameter(torch.randn(8))
        self.register_buffer("scale", torch.rand(8) + 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        x = x * torch.sigmoid(self.gate) / self.scale
        x = x.to(self.head.weight.dtype)
        return torch.cat([F.linear(x, self.table.weight), self.head(x)], -1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_way_to_read_a_weight_gives_what_a_widened_model_gives(dtype: torch.dtype) -> None:
    plain, streamed = widened(Mixed().eval().requires_grad_(False), dtype)
    ids = torch.randint(0, 16, (2, 5), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, found = plain(ids), streamed(ids)
    assert type(found) is Tensor
    assert found.dtype == torch.float32
    # Attention over subclasses takes the path without the fused kernel: the same up to rounding.
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    plain.table.weight[3] += 1.0
    with torch.no_grad():
        assert not torch.allclose(found, plain(ids), rtol=1e-3)


@pytest.mark.parametrize(
    ("model_class", "config"),
    [(T5EncoderModel, t5_config()), (BertModel, bert_config()), (LlamaModel, llama_config())],
    ids=["t5", "bert", "llama"],
)
def test_transformers_models_are_bit_equal(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    made = model_class(config)
    perturb(made)
    made.to(torch.bfloat16).save_pretrained(tmp_path)
    plain = model_class.from_pretrained(tmp_path, dtype=torch.float32).eval()
    eager = open_folder(tmp_path, None).eager(torch.float32)
    assert any(isinstance(p, WidenedWeight) for p in eager.parameters())
    assert {p.dtype for p in eager.parameters()} == {torch.float32}
    ids = torch.randint(0, 96, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    with torch.no_grad():
        wanted = plain(input_ids=ids, attention_mask=mask).last_hidden_state
        found = eager(input_ids=ids, attention_mask=mask).last_hidden_state
    assert torch.equal(found, wanted)
