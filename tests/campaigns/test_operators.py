"""docs/results/operators.md is what was found; a few operators go through it in the default run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from operators.examine import MADE_INSIDE, NOT_FINITE, examine, judged
from operators.page import GROUPS, PAGE, counts, group_of, page, plain, read
from operators.samples import Calls, Inside, calls, names

import enginecast
from enginecast.runtime.sessions.onnxruntime import OrtSession

FOUND = read()
FEW = ("hardswish", "glu", "prelu", "celu")


def test_the_page_is_what_the_results_render_to() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(FOUND), "run `make operators`"


def test_rows_are_of_operators_that_there_are() -> None:
    rows = FOUND["operators"]
    assert rows.keys() <= set(names())
    assert len(rows) > 100
    assert {group_of(name) for name in names()} == set(GROUPS)


def test_nothing_crashed_and_nothing_is_silently_wrong() -> None:
    ended = counts(FOUND)
    bad = {
        name
        for name, row in FOUND["operators"].items()
        for cell in row["cells"].values()
        if cell["outcome"] in ("crashed", "silently wrong")
    }
    assert ended["verified"] > 0.8 * ended.total()
    assert bad == set()


def test_samples_are_seeded_and_differ() -> None:
    first, second = (Calls(calls("scatter_reduce.mean", "float32")).example() for _ in range(2))
    assert [torch.equal(first[name], second[name]) for name in first] == [True] * len(first)
    said = [call.said for call in calls("nn.functional.conv2d", "float32")]
    assert len(said) == len(set(said)) == 3


def test_a_few_operators_are_verified(tmp_path: Path) -> None:
    chosen = [*(f"nn.functional.{name}" for name in FEW), "maximum", "prod"]
    for row in examine(chosen, tmp_path, ["float32"]):
        assert row.cells, row.name
        assert {cell.outcome for cell in row.cells.values()} == {"verified"}, row


def test_an_engine_that_is_wrong_on_nan_inside_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = OrtSession.run_to_host

    def without_nan(
        self: OrtSession, feeds: Mapping[str, Any], outputs: Sequence[str]
    ) -> dict[str, NDArray[Any]]:
        return {name: np.nan_to_num(x) for name, x in right(self, feeds, outputs).items()}

    found = calls("nn.functional.relu", "float32")[:1]
    module = Inside(found)
    bundle = enginecast.compile(module, tmp_path / "bundle", example=module.example(), threads=1)
    assert judged(module, bundle.root, MADE_INSIDE) == ""
    monkeypatch.setattr(OrtSession, "run_to_host", without_nan)
    assert judged(Calls(found), bundle.root, NOT_FINITE, is_checked=False)
    assert "inside: output 0: " in judged(module, bundle.root, MADE_INSIDE)


def test_reasons_are_plain() -> None:
    refused = "VerificationError: Type 'tensor(int64)' of input parameter (x) of operator (Conv)"
    assert plain(refused) == "ONNX has no Conv of int64"
    assert plain("LoweringError: ONNX has no form for aten.frexp.Tensor (module '')") == (
        "ONNX has no operator for aten.frexp.Tensor"
    )
    assert plain("something else") == "something else"
