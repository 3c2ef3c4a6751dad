"""Texts in one block of memory with the places they come from, and which column they are in."""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import numpy as np

from enginecast.errors import InputError
from enginecast.runtime.arrays import Array

DEFAULT_COLUMNS = ("caption", "text", "prompt")


class Texts(Sequence[str]):
    """Many texts, at the cost of their bytes and 24 more each.

    Args:
        data: of all texts, UTF-8.
        begins: int64 [texts]: where each begins in `data`.
        ends: int64 [texts]
        rows: int64 [texts]: its line or row in its file, from 1.
        files: index of each file's first text, and the file.
    """

    def __init__(
        self,
        data: bytes,
        begins: Array,
        ends: Array,
        rows: Array,
        files: Sequence[tuple[int, Path]],
    ) -> None:
        self._data = data
        self._begins = begins
        self._ends = ends
        self._rows = rows
        self._files = tuple(files)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._text(number) for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._text(index)

    def where(self, index: int) -> str:
        """The place of a text, "captions.csv:17": its line, or its row in a table, from 1."""
        index = range(len(self))[index]
        file = self._files[bisect_right(self._files, index, key=lambda first: first[0]) - 1][1]
        return f"{file.name}:{self._rows[index]}"

    def _text(self, index: int) -> str:
        return self._data[self._begins[index] : self._ends[index]].decode()


class Collecting:
    """Texts as they are read, and what is there that is no text."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._ends = array("q")
        self._rows = array("q")
        self._files: list[tuple[int, Path]] = []
        self._strays = 0
        self._first_stray = ""

    def begin(self, file: Path) -> None:
        """What is added from now on is from this file."""
        self._files.append((len(self._ends), file))

    def add(self, value: object, row: int) -> None:
        """Take a text, or several in a list; anything else is counted."""
        for text in value if isinstance(value, list) else (value,):
            if isinstance(text, str):
                self._data += text.encode()
                self._ends.append(len(self._data))
                self._rows.append(row)
            else:
                self._strays += 1
                if self._strays == 1:
                    self._first_stray = f"{self._files[-1][1]}:{row}: {_shown(text)}"

    def done(self, path: Path) -> Texts:
        """What was read.

        Raises:
            InputError: something was no text, or there is no text at all.
        """
        if self._strays:
            place, _, got = self._first_stray.rpartition(": ")
            more = f", and {self._strays - 1} more like it" if self._strays > 1 else ""
            raise InputError(
                f"{place}: expected text, got {got}{more}",
                hint="Leave those rows out, or write an empty text.",
            )
        if not self._ends:
            raise InputError(f"{path}: expected texts, got none")
        ends = np.array(self._ends, dtype=np.int64)
        begins = np.concatenate([[0], ends[:-1]])
        rows = np.array(self._rows, dtype=np.int64)
        return Texts(bytes(self._data), begins, ends, rows, self._files)


def choose_column(path: Path, asked: str | None, columns: Sequence[str]) -> str:
    """The column to read: the one asked for, or the only one of those that captions are mostly in.

    Raises:
        InputError: it is not there, or it is not clear which; lists those that are there.
    """
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


def undecodable(path: Path) -> InputError:
    """What to raise for a file that is not UTF-8: the first line that is not."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return InputError(f"{path}:{number}: expected UTF-8: {error}")
    return InputError(f"{path}: expected UTF-8")


def _shown(value: object) -> str:
    names = {"NoneType": "null", "bool": "a boolean", "dict": "an object"}
    kind = names.get(type(value).__name__)
    return kind or f"{value!r:.40} ({type(value).__name__})"
