"""The models of the TensorRT acceptance run: real configurations, seeded random weights.

Weights are drawn as in gpu_models.py; they are saved as a Hugging Face folder, which is what an
export starts from.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_models import OUTLIER_SCALE, OUTLIERS, Case, images, made, texts
from torch import Tensor, nn

OUTPUT = "last_hidden_state"
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float16,  # what a quantized engine computes in else
}
"""Precision -> what eager runs in beside it."""
CLIP_TOKENS = 77
NARROW, NARROW_OUTLIER_SCALE = 512, 2.0
"""Channels below which outliers are smaller, and how large they are there."""


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


def subjects(*, small: bool) -> list[Subject]:
    """T5, UMT5, the two encoders of CLIP, ViT and Segformer; small: for a run within minutes."""
    found = [*_texts(small), *_images(small), _segformer(small)]
    return found if not small else [replace(one, name=f"{one.name}-tiny") for one in found]


def _texts(small: bool) -> list[Subject]:
    batch, tokens = (2, 16) if small else (8, 128)
    t5 = {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12}
    clip = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
    heads, umt5_vocabulary, clip_vocabulary = 12, 256384, 49408
    if small:
        t5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
        clip = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        heads, umt5_vocabulary = 2, 32128
    gated = {"feed_forward_proj": "gated-gelu", "use_cache": False}
    clip |= {"num_attention_heads": heads, "max_position_embeddings": CLIP_TOKENS}

    def text(name: str, model: Any, config: Callable[[], Any], longest: int) -> Subject:
        size = min(tokens, longest)
        ranges = ("input_ids:0=1..8", f"input_ids:1=1..{longest}")
        return Subject(name, model, config, lambda d: texts(name, batch, size, d), ranges)

    return [
        text(
            "t5",
            transformers.T5EncoderModel,
            lambda: transformers.T5Config(
                vocab_size=32128, **t5, **gated, architectures=["T5EncoderModel"]
            ),
            512,
        ),
        text(
            "umt5",
            transformers.UMT5EncoderModel,
            lambda: transformers.UMT5Config(
                vocab_size=umt5_vocabulary, **t5, **gated, architectures=["UMT5EncoderModel"]
            ),
            512,
        ),
        text(
            "clip-text",
            transformers.CLIPTextModel,
            lambda: transformers.CLIPTextConfig(
                vocab_size=clip_vocabulary, **clip, architectures=["CLIPTextModel"]
            ),
            CLIP_TOKENS,
        ),
    ]


def _images(small: bool) -> list[Subject]:
    batch, size, clip_patch, vit_patch = (2, 32, 8, 16) if small else (8, 224, 14, 16)
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    heads = {"num_attention_heads": 16}
    if small:
        large = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2}

    def image(name: str, model: Any, config: Any, patch: int) -> Subject:
        rows = (size // patch) ** 2 + 1
        return Subject(
            name,
            model,
            lambda: config(
                **large,
                **heads,
                image_size=size,
                patch_size=patch,
                architectures=[model.__name__],
            ),
            lambda device: images(name, batch, (size, size), rows, device),
            ("pixel_values:0=1..8",),
        )

    clip = (transformers.CLIPVisionModel, transformers.CLIPVisionConfig)
    vit = (transformers.ViTModel, transformers.ViTConfig)
    return [image("clip-vision", *clip, clip_patch), image("vit", *vit, vit_patch)]


def _segformer(small: bool) -> Subject:
    """B2; its output is [batch, channels, height / 32, width / 32]."""
    batch, size = (2, 64) if small else (8, 512)
    widths, depths = ([64, 128, 320, 512], [3, 4, 6, 3])
    if small:
        widths, depths = ([16, 16, 32, 32], [1, 1, 1, 1])
    return Subject(
        "segformer",
        transformers.SegformerModel,
        lambda: transformers.SegformerConfig(
            depths=depths,
            hidden_sizes=widths,
            num_attention_heads=[1, 2, 4, 8] if small else [1, 2, 5, 8],
            architectures=["SegformerModel"],
        ),
        lambda device: images("segformer", batch, (size, size), widths[-1], device),
        ("pixel_values:0=1..8", f"pixel_values:2={size}", f"pixel_values:3={size}"),
    )
