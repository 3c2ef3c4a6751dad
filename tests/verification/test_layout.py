"""Tables never cut a word, however narrow the terminal is."""

import io

import pytest
from rich.console import Console

from enginecast.verification.report.layout import print_table

COLUMNS = ("output", "error / eager fp32's", "SQNR dB", "worst place")
ROWS = (
    ("last_hidden_state", "0.9x", "119.1", "encoder.layer.0.output.dense modeling_bert.py:348"),
    ("pooler_output", "0.8x", "", "pooler modeling_bert.py:499"),
)


def shown(width: int, whole: int = 1, title: int = 0) -> str:
    stream = io.StringIO()
    print_table(Console(file=stream, width=width), COLUMNS, ROWS, whole=whole, title=title)
    return stream.getvalue()


@pytest.mark.parametrize("width", [20, 40, 60, 72, 80, 120])
def test_every_word_stays_whole(width: int) -> None:
    words = shown(width).split()
    for row in ROWS:
        for cell in row:
            assert set(cell.split()) <= set(words), cell


@pytest.mark.parametrize("width", [60, 72, 80, 120])
def test_lines_fit_where_words_do(width: int) -> None:
    assert all(len(line) <= width for line in shown(width).splitlines())


def test_it_is_a_table_where_that_fits() -> None:
    lines = shown(120).splitlines()
    assert len(lines) == 1 + len(ROWS)
    assert lines[0].split() == " ".join(COLUMNS).split()
    assert lines[1].startswith("last_hidden_state  0.9x ")
