"""Methods of library classes, rewritten for torch.export: the same results, from plain operators.

They are for code that reads sizes out of values, or takes another path where a size has a divisor:
no range of sizes says either.  What they compute is checked as everything is: engines are compared
with the library's own code.
"""

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from enginecast.capture.python.recompile import source_of, swapped


def lumina2(
    self: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    encoder_attention_mask: Tensor,
    attention_kwargs: object = None,
    return_dict: bool = True,
) -> Any:
    """Lumina 2, which puts the patches of each row behind that row's own text.

    The library makes the row as long as the longest text needs; here it is as long as all of the
    text, and what is too much is masked.
    """
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    count, channels, height, width = hidden_states.shape
    size = self.config.patch_size
    high, wide = height // size, width // size
    tokens, patches = encoder_attention_mask.shape[1], high * wide
    temb, text = self.time_caption_embed(hidden_states, timestep, encoder_hidden_states)
    image = hidden_states.view(count, channels, high, size, wide, size)
    image = self.x_embedder(image.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2))

    lengths = encoder_attention_mask.sum(dim=1).unsqueeze(1)
    place = torch.arange(tokens + patches, device=lengths.device)
    is_text, is_used = place < lengths, place < lengths + patches
    patch = (place - lengths).clamp(0, patches - 1)
    of_image = torch.where(is_text, 0, patch)
    rotary = _rotary(self, torch.minimum(place, lengths), of_image // wide, of_image % wide)
    text_rotary = torch.where(is_text[:, :tokens, None, None], rotary[:, :tokens], 0.0)
    patch_place = lengths + place[:patches]
    image_rotary = rotary.gather(1, _wide(patch_place, rotary))

    for layer in self.context_refiner:
        text = layer(text, encoder_attention_mask, torch.view_as_complex(text_rotary))
    for layer in self.noise_refiner:
        image = layer(image, None, torch.view_as_complex(image_rotary), temb)
    text = functional.pad(text, (0, 0, 0, patches))
    joint = torch.where(is_text.unsqueeze(-1), text, image.gather(1, _wide(patch, image)))
    for layer in self.layers:
        joint = layer(joint, is_used, torch.view_as_complex(rotary), temb)
    joint = self.norm_out(joint, temb)
    found = joint.gather(1, _wide(patch_place, joint))
    found = found.view(count, high, wide, size, size, self.out_channels)
    found = found.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
    return Transformer2DModelOutput(sample=found) if return_dict else (found,)


def _rotary(self: Any, *places: Tensor) -> Tensor:
    """Real and imaginary parts in fp32; the library's are in fp64, of which fp32 is kept."""
    tables = self.rope_embedder.freqs_cis
    pairs = zip(tables, places, strict=True)
    parts = (torch.view_as_real(table.to(at.device)).float()[at] for table, at in pairs)
    return torch.cat(list(parts), dim=2)


def _wide(index: Tensor, like: Tensor) -> Tensor:
    """An index of rows that fits `gather`."""
    more = like.shape[2:]
    return index.view(*index.shape, *(1 for _ in more)).expand(*index.shape, *more)


def z_image_padding(
    self: Any,
    feat: Tensor,
    pos_grid_size: tuple[int, ...],
    pos_start: tuple[int, ...],
    device: torch.device,
    noise_mask_val: int | None = None,
) -> Any:
    """Z-Image's padding of patches or text to a multiple of 32, where there may be none to add.

    The library fills up with the last row, and here there are zeros: the padding token stands there
    in the end.
    """
    count = feat.shape[0]
    total = (count + 31) // 32 * 32
    places = self.create_coordinate_grid(pos_grid_size, pos_start, device).flatten(0, 2)
    places = functional.pad(places, (0, 0, 0, total - places.shape[0]))
    is_padding = torch.arange(total, device=device) >= count
    noise = None if noise_mask_val is None else [noise_mask_val] * total
    return functional.pad(feat, (0, 0, 0, total - count)), places, is_padding, total, noise


def chroma_times(self: Any, timestep: Tensor) -> Tensor:
    """Chroma's embedding of times, without a list that is as long as the batch."""
    parts = self.time_proj(timestep), self.guidance_proj(torch.zeros_like(timestep))
    times = torch.cat([part.to(timestep.dtype) for part in parts], dim=1).unsqueeze(1)
    table = self.mod_proj.to(times).expand(timestep.shape[0], -1, -1)
    return torch.cat([times.expand(-1, table.shape[1], -1), table], dim=-1)


_MODELS = "diffusers.models.transformers"
EQUIVALENTS: Mapping[str, Callable[..., Any]] = {
    f"{_MODELS}.transformer_chroma.ChromaCombinedTimestepTextProjEmbeddings.forward": chroma_times,
    f"{_MODELS}.transformer_lumina2.Lumina2Transformer2DModel.forward": lumina2,
    f"{_MODELS}.transformer_z_image.ZImageTransformer2DModel._pad_with_ids": z_image_padding,
}
"""By the method that they stand for."""


def replaced_in(module: nn.Module) -> tuple[str, ...]:
    """Notes on the methods of `module` that are captured as others."""
    return tuple(
        f"the {path.rpartition('.')[2]} of {kind.__name__} is captured as one that gives the"
        " same from operators alone"
        for path, kind in _found(module).items()
    )


@contextmanager
def with_equivalents(module: nn.Module) -> Iterator[None]:
    """Replace these methods, where `module` has parts of their classes."""
    found = {}
    for path, kind in _found(module).items():
        written = EQUIVALENTS[path]
        source = source_of(getattr(kind, path.rpartition(".")[2]))
        # The definition, with a body that calls `written` with its arguments.
        definition = source.definition
        name = written.__name__
        given = ", ".join(argument.arg for argument in definition.args.args)
        body = ast.parse(f"from {__name__} import {name}\nreturn {name}({given})")
        definition.body = body.body
        found[source.function] = definition
    spaces = [vars(sys.modules[kind.__module__]) for kind in _found(module).values()]
    before = [space.get("len", len) for space in spaces]
    with swapped(found):
        for space in spaces:
            space["len"] = _length
        try:
            yield
        finally:
            for space, plain in zip(spaces, before, strict=True):
                space["len"] = plain


def _length(value: Any) -> Any:
    """`len`, which is a plain number in torch even where a size varies."""
    return value.shape[0] if isinstance(value, Tensor) else len(value)


def _found(module: nn.Module) -> dict[str, type[nn.Module]]:
    """The methods of `EQUIVALENTS` that parts of `module` have, with their classes."""
    kinds = {f"{type(p).__module__}.{type(p).__qualname__}": type(p) for p in module.modules()}
    owners = ((path, *path.rpartition(".")[::2]) for path in EQUIVALENTS)
    return {p: kinds[k] for p, k, name in owners if hasattr(kinds.get(k), name)}
