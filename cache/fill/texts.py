"""The texts that a cache is filled with: from a file, or from a folder of a data set."""

import csv
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from enginecast.errors import InputError, UsageError
from enginecast.installation import required

DEFAULT_COLUMNS = ("caption", "text", "prompt")
_IN_FOLDERS = (".parquet", ".jsonl", ".csv")
_SAVED_MARKS = ("dataset_dict.json", "state.json")
"""What `save_to_disk` writes: for several splits, or for one."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ROWS = 1 << 16
"""Rows of a table that are read at once."""


class Texts(list[str]):
    """Texts that know where they were read."""

    def __init__(self) -> None:
        super().__init__()
        self._rows = array("q")
        self._files: list[tuple[int, Path]] = []
        self._strays = 0
        self._first_stray = ""

    def begin(self, file: Path) -> None:
        """What is taken from now on is from this file."""
        self._files.append((len(self), file))

    def take(self, value: object, row: int) -> None:
        """Take a text, or several in a list; anything else is counted."""
        for text in value if isinstance(value, list) else (value,):
            if isinstance(text, str):
                self.append(text)
                self._rows.append(row)
                continue
            self._strays += 1
            names = {"NoneType": "null", "bool": "a boolean", "dict": "an object"}
            kind = type(text).__name__
            shown = names.get(kind) or f"{text!r:.40} ({kind})"
            stray = f"{self._files[-1][1]}:{row}: expected text, got {shown}"
            self._first_stray = self._first_stray or stray

    def where(self, index: int) -> str:
        """The place of a text, "captions.csv:17": its line, or its row in a table, from 1."""
        file = self._files[bisect_right(self._files, index, key=lambda first: first[0]) - 1][1]
        return f"{file.name}:{self._rows[index]}"

    def require_texts(self, path: Path) -> None:
        """Refuse what was read where something was not text, or there is no text at all."""
        if self._strays:
            more = f", and {self._strays - 1} more like it" if self._strays > 1 else ""
            raise InputError(
                f"{self._first_stray}{more}", hint="Leave those rows out, or write an empty text."
            )
        if not self:
            raise InputError(f"{path}: expected texts, got none")


def read_texts(path: Path, column: str | None = None) -> Texts:
    """Read all texts.

    Args:
        path: a `.txt` with a text a line, a `.jsonl` of objects or strings, a `.csv` with a
            header, a `.parquet`, or a folder: as `save_to_disk` of Hugging Face's datasets writes
            it, or one with `.parquet`, `.jsonl` or `.csv` files anywhere in it.  All splits are
            read.
        column: of the texts; None: the only one of caption, text, prompt.  Where it holds lists of
            strings, each is a text.

    Raises:
        InputError: there is no such file or column, something is not UTF-8 or no text, a file is
            damaged, or there is no text; names the file, and the line or row where there is one.
        UsageError: files of a kind that is not read.
        MissingError: the library that reads the kind of file is not installed.
    """
    path = Path(path)
    texts = Texts()
    try:
        if not path.exists():
            raise InputError(f"{path}: no such file or folder")
        reader = _READERS.get(path.suffix.lower())
        if path.is_dir():
            saved = any((path / mark).is_file() for mark in _SAVED_MARKS)
            reader = _read_saved if saved else _read_folder
        if reader is None:
            raise UsageError(
                f"{path}: expected {', '.join(_READERS)} or the folder of a data set, got "
                f"{path.suffix or 'no suffix'}"
            )
        reader(path, column, texts)
    except OSError as error:
        raise InputError(f"{error.filename or path}: {error.strerror or error}") from error
    texts.require_texts(path)
    return texts


def _read_folder(folder: Path, column: str | None, into: Texts) -> None:
    """The data files of a folder, in the order of their names; hidden ones are skipped."""
    files = [
        file
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in _IN_FOLDERS
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]
    kinds = sorted({file.suffix.lower() for file in files})
    if len(kinds) != 1:
        what = f"holds {' and '.join(kinds)} files" if kinds else "holds none of them"
        raise InputError(
            f"{folder}: expected a data set: what save_to_disk writes, or files of one kind of "
            f"{', '.join(_IN_FOLDERS)}, but it {what}",
            hint="Give one of the files." if kinds else "",
        )
    for file in files:
        _READERS[kinds[0]](file, column, into)


def _choose_column(path: Path, asked: str | None, columns: Sequence[str]) -> str:
    """The column asked for, or the only one of those that captions are mostly in."""
    there = f"It has {', '.join(columns) or 'no columns'}."
    if asked is not None:
        if asked not in columns:
            raise InputError(f"{path}: expected a column {asked!r}, got none", hint=there)
        return asked
    found = [name for name in DEFAULT_COLUMNS if name in columns]
    if len(found) == 1:
        return found[0]
    what = f"{' and '.join(found)} are both there" if found else "none of them is there"
    raise InputError(
        f"{path}: expected one column of {', '.join(DEFAULT_COLUMNS)}, but {what}",
        hint=f"Name the column of the texts with --column.  {there}",
    )


def _lines(path: Path) -> Iterator[str]:
    """The lines of a file with their ends."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield (line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line).decode()
            except UnicodeDecodeError as error:
                raise InputError(f"{path}:{number}: expected UTF-8: {error}") from error


