"""The user's options for a component of a diffusion pipeline, besides its folder."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar

from enginecast.errors import UsageError
from enginecast.option_fields import Option


@dataclass(frozen=True)
class ComponentOptions:
    """Which part of a component is captured, from which files, and for which sizes."""

    HEADING: ClassVar[str] = "Model and inputs"

    variant: Annotated[str, Option("Variant of a folder's weight files, such as fp16.", "NAME")] = (
        ""
    )
    entry: Annotated[str, Option("Part of a diffusers autoencoder: decode or encode.", "NAME")] = ""
    """The method that the engine is; empty: `forward`, or `decode` of an autoencoder."""
    height: Annotated[int | None, Option("Height of a diffusion pipeline's images.", "PIXELS")] = (
        None
    )
    width: Annotated[int | None, Option("Width of a diffusion pipeline's images.", "PIXELS")] = None
    frames: Annotated[int | None, Option("Frames of a diffusion pipeline's videos.", "N")] = None
    single_file: Annotated[
        Path | None, Option("Weights for MODEL's config: a .safetensors or .gguf file.", "FILE")
    ] = None
    """As it is published, under the names that it has there."""

    def __post_init__(self) -> None:
        if self.single_file is not None and self.variant:
            raise UsageError("--variant does not go with --single-file: a file is one of them")
        for name, size in (("height", self.height), ("width", self.width), ("frames", self.frames)):
            if size is not None and size < 1:
                raise UsageError(f"--{name} {size}: expected at least 1")

    @property
    def given(self) -> dict[str, str]:
        """What was given, by name; but for the file, which is no property of the model."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {n: str(value) for n, value in found.items() if value and n != "single_file"}


DEFAULTS = ComponentOptions()
