"""Texts in Arrow tables: parquet files, and data sets that Hugging Face's library saved."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from enginecast.cache.texts_collecting import Collecting, choose_column
from enginecast.errors import InputError, MissingError

SAVED_MARKS = ("dataset_dict.json", "state.json")
"""What `save_to_disk` writes: for several splits, or for one."""
_ROWS = 1 << 16


def collect_parquet(path: Path, column: str | None, into: Collecting) -> None:
    """A column of strings, or of lists of strings; the others are not read.

    Raises:
        InputError: no parquet file, no such column, or it holds something else.
        MissingError: pyarrow is not installed.
    """
    with _lacking("pyarrow", path):
        import pyarrow
        from pyarrow import parquet
    into.begin(path)
    try:
        with parquet.ParquetFile(path) as file:
            name = choose_column(path, column, file.schema_arrow.names)
            _require_text(path, name, file.schema_arrow.field(name).type)
            _collect(file.iter_batches(_ROWS, columns=[name]), into)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a parquet file, or damaged: {error}") from error


def collect_saved(path: Path, column: str | None, into: Collecting) -> None:
    """A data set in the form of `save_to_disk`, with all its splits; no other column is decoded.

    Raises:
        InputError: it cannot be read, or there is no such column of text.
        MissingError: datasets is not installed.
    """
    with _lacking("datasets", path):
        import datasets
    try:
        read = datasets.load_from_disk(str(path))
    except Exception as error:  # any kind: missing files, broken JSON, Arrow errors
        raise InputError(f"{path}: not a data set, or damaged: {error}") from error
    splits = read if isinstance(read, datasets.DatasetDict) else {"": read}
    for split, data in splits.items():
        place = path / split if split else path
        name = choose_column(place, column, data.column_names)
        _require_text(place, name, data.features.arrow_schema.field(name).type)
        into.begin(place)
        _collect(data.select_columns([name]).with_format("arrow").iter(_ROWS), into)


def _collect(batches: Iterator[Any], into: Collecting) -> None:
    row = 0
    for batch in batches:
        for value in batch.column(0).to_pylist():
            row += 1
            into.add(value, row)


def _require_text(path: Path, name: str, kind: Any) -> None:
    from pyarrow import types

    held = kind
    if types.is_dictionary(held) or types.is_list(held) or types.is_large_list(held):
        held = held.value_type
    if not (types.is_string(held) or types.is_large_string(held) or types.is_string_view(held)):
        raise InputError(f"{path}: expected text in the column {name!r}, got {kind}")


@contextmanager
def _lacking(package: str, path: Path) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise MissingError(
            f"{path}: reading it takes {package}, which is not installed",
            hint="pip install 'enginecast[cache]'",
        ) from error
