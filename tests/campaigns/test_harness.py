"""What the campaigns share: what is chosen, a row for each child, rows that are kept."""

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import Campaign, choose, keep_rows, one_line
from rows import Store, cell, put_between, table


@dataclass
class Row:
    group: str
    name: str
    outcome: str = "none"
    reason: str = ""


class Small(Campaign[str, Row]):
    row, seconds = Row, 60

    def items(self) -> Sequence[str]:
        return ["a: add", "a: addmm", "a: add, twice", "b: topk"]

    def labels(self, item: str) -> tuple[str, ...]:
        group, _, name = item.partition(": ")
        return group, name

    def examine(self, item: str, folder: Path) -> Row:
        row = self.blank(item)
        row.outcome = "right"
        if item == "a: addmm":
            row.outcome = "early"
            keep_rows([row], folder)
            os.kill(os.getpid(), signal.SIGKILL)
        if item == "b: topk":
            os.kill(os.getpid(), signal.SIGKILL)
        return row

    def said(self, row: Row) -> str:
        return row.name


@pytest.mark.parametrize(
    ("only", "match", "chosen"),
    [
        ("", "", ["a: add", "a: addmm", "a: add, twice", "b: topk"]),
        ("a", "mm|top", ["a: addmm"]),
        ("add", "", ["a: add"]),
        ("addm,b", "", ["a: addmm", "b: topk"]),
        ("none", "", []),
    ],
)
def test_what_is_chosen(only: str, match: str, chosen: list[str]) -> None:
    assert choose(Small(), only, match) == chosen


def test_each_item_has_a_row_however_its_child_ends(tmp_path: Path) -> None:
    rows = Small().run(Small().items(), tmp_path, jobs=2, keep=True)
    found = {row.name: (row.outcome, row.reason) for row in rows}
    dead = ("crashed", "killed by SIGKILL")
    assert found == {
        "add": ("right", ""),
        "addmm": dead,
        "add, twice": ("right", ""),
        "topk": dead,
    }
    assert '"early"' in (tmp_path / "a-addmm" / "rows.json").read_text(encoding="utf-8")


def test_rows_are_kept_below_their_groups(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text('{"versions": {}, "rows": {"a": {"old": {"outcome": "right"}}}}')
    store = Store(file, under="rows", keys=("group", "name"), libraries=("numpy", "no-such"))
    store.merge([Row("a", "new"), Row("b", "x", "wrong")])
    store.merge([Row("b", "x", "right")])
    found = json.loads(file.read_text(encoding="utf-8"))
    assert list(found["versions"]) == ["numpy"]
    assert list(found["rows"]["a"]) == ["new", "old"]
    assert found["rows"]["b"] == {"x": {"outcome": "right", "reason": ""}}


def test_what_pages_are_made_of(tmp_path: Path) -> None:
    assert list(table(("a", "b"), [(1, "x")])) == ["| a | b |", "|---|---|", "| 1 | x |"]
    assert cell("`a|b` < c", 99) == "'a\\|b' &lt; c"
    assert cell("x" * 30, 10) == "xxxxxxx..."
    assert one_line("in /home/me/x.py:3\n  y", 12) == "in x.py:3 y"
    page = tmp_path / "page.md"
    page.write_text("head <b>old</b> tail")
    put_between(page, "<b>", "</b>", "new")
    assert page.read_text(encoding="utf-8") == "head <b>new</b> tail"
