"""Terminal tables that never cut a name: if one is too wide, its rows become lists."""

import textwrap
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from enginecast.printable import printable

GAP = 2
"""Blanks between columns."""


def print_table(
    console: Console,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    whole: int = 1,
    title: int = 0,
) -> None:
    """Print a table without frames.

    Text wraps at blanks alone, and the first columns (`whole` of them) not even there.  Where that
    does not fit the console, each row is printed as a heading and one line for each column.

    Args:
        title: the column that becomes the heading of a row.
    """
    cells = [tuple(map(printable, row)) for row in rows]
    by_column = [(column, *(row[index] for row in cells)) for index, column in enumerate(columns)]
    least = [
        max(_least(cell, whole=i < whole) for cell in by_column[i]) for i in range(len(columns))
    ]
    room = console.width - GAP * (len(columns) - 1)
    if sum(least) > room:
        _print_lists(console, columns, cells, title)
        return
    shown = Table(box=None, pad_edge=False, header_style="bold")
    most = [max(_least(cell, whole=True) for cell in one) for one in by_column]
    # Of columns, in all at most `room`: the widest gives first; rich would break words for it.
    found = list(most)
    while sum(found) > room:
        spare = [index for index, width in enumerate(found) if width > least[index]]
        found[max(spare, key=found.__getitem__)] -= 1
    for column, width in zip(columns, found, strict=True):
        shown.add_column(column, width=width, overflow="fold")
    for row in cells:
        shown.add_row(*row)
    console.print(shown)


def _least(cell: str, *, whole: bool) -> int:
    """The columns that a cell needs: of its longest word, or of its longest line."""
    return max(map(cell_len, cell.splitlines() if whole else cell.split()), default=0)


def _print_lists(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], title: int
) -> None:
    others = [index for index in range(len(columns)) if index != title]
    width = max((cell_len(columns[index]) for index in others), default=0)
    for row in rows:
        heading = f"{columns[title]} {row[title]}".strip()
        console.print(heading, style="bold", markup=False, highlight=False, soft_wrap=True)
        for index in others:
            if not row[index]:
                continue
            name = f"  {columns[index]:<{width}}  "
            lines = _wrapped(row[index], console.width - len(name))
            for begin, line in zip([name, *[" " * len(name)] * len(lines)], lines, strict=False):
                text = f"{begin}{line}"
                console.print(text, markup=False, highlight=False, soft_wrap=True)


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns, if no word is longer."""
    return [
        part
        for line in text.splitlines()
        for part in textwrap.wrap(
            line, max(width, 1), break_long_words=False, break_on_hyphens=False
        )
    ]
