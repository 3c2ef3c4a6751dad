"""Small modules and their programs for the tests of verification/."""

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from enginecast.passes.ir.edit import structural_copy


@dataclass(frozen=True)
class Inputs:
    """Inputs under a name."""

    name: str
    inputs: dict[str, Tensor]


class Block(nn.Module):
    """Two linears around a norm, with a residual sum."""

    def __init__(self, width: int = 16, *, scale: float = 1.0) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width, eps=1e-5)
        self.second = nn.Linear(2 * width, width)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(self.first(x)) * self.scale
        result: Tensor = x + self.second(self.norm(hidden))
        return result


class Encoder(nn.Module):
    """Two blocks over masked tokens: valid rows see the mean of the valid rows."""

    def __init__(self, *, scale: float = 1.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([Block(scale=scale), Block(scale=scale)])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            weights = attention_mask[..., None].to(x.dtype)
            mean = (x * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
            x = block(x + mean)
        return {"hidden": x, "pooled": x[:, 0]}


NAMES = ("hidden", "pooled")
_CAPTURED: dict[str, ExportedProgram] = {}


def encoder(*, scale: float = 1.0) -> Encoder:
    """A seeded encoder whose norms and biases are not ones and zeros."""
    torch.manual_seed(7)
    module = Encoder(scale=scale).eval().requires_grad_(False)
    for name, tensor in module.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            tensor.add_(torch.randn_like(tensor), alpha=0.2)
    return module


def cases() -> list[Inputs]:
    """Two shapes, the second with padding."""
    generator = torch.Generator().manual_seed(3)
    first = torch.randint(0, 32, (2, 6), generator=generator)
    second = torch.randint(0, 32, (3, 9), generator=generator)
    ragged = (torch.arange(9)[None] < torch.tensor([[9], [4], [1]])).long()
    return [
        Inputs("full", {"input_ids": first, "attention_mask": torch.ones_like(first)}),
        Inputs("ragged", {"input_ids": second, "attention_mask": ragged}),
    ]


def program(module: nn.Module) -> ExportedProgram:
    """An encoder's program with dynamic batch and sequence; equal encoders are captured once."""
    settings = [(type(part), getattr(part, "scale", None)) for part in module.modules()]
    weights = {name: tensor.tolist() for name, tensor in module.state_dict().items()}
    key = repr((settings, weights))
    if key not in _CAPTURED:
        _CAPTURED[key] = _captured(module)
    copy = structural_copy(_CAPTURED[key])
    copy._state_dict = deepcopy(copy.state_dict)  # a test may change its weights
    return copy


def _captured(module: nn.Module) -> ExportedProgram:
    sizes = {0: Dim("batch", min=1, max=8), 1: Dim("sequence", min=2, max=32)}
    with torch.no_grad():
        return export(
            module,
            (),
            cases()[0].inputs,
            dynamic_shapes={"input_ids": sizes, "attention_mask": sizes},
        )
