"""The texts that a cache is filled with: from a file, or from a folder of a data set."""

from collections.abc import Callable, Mapping
from pathlib import Path

from enginecast.cache.texts_collecting import Collecting, Texts
from enginecast.cache.texts_files import collect_csv, collect_json_lines, read_lines
from enginecast.cache.texts_tables import SAVED_MARKS, collect_parquet, collect_saved
from enginecast.errors import InputError, UsageError

Reader = Callable[[Path, str | None, Collecting], None]

_READERS: Mapping[str, Reader] = {
    ".parquet": collect_parquet,
    ".jsonl": collect_json_lines,
    ".csv": collect_csv,
}


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
    try:
        if path.is_file() and path.stat().st_size == 0:
            raise InputError(f"{path}: expected texts, got an empty file")
        if path.is_file() and path.suffix.lower() == ".txt":
            return _plain(path, column)
        collecting = Collecting()
        _collect(path, column, collecting)
        return collecting.done(path)
    except OSError as error:
        raise InputError(f"{error.filename or path}: {error.strerror or error}") from error


def _plain(path: Path, column: str | None) -> Texts:
    if column is not None:
        raise UsageError(f"--column {column}: {path} is plain text, which has no columns")
    return read_lines(path)


def _collect(path: Path, column: str | None, into: Collecting) -> None:
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if path.is_dir() and any((path / mark).is_file() for mark in SAVED_MARKS):
        return collect_saved(path, column, into)
    if path.is_dir():
        return _collect_folder(path, column, into)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UsageError(
            f"{path}: expected .txt, {', '.join(_READERS)} or the folder of a data set, got "
            f"{path.suffix or 'no suffix'}"
        )
    return reader(path, column, into)


def _collect_folder(folder: Path, column: str | None, into: Collecting) -> None:
    """The data files of a folder, in the order of their names; hidden ones are passed over."""
    files = [
        file
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in _READERS
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]
    kinds = sorted({file.suffix.lower() for file in files})
    if len(kinds) != 1:
        what = f"holds {' and '.join(kinds)} files" if kinds else "holds none of them"
        raise InputError(
            f"{folder}: expected a data set: what save_to_disk writes, or files of one kind of "
            f"{', '.join(_READERS)}, but it {what}",
            hint="Give one of the files." if kinds else "",
        )
    for file in files:
        _READERS[kinds[0]](file, column, into)
