"""The models and inputs of the GPU benchmarks: real shapes, random weights made on the device.

The weights are not trained ones: a seed draws them with the scales that transformers starts from,
norms are perturbed, and a few channels of the norms are outliers, as in trained text encoders.
Times, memory and kernels are those of trained models; errors only say how the engines compare.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

WEIGHTS = "random, seeded: scales of transformers, perturbed norms with outlier channels; untrained"
SEED = 0
VOCABULARY, PAD, END = 32128, 0, 1
OUTLIERS, OUTLIER_SCALE = (3, 11), 12.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer."""

    width: int
    inner: int
    heads: int
    layers: int
    head_width: int = 64


@dataclass(frozen=True)
class Case:
    """One model at one size of its inputs; `model` and `size` name it."""

    model: str
    size: str
    inputs: Mapping[str, Tensor]
    valid: Tensor
    """Bool, [batch, rows]: the rows of the output that count."""

    @property
    def name(self) -> str:
        return f"{self.model} {self.size}"


T5 = {
    "t5-xxl": Shape(4096, 10240, 64, 24),
    "t5-xl": Shape(2048, 5120, 32, 24),
    "t5-base": Shape(768, 2048, 12, 12),
}
"""T5 v1.1 encoders (Raffel et al. 2020; t5x's v1.1 checkpoints)."""
T5_SMALL = {"t5-tiny": Shape(64, 160, 4, 2, head_width=16)}
VIT = {"vit-l": Shape(1024, 4096, 16, 24), "sapiens-0.3b": Shape(1024, 4096, 16, 24)}
"""ViT-L (Dosovitskiy et al. 2021) and the backbone of Sapiens-0.3B (Khirodkar et al. 2024), which
has no class token."""
VIT_SMALL = {
    "vit-tiny": Shape(64, 128, 4, 2, head_width=16),
    "sapiens-tiny": Shape(64, 128, 4, 2, head_width=16),
}


class TextEncoder(nn.Module):
    """transformers' T5 encoder, from tensors to one tensor."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from transformers import T5Config, T5EncoderModel

        self.model = T5EncoderModel(
            T5Config(
                vocab_size=VOCABULARY,
                d_model=shape.width,
                d_ff=shape.inner,
                d_kv=shape.head_width,
                num_heads=shape.heads,
                num_layers=shape.layers,
                feed_forward_proj="gated-gelu",
                is_encoder_decoder=False,
                use_cache=False,
            )
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[batch, tokens] each, to [batch, tokens, width]."""
        found: Tensor = self.model(
            input_ids=input_ids, attention_mask=attention_mask
        ).last_hidden_state
        return found


class ImageEncoder(nn.Module):
    """transformers' ViT, from one tensor to one tensor."""

    def __init__(self, shape: Shape, size: tuple[int, int], patch: int) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTModel

        config = ViTConfig(
            hidden_size=shape.width,
            intermediate_size=shape.inner,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            image_size=size,
            patch_size=patch,
        )
        self.model = ViTModel(config, add_pooling_layer=False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """[batch, 3, height, width], in fp32 for all dtypes, to [batch, 1 + patches, width]."""
        found: Tensor = self.model(pixel_values=pixel_values).last_hidden_state
        return found


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, shape.inner), nn.Linear(shape.inner, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.first_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        seen = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        found: Tensor = x + self.narrow(functional.gelu(self.widen(self.second_norm(x))))
        return found


class Backbone(nn.Module):
    """The plain ViT of Sapiens: patches, positions, blocks, no class token."""

    def __init__(self, shape: Shape, size: tuple[int, int], patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, shape.width, patch, stride=patch)
        count = (size[0] // patch) * (size[1] // patch)
        self.positions = nn.Parameter(torch.zeros(1, count, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """[batch, 3, height, width] to [batch, patches, width]."""
        pixels = pixel_values.to(self.patches.weight.dtype)
        x = self.patches(pixels).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.norm(x)
        return found


def make_t5(shape: Shape, device: str, dtype: torch.dtype) -> nn.Module:
    """A T5 encoder with seeded weights, made on the device."""
    return made(lambda: TextEncoder(shape), device, dtype)


def make_vit(
    name: str, shape: Shape, size: tuple[int, int], patch: int, device: str, dtype: torch.dtype
) -> nn.Module:
    """An image encoder with seeded weights, made on the device."""
    kind = Backbone if name.startswith("sapiens") else ImageEncoder
    return made(lambda: kind(shape, size, patch), device, dtype)


def made(build: Callable[[], nn.Module], device: str, dtype: torch.dtype) -> nn.Module:
    """Build a model where it will run, then draw every weight again from our own seed."""
    with _default_dtype(dtype), torch.device(device):
        model = build()
    generator = torch.Generator(device).manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw(name, parameter, generator)
    return model.eval().requires_grad_(False)


def draw(name: str, weight: Tensor, generator: torch.Generator) -> None:
    """Fill one weight: norms around 1 with outliers, matrices by their fan-in, others around 0."""
    weight.normal_(generator=generator)
    if weight.ndim == 1 and name.endswith("weight"):
        weight.mul_(0.1).add_(1.0)
        weight[list(OUTLIERS)] *= OUTLIER_SCALE
    elif weight.ndim in (0, 1, 3):
        weight.mul_(0.02)
    elif name.endswith("SelfAttention.q.weight"):  # T5 does not divide by the size of a head
        weight.mul_((weight.shape[1] * 64) ** -0.5)
    elif not name.endswith("shared.weight"):
        weight.mul_(weight[0].numel() ** -0.5)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def texts(model: str, batch: int, tokens: int, device: str) -> Case:
    """Token ids and mask: one prompt fills its row, several are ragged down to half of it."""
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(2, VOCABULARY, (batch, tokens), generator=generator)
    lengths = torch.linspace(tokens, tokens if batch == 1 else tokens // 2, batch).long()
    valid = torch.arange(tokens)[None] < lengths[:, None]
    ids[torch.arange(batch), lengths - 1] = END
    ids[~valid] = PAD
    inputs = {"input_ids": ids.to(device), "attention_mask": valid.long().to(device)}
    return Case(model, f"{batch}x{tokens}", inputs, valid)


def images(model: str, batch: int, size: tuple[int, int], rows: int, device: str) -> Case:
    """Noise; every row of the output counts."""
    generator = torch.Generator().manual_seed(SEED)
    pixels = torch.randn(batch, 3, *size, generator=generator)
    name = f"{batch}x{size[0]}x{size[1]}"
    valid = torch.ones(batch, rows, dtype=torch.bool)
    return Case(model, name, {"pixel_values": pixels.to(device)}, valid)
