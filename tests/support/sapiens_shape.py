"""A segmentation model of the shape of Sapiens, in small, in a module of the user's own.

A plain ViT over patches without class token, a head of transposed and plain convolutions, and a
`forward` that cuts the padding off the logits, as segmentation frameworks do: how large the picture
in the padded batch is stands in a tensor.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

PATCH, WIDTH, HEADS, CLASSES = 4, 32, 4, 6
HEIGHT, BREADTH = 32, 24


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.first_norm(x)).view(batch, tokens, 3, HEADS, WIDTH // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        seen = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, tokens, WIDTH))
        found: Tensor = x + self.narrow(functional.gelu(self.widen(self.second_norm(x))))
        return found


class Head(nn.Module):
    """Twice as large by a transposed convolution, then classes by plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(WIDTH, WIDTH, 4, stride=2, padding=1, bias=False)
        self.up_norm = nn.BatchNorm2d(WIDTH)
        self.conv = nn.Conv2d(WIDTH, WIDTH, 1)
        self.conv_norm = nn.BatchNorm2d(WIDTH)
        self.classes = nn.Conv2d(WIDTH, CLASSES, 1)

    def forward(self, features: Tensor) -> Tensor:
        wide = functional.silu(self.up_norm(self.up(features)))
        found: Tensor = self.classes(functional.silu(self.conv_norm(self.conv(wide))))
        return found


class Segmenter(nn.Module):
    """Logits of every class for every pixel of the picture, without the padding around it."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        places = (HEIGHT // PATCH) * (BREADTH // PATCH)
        self.positions = nn.Parameter(torch.randn(1, places, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = Head()

    def forward(self, image: Tensor, size: Tensor) -> Tensor:
        """`image` [batch, 3, HEIGHT, BREADTH]; `size` [2]: height and width of the picture."""
        grid = self.patches(image)
        x = grid.flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        features = self.norm(x).transpose(1, 2).reshape(grid.shape)
        logits = self.head(features)
        logits = functional.interpolate(logits, size=image.shape[2:], mode="bilinear")
        height, width = size[0].item(), size[1].item()
        return logits[:, :, :height, :width]  # HERE


def make() -> tuple[Segmenter, dict[str, Tensor]]:
    """A seeded model with norms and running statistics of their own, and an example."""
    from models import perturb

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        model = Segmenter().eval()
        perturb(model)
        with torch.no_grad():
            for norm in (model.head.up_norm, model.head.conv_norm):
                assert norm.running_mean is not None
                assert norm.running_var is not None
                norm.running_mean.add_(torch.randn(WIDTH) * 0.1)
                norm.running_var.mul_(torch.rand(WIDTH) + 0.5)
        return model, example(21, 18)


def example(height: int, width: int, batch: int = 3) -> dict[str, Tensor]:
    """Noise as a picture of this size in a padded batch."""
    generator = torch.Generator().manual_seed(height * 100 + width)
    image = torch.randn(batch, 3, HEIGHT, BREADTH, generator=generator)
    image[:, :, height:], image[:, :, :, width:] = 0, 0
    return {"image": image, "size": torch.tensor([height, width])}
