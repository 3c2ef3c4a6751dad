"""Autoencoders that work by tiles and slices: diffusers cuts and blends, an engine does each."""

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn

IMAGES = ("AutoencoderKL", "AutoencoderKLFlux2", "AutoencoderKLHunyuanImage", "AutoencoderDC")
"""Classes that decode a tile as they decode an image; those of videos keep state between frames."""
SETTINGS = ("use_tiling", "use_slicing", "tile_")
"""What the names of the settings begin with."""
PARTS = {"decode": "decoder", "encode": "encoder"}


def works_by_tiles(component: nn.Module) -> bool:
    """Whether an engine of its methods can be run tile by tile."""
    return type(component).__name__ in IMAGES


def is_cut(module: nn.Module) -> bool:
    """Whether its methods are asked for tiles or slices."""
    asked = ("use_tiling", "use_slicing")
    return works_by_tiles(module) and any(getattr(module, name, False) for name in asked)


class Cut:
    """What diffusers' own `decode` or `encode` takes for the autoencoder: its settings and its
    methods, and an engine in the place of its layers.

    Args:
        module: the autoencoder.
        entry: "decode" or "encode".
        whole: the method as an engine, of a tile.
    """

    def __init__(self, module: nn.Module, entry: str, whole: Callable[[Tensor], Any]) -> None:
        def layers(tile: Tensor) -> Tensor:
            found = whole(tile)
            for field in ("sample", "latent"):
                if hasattr(found, field):
                    return getattr(found, field)  # type: ignore[no-any-return]
            return found.latent_dist.parameters  # type: ignore[no-any-return]

        self._module = module
        setattr(self, PARTS[entry], layers)

    def __getattr__(self, name: str) -> Any:
        module = vars(self)["_module"]
        method = getattr(type(module), name, None)
        return MethodType(method, self) if inspect.isfunction(method) else getattr(module, name)

    def quant_conv(self, tile: Tensor) -> Tensor:
        """The engine has done it."""
        return tile

    post_quant_conv = quant_conv
