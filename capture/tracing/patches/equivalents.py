"""Forwards of library classes, rewritten for torch.export: the same results, from plain operators.

They are for code that reads sizes out of values, which no range of sizes says.  What they compute
is checked as everything is: engines are compared with the library's own code.
"""

import ast
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


EQUIVALENTS: Mapping[str, Callable[..., Any]] = {
    "diffusers.models.transformers.transformer_lumina2.Lumina2Transformer2DModel": lumina2,
}
"""By the class that has the forward."""


def replaced_in(module: nn.Module) -> tuple[str, ...]:
    """Notes on the forwards of `module` that are captured as others."""
    kinds = {f"{type(part).__module__}.{type(part).__qualname__}" for part in module.modules()}
    return tuple(
        f"the forward of {kind.rpartition('.')[2]} is captured as one that gives the same from"
        " operators alone"
        for kind in sorted(kinds & EQUIVALENTS.keys())
    )


@contextmanager
def with_equivalents(module: nn.Module) -> Iterator[None]:
    """Replace the forwards of these classes, where `module` has parts of them."""
    found = {}
    for each in {type(part) for part in module.modules()}:
        written = EQUIVALENTS.get(f"{each.__module__}.{each.__qualname__}")
        if written is not None:
            source = source_of(each.forward)
            # The definition, with a body that calls `written` with its arguments.
            definition = source.definition
            name = written.__name__
            given = ", ".join(argument.arg for argument in definition.args.args)
            body = ast.parse(f"from {__name__} import {name}\nreturn {name}({given})")
            definition.body = body.body
            found[source.function] = definition
    with swapped(found):
        yield
