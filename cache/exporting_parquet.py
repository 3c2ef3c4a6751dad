"""The entries of an encoder as one parquet file.

    text          string
    ids           list<int32>      without padding
    OUTPUT        large_binary     the values, row by row, little-endian
    OUTPUT_shape  list<int32>      [rows, width], or [width] for an output per text
    OUTPUT_dtype  string           "bfloat16", "float32", ...

Bytes, and not lists of numbers: Arrow has no bfloat16.  `numpy.frombuffer(value, dtype)` reads
them, with `ml_dtypes.bfloat16`.  The file's metadata has the spec, as JSON.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from enginecast.cache.rewriting import chunked
from enginecast.cache.shard_writing import Entry
from enginecast.cache.spec import EncoderSpec
from enginecast.cache.store import Encodings
from enginecast.errors import MissingError

_GROUP_BYTES = 32_000_000
"""Size of a row group, about: what a reader has in memory at least."""


def write_parquet(path: Path, encodings: Encodings, entries: Iterable[Entry], told: Any) -> None:
    """Write entries; `told` hears of each group.

    Raises:
        MissingError: pyarrow is not installed.
        OSError: the disk failed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingError(
            "a parquet file takes pyarrow, which is not installed",
            hint="pip install 'enginecast[cache]', or --format safetensors, pt or npz.",
        ) from error
    schema = _schema(pyarrow, encodings.spec)
    values = {one.name for one in encodings.spec.outputs}
    packed = {name: "none" if name in values else "zstd" for name in schema.names}
    plain = [name for name in schema.names if name not in values]
    # values neither repeat nor compress
    with parquet.ParquetWriter(path, schema, compression=packed, use_dictionary=plain) as writer:
        for group in chunked(entries, _GROUP_BYTES):
            columns = _columns(encodings.spec, group)
            writer.write_table(pyarrow.table(columns, schema=schema), row_group_size=len(group))
            told(len(group))


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
