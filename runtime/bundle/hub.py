"""Repositories of the Hugging Face Hub, and the bundles in them.

Nothing here asks the hub but on a user's word. The hub's own cache holds links; a bundle holds
none, and no file that its manifest does not list, so that it gets a folder of its own.
"""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from enginecast.errors import BundleError, EnginecastError, MissingError
from enginecast.installation import required
from enginecast.runtime.bundle.manifest import MANIFEST_NAME, SIGNATURE_NAME
from enginecast.runtime.bundle.manifest_json import decode

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_hub_name(text: str) -> bool:
    """Whether a text looks like "google/t5-v1_1-small" and is not a local file."""
    found = NAME.fullmatch(text) is not None
    return found and ".." not in text and not Path(text).exists()


def hub_endpoint() -> str:
    """Where the hub is, as HF_ENDPOINT says."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def snapshot(
    name: str,
    files: Sequence[str],
    *,
    what: str,
    refused: type[EnginecastError],
    revision: str | None = None,
) -> Path:
    """Download files of a repository, or find them in the hub's cache.

    Args:
        name: OWNER/NAME.
        files: patterns of their names.
        what: is expected there, for messages: "model".
        refused: the error where the hub has no such repository.
        revision: a branch, tag or commit; None: the newest.

    Raises:
        MissingError: the hub cannot be reached.
    """
    with required("huggingface_hub", "a download", "export"):
        import huggingface_hub
    from huggingface_hub import errors, utils

    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    try:
        found = huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=[*files])
    except (
        errors.GatedRepoError,
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
    ) as error:
        why = f"no such {what}, or a private one"
        if isinstance(error, errors.GatedRepoError):
            why = "its owner has to grant access"
        if isinstance(error, errors.RevisionNotFoundError):
            why = f"no revision {revision}"
        raise refused(
            f"{name}: {hub_endpoint()}: {why}",
            hint="Check the name; private models need `hf auth login` or HF_TOKEN.",
        ) from error
    except errors.HFValidationError as error:
        raise refused(f"{name}: not a valid name on the Hugging Face hub: {error}") from error
    # Whatever else: a refused or silent connection, a 5xx, HF_HUB_OFFLINE, a cut download.
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        raise _unreachable(name, error) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpcore", "requests"):
            raise
        raise _unreachable(name, error) from error
    return Path(found)


def download_line(name: str) -> str:
    """The command that downloads a repository, on this machine or another one."""
    return f"hf download {name} --local-dir {name.rpartition('/')[2]}"


def fetch_bundle(text: str) -> Path:
    """The folder of a bundle of the hub, which is downloaded where it is not here already.

    Args:
        text: OWNER/NAME, or OWNER/NAME@REVISION.

    Raises:
        BundleError: the hub has no such bundle.
        MissingError: the hub cannot be reached.
    """
    name, _, revision = text.partition("@")
    get = partial(snapshot, name, what="bundle", refused=BundleError)
    first = get([MANIFEST_NAME], revision=revision or None)
    if not (first / MANIFEST_NAME).is_file():
        raise BundleError(
            f"{name}: {hub_endpoint()}: expected a bundle, but it has no {MANIFEST_NAME}",
            hint="A model's repository is for `enginecast export`, with download=True.",
        )
    folder = _cache() / name.replace("/", "--") / first.name
    if folder.is_dir():
        return folder
    names = _listed(first)
    wanted = [*names, SIGNATURE_NAME]
    inner = [part.name for part in decode((first / MANIFEST_NAME).read_bytes()).parts]
    if inner:
        parts = [f"{part}/{MANIFEST_NAME}" for part in inner]
        held = get(parts, revision=first.name)
        wanted += [f"{p}/{n}" for p in inner if (held / p).is_dir() for n in _listed(held / p)]
    whole = get(wanted, revision=first.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        for each in wanted:
            if (source := whole / each).is_file():  # what is missing is named when it is opened
                (made / each).parent.mkdir(exist_ok=True)
                _link(source.resolve(), made / each)
        made.chmod(0o755)
        with suppress(OSError):  # another process was first
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _listed(folder: Path) -> list[str]:
    """The manifest of a bundle, and the files that it lists."""
    manifest = decode((folder / MANIFEST_NAME).read_bytes())
    return [MANIFEST_NAME, *(file.name for file in manifest.files)]


def _link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the cache is on another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _cache() -> Path:
    """Beside the cache of the hub, so that files need not be copied."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).parent / "enginecast"


def _unreachable(name: str, error: Exception) -> MissingError:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    reason = (str(cause) or type(cause).__name__).splitlines()[0]
    return MissingError(
        f"{name}: {hub_endpoint()} cannot be reached: {reason}",
        hint=f"On a machine that can reach it: {download_line(name)}",
    )
