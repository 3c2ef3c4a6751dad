"""Names of tensors in files as they are published, where they are not those of the class."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from enginecast.capture.sources.weights.checkpoint import some
from enginecast.errors import SourceError, first_line

_PREFIX = "model.diffusion_model."
"""Of a denoiser in a file with other models, and in ComfyUI's files."""
_ENCODER = re.compile(
    r"(text_encoders\.\w+|cond_stage_model|conditioner\.embedders\.\d+)\.transformer\."
)
"""The same of encoders, of Stable Diffusion 3 and Flux, 1 and XL."""


def as_diffusers(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    model_class: type[Any],
    config: Mapping[str, Any],
    file: Path,
) -> dict[str, Tensor]:
    """The tensors of a file by the names that diffusers has, as `from_single_file` converts them.

    Args:
        expected: the names of the class.

    Raises:
        SourceError: diffusers has no conversion for the class, or it does not fit the file.
    """
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    owner = model_class.__name__
    own = {n.removeprefix(_PREFIX): t for n, t in tensors.items() if n.startswith(_PREFIX)}
    if expected.keys() <= own.keys():
        return own
    if own and not owner.startswith("Autoencoder"):
        tensors = {f"{_PREFIX}{name}": tensor for name, tensor in own.items()}
    known = (SINGLE_FILE_LOADABLE_CLASSES.get(each.__name__) for each in model_class.__mro__)
    entry = next((each for each in known if each is not None), None)
    why = f"diffusers has no from_single_file for {owner}"
    if entry is not None:
        try:
            found: dict[str, Tensor] = entry["checkpoint_mapping_fn"](
                config=dict(config), checkpoint=dict(tensors)
            )
        except Exception as error:  # written for the files of one model, it fails in any way
            why = f"diffusers does not convert it ({type(error).__name__}: {first_line(error)})"
        else:
            if expected.keys() & found.keys():
                return found
            why = "what diffusers makes of it has other names"
    raise SourceError(
        f"{file}: {why}; expected {some(expected)} of a {owner}, got {some(tensors)}",
        hint="The config is of another model, or the file needs a newer diffusers.",
    )


def of_encoder(tensors: Mapping[str, Tensor], expected: Iterable[str]) -> Mapping[str, Tensor]:
    """The tensors of an encoder of texts in a file with other models; all of a file without.

    Args:
        expected: the names of the class; what ends like most of them, and no more, is taken.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if found := _ENCODER.match(name):
            parts.setdefault(found[0], {})[name.removeprefix(found[0])] = tensor
    wanted = {_end(name) for name in expected}
    return max(
        parts.values(),
        key=lambda part: (len(wanted & {_end(name) for name in part}), -len(part)),
        default=tensors,
    )


def _end(name: str) -> str:
    return ".".join(name.split(".")[-5:])
