"""Forwards that are written again for torch.export give what the library's own code gives."""

from typing import Any

import diffusers
import pytest
import torch
from tiny_components import CONFIGS
from torch import nn

from enginecast.capture.python.recompile import innermost
from enginecast.capture.tracing.patches.equivalents import lumina2, replaced_in, with_equivalents

TEXT = 7


@pytest.fixture(scope="module")
def lumina() -> nn.Module:
    _, config = CONFIGS["lumina2"]
    torch.manual_seed(0)
    model: nn.Module = diffusers.Lumina2Transformer2DModel(**config).eval()
    return model


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(3, TEXT, dtype=torch.int64),
        torch.arange(TEXT) < torch.tensor([[3], [7], [1]]),
        torch.arange(TEXT) < torch.tensor([[4], [4], [4]]),
        torch.arange(TEXT) < torch.tensor([[3], [0], [1]]),
        torch.tensor([[1, 0, 1, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1]]),
    ],
    ids=["full", "ragged", "equally short", "an empty row", "with holes"],
)
def test_lumina2_is_the_library_s(lumina: nn.Module, mask: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(3, 4, 8, 12, generator=generator)
    text = torch.randn(3, TEXT, 8, generator=generator)
    given = latents, torch.rand(3, generator=generator), text, mask
    with torch.no_grad():
        expected = lumina(*given).sample
        with with_equivalents(nn.Sequential(lumina)):
            found = lumina(*given).sample
        assert torch.equal(found, lumina2(lumina, *given, return_dict=False)[0])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [(1, 33), (32, 64)])
def test_z_image_is_the_library_s(tokens: tuple[int, ...]) -> None:
    kind, config = CONFIGS["z-image"]
    torch.manual_seed(0)
    model: Any = getattr(diffusers, kind)(**config).eval()
    for pad in (model.x_pad_token, model.cap_pad_token):
        nn.init.normal_(pad.data)
    generator = torch.Generator().manual_seed(1)
    sizes = ((4, 6), (16, 8))
    images = [torch.randn(4, 1, *size, generator=generator) for size in sizes]
    texts = [torch.randn(count, 8, generator=generator) for count in tokens]
    given = images, torch.rand(2, generator=generator), texts
    with torch.no_grad():
        expected = model(*given).sample
        with with_equivalents(model):
            found = model(*given).sample
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated")
def test_chroma_s_times_are_the_library_s() -> None:
    kind, config = CONFIGS["chroma"]
    model: nn.Module = getattr(diffusers, kind)(**config).eval()
    [part] = [p for p in model.modules() if type(p).__name__.startswith("ChromaCombined")]
    times = torch.tensor([0.25, 1.0, 0.7])
    expected = part(times)
    with with_equivalents(model):
        assert torch.equal(part(times), expected)


def test_what_is_captured_in_the_place_of_a_forward_is_said(lumina: nn.Module) -> None:
    [note] = replaced_in(nn.Sequential(lumina))
    assert note.startswith("the forward of Lumina2Transformer2DModel is captured as one")
    assert replaced_in(nn.Linear(1, 1)) == ()


def test_the_library_s_code_is_back_afterwards(lumina: nn.Module) -> None:
    forward = innermost(type(lumina).forward)
    code = forward.__code__
    with with_equivalents(lumina):
        assert forward.__code__ is not code
    assert forward.__code__ is code
    with with_equivalents(nn.Linear(1, 1)):
        assert forward.__code__ is code
