"""The batches that rows are compared in; tests/exporters/test_rows_apart.py has what follows."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from enginecast.runtime.bundle.manifest import Input, ShapeRange, SizeCheck
from enginecast.verification.floor import Floor
from enginecast.verification.metrics import measure
from enginecast.verification.reference import Reference, ReferenceCase, Rows
from enginecast.verification.rows import base_case, batches, judge_rows

SHAPES = {"one": (1, 40), "two": (2, 4), "three": (3, 8)}
SHORT = ShapeRange(name="x", profile=0, least=(1, 1), optimal=(1, 4), greatest=(4, 4))
LONG = ShapeRange(name="x", profile=1, least=(1, 1), optimal=(8, 40), greatest=(9, 40))


def reference() -> Reference:
    cases = []
    for name, (batch, length) in SHAPES.items():
        x = np.arange(batch * length, dtype=np.float64).reshape(batch, length) + 1
        cases.append(ReferenceCase(name, {"x": x}, {"y": x, "n": x[:, 0]}, {"y": x, "n": x[:, 0]}))
    floor = {c.name: {n: measure(a, a) for n, a in c.reference.items()} for c in cases}
    return Reference(tuple(cases), Floor("fp32", floor), rows=Rows(("x",), ("y", "n")))


@pytest.mark.parametrize(
    ("changes", "profile", "sizes"),
    [
        ({}, (), [(5, 8)]),  # 40 elements, as the largest case has
        ({"symbols": {"b": (2, 3), "s": (1, 40)}}, (), []),
        ({"steps": {"b": 2}}, (), [(4, 8)]),
        ({"size_checks": (SizeCheck(condition="b < 5", place=""),)}, (), []),
        ({"guards": ("takes a path",)}, (), []),
        ({}, (SHORT, LONG), [(1, 4), (3, 4), (4, 4), (2, 8), (5, 8)]),
        ({}, (LONG,), [(5, 8)]),
    ],
)
def test_batches_have_sizes_that_no_case_has(
    changes: dict[str, Any], profile: Sequence[ShapeRange], sizes: list[tuple[int, int]]
) -> None:
    x = Input(name="x", kind="tensor", dtype="float32", shape=("b", "s"))
    known = {"symbols": {"b": (1, 64), "s": (1, 40)}, "steps": {}, "size_checks": (), "guards": ()}
    manifest = cast(Any, SimpleNamespace(inputs=(x,), **{**known, **changes}))
    record = cast(Any, SimpleNamespace(profile=tuple(profile)))
    found = [case.inputs["x"].shape for _, case in batches(manifest, record, reference())]
    assert found == sizes


def test_a_row_is_judged_by_what_it_is_alone() -> None:
    known = reference()
    inputs = {case.name: case.inputs for case in known.cases}
    assert base_case(inputs, ("x",)) == "three"
    assert base_case({name: inputs[name] for name in ("one", "two")}, ("x",)) == "two"
    assert base_case({"one": inputs["one"]}, ("x",)) is None

    case = known.cases[2]
    right = {"y": case.reference["y"], "n": case.reference["n"]}
    assert not list(judge_rows(known, 3, case, right))
    swapped = {name: array[[0, 2, 1]] for name, array in right.items()}
    found = {error.output: error for error in judge_rows(known, 3, case, swapped)}
    assert found["y"].row == 1
    assert found["n"].row in (1, 2)
    assert str(found["y"].reason).startswith("at batch 3, row 1 of 'y' parts from what it is alone")
    short = {"y": right["y"][:2], "n": right["n"]}
    assert [(e.output, e.error) for e in judge_rows(known, 3, case, short)] == [("y", np.inf)]