def _read_plain(path: Path, column: str | None, into: Texts) -> None:
    """Each line is a text, an empty one the empty text, as in files of prompts."""
    if column is not None:
        raise UsageError(f"--column {column}: {path} is plain text, which has no columns")
    into.begin(path)
    for number, line in enumerate(_lines(path), start=1):
        into.take(line.removesuffix("\n").removesuffix("\r"), number)


def _read_json_lines(path: Path, column: str | None, into: Texts) -> None:
    """Each line is an object with the column, or each a string; blank lines are skipped."""
    into.begin(path)
    decode = msgspec.json.Decoder().decode
    bare: bool | None = None
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            value = decode(line)
        except msgspec.DecodeError as error:
            raise InputError(f"{path}:{number}: expected JSON: {error}") from error
        if bare is None:  # the first line says what all of them are
            bare = isinstance(value, str)
            if isinstance(value, dict):
                column = _choose_column(path, column, [*value])
            elif column is not None:
                raise InputError(
                    f"{path}: expected objects with a column {column!r}, but a line "
                    "is not an object",
                    hint="Leave --column out where each line is a string.",
                )
        if not bare:
            if not isinstance(value, dict) or column is None:
                what = "expected an object or a string, as in every line"
                raise InputError(f"{path}:{number}: {what}")
            if column not in value:
                there = ", ".join(value) or "nothing"
                raise InputError(f"{path}:{number}: expected {column!r}, but it has {there}")
            value = value[column]
        into.take(value, number)


def _read_csv(path: Path, column: str | None, into: Texts) -> None:
    """A header, then records with commas between the fields; an empty field is the empty text."""
    into.begin(path)
    reader = csv.reader(_lines(path), strict=True)
    try:
        header = next(reader, [])
        place = header.index(_choose_column(path, column, header))
        line = reader.line_num + 1
        for record in reader:
            if record and len(record) != len(header):
                raise InputError(
                    f"{path}:{line}: expected {len(header)} fields as in the header, got "
                    f"{len(record)}",
                    hint="A text with commas, quotes or line ends must be in double quotes.",
                )
            if record:
                into.take(record[place], line)
            line = reader.line_num + 1
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: {error}") from error


def _read_parquet(path: Path, column: str | None, into: Texts) -> None:
    """A column of strings, or of lists of strings; the others are not read."""
    with required("pyarrow", f"{path}: reading it", "cache"):
        import pyarrow
        from pyarrow import parquet
    into.begin(path)
    try:
        with parquet.ParquetFile(path) as file:
            name = _choose_column(path, column, file.schema_arrow.names)
            _require_text(path, name, file.schema_arrow.field(name).type)
            _read_batches(path, file.iter_batches(_ROWS, columns=[name]), into)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a parquet file, or damaged: {error}") from error


def _read_saved(path: Path, column: str | None, into: Texts) -> None:
    """A data set in the form of `save_to_disk`, with all its splits; no other column is decoded."""
    with required("datasets", f"{path}: reading it", "cache"):
        import datasets
        import pyarrow
    try:
        read = datasets.load_from_disk(str(path))
    except Exception as error:  # any kind: missing files, broken JSON, Arrow errors
        raise InputError(f"{path}: not a data set, or damaged: {error}") from error
    splits = read if isinstance(read, datasets.DatasetDict) else {"": read}
    for split, data in splits.items():
        place = path / split if split else path
        name = _choose_column(place, column, data.column_names)
        _require_text(place, name, data.features.arrow_schema.field(name).type)
        into.begin(place)
        try:
            batches = data.select_columns([name]).with_format("arrow").iter(_ROWS)
            _read_batches(place, batches, into)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise InputError(f"{place}: damaged: {error}") from error


def _read_batches(path: Path, batches: Iterator[Any], into: Texts) -> None:
    import pyarrow

    row = 0
    for batch in batches:
        column = batch.column(0)
        try:
            column.validate(full=True)  # texts lie in their buffer, and are UTF-8
        except pyarrow.ArrowInvalid as error:
            place = f"{path}{_bad_row(column, row)}"
            raise InputError(f"{place}: damaged, or not UTF-8: {error}") from error
        for value in column.to_pylist():
            row += 1
            into.take(value, row)


def _bad_row(column: Any, rows_before: int) -> str:
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(column.type):  # whose rows share their texts
        return ""
    for number in range(len(column)):
        try:
            column.slice(number, 1).validate(full=True)
        except pyarrow.ArrowInvalid:
            return f":{rows_before + number + 1}"
    return ""


def _require_text(path: Path, name: str, kind: Any) -> None:
    from pyarrow import types

    one = kind
    if types.is_dictionary(one) or types.is_list(one) or types.is_large_list(one):
        one = one.value_type
    if not (types.is_string(one) or types.is_large_string(one) or types.is_string_view(one)):
        raise InputError(f"{path}: expected text in the column {name!r}, got {kind}")


_READERS: Mapping[str, Callable[[Path, str | None, Texts], None]] = {
    ".txt": _read_plain,
    ".parquet": _read_parquet,
    ".jsonl": _read_json_lines,
    ".csv": _read_csv,
}
