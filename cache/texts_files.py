"""Texts in files that need no library of their own: lines, JSON lines, CSV."""

import csv
from pathlib import Path

import msgspec
import numpy as np

from enginecast.cache.texts_collecting import Collecting, Texts, choose_column, undecodable
from enginecast.errors import InputError

_LINE_END, _RETURN = 0x0A, 0x0D
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(path: Path) -> Texts:
    """Each line is a text, an empty one the empty text: as `runtime.prompts.read_prompts` reads it.

    Raises:
        InputError: a line is not UTF-8.
    """
    data = path.read_bytes()
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise undecodable(path) from error
    values = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(values == _LINE_END)
    if not data.endswith(b"\n"):
        ends = np.append(ends, len(data))
    first = len(_BYTE_ORDER_MARK) if data.startswith(_BYTE_ORDER_MARK) else 0
    begins = np.concatenate([[first], ends[:-1] + 1])
    before = values[np.maximum(ends - 1, 0)]
    returns = (before == _RETURN) & (ends > begins)
    rows = np.arange(1, len(ends) + 1)
    return Texts(data, begins, ends - returns, rows, [(0, path)])


def collect_json_lines(path: Path, column: str | None, into: Collecting) -> None:
    """Each line is an object with the column, or each a string; blank lines are passed over.

    Raises:
        InputError: a line is not UTF-8 or no JSON, or lacks the column.
    """
    into.begin(path)
    decode = msgspec.json.Decoder().decode
    bare: bool | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
            if not line.strip():
                continue
            try:
                value = decode(line)
            except UnicodeDecodeError as error:
                raise undecodable(path) from error
            except msgspec.DecodeError as error:
                raise InputError(f"{path}:{number}: expected JSON: {error}") from error
            if bare is None:
                bare = isinstance(value, str)
                column = _first_column(path, column, value)
            into.add(value if bare else _field(path, number, column, value), number)


def _first_column(path: Path, column: str | None, value: object) -> str | None:
    """The column of the texts, by the first line; None: the lines are strings."""
    if isinstance(value, dict):
        return choose_column(path, column, [*value])
    if column is not None:
        raise InputError(
            f"{path}: expected objects with a column {column!r}, but a line is no object",
            hint="Leave --column out where each line is a string.",
        )
    return None


def _field(path: Path, number: int, column: str | None, value: object) -> object:
    if not isinstance(value, dict) or column is None:
        raise InputError(f"{path}:{number}: expected an object or a string, as in every line")
    if column not in value:
        there = ", ".join(value) or "nothing"
        raise InputError(f"{path}:{number}: expected {column!r}, but it has {there}")
    found: object = value[column]
    return found


def collect_csv(path: Path, column: str | None, into: Collecting) -> None:
    """A header, then records with commas between the fields; an empty field is the empty text.

    Raises:
        InputError: not UTF-8, a record of another length than the header, an open quote, or no
            such column.
    """
    into.begin(path)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            place = header.index(choose_column(path, column, header))
            line = reader.line_num + 1
            for record in reader:
                if record and len(record) != len(header):
                    raise InputError(
                        f"{path}:{line}: expected {len(header)} fields as in the header, got "
                        f"{len(record)}",
                        hint="A text with commas, quotes or line ends stands in double quotes.",
                    )
                if record:
                    into.add(record[place], line)
                line = reader.line_num + 1
        except csv.Error as error:
            raise InputError(f"{path}:{reader.line_num}: {error}") from error
        except UnicodeDecodeError as error:
            raise undecodable(path) from error
