"""A convolutional UNet as diffusion models have them, in small, in a module of its own."""

import math
from pathlib import Path

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions behind group norms, with the time step added between them."""

    def __init__(self, channels: int, width: int, step_width: int) -> None:
        super().__init__()
        self.first_norm = nn.GroupNorm(4, channels, eps=1e-5)
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.step = nn.Linear(step_width, width)
        self.second_norm = nn.GroupNorm(4, width, eps=1e-5)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.skip = nn.Conv2d(channels, width, 1) if channels != width else nn.Identity()
        self.silu = nn.SiLU()

    def forward(self, hidden: Tensor, step: Tensor) -> Tensor:
        kept: Tensor = self.skip(hidden)
        hidden = self.first(self.silu(self.first_norm(hidden)))
        hidden = hidden + self.step(self.silu(step))[:, :, None, None]
        hidden = self.second(self.silu(self.second_norm(hidden)))
        return torch.add(kept, hidden)


class CrossAttention(nn.Module):
    """Pixels look at the text."""

    def __init__(self, width: int, text_width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(text_width, width, bias=False)
        self.value = nn.Linear(text_width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor, text: Tensor) -> Tensor:
        batch, width, height, breadth = hidden.shape
        rows = hidden.flatten(2).transpose(1, 2)
        query, key, value = (
            tensor.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for tensor in (self.query(self.norm(rows)), self.key(text), self.value(text))
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value)
        rows = rows + self.out(seen.transpose(1, 2).flatten(2))
        return torch.reshape(rows.transpose(1, 2), (batch, width, height, breadth))


class UNet(nn.Module):
    """Down, middle, up; skips are concatenated; sinusoidal time steps."""

    def __init__(self, channels: int = 4, width: int = 16, text_width: int = 24) -> None:
        super().__init__()
        self.width = width
        self.embed = nn.Sequential(nn.Linear(width, 32), nn.SiLU(), nn.Linear(32, 32))
        self.enter = nn.Conv2d(channels, width, 3, padding=1)
        self.down = Residual(width, width, 32)
        self.halve = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.middle = Residual(width, 2 * width, 32)
        self.attend = CrossAttention(2 * width, text_width)
        self.widen = nn.Conv2d(2 * width, width, 3, padding=1)
        self.up = Residual(2 * width, width, 32)
        self.last_norm = nn.GroupNorm(4, width, eps=1e-5)
        self.leave = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor, text: Tensor) -> dict[str, Tensor]:
        half = self.width // 2
        rates = torch.exp(-math.log(10000.0) * torch.arange(half, device=sample.device) / half)
        angles = timestep[:, None].float() * rates[None, :]
        step = self.embed(torch.cat([angles.cos(), angles.sin()], dim=-1).to(sample.dtype))
        wide = self.down(self.enter(sample), step)
        hidden = self.attend(self.middle(self.halve(wide), step), text)
        hidden = nn.functional.interpolate(hidden, scale_factor=2.0, mode="nearest")
        hidden = self.up(torch.cat([self.widen(hidden), wide], dim=1), step)
        return {"noise": self.leave(nn.functional.silu(self.last_norm(hidden)))}


def make() -> tuple[UNet, dict[str, Tensor]]:
    """A seeded, perturbed UNet with an example of its inputs."""
    from models import perturb

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = UNet().eval()
        perturb(model)
        example = {
            "sample": torch.randn(3, 4, 16, 24),
            "timestep": torch.tensor([0, 17, 999]),
            "text": torch.randn(3, 7, 24),
        }
    return model, example


def write_unet(folder: Path) -> Path:
    """A module of the user's own, beside which `enginecast export unet_model:make` is run."""
    (folder / "unet_model.py").write_text("from small_unet import make\n\n__all__ = ['make']\n")
    return folder
