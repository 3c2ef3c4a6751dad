"""Running a diffusion pipeline: what it is asked for, and what it gave on the way."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from enginecast.errors import UsageError
from enginecast.pipelines.folder import quiet_diffusers

PROMPTS = ("a red fox in the snow", "a small boat on a lake, mountains behind it, oil painting")


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

    def __post_init__(self) -> None:
        sizes = {"steps": self.steps, "height": self.height}
        for name, size in {**sizes, "width": self.width, "frames": self.frames}.items():
            if size is not None and size < 1:
                raise UsageError(f"--{name} {size}: expected at least 1")
        if (self.height is None) != (self.width is None):
            raise UsageError("--height and --width go together: pipelines ignore one alone")

    def sized(self, height: int, width: int) -> "Wish":
        """The same in another size."""
        return replace(self, height=height, width=width)

    def arguments(self, pipe: Any) -> dict[str, Any]:
        """What the pipeline is called with.

        Raises:
            UsageError: it has no such argument.
        """
        known = inspect.signature(type(pipe).__call__).parameters
        many = len(self.prompts) > 1
        named = {
            "prompt": ("--prompt", list(self.prompts) if many else self.prompts[0]),
            "negative_prompt": ("--negative-prompt", self._negative(many)),
            "num_inference_steps": ("--steps", self.steps),
            "height": ("--height", self.height),
            "width": ("--width", self.width),
            "num_frames": ("--frames", self.frames),
            "guidance_scale": ("--guidance-scale", self.guidance_scale),
            **{name: (f"--set {name}", value) for name, value in self.more.items()},
        }
        found: dict[str, Any] = {}
        for name, (option, value) in named.items():
            if value is None:
                continue
            if name not in known:
                raise UsageError(f"{option}: {type(pipe).__name__} has no {name}")
            found[name] = value
        if "use_resolution_binning" in known:  # it would make another size than was asked for
            found.setdefault("use_resolution_binning", False)
        return found

    def _negative(self, many: bool) -> Any:
        if not self.negative_prompt:
            return None
        return [self.negative_prompt] * len(self.prompts) if many else self.negative_prompt


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
    with quiet_diffusers(), torch.no_grad():
        try:
            found = pipe(**arguments, output_type=output_type, return_dict=False)
        except (ValueError, TypeError) as error:  # of the pipeline's own checks
            raise UsageError(f"{type(pipe).__name__}: {error}") from error
    return Made(found[0], tuple(latents))
