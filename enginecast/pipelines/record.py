"""`enginecast.json` of a folder of engines: how it was made, and how far it agrees with eager."""

import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from enginecast.errors import BundleError, EnginecastWarning, SourceError
from enginecast.public import some
from enginecast.runtime.bundle.manifest import MANIFEST_NAME, Downgrade
from enginecast.runtime.bundle.pipeline_folder import INDEX as INDEX
from enginecast.runtime.bundle.pipeline_folder import RECORD as RECORD
from enginecast.runtime.bundle.pipeline_folder import pipeline_at
from enginecast.runtime.bundle.staging import write_file
from enginecast.version import __version__

FORMAT = 1


def require_original(path: Path) -> None:
    """Refuse a folder of engines.

    Raises:
        SourceError: it is one.
    """
    if pipeline_at(path) == "engines":
        raise SourceError(
            f"{path} holds engines already", hint="Give the folder that they were made from."
        )


def require_pipeline(path: Path) -> None:
    """Refuse a folder that no pipeline was saved to; needs neither torch nor diffusers.

    Raises:
        SourceError: it has no model_index.json.
    """
    if not (path / INDEX).is_file():
        is_bundle = (path / MANIFEST_NAME).is_file()
        has_config = (path / "config.json").is_file() and not is_bundle
        raise SourceError(
            f"{path} is a bundle, and not a diffusion pipeline"
            if is_bundle
            else f"{path} is not a diffusion pipeline: it has no {INDEX}",
            hint=f"`enginecast export {path}` exports one model."
            if has_config
            else "Give the folder that `pipe.save_pretrained` wrote.",
        )


class Record(Struct, frozen=True, kw_only=True):
    """Base of every object in the file."""


class EngineOutcome(Record, frozen=True, kw_only=True):
    """An engine of a component."""

    outcome: Literal["verified", "verified-by-emulation"]
    error: float
    """The largest relative error of an output."""
    errors: dict[str, float] = {}
    """Of a quantized engine, the largest relative error of a row in each case: early, middle and
    late calls of the recorded run among them."""
    max_error: float | None = None
    """Of such a row, as its plan allows it."""
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> float:
        """The largest error of all: `error` is that of all cases together, the others of rows."""
        return max((self.error, *self.errors.values()))


class ComponentOutcome(Record, frozen=True, kw_only=True):
    """What became of a component that has weights."""

    kind: str
    """Its class."""
    outcome: Literal["engine", "eager", "failed"]
    precision: str = ""
    engines: dict[str, EngineOutcome] = {}
    """By entry point: "forward", "decode"."""
    reason: str = ""
    """Why it stays eager."""


class StageOutcome(Record, frozen=True, kw_only=True):
    """How far the pipelines are apart after a step, or in the pictures."""

    name: str
    error: float | None
    """Relative; None: not a number, or of another shape."""
    limit: float


class CheckOutcome(Record, frozen=True, kw_only=True):
    """The whole check."""

    outcome: Literal["verified", "verified-by-emulation", "rejected", "not run"]
    reasons: tuple[str, ...] = ()
    dtype: str = ""
    """Of the eager pipeline."""
    max_error: float | None = None
    """Of the latents of each step, and the pictures, where something is quantized."""
    steps: tuple[StageOutcome, ...] = ()
    pictures: StageOutcome | None = None
    psnr: float | None = None
    """In dB; None: the pictures are equal, or the check was not run."""
    worst: str = ""
    parts_at: str | None = None
    prompts: tuple[float | None, ...] = ()
    """Of each prompt, the largest relative error of its latents after a step; None: not finite."""

    def __repr__(self) -> str:
        """The outcome, and what is wrong."""
        wrong = f": {some(self.reasons, 1)}" if self.reasons else ""
        return f"CheckOutcome({self.outcome}, {len(self.steps)} steps{wrong})"


class PipelineRecord(Record, frozen=True, kw_only=True):
    """The whole file."""

    format: int = FORMAT
    pipeline: str
    versions: dict[str, str]
    recording: dict[str, Any]
    """What the pipeline was asked for."""
    sizes: tuple[tuple[int, int], ...]
    """Heights and widths that were recorded; the engines are for those and what lies between."""
    components: dict[str, ComponentOutcome]
    check: CheckOutcome
    downgrades: tuple[Downgrade, ...] = ()
    """What the engines lack, and components that were to become engines and stay eager."""


def versions() -> dict[str, str]:
    """Of what decides how a pipeline behaves."""
    names = ("torch", "diffusers", "transformers")
    return {"enginecast": __version__, **{name: version(name) for name in names}}


def write_record(folder: Path, record: PipelineRecord) -> None:
    """Write the file, for people to read, too."""
    write_file(folder / RECORD, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def read_record(folder: Path) -> PipelineRecord:
    """Read the file.

    Raises:
        BundleError: it is missing, damaged, or of another version.
    """
    file = folder / RECORD
    try:
        found = msgspec.json.decode(file.read_bytes(), type=PipelineRecord)
    except OSError as error:
        raise BundleError(
            f"{folder} is not a pipeline of engines: it has no {RECORD}",
            hint="Make one with `enginecast diffusers export FOLDER -o DIR`.",
        ) from error
    except msgspec.DecodeError as error:
        raise BundleError(f"{file}: {error}") from error
    if found.format != FORMAT:
        raise BundleError(
            f"{file}: format {found.format}, and this version reads {FORMAT}",
            hint="Export the pipeline again.",
        )
    return found


def usable_record(folder: Path) -> PipelineRecord:
    """Read the file of a folder whose engines are about to run.

    Raises:
        BundleError: see `read_record`; or the pipeline of engines was rejected.

    Warns:
        EnginecastWarning: it was made with another diffusers.
    """
    found = read_record(folder)
    if found.check.outcome == "rejected":
        raise BundleError(f"{folder}: the pipeline was rejected: {'; '.join(found.check.reasons)}")
    here = versions()
    for name in ("diffusers", "transformers"):
        made_with = found.versions.get(name, "")
        if made_with != here[name]:
            warnings.warn(
                f"{folder} was made with {name} {made_with}; here is {here[name]}",
                EnginecastWarning,
                stacklevel=3,
            )
    return found
