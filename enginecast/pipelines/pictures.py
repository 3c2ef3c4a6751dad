"""Images and videos as files."""

import inspect
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from enginecast.errors import MissingError, UsageError

IMAGES = (".png", ".jpg", ".jpeg", ".webp")
VIDEOS = (".gif", ".mp4")
FRAME = "frame-{:04}.png"


def require_output(path: Path) -> None:
    """Refuse what cannot be written, before the work and not after it.

    Raises:
        MissingError: a video needs a package that is not here.
        UsageError: the ending is unknown, or the folder is not there or not free.
    """
    if path.suffix and path.suffix.lower() not in (*IMAGES, *VIDEOS):
        expected = ", ".join((*IMAGES, *VIDEOS))
        raise UsageError(
            f"-o {path}: expected a name that ends in {expected}, or a folder for frames"
        )
    if not path.parent.is_dir():
        raise UsageError(f"-o {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"-o {path}: the folder {path.parent} cannot be written")
    writer = "imageio_ffmpeg" if find_spec("imageio") else "cv2"  # as diffusers has it
    if path.suffix.lower() == ".mp4" and not find_spec(writer):
        raise MissingError(
            f"-o {path}: .mp4 files need imageio, which is not installed",
            hint="pip install imageio imageio-ffmpeg, or give a .gif or a folder for frames.",
        )
    if path.is_dir() and (path.suffix or any(path.iterdir())):
        raise UsageError(f"-o {path}: expected a new name, got an existing folder")


def require_frames_fit(path: Path, pipe: Any, frames: int | None) -> None:
    """Refuse the file of an image for a video, before the work.

    Raises:
        UsageError: the pipeline makes videos.
    """
    makes_videos = "num_frames" in inspect.signature(type(pipe).__call__).parameters
    if makes_videos and frames != 1 and path.suffix.lower() in IMAGES:
        raise UsageError(
            f"-o {path}: {type(pipe).__name__} makes videos",
            hint="Give a name that ends in .gif or .mp4, or a folder for frames.",
        )


def save_pictures(pictures: Sequence[Any], path: Path) -> list[Path]:
    """Write each image or video of a batch; those after the first as `NAME-2`, `NAME-3`.

    Args:
        pictures: pictures of PIL, or lists of them: videos.

    Returns:
        The files that were written.

    Raises:
        UsageError: the file cannot be written.
    """
    places = [path, *(path.with_stem(f"{path.stem}-{n + 1}") for n in range(1, len(pictures)))]
    try:
        return [
            file
            for made, place in zip(pictures, places, strict=True)
            for file in _save(list(made) if isinstance(made, (list, tuple)) else [made], place)
        ]
    except OSError as error:
        raise UsageError(f"-o {path}: cannot be written: {error.strerror or error}") from error


def _save(frames: list[Any], path: Path) -> list[Path]:
    from diffusers.utils import export_to_gif, export_to_video

    ending = path.suffix.lower()
    if not ending:
        path.mkdir(exist_ok=True)
        files = [path / FRAME.format(number) for number in range(len(frames))]
        for file, frame in zip(files, frames, strict=True):
            frame.save(file)
        return files
    if ending == ".gif":
        export_to_gif(frames, str(path))
    elif ending == ".mp4":
        export_to_video(frames, str(path))
    else:
        frames[0].save(path)
    return [path]
