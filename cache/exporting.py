"""Writing entries for other tools: one parquet file, or a file a text.

    PATH.parquet          see `exporting_parquet`
    PATH/ab/abcd...pt     one a text, named by key, in folders of its first two digits
    PATH/index.jsonl      a line a text: {"text": ..., "file": ..., "tokens": ...}

A `.safetensors` or `.pt` file has the outputs by name, trimmed as they are stored and in their
dtypes, and `ids`; an `.npz` file has them in float32, since numpy's format knows no bfloat16.
"""

import io
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from enginecast.cache.disk import disk_error
from enginecast.cache.index import Index, open_index
from enginecast.cache.shard_writing import Entry
from enginecast.cache.store import Encodings
from enginecast.errors import CacheError, UsageError
from enginecast.runtime.arrays import BFLOAT16, Array
from enginecast.runtime.staging import flush_folder, require_space

FORMATS = ("parquet", "safetensors", "pt", "npz")
Watch = Callable[[int], object]
"""Told how many texts were written since the last call."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        path: file or folder.
        bytes: of all files.
    """

    path: Path
    form: str
    texts: int
    bytes: int


def export(
    encodings: Encodings, output: Path, form: str = "parquet", watch: Watch | None = None
) -> Exported:
    """Write all entries to a file or folder that is not there yet.

    Raises:
        UsageError: no such format.
        CacheError: the target is there, an entry is damaged, or the disk failed.
        MissingError: the disk is full, or a package is missing (pyarrow for parquet).  Whatever is
            raised: nothing was written.
    """
    if form not in FORMATS:
        raise UsageError(f"--format {form}: expected {', '.join(FORMATS)}")
    if os.path.lexists(output):
        raise CacheError(
            f"{output}: is there already; nothing is overwritten",
            hint="Name another one, or remove it first.",
        )
    if not output.resolve().parent.is_dir():
        raise UsageError(f"-o {output}: there is no folder {output.resolve().parent}")
    index = open_index(encodings, keep=False)
    if index.errors:
        raise index.errors[0]
    require_space(output.parent, _bytes(index, form))
    told = watch or (lambda _: None)
    with _staged(output) as staged:
        if form == "parquet":
            from enginecast.cache.exporting_parquet import write_parquet

            write_parquet(staged, encodings, whole_entries(index), told)
        else:
            _write_files(staged, _WRITERS[form], form, index, told)
        size = sum(path.stat().st_size for path in _files(staged))
        _publish(staged, output)
    return Exported(output, form, len(index), size)


def whole_entries(index: Index) -> Iterator[Entry]:
    """All entries in the order of their numbers.

    Raises:
        CacheError: one is damaged.
    """
    for number in range(len(index)):
        place = index.row(number)
        shard = index.shards[place.shard]
        if not shard.is_whole(place.text):
            raise CacheError(
                f"{shard.path}: damaged: the outputs of text {place.text} differ from their sum",
                hint="`enginecast cache verify CACHE` takes it out; then `cache fill` fills it"
                " again.",
            )
        yield shard.entry(place.text)


def _bytes(index: Index, form: str) -> int:
    """Room that an export takes at least."""
    times = 2 if form == "npz" else 1  # of bfloat16
    narrow = any(one.dtype == "bfloat16" for shard in index.shards for one in shard.spec.outputs)
    stored = sum(shard.path.stat().st_size for shard in index.shards)
    return stored * (times if narrow else 1)


def _write_files(
    folder: Path, write: Callable[[Path, Entry], None], form: str, index: Index, told: Watch
) -> None:
    folder.mkdir()
    with (folder / "index.jsonl").open("wb") as lines:
        for entry in whole_entries(index):
            key = entry.key.hex()
            file = Path(key[:2]) / f"{key}.{form}"
            (folder / file.parent).mkdir(exist_ok=True)
            write(folder / file, entry)
            line = {"text": entry.text, "file": str(file), "tokens": len(entry.ids)}
            lines.write(msgspec.json.encode(line) + b"\n")
            told(1)


def _tensors(entry: Entry) -> dict[str, Array]:
    return {**entry.outputs, "ids": entry.ids}


def _write_safetensors(path: Path, entry: Entry) -> None:
    contiguous = {name: np.ascontiguousarray(array) for name, array in _tensors(entry).items()}
    safetensors.numpy.save_file(contiguous, path, {"text": entry.text})
    path.chmod(0o644)  # safetensors writes 0600


def _write_pt(path: Path, entry: Entry) -> None:
    import torch

    tensors = {}
    for name, array in _tensors(entry).items():
        own = array.copy()  # of a view torch would save the whole buffer
        if own.dtype == BFLOAT16:
            tensors[name] = torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
        else:
            tensors[name] = torch.from_numpy(own)
    buffer = io.BytesIO()  # torch raises RuntimeError for a full disk
    torch.save(tensors, buffer)
    path.write_bytes(buffer.getvalue())


def _write_npz(path: Path, entry: Entry) -> None:
    arrays: dict[str, Any] = {
        name: array.astype(np.float32) for name, array in entry.outputs.items()
    }
    np.savez(path, **arrays, ids=entry.ids)


_WRITERS: dict[str, Callable[[Path, Entry], None]] = {
    "safetensors": _write_safetensors,
    "pt": _write_pt,
    "npz": _write_npz,
}


@contextmanager
def _staged(output: Path) -> Iterator[Path]:
    """Where to write what is renamed at the end; gone afterwards, whatever happens."""
    staged = output.with_name(f".{output.name}.{uuid.uuid4().hex}")
    try:
        yield staged
    except (OSError, SafetensorError) as error:
        raise disk_error(output, error) from error
    finally:
        if staged.is_dir():
            shutil.rmtree(staged, ignore_errors=True)
        else:
            staged.unlink(missing_ok=True)


def _files(staged: Path) -> list[Path]:
    return [path for path in (staged, *staged.rglob("*")) if path.is_file()]


def _publish(staged: Path, output: Path) -> None:
    """Flush and rename; a target that somebody made meanwhile stays as it is."""
    for path in _files(staged):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    if os.path.lexists(output):
        raise CacheError(f"{output}: appeared meanwhile; nothing is overwritten")
    staged.rename(output)
    flush_folder(output.resolve().parent)
