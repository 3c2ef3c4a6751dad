"""The stored reference: what goes in comes out, the budget holds, damage is an error."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from enginecast.errors import BundleError
from enginecast.runtime.bundle.manifest import ShapeRange
from enginecast.verification.floor import Floor
from enginecast.verification.metrics import compare
from enginecast.verification.reference import (
    Reference,
    ReferenceCase,
    read_reference,
    within_profiles,
    write_reference,
)

SIZES = {"small": 2, "large": 64, "middle/odd": 16}


def reference(dtype: str = "fp32") -> Reference:
    generator = np.random.default_rng(1)
    cases, floors = [], {}
    for name, size in SIZES.items():
        exact = generator.standard_normal((size, 8, 32))
        inputs = {
            "input_ids": generator.integers(0, 9, (size, 8)),
            "attention_mask": np.ones((size, 8), dtype=np.int64),
            "pixels": exact.astype(ml_dtypes.bfloat16),
        }
        cases.append(ReferenceCase(name, inputs, {"y": exact.astype(np.float32)}, {"y": exact}))
        floors[name] = compare({"y": exact.astype(np.float32)}, {"y": exact})
    wider = floors if dtype == "fp16" else None
    return Reference(
        tuple(cases), Floor(dtype, floors, wider, "why"), "attention_mask", frozenset({"y"})
    )


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_it_comes_back_as_it_went(tmp_path: Path, dtype: str) -> None:
    written = reference(dtype)
    assert write_reference(tmp_path / "r.safetensors", written) == ()
    found = read_reference(tmp_path / "r.safetensors")
    assert found.floor == written.floor
    assert (found.mask_input, found.masked) == ("attention_mask", frozenset({"y"}))
    assert [case.name for case in found.cases] == list(SIZES)
    for left, right in zip(found.cases, written.cases, strict=True):
        for part in ("inputs", "outputs", "reference"):
            ours, theirs = getattr(left, part), getattr(right, part)
            assert list(ours) == list(theirs)
            for name in ours:
                assert ours[name].dtype == theirs[name].dtype
                np.testing.assert_array_equal(ours[name], theirs[name])


def test_the_largest_cases_are_left_out_and_their_floors_too(tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    assert write_reference(path, reference("fp16"), budget=100_000) == ("large",)
    found = read_reference(path)
    assert [case.name for case in found.cases] == ["small", "middle/odd"]
    assert set(found.floor.cases) == {"small", "middle/odd"}
    assert found.floor.wider is not None
    assert set(found.floor.wider) == {"small", "middle/odd"}
    assert found.left_out == ("large",)


def test_cases_in_a_gap_between_profiles_are_left_out() -> None:
    def ranges(*rows: tuple[int, int]) -> list[ShapeRange]:
        return [
            ShapeRange(
                name="input_ids", least=(low, 8), optimal=(low, 8), greatest=(high, 8), profile=i
            )
            for i, (low, high) in enumerate(rows)
        ]

    whole = reference("fp16")
    assert within_profiles(whole, []) == (whole, ())
    assert within_profiles(whole, ranges((1, 16), (17, 64))) == (whole, ())
    found, notes = within_profiles(whole, ranges((1, 4), (32, 64)))
    assert [case.name for case in found.cases] == ["small", "large"]
    assert set(found.floor.cases) == {"small", "large"}
    assert notes == ("not compared: middle/odd, whose shapes no profile of the engine has",)


def test_a_damaged_file_is_an_error_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    write_reference(path, reference())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BundleError, match="not a stored reference"):
        read_reference(path)
