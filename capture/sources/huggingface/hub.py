"""Models given by their name on the Hugging Face hub: recognize the name, download the files."""

import re
import sys
from pathlib import Path

from enginecast.errors import MissingError, SourceError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
FILES = ("*.safetensors", "*.json", "*.model", "vocab.txt", "merges.txt")
"""Of a repository: weights as safetensors, configs and tokenizers.  Never code, never a pickle."""
_SNAPSHOT = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")


def is_hub_name(model: str) -> bool:
    """Whether MODEL looks like "google/t5-v1_1-small" and is not a local file."""
    found = NAME.fullmatch(model) is not None and not model.endswith(".pt2")
    return found and ".." not in model and not Path(model).exists()


def download_line(name: str) -> str:
    """The command that downloads a model, on this machine or another one."""
    return f"hf download {name} --local-dir {name.rpartition('/')[2]}"


def fetch(name: str) -> Path:
    """Download a model's safetensors, configs and tokenizer, or find them in the hub's cache.

    Raises:
        SourceError: the hub has no such model, or not as safetensors, or not for everybody.
        MissingError: the hub cannot be reached.
    """
    import huggingface_hub
    from huggingface_hub import errors, utils

    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=list(FILES)))
    except (errors.GatedRepoError, errors.RepositoryNotFoundError) as error:
        gated = isinstance(error, errors.GatedRepoError)
        what = "its owner has to grant access" if gated else "no such model, or a private one"
        raise SourceError(
            f"{name}: {_hub()}: {what}",
            hint="Check the name; private models need `hf auth login` or HF_TOKEN.",
        ) from error
    except errors.HFValidationError as error:
        raise SourceError(f"{name}: not a valid name on the Hugging Face hub: {error}") from error
    # Whatever else: a refused or silent connection, a 5xx, HF_HUB_OFFLINE, a cut download.
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        raise _unreachable(name, error) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpcore", "requests"):
            raise
        raise _unreachable(name, error) from error
    if not any(folder.rglob("*.safetensors")) and any(folder.rglob("config.json")):
        raise SourceError(
            f"{name}: {_hub()} has its config, but no safetensors weights",
            hint="Convert it at https://huggingface.co/spaces/safetensors/convert.",
        )
    return folder


def model_name(folder: Path) -> str:
    """The name of a model's folder; for a snapshot in the hub's cache, the repository's name."""
    whole = folder.resolve()
    found = _SNAPSHOT.fullmatch(whole.parent.parent.name)
    return found["name"] if found and whole.parent.name == "snapshots" else whole.name


def _hub() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _unreachable(name: str, error: Exception) -> MissingError:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    reason = (str(cause) or type(cause).__name__).splitlines()[0]
    return MissingError(
        f"{name}: {_hub()} cannot be reached: {reason}",
        hint=f"On a machine that can reach it: {download_line(name)}",
    )
