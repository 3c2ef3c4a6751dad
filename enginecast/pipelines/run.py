"""A folder of engines as a pipeline of diffusers."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch

from enginecast.errors import BundleError, EnginecastError, InputError, UsageError, first_line
from enginecast.pipelines.attach import attach
from enginecast.pipelines.components import empty_component
from enginecast.pipelines.folder import open_pipeline
from enginecast.pipelines.generate import Made, Wish, generate
from enginecast.pipelines.record import ComponentOutcome, PipelineRecord
from enginecast.runtime.device.gpu import require_cuda
from enginecast.runtime.sessions.session import PROVIDERS


def require_device(device: str) -> None:
    """Refuse a device that is not here, before the work.

    Raises:
        MissingError: there is no GPU.
        UsageError: the device is something else.
    """
    if device not in PROVIDERS:
        raise UsageError(f"--device {device}: expected {' or '.join(PROVIDERS)}")
    if device == "cuda":
        require_cuda(torch)


def load_pipeline(path: Path, record: PipelineRecord, device: str = "cpu", **how: Any) -> Any:
    """The pipeline of a folder of engines; components that stayed eager hold their weights.

    Args:
        record: of the folder.
        device: "cpu" or "cuda".
        how: of `attach`.

    Raises:
        BundleError: the folder holds another pipeline than its record says.
    """
    folder = open_pipeline(path)
    if folder.kind.__name__ != record.pipeline:
        raise BundleError(
            f"{path}: it was made of a {record.pipeline}, and its index says"
            f" {folder.kind.__name__}",
            hint="Export the pipeline again.",
        )
    return with_engines(path, record.components, **how).to(device)


def with_engines(path: Path, components: Mapping[str, ComponentOutcome], **how: Any) -> Any:
    """The pipeline of a folder whose record may not be written yet."""
    engines = [name for name, each in components.items() if each.outcome == "engine"]
    empty: dict[str, Any] = {name: empty_component(path / name) for name in engines}
    pipe = open_pipeline(path).load(empty)
    attach(pipe, {name: path / name for name in engines}, **how)
    return pipe


def run_pipeline(pipe: Any, record: PipelineRecord, wish: Wish) -> Made:
    """Make pictures of PIL with a pipeline of engines.

    Raises:
        EnginecastError: the engines do not take what is asked for.
    """
    try:
        return generate(pipe, wish, output_type="pil")
    except InputError as error:
        asked = (wish.height, wish.width) if wish.height and wish.width else record.sizes[0]
        recorded = wish_of(record)
        if asked not in record.sizes or wish.frames != recorded.frames:
            sizes = " and ".join(f"{height} x {width}" for height, width in record.sizes)
            frames = f", {recorded.frames} frames" if recorded.frames else ""
            error.hint = (
                f"The pipeline was recorded at {sizes}{frames} (height x width): export it again"
                " with the sizes that you want."
            )
        raise
    except Exception as error:  # the pipeline's own code raises any kind
        names = [frame.f_globals["__name__"] for frame, _ in walk_tb(error.__traceback__)]
        inside = names[names.index(generate.__module__) + 1 :]
        is_ours = any(name.startswith("enginecast.") for name in inside)
        if isinstance(error, EnginecastError) or is_ours:
            raise
        raise UsageError(
            f"{type(pipe).__name__}: {type(error).__name__}: {first_line(error)}"
        ) from error


def made_how(pipe: Any, wish: Wish, made: Made) -> str:
    """Steps and size (height x width) of pictures of PIL, such as "50 steps at 64 x 64"."""
    steps: Any = wish.steps
    if steps is None:
        known = inspect.signature(type(pipe).__call__).parameters
        default = known.get("num_inference_steps")
        is_listed = not {"timesteps", "sigmas"}.isdisjoint(wish.more)
        steps = len(made.latents) if default is None or is_listed else default.default
    first = made.pictures[0]
    picture = first[0] if isinstance(first, (list, tuple)) else first
    return f"{steps} steps at {picture.height} x {picture.width}"


def wish_of(record: PipelineRecord) -> Wish:
    """What the pipeline was asked for when it was recorded."""
    said = dict(record.recording)
    return Wish(**{**said, "prompts": tuple(said["prompts"])})
