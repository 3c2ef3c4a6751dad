"""Images and videos as files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from enginecast.errors import MissingError, UsageError, first_line

IMAGES = (".png", ".jpg", ".jpeg", ".webp")
VIDEOS = (".gif", ".mp4")
FRAME = "frame-{:04}.png"


def require_output(path: Path) -> None:
    """Refuse what cannot be written, before the work and not after it.

    Raises:
        UsageError: the ending is unknown, or the folder is not there or not free.
    """
    if path.suffix and path.suffix.lower() not in (*IMAGES, *VIDEOS):
        expected = ", ".join((*IMAGES, *VIDEOS))
        raise UsageError(
            f"-o {path}: expected a name that ends in {expected}, or a folder for frames"
        )
    if not path.parent.is_dir():
        raise UsageError(f"-o {path}: there is no folder {path.parent}")
    if path.is_dir() and (path.suffix or any(path.iterdir())):
        raise UsageError(f"-o {path}: expected a name that is free, got a folder that is there")


def save_pictures(pictures: Sequence[Any], path: Path) -> list[Path]:
    """Write each image or video of a batch; those after the first as `NAME-2`, `NAME-3`.

    Args:
        pictures: pictures of PIL, or lists of them: videos.

    Returns:
        The files that were written.

    Raises:
        MissingError: a video needs a package that is not here.
        UsageError: a video does not fit the file.
    """
    places = [path, *(path.with_stem(f"{path.stem}-{n + 1}") for n in range(1, len(pictures)))]
    return [
        file
        for made, place in zip(pictures, places, strict=True)
        for file in _save(list(made) if isinstance(made, (list, tuple)) else [made], place)
    ]


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
        try:
            export_to_video(frames, str(path))
        except (ImportError, AttributeError) as error:
            raise MissingError(
                f"-o {path}: {first_line(error)}",
                hint="pip install imageio imageio-ffmpeg, or give a .gif or a folder for frames.",
            ) from error
    elif len(frames) > 1:
        raise UsageError(
            f"-o {path}: a video of {len(frames)} frames",
            hint="Give a name that ends in .gif or .mp4, or a folder for frames.",
        )
    else:
        frames[0].save(path)
    return [path]
