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
            _collect(path, file.iter_batches(_ROWS, columns=[name]), into)
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
        import pyarrow
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
        try:
            _collect(place, data.select_columns([name]).with_format("arrow").iter(_ROWS), into)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise InputError(f"{place}: damaged: {error}") from error


def _collect(path: Path, batches: Iterator[Any], into: Collecting) -> None:
    row = 0
    for batch in batches:
        column = batch.column(0)
        _require_decodable(path, column, row)
        for value in column.to_pylist():
            row += 1
            into.add(value, row)


def _require_decodable(path: Path, column: Any, rows_before: int) -> None:
    """Refuse bytes that are not UTF-8, and texts that lie outside their buffer."""
    import pyarrow
    from pyarrow import types

    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid as error:
        place = f"{path}"
        if not types.is_dictionary(column.type):  # whose rows share their texts
            bad = next(number for number in range(len(column)) if not _is_whole(column, number))
            place = f"{path}:{rows_before + bad + 1}"
        raise InputError(f"{place}: damaged, or not UTF-8: {error}") from error


def _is_whole(column: Any, number: int) -> bool:
    import pyarrow

    try:
        column.slice(number, 1).validate(full=True)
    except pyarrow.ArrowInvalid:
        return False
    return True


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
