"""Texts from every kind of file, and what is said of those that cannot be read."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from enginecast.cache.fill.texts import read_texts
from enginecast.errors import InputError, MissingError
from enginecast.installation import install_command
from enginecast.runtime.prompts import read_prompts

HARD = ["", "a fox", 'with "quotes", and commas', "  é ünï 狐 🦊 ", "two\u2028lines", "tab\tin it"]
KINDS = ["jsonl", "csv", "parquet", "saved"]


def write(folder: Path, kind: str, rows: list[dict[str, Any]], name: str = "captions") -> Path:
    """A file of `rows`, which all have the same columns."""
    path = folder / f"{name}.{kind}"
    if kind == "txt":
        path.write_text("".join(f"{row['caption']}\n" for row in rows), encoding="utf-8")
    elif kind == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    elif kind == "csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0]])
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "parquet":
        write_parquet(path, rows)
    else:
        import datasets

        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.Table.from_pylist(rows), path, row_group_size=max(2, len(rows) // 8)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_texts_come_back_as_they_were(tmp_path: Path, kind: str) -> None:
    rows = [{"id": n, "caption": text, "other": "x"} for n, text in enumerate(HARD)]
    texts = read_texts(write(tmp_path, kind, rows))
    assert list(texts) == HARD
    assert texts[1:3] == HARD[1:3]
    assert texts[-1] == HARD[-1]
    first = {"csv": 2}.get(kind, 1)
    assert texts.where(2).endswith(f":{first + 2}")
    with pytest.raises(IndexError):
        texts[len(HARD)]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_lines_are_those_of_prompt_files(tmp_path: Path, end: str, last: bool, mark: str) -> None:
    lines = ["one", "", "über \u2028", "a\rb", "", "last"]
    path = tmp_path / "texts.txt"
    path.write_bytes((mark + end.join(lines) + end * last).encode())
    texts = read_texts(path)
    assert list(texts) == read_prompts(path) == lines
    assert texts.where(2) == "texts.txt:3"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_what_is_not_text_is_counted(tmp_path: Path, kind: str) -> None:
    rows: list[dict[str, Any]] = [{"text": "a"}, {"text": None}, {"text": "b"}, {"text": None}]
    with pytest.raises(InputError, match=r":2: expected text, got null, and 1 more like it"):
        read_texts(write(tmp_path, kind, rows))
    numbers = [{"text": 1}, {"text": 2}]
    with pytest.raises(InputError, match=r"expected text.* got (1 \(int\)|int64)"):
        read_texts(write(tmp_path, kind, numbers, "numbers"))


def broken(folder: Path, kind: str) -> Path:
    path = folder / f"captions.{kind}"
    good = {"jsonl": b'{"text": "a"}\n', "csv": b"text,id\na,1\n", "txt": b"a\n"}
    path.write_bytes(good.get(kind, b"PAR1 no table PAR1"))
    return path


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [
        ("txt", b"\xff\xfe\n", r"captions.txt:2: expected UTF-8: .*0xff"),
        ("jsonl", b'{"text": "b"\n', r"captions.jsonl:2: expected JSON: .*truncated"),
        ("jsonl", b'{"label": "b"}\n', r"captions.jsonl:2: expected 'text', but it has label"),
        ("csv", b'"b,2\n', r"captions.csv:3: unexpected end of data"),
        ("parquet", b"", r"captions.parquet: not a parquet file, or damaged"),
    ],
)
def test_damage_is_named_with_its_line(
    tmp_path: Path, kind: str, line: bytes, message: str
) -> None:
    path = broken(tmp_path, kind)
    with path.open("ab") as file:
        file.write(line)
    with pytest.raises(InputError, match=message):
        read_texts(path)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_folder_of_files_is_what_load_dataset_takes(tmp_path: Path, kind: str) -> None:
    import datasets

    folder = tmp_path / "data"
    for number, part in enumerate(("train-0", "train-1", "test-0")):
        place = folder / "nested" if number else folder
        place.mkdir(parents=True, exist_ok=True)
        write(place, kind, [{"caption": f"{part} {n}"} for n in range(3)], part)
    (folder / "README.md").write_text("a data set")
    (folder / ".hidden.csv").write_text("caption\nhidden\n")
    loaded = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    wanted = [text for split in loaded.values() for text in split["caption"]]
    assert len(wanted) == 9
    texts = read_texts(folder)
    assert sorted(texts) == sorted(wanted)
    assert texts[0] in texts.where(0).replace("-0", "-0 0")


@pytest.mark.parametrize(("kind", "package"), [("parquet", "pyarrow"), ("saved", "datasets")])
def test_a_missing_library_is_named(
    tmp_path: Path, kind: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, kind, [{"text": "a"}])
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingError, match=package) as error:
        read_texts(path)
    assert error.value.hint == install_command("cache")
