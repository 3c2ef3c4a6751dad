"""Names of tensors in files as they are published, where they are not those of the class."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from enginecast.capture.sources.weights.checkpoint import some
from enginecast.errors import SourceError, first_line

_PREFIX = "model.diffusion_model."
"""Of a denoiser in a file with other models, and in ComfyUI's files."""


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
