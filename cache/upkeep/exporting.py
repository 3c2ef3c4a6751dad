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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from enginecast.cache.store.index import Index, open_index
from enginecast.cache.store.shard import Entry
from enginecast.cache.store.spec import EncoderSpec
from enginecast.cache.store.store import Encodings
from enginecast.cache.upkeep.rewriting import chunked
from enginecast.errors import CacheError, UsageError
from enginecast.installation import required
from enginecast.runtime.bundle.staging import flush_folder, require_space
from enginecast.runtime.device.torch_values import as_tensor
from enginecast.runtime.values.arrays import Array

FORMATS = ("parquet", "safetensors", "pt", "npz")
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
        MissingError: the disk is full, or a package is missing (pyarrow for parquet).  Whatever is
            raised: nothing was written.
    """
    if form not in FORMATS:
        raise UsageError(f"--format {form}: expected {', '.join(FORMATS)}")
    with disk_errors(output):
        if os.path.lexists(output):
            raise CacheError(
                f"{output}: already exists; nothing is overwritten",
                hint="Name another one, or remove it first.",
            )
        if not output.resolve().parent.is_dir():
            raise UsageError(f"-o {output}: there is no folder {output.resolve().parent}")
        index = open_index(encodings, keep=False).require_whole()
        require_space(output.parent, _bytes(index, form))
        report = watch or (lambda _: None)
        entries = map(index.whole_entry, range(len(index)))
        with _staged(output) as staged:
            if form == "parquet":
                write_parquet(staged, encodings, entries, report)
            else:
                _write_files(staged, form, entries, report)
            size = bytes_in([staged])
            _publish(staged, output)
    return Exported(len(index), size)


def _bytes(index: Index, form: str) -> int:
    """Room that an export takes at least."""
    narrow = any(one.dtype == "bfloat16" for shard in index.shards for one in shard.spec.outputs)
    stored = bytes_in(shard.path for shard in index.shards)
    return stored * 2 if narrow and form == "npz" else stored


def _write_files(folder: Path, form: str, entries: Iterable[Entry], report: Watch) -> None:
    folder.mkdir()
    with (folder / "index.jsonl").open("wb") as lines:
        for entry in entries:
            key = entry.key.hex()
            file = Path(key[:2]) / f"{key}.{form}"
            (folder / file.parent).mkdir(exist_ok=True)
            _WRITERS[form](folder / file, entry)
            line = {"text": entry.text, "file": str(file), "tokens": len(entry.ids)}
            lines.write(msgspec.json.encode(line) + b"\n")
            report(1)


def _copied(entry: Entry) -> dict[str, Array]:
    """Of a view torch would save the whole buffer."""
    return {name: array.copy() for name, array in {**entry.outputs, "ids": entry.ids}.items()}


def _write_safetensors(path: Path, entry: Entry) -> None:
    safetensors.numpy.save_file(_copied(entry), path, {"text": entry.text})
    path.chmod(0o644)  # safetensors writes 0600


def _write_pt(path: Path, entry: Entry) -> None:
    import torch

    tensors = {name: as_tensor(array) for name, array in _copied(entry).items()}
    buffer = io.BytesIO()  # torch raises RuntimeError for a full disk
    torch.save(tensors, buffer)
    path.write_bytes(buffer.getvalue())


def _write_npz(path: Path, entry: Entry) -> None:
    wide: dict[str, Any] = {name: one.astype(np.float32) for name, one in entry.outputs.items()}
    np.savez(path, **wide, ids=entry.ids)


_WRITERS: dict[str, Callable[[Path, Entry], None]] = {
    "safetensors": _write_safetensors,
    "pt": _write_pt,
    "npz": _write_npz,
}


@contextmanager
def _staged(output: Path) -> Iterator[Path]:
    """Where to write what is renamed at the end; gone afterwards, whatever happens."""
    place = output.resolve().parent
    try:
        with TemporaryDirectory(
            dir=place, prefix=f".{output.name}.", ignore_cleanup_errors=True
        ) as folder:
            yield Path(folder) / output.name
    except (OSError, SafetensorError) as error:
        raise disk_error(output, error) from error


def _publish(staged: Path, output: Path) -> None:
    """Flush and rename; a target that somebody made meanwhile stays as it is."""
    for path in (staged, *staged.rglob("*")):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    if os.path.lexists(output):
        raise CacheError(f"{output}: was created meanwhile; nothing is overwritten")
    staged.rename(output)
    flush_folder(output.resolve().parent)


_GROUP_BYTES = 32_000_000
"""Size of a row group, about: what a reader has in memory at least."""


def write_parquet(path: Path, encodings: Encodings, entries: Iterable[Entry], report: Any) -> None:
    """Write entries; `report` is called after each group."""
    instead = "or --format safetensors, pt or npz"
    with required("pyarrow", "a parquet file", "cache", instead=instead):
        import pyarrow
        from pyarrow import parquet
    schema = _schema(pyarrow, encodings.spec)
    values = {one.name for one in encodings.spec.outputs}
    packed = {name: "none" if name in values else "zstd" for name in schema.names}
    plain = [name for name in schema.names if name not in values]
    # values neither repeat nor compress
    with parquet.ParquetWriter(path, schema, compression=packed, use_dictionary=plain) as writer:
        for group in chunked(entries, _GROUP_BYTES):
            columns = _columns(encodings.spec, group)
            writer.write_table(pyarrow.table(columns, schema=schema), row_group_size=len(group))
            report(len(group))


def _schema(pyarrow: Any, spec: EncoderSpec) -> Any:
    fields = [("text", pyarrow.string()), ("ids", pyarrow.list_(pyarrow.int32()))]
    for one in spec.outputs:
        fields += [
            (one.name, pyarrow.large_binary()),
            (f"{one.name}_shape", pyarrow.list_(pyarrow.int32())),
            (f"{one.name}_dtype", pyarrow.string()),
        ]
    return pyarrow.schema(fields, metadata={"enginecast.spec": msgspec.json.encode(spec)})


def _columns(spec: EncoderSpec, entries: Sequence[Entry]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        "text": [entry.text for entry in entries],
        "ids": [entry.ids for entry in entries],
    }
    for one in spec.outputs:
        arrays = [entry.outputs[one.name] for entry in entries]
        columns[one.name] = [array.tobytes() for array in arrays]
        columns[f"{one.name}_shape"] = [list(array.shape) for array in arrays]
        columns[f"{one.name}_dtype"] = [array.dtype.name for array in arrays]
    return columns
