"""The weight files of a Hugging Face folder: one safetensors, or shards with an index."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from enginecast.errors import SourceError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def find_weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that hold the weights; empty when the folder has no weights at all.

    Raises:
        SourceError: only pickle checkpoints, a missing shard, or an index that cannot be read.
    """
    if (folder / SINGLE).is_file():
        return (folder / SINGLE,)
    if (folder / INDEX).is_file():
        return tuple(sorted({folder / name for name in _weight_map(folder / INDEX).values()}))
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise SourceError(
            f"{folder / pickles[0]} is a pickle: loading it can run code, so it is refused",
            hint=f"Convert it to {SINGLE}, with safetensors.torch.save_file or save_pretrained.",
        )
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    if others:
        raise SourceError(
            f"{folder} holds {', '.join(others[:3])} and no {SINGLE} or {INDEX}",
            hint=f"Rename the file to {SINGLE}, or add the index of the shards.",
        )
    return ()


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Map every tensor of the folder's weight files, by its name in the file, in its own dtype.

    Raises:
        SourceError: a file that is truncated or no safetensors, or a shard without a tensor that
            the index promises.
    """
    tensors: dict[str, Tensor] = {}
    for file in find_weight_files(folder):
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 - no iterator of its own
                    tensors[name] = reader.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise SourceError(
                f"{file} cannot be read as safetensors: {error}",
                hint="The file is truncated or damaged: copy or download it again.",
            ) from error
    _check_index(folder, tensors)
    return tensors


def sha256_of(files: Iterable[Path]) -> str:
    """sha256 over the contents of `files`, in the order given."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        SourceError: the file is missing, no JSON, or no object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SourceError(f"{file} is missing") from error
    except (ValueError, RecursionError, OSError) as error:
        raise SourceError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise SourceError(f"{file} must hold a JSON object, it holds a {type(value).__name__}")
    return value


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{index} has no weight_map: tensor name -> shard")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise SourceError(f"{index}: the shard of {name} must be a plain file name: {shard!r}")
        if not (index.parent / shard).is_file():
            raise SourceError(
                f"{index.parent / shard} is missing: {index.name} lists it for {name}",
                hint="Copy or download the shard beside the index.",
            )
    return weight_map


def _check_index(folder: Path, tensors: dict[str, Tensor]) -> None:
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return
    absent = sorted(set(_weight_map(folder / INDEX)) - set(tensors))
    if absent:
        raise SourceError(f"{folder / INDEX} lists {absent[0]}, which no shard holds")
