"""docs/results/operators.md is what was found; a few operators go through it in the default run."""

from pathlib import Path

import numpy as np
import pytest
import torch

from operators.examine import Cell, examine, export
from operators.page import GROUPS, PAGE, counts, group_of, page, read
from operators.samples import Calls, calls, names

FOUND = read()
FEW = ("softmax", "topk", "remainder", "fft.rfft", "scatter_reduce.mean")


def test_the_page_is_what_the_results_render_to() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(FOUND), "run `make operators`"


def test_rows_are_of_operators_that_there_are() -> None:
    rows = FOUND["operators"]
    assert rows.keys() <= set(names())
    assert len(rows) > 0.5 * len(names())
    assert {group_of(name) for name in names()} == set(GROUPS)


def test_nothing_crashed_and_nothing_was_silently_wrong() -> None:
    ended = counts(FOUND)
    listed = {
        f"{name} {column}": cell["reason"]
        for name, row in FOUND["operators"].items()
        for column, cell in row["cells"].items()
        if cell["outcome"] in ("crashed", "silently wrong")
    }
    assert ended["verified"] > 0.8 * ended.total()
    assert listed == KNOWN


KNOWN: dict[str, str] = {}
"""What is wrong and not mended yet; each is in the table."""


def test_samples_are_seeded_and_differ() -> None:
    first, second = (Calls(calls("scatter_reduce.mean", "float32")).example() for _ in range(2))
    assert [torch.equal(first[name], second[name]) for name in first] == [True] * len(first)
    said = [call.said for call in calls("nn.functional.conv2d", "float32")]
    assert len(said) == len(set(said)) == 3


def test_a_few_operators_are_verified(tmp_path: Path) -> None:
    for row in examine(FEW, tmp_path):
        assert row.cells, row.name
        assert {cell.outcome for cell in row.cells.values()} == {"verified"}, row


def test_an_engine_that_is_wrong_on_nan_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from enginecast.runtime.engine import Engine, Outputs

    plain = Engine.run

    def without_nan(self: Engine, *args: object, **options: object) -> Outputs:
        given = plain(self, *args, **options)  # type: ignore[arg-type]
        return Outputs({name: np.nan_to_num(array) for name, array in given.items()}, "")

    monkeypatch.setattr(Engine, "run", without_nan)
    cell = export(calls("nn.functional.relu", "float32")[:1], tmp_path / "bundle")
    assert cell == Cell("silently wrong", cell.reason, 1)
    assert cell.reason.startswith(("infinities", "not numbers"))
