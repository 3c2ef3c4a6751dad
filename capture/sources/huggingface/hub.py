"""Models given by their name on the Hugging Face hub: recognize the name, download the files."""

import re
from pathlib import Path

from enginecast.errors import SourceError
from enginecast.runtime.bundle import hub
from enginecast.runtime.bundle.hub import download_line as download_line

FILES = (
    *("*.safetensors", "*.json", "*.model", "vocab.txt", "merges.txt"),
    "chat_template.jinja",
)
"""Of a repository: weights as safetensors, configs and tokenizers.  Never code, never a pickle."""
_SNAPSHOT = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")


def is_hub_name(model: str) -> bool:
    """Whether MODEL looks like "google/t5-v1_1-small" and is not a local file."""
    return hub.is_hub_name(model) and not model.endswith(".pt2")


def fetch(name: str) -> Path:
    """Download a model's safetensors, configs and tokenizer, or find them in the hub's cache.

    Raises:
        SourceError: the hub has no such model, or not as safetensors, or not for everybody.
        MissingError: the hub cannot be reached.
    """
    folder = hub.snapshot(name, FILES, what="model", refused=SourceError)
    if not any(folder.rglob("*.safetensors")) and any(folder.rglob("config.json")):
        raise SourceError(
            f"{name}: {hub.hub_endpoint()} has its config, but no safetensors weights",
            hint="Convert it at https://huggingface.co/spaces/safetensors/convert.",
        )
    return folder


def model_name(folder: Path) -> str:
    """The name of a model's folder; for a snapshot in the hub's cache, the repository's name, and
    for a folder that is called "model", as in a package, that of the folder around it.
    """
    whole = folder.resolve()
    found = _SNAPSHOT.fullmatch(whole.parent.parent.name)
    if found and whole.parent.name == "snapshots":
        return found["name"]
    return whole.parent.name if whole.name == "model" and whole.parent.name else whole.name
