"""The models and inputs of `make gpu`: real shapes, random weights.

The weights are not trained ones: a seed draws them with the scales that transformers starts from,
norms are perturbed, and a few channels of the norms are outliers, as in trained text encoders.
Times, memory and kernels are those of trained models; errors only say how the engines compare.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

WEIGHTS = "random, seeded: scales of transformers, perturbed norms with outlier channels; untrained"
SEED = 0
VOCABULARY, PAD, END = 32128, 0, 1
OUTLIERS, OUTLIER_SCALE = (3, 11), 12.0
NARROW, NARROW_OUTLIER_SCALE = 512, 2.0
"""Channels below which outliers are smaller, and how large they are there."""
OUTPUT = "last_hidden_state"


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
    "t5-xxl-6": Shape(4096, 10240, 64, 6),
    "t5-base": Shape(768, 2048, 12, 12),
    "t5-tiny": Shape(64, 160, 4, 2, head_width=16),
}
"""T5 v1.1 encoders (Raffel et al. 2020; t5x's v1.1 checkpoints): XXL with 6 of its 24 layers, which
are compiled within minutes, and take a quarter of the time."""


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


def make_t5(shape: Shape, device: str, dtype: torch.dtype) -> nn.Module:
    """A T5 encoder with seeded weights, made on the device."""
    return made(lambda: TextEncoder(shape), device, dtype)


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


@dataclass(frozen=True)
class Subject:
    """A model, and the inputs that its engines are built for and timed on."""

    name: str
    model: Callable[[Any], nn.Module]
    config: Callable[[], Any]
    case: Callable[[str], Case]
    """Takes a device."""
    dynamic: tuple[str, ...]
    """Ranges of the engine, as `--dynamic` has them."""

    def save(self, folder: Path) -> Path:
        """Draw the weights, and write them as users have them."""
        model: Any = made(lambda: self.model(self.config()), "cpu", torch.float32)
        tame(model)
        model.save_pretrained(folder)
        return folder

    def optimal(self) -> dict[str, tuple[int, ...]]:
        """The shapes that a TensorRT engine is tuned for: those that are timed."""
        return {name: tuple(tensor.shape) for name, tensor in self.case("cpu").inputs.items()}


def tame(model: nn.Module) -> None:
    """Make outliers of narrow norms smaller, where two channels would be most of a row.

    Else attention over them is so sharp that eager itself is 20 times worse in fp16 than it should
    be: seen of Segformer, whose first layers have 64 channels.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 and name.endswith("weight") and weight.numel() < NARROW:
                weight[list(OUTLIERS)] *= NARROW_OUTLIER_SCALE / OUTLIER_SCALE


class Encoder(nn.Module):
    """A model from tensors to one tensor; images are cast to the dtype of its weights."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model.to(dtype)
        self.dtype = dtype

    def forward(self, **inputs: Tensor) -> Tensor:
        cast = {n: x.to(self.dtype) if x.is_floating_point() else x for n, x in inputs.items()}
        found: Tensor = getattr(self.model(**cast), OUTPUT)
        return found


def encoder(subject: Subject, folder: Path, device: str, dtype: torch.dtype) -> Encoder:
    """The saved model, as eager runs it."""
    model_class: Any = subject.model
    model = model_class.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    return Encoder(model.to(device), dtype)


def subjects(*, small: bool) -> dict[str, Subject]:
    """T5, ViT and Segformer with few layers, as users have them in folders; small: tiny."""
    batch, tokens, size, patch = (2, 16, 32, 16) if small else (8, 128, 224, 16)
    t5 = {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 4, "num_heads": 12}
    vit = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
    heads, widths, depths = 16, [32, 64, 160, 256], [2, 2, 2, 2]
    if small:
        t5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
        vit = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        heads, widths, depths = 2, [16, 16, 32, 32], [1, 1, 1, 1]
    of_t5 = {"feed_forward_proj": "gated-gelu", "use_cache": False, "vocab_size": VOCABULARY}
    of_vit = {"num_attention_heads": heads, "image_size": size, "patch_size": patch}
    large = 2 * size
    found = (
        Subject(
            "t5",
            transformers.T5EncoderModel,
            lambda: transformers.T5Config(**t5, **of_t5, architectures=["T5EncoderModel"]),
            lambda device: texts("t5", batch, tokens, device),
            ("input_ids:0=1..8", f"input_ids:1=1..{4 * tokens}"),
        ),
        Subject(
            "vit",
            transformers.ViTModel,
            lambda: transformers.ViTConfig(**vit, **of_vit, architectures=["ViTModel"]),
            lambda d: images("vit", batch, (size, size), (size // patch) ** 2 + 1, d),
            ("pixel_values:0=1..8",),
        ),
        Subject(
            "segformer",
            transformers.SegformerModel,
            lambda: transformers.SegformerConfig(
                depths=depths, hidden_sizes=widths, architectures=["SegformerModel"]
            ),
            lambda device: images("segformer", batch, (large, large), widths[-1], device),
            ("pixel_values:0=1..8", f"pixel_values:2={large}", f"pixel_values:3={large}"),
        ),
    )
    return {one.name: one for one in found}
