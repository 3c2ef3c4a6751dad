"""Writing entries for other tools: one parquet file, or a file a text.

    PATH.parquet          a row a text: `text` string, `ids` list<int32> without padding, and for
                          each output its values row by row as large_binary, OUTPUT_shape
                          list<int32> and OUTPUT_dtype string; the spec, as JSON, in the metadata
    PATH/ab/abcd...pt     one a text, named by key, in folders of its first two digits
    PATH/index.jsonl      a line a text: {"text": ..., "file": ..., "tokens": ...}

A `.safetensors` or `.pt` file has the outputs by name, trimmed as they are stored and in their
dtypes, and `ids`; an `.npz` file has them in float32, since numpy's format knows no bfloat16, and a
parquet file as bytes, since Arrow knows none.
"""

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from enginecast.cache.store.disk import bytes_in, disk_error, disk_errors
from enginecast.cache.store.folders import Encodings
from enginecast.cache.store.index import open_index
from enginecast.cache.store.shard import Entry
from enginecast.cache.upkeep.rewriting import chunked
from enginecast.errors import CacheError, UsageError
from enginecast.installation import required
from enginecast.runtime.bundle.staging import flush_folder, require_space
from enginecast.runtime.device.torch_values import as_tensor
from enginecast.runtime.values.arrays import Array

FORMATS = ("parquet", "safetensors", "pt", "npz")
_GROUP_BYTES = 32_000_000
"""Size of a row group of parquet, about: what a reader has in memory at least."""
Watch = Callable[[int], object]
"""Called with how many texts were written since the last call."""


@dataclass(frozen=True)
class Exported:
    """What was written: texts, and bytes of all files."""

    texts: int
    bytes: int


def export(
    encodings: Encodings, output: Path, form: str = "parquet", watch: Watch | None = None
) -> Exported:
    """Write all entries to a file or folder that is not there yet.

    Raises:
        UsageError: no such format.
        CacheError: the target is there, an entry is damaged, or the disk failed.
        MissingError: the disk is full, or pyarrow is missing.  Whatever is raised: nothing was
            written.
    """
    if form not in FORMATS:
        raise UsageError(f"--format {form}: expected {', '.join(FORMATS)}")
    report = watch or (lambda _: None)
    with disk_errors(output):
        index = open_index(encodings, keep=False).require_whole()
        stored = bytes_in(shard.path for shard in index.shards)
    narrow = any(one.dtype == "bfloat16" for one in encodings.spec.outputs)
    with publishing(output, stored * 2 if narrow and form == "npz" else stored) as staged:
        entries = map(index.whole_entry, range(len(index)))
        if form == "parquet":
            _write_parquet(staged, encodings, entries, report)
        else:
            _write_files(staged, form, entries, report)
    return Exported(len(index), bytes_in([output]))


@contextmanager
def publishing(output: Path, needed: int) -> Iterator[Path]:
    """A path to write a file or folder to, which then is at `output`, whole, or nothing is.

    Args:
        needed: bytes, about.

    Raises:
        CacheError: the target is there, or the disk failed.
        MissingError: the disk is full.
    """
    with disk_errors(output):
        if os.path.lexists(output):
            raise CacheError(
                f"{output}: already exists; nothing is overwritten",
                hint="Name another one, or remove it first.",
            )
        folder = output.resolve().parent
        if not folder.is_dir():
            raise UsageError(f"-o {output}: there is no folder {folder}")
        require_space(output.parent, needed)
        try:
            with TemporaryDirectory(
                dir=folder, prefix=f".{output.name}.", ignore_cleanup_errors=True
            ) as temporary:
                staged = Path(temporary) / output.name
                yield staged
                for path in (staged, *staged.rglob("*")):
                    if path.is_file():
                        with path.open("rb+") as file:
                            os.fsync(file.fileno())
                if os.path.lexists(output):
                    raise CacheError(f"{output}: was created meanwhile; nothing is overwritten")
                staged.rename(output)
                flush_folder(folder)
        except (OSError, SafetensorError) as error:
            raise disk_error(output, error) from error


def _write_files(folder: Path, form: str, entries: Iterable[Entry], report: Watch) -> None:
    folder.mkdir()
    with (folder / "index.jsonl").open("wb") as lines:
        for entry in entries:
            key = entry.key.hex()
            file = Path(key[:2]) / f"{key}.{form}"
            (folder / file.parent).mkdir(exist_ok=True)
            _write_file(folder / file, form, entry)
            line = {"text": entry.text, "file": str(file), "tokens": len(entry.ids)}
            lines.write(msgspec.json.encode(line) + b"\n")
            report(1)


def _write_file(path: Path, form: str, entry: Entry) -> None:
    arrays = {**entry.outputs, "ids": entry.ids}
    if form == "npz":
        wide = {name: one.astype(np.float32) for name, one in entry.outputs.items()}
        write_arrays(path, {**arrays, **wide}, {})
    elif form == "safetensors":
        write_arrays(path, arrays, {"text": entry.text})
    else:
        import torch

        buffer = io.BytesIO()  # torch raises RuntimeError for a full disk
        # Of a view torch would save the whole buffer.
        torch.save({name: as_tensor(array.copy()) for name, array in arrays.items()}, buffer)
        path.write_bytes(buffer.getvalue())


def write_arrays(path: Path, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write an `.npz`, which takes no metadata and no bfloat16, or a safetensors file."""
    if path.suffix == ".npz":
        named: dict[str, Any] = dict(arrays)
        np.savez(path, **named)
        return
    copied = {name: one.copy() for name, one in arrays.items()}
    safetensors.numpy.save_file(copied, path, dict(metadata))
    path.chmod(0o644)  # safetensors writes 0600


def _write_parquet(
    path: Path, encodings: Encodings, entries: Iterable[Entry], report: Watch
) -> None:
    """Write entries; `report` is called after each group."""
    instead = "or --format safetensors, pt or npz"
    with required("pyarrow", "a parquet file", "cache", instead=instead):
        import pyarrow
        from pyarrow import parquet
    outputs = [one.name for one in encodings.spec.outputs]
    fields = [("text", pyarrow.string()), ("ids", pyarrow.list_(pyarrow.int32()))]
    for name in outputs:
        fields += [
            (name, pyarrow.large_binary()),
            (f"{name}_shape", pyarrow.list_(pyarrow.int32())),
            (f"{name}_dtype", pyarrow.string()),
        ]
    spec = {"enginecast.spec": msgspec.json.encode(encodings.spec)}
    schema = pyarrow.schema(fields, metadata=spec)
    # Values neither repeat nor compress.
    packed = {name: "none" if name in outputs else "zstd" for name in schema.names}
    plain = [name for name in schema.names if name not in outputs]
    with parquet.ParquetWriter(path, schema, compression=packed, use_dictionary=plain) as writer:
        for group in chunked(entries, _GROUP_BYTES):
            columns: dict[str, list[Any]] = {
                "text": [entry.text for entry in group],
                "ids": [entry.ids for entry in group],
            }
            for name in outputs:
                arrays = [entry.outputs[name] for entry in group]
                columns[name] = [array.tobytes() for array in arrays]
                columns[f"{name}_shape"] = [list(array.shape) for array in arrays]
                columns[f"{name}_dtype"] = [array.dtype.name for array in arrays]
            writer.write_table(pyarrow.table(columns, schema=schema), row_group_size=len(group))
            report(len(group))
