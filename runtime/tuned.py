"""The settings that `enginecast tune` chose for an engine on one machine: a file next to the
bundle.
"""

import hashlib
from pathlib import Path

import msgspec

from enginecast.errors import BundleError
from enginecast.runtime.bundle.manifest import TUNED_SUFFIX, Digest, EngineRecord, Record
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.bundle.staging import write_file
from enginecast.runtime.device.machine import cores, processor
from enginecast.runtime.device.versions import installed
from enginecast.runtime.sessions.session import Session
from enginecast.runtime.sessions.settings import DEFAULT, Settings

_LARGEST = 1 << 20
_HOLD_TIMES = ("report.html", "report.json", "build.log")
"""Files of a bundle that differ if the same model is exported again."""


class Machine(Record, frozen=True, kw_only=True):
    """The machine properties that must match for a choice to apply."""

    processor: str
    cores: int
    versions: dict[str, str]
    """Versions of the packages that run the engine."""


class Tuned(Record, frozen=True, kw_only=True):
    """The chosen settings for an engine."""

    schema_version: int = 1
    bundle: Digest
    engine: str
    """The engine's file."""
    provider: str
    machine: Machine
    settings: Settings
    speed: float
    """Speedup over the default."""
    inputs: str
    """The measured inputs, in words."""


def tuned_path(root: Path) -> Path:
    """The path of a bundle's tuned settings."""
    return root.with_name(f"{root.name}{TUNED_SUFFIX}")


def machine_of(session: type[Session]) -> Machine:
    """This machine, for engines that `session` runs."""
    return Machine(processor=processor(), cores=cores(), versions=installed(*session.packages))


def bundle_digest(bundle: Bundle) -> str:
    """Digest of all files except those with timings, so that a repeated export has the same one."""
    lines = [f"{f.name} {f.sha256}" for f in bundle.manifest.files if f.name not in _HOLD_TIMES]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def write_tuned(root: Path, tuned: Tuned) -> Path:
    """Write the choice atomically."""
    path = tuned_path(root)
    write_file(path, msgspec.json.format(msgspec.json.encode(tuned), indent=1) + b"\n")
    return path


def forget_tuned(root: Path) -> None:
    """Remove the tuned settings of a bundle."""
    path = tuned_path(root)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}") from error


def find_tuned(
    bundle: Bundle, record: EngineRecord, session: type[Session], provider: str
) -> Settings:
    """The settings chosen for an engine on this machine, or the defaults; a BundleError where the
    choice is for another bundle or machine, or is damaged.
    """
    path = tuned_path(bundle.root)
    if not session.tunable or not path.is_file():
        return DEFAULT
    try:
        with path.open("rb") as file:
            tuned = msgspec.json.decode(file.read(_LARGEST), type=Tuned)
    except (OSError, RecursionError, msgspec.MsgspecError) as error:
        raise BundleError(f"{path}: cannot be read: {error}") from error
    if (tuned.settings.threads or 1) > tuned.machine.cores:
        raise BundleError(
            f"{path}: {tuned.settings.threads} threads on {tuned.machine.cores} cores"
        )
    if tuned.bundle != bundle_digest(bundle):
        raise BundleError(f"{path}: made for another bundle of this name")
    if (tuned.engine, tuned.provider) != (record.file, session.provider_for(provider)):
        return DEFAULT
    here = machine_of(session)
    for name in Machine.__struct_fields__:
        then, now = getattr(tuned.machine, name), getattr(here, name)
        if then != now:
            raise BundleError(f"{path}: made on another machine: {name} {then!r}, here {now!r}")
    return tuned.settings
