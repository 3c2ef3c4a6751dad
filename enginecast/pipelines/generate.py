"""Running a diffusion pipeline: what it is asked for, and what it gave on the way."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from enginecast.errors import UsageError, first_line
from enginecast.pipelines.folder import quiet_diffusers

PROMPTS = ("a red fox in the snow", "a small boat on a lake, mountains behind it, oil painting")
SEEDS = (-(2**63), 2**64 - 1)
"""What torch takes."""
OPTIONS = {
    "prompt": "--prompt",
    "negative_prompt": "--negative-prompt",
    "num_inference_steps": "--steps",
    "height": "--height",
    "width": "--width",
    "num_frames": "--frames",
    "guidance_scale": "--guidance-scale",
}
"""By argument of a pipeline."""
OWN = {
    **{name: f"give {option}" for name, option in OPTIONS.items()},
    **dict.fromkeys(("output_type", "return_dict"), "the command sets it"),
    **dict.fromkeys(("callback", "callback_steps", "callback_on_step_end"), "the command sets it"),
    "prompt": "give --prompt",
    "generator": "give --seed",
}
"""Arguments that `--set` does not take, and what to do instead."""


@dataclass(frozen=True)
class Wish:
    """What a pipeline is asked for."""

    prompts: tuple[str, ...] = PROMPTS
    negative_prompt: str = ""
    steps: int | None = None
    """None, here and below: what the pipeline does by default."""
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    guidance_scale: float | None = None
    seed: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the pipeline."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Files of images by argument: "image", "mask_image", "control_image"."""

    def __post_init__(self) -> None:
        sizes = {"steps": self.steps, "height": self.height}
        for name, size in {**sizes, "width": self.width, "frames": self.frames}.items():
            if size is not None and size < 1:
                raise UsageError(f"--{name} {size}: expected at least 1")
        if self.guidance_scale is not None and not math.isfinite(self.guidance_scale):
            raise UsageError(f"--guidance-scale {self.guidance_scale}: expected a finite number")
        if not SEEDS[0] <= self.seed <= SEEDS[1]:
            raise UsageError(f"--seed {self.seed}: expected {SEEDS[0]}..{SEEDS[1]}")
        for name in self.more:
            if name in OWN or name in self.images:
                raise UsageError(f"--set {name}: {OWN.get(name, 'it is an --image')}")
        if (self.height is None) != (self.width is None):
            raise UsageError("--height and --width go together: pipelines ignore one alone")

    def sized(self, height: int, width: int) -> "Wish":
        """The same in another size."""
        return replace(self, height=height, width=width)

    def briefly(self) -> "Wish":
        """The same in two steps; of a pipeline that changes an image, which takes a part of them
        alone, in all.
        """
        return self if self.images else replace(self, steps=2)

    def arguments(self, pipe: Any) -> dict[str, Any]:
        """What the pipeline is called with.

        Raises:
            UsageError: it has no such argument.
        """
        known = inspect.signature(type(pipe).__call__).parameters
        many, negative = len(self.prompts) > 1, self.negative_prompt or None
        asked = {
            "prompt": list(self.prompts) if many else self.prompts[0],
            "negative_prompt": [negative] * len(self.prompts) if many and negative else negative,
            "num_inference_steps": self.steps,
            "height": self.height,
            "width": self.width,
            "num_frames": self.frames,
            "guidance_scale": self.guidance_scale,
            **self.more,
        }
        found = {name: value for name, value in asked.items() if value is not None}
        opened = {name: open_image(name, file) for name, file in self.images.items()}
        if opened and "height" not in known and self.height and self.width:
            # A pipeline that takes its size from the image.
            size = found.pop("width"), found.pop("height")
            opened = {name: image.resize(size) for name, image in opened.items()}
        for name in (*found, *opened):
            if name not in known:
                option = OPTIONS.get(name, f"--{'image' if name in opened else 'set'} {name}")
                raise UsageError(f"{option}: {type(pipe).__name__} has no {name}")
        found |= opened
        if "use_resolution_binning" in known:  # it would make another size than was asked for
            found.setdefault("use_resolution_binning", False)
        return found


def open_image(argument: str, file: str) -> Any:
    """An image of PIL, in RGB.

    Raises:
        UsageError: it is not there, or is no image.
    """
    from PIL import Image

    try:
        with Image.open(file) as image:
            return image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise UsageError(f"--image {argument}={file}: {first_line(error)}") from error


@dataclass(frozen=True)
class Made:
    """What a run of a pipeline gave."""

    pictures: Any
    """A tensor [batch, (frames,) channels, height, width] in 0..1, or pictures of PIL."""
    latents: tuple[Tensor, ...]
    """After each step; none where the pipeline does not hand them out."""


def generate(pipe: Any, wish: Wish, output_type: str = "pt") -> Made:
    """Run a pipeline with seeded noise, drawn on the CPU.

    Raises:
        UsageError: the pipeline refuses what it is asked for.
    """
    arguments, latents = wish.arguments(pipe), list[Tensor]()

    def keep(step: int, timestep: Any, found: Tensor) -> None:
        latents.append(found.detach().to("cpu", torch.float32, copy=True))

    def keep_at_end(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        keep(step, timestep, given["latents"])
        return given

    known = inspect.signature(type(pipe).__call__).parameters
    if "callback_on_step_end" in known:
        arguments["callback_on_step_end"] = keep_at_end
    elif "callback" in known:  # of older pipelines, such as PixArt's
        arguments |= {"callback": keep, "callback_steps": 1}
    if "generator" in known:
        arguments["generator"] = torch.Generator().manual_seed(wish.seed)
    with quiet_diffusers(), torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(wish.seed)  # for schedulers that draw without a generator
        try:
            found = pipe(**arguments, output_type=output_type, return_dict=False)
        except (ValueError, TypeError) as error:  # of the pipeline's own checks
            raise UsageError(
                f"{type(pipe).__name__}: {error}",
                hint="Give it an image: --image FILE; or --image ARGUMENT=FILE, such as mask_image."
                if "image" in known and not wish.images
                else "",
            ) from error
    return Made(found[0], tuple(latents))
