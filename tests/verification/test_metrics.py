"""Metrics: relative, mask-aware, finite in JSON, and not fooled by small outputs."""

import json
from dataclasses import asdict

import ml_dtypes
import numpy as np
import pytest

from enginecast.errors import VerificationError
from enginecast.verification.metrics import (
    BEYOND,
    SQNR_CAP,
    masked_outputs,
    measure,
    pool,
    row_mask,
)


def sample(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(shape)


def test_equal_arrays_have_no_error() -> None:
    reference = sample(2, 3, 8)
    found = measure(reference.astype(np.float64), reference)
    assert (found.relative, found.worst_row, found.max_abs) == (0.0, 0.0, 0.0)
    assert found.cosine == pytest.approx(1.0)
    assert found.sqnr_db == SQNR_CAP
    assert found.rows == 6


def test_booleans_are_not_integers() -> None:
    marks = np.array([True, False])
    assert measure(marks, marks).wrong == 0
    assert measure(marks.astype(np.int32), marks.astype(np.int64)).wrong == 0
    assert measure(sample(2).astype(ml_dtypes.bfloat16), sample(2)).worst_row < 0.1
    with pytest.raises(VerificationError, match="the output is int64, its reference bool"):
        measure(marks.astype(np.int64), marks)
    with pytest.raises(VerificationError, match="the output is float32, its reference int64"):
        measure(np.ones(2, np.float32), np.ones(2, np.int64))


def test_relative_error_and_sqnr_of_a_known_difference() -> None:
    reference = sample(4, 8)
    found = measure(reference * 1.01, reference)
    assert found.relative == pytest.approx(0.01)
    assert found.worst_row == pytest.approx(0.01)
    assert found.sqnr_db == pytest.approx(40.0)


def test_a_small_output_does_not_agree_by_being_small() -> None:
    reference = 3e-21 * sample(4, 8)
    found = measure(np.zeros_like(reference), reference)
    assert found.max_abs < 1e-20
    assert found.relative == pytest.approx(1.0)
    assert found.sqnr_db == pytest.approx(0.0)


def test_squares_that_leave_float64_are_not_trouble() -> None:
    for size in (1e-200, 1e200):
        reference = size * sample(4, 8)
        assert measure(1.5 * reference, reference).relative == pytest.approx(0.5)


def test_one_wrong_row_shows_in_the_worst_row_and_the_cosine() -> None:
    reference = sample(1000, 8)
    wrong = reference.copy()
    wrong[123] *= -1
    found = measure(wrong, reference)
    assert found.relative < 0.1
    assert found.worst_row == pytest.approx(2.0)
    assert found.cosine == pytest.approx(-1.0)


def test_a_row_of_almost_nothing_neither_explodes_nor_hides() -> None:
    reference = sample(10, 8)
    reference[3] = 1e-12
    noisy = reference + 1e-6
    assert measure(noisy, reference).worst_row < 1e-4
    wrong = reference.copy()
    wrong[3] = 1.0
    assert measure(wrong, reference).worst_row > 1.0


def test_pad_rows_are_reported_apart() -> None:
    reference = sample(2, 4, 8)
    mask = row_mask(reference.shape, np.array([[1, 1, 0, 0], [1, 1, 1, 1]]))
    wrong = reference.copy()
    wrong[0, 2:] += 5.0
    found = measure(wrong, reference, mask)
    assert found.relative == 0.0
    assert found.rows == 6
    assert found.pad_error is not None
    assert found.pad_error > 1.0


def test_a_wrong_valid_row_is_not_taken_for_padding() -> None:
    reference = sample(2, 4, 8)
    mask = row_mask(reference.shape, np.array([[1, 1, 0, 0], [1, 1, 1, 1]]))
    wrong = reference.copy()
    wrong[0, 1] += 5.0
    assert measure(wrong, reference, mask).relative > 0.1


def test_an_output_of_the_masks_own_shape_has_rows_of_one() -> None:
    reference = sample(2, 4)
    mask = row_mask(reference.shape, np.array([[1, 1, 0, 0], [1, 0, 0, 0]]))
    assert measure(reference, reference, mask).rows == 3


def test_non_finite_values_are_counted_and_located_and_the_rest_stays_finite() -> None:
    reference = sample(2, 3)
    broken = reference.copy()
    broken[1, 0], broken[1, 2] = np.nan, np.inf
    found = measure(broken, reference)
    assert found.nonfinite == 2
    assert found.first_nonfinite == (1, 0)
    json.dumps(asdict(found), allow_nan=False)


def test_a_non_finite_pad_row_counts_unless_eager_has_it_too() -> None:
    reference = sample(1, 2, 3)
    mask = np.array([[True, False]])
    broken = reference.copy()
    broken[0, 1, 1] = np.nan
    assert measure(broken, reference, mask).nonfinite == 1
    assert measure(broken, broken, mask).nonfinite == 0
    assert measure(reference, broken, mask).nonfinite == 0  # eager's NaN in a row nobody reads
    assert measure(reference, broken).nonfinite == 1


def test_a_degenerate_reference_is_flagged() -> None:
    assert measure(np.zeros((2, 3)), np.zeros((2, 3))).degenerate == "all zero"
    assert measure(np.ones((2, 3)), np.ones((2, 3))).degenerate == "constant"
    assert measure(sample(2, 3), sample(2, 3)).degenerate == ""
    assert measure(np.full((2, 3), 1e-9), np.zeros((2, 3))).relative == BEYOND


def test_bfloat16_integers_and_scalars_are_measured() -> None:
    reference = sample(4, 8)
    error = measure(reference.astype(ml_dtypes.bfloat16), reference).relative
    assert 2**-11 < error < 2**-8
    assert measure(np.array([1, 2]), np.array([1, 3])).relative > 0.1
    assert measure(np.array(2.0, dtype=np.float32), np.array(2.0)).rows == 1


def test_shapes_must_agree() -> None:
    with pytest.raises(VerificationError, match=r"\[2, 3\].*\[3, 2\]"):
        measure(np.ones((2, 3)), np.ones((3, 2)))


def test_pooling_weighs_cases_by_their_norm() -> None:
    large, small = sample(100, 8), sample(1, 8)
    pooled = pool([measure(large, large), measure(2 * small, small)])
    assert pooled.rows == 101
    assert 0.0 < pooled.relative < 0.2
    assert pooled.worst_row == pytest.approx(1.0)


def test_an_output_follows_the_mask_only_when_it_does_in_every_case() -> None:
    masks = [np.ones((2, 8)), np.ones((2, 5))]
    shapes = [
        {"hidden": (2, 8, 3), "pooled": (2, 8)},
        {"hidden": (2, 5, 3), "pooled": (2, 8)},
    ]
    assert masked_outputs(shapes, masks) == {"hidden"}
    assert masked_outputs(shapes, [None, None]) == frozenset()


def test_the_worst_row_is_named_by_prompt_and_token() -> None:
    reference = sample(3, 5, 8)
    wrong = reference.copy()
    wrong[1, 3] += 0.1
    wrong[2, 4] += 9.0
    everything = measure(wrong, reference)
    assert everything.worst_at == (2, 4)
    mask = np.ones((3, 5), dtype=bool)
    mask[2, 4] = False
    assert measure(wrong, reference, mask).worst_at == (1, 3)
    heads = sample(3, 5, 2, 8)
    broken = heads.copy()
    broken[1, 3, 1] *= 2
    assert measure(broken, heads, mask).worst_at == (1, 3, 1)
    assert measure(broken[0, 0, 0], heads[0, 0, 0]).worst_at == (0,)


def test_a_prompt_s_mean_is_taken_over_its_valid_tokens() -> None:
    reference = sample(2, 5, 8)
    mask = np.ones((2, 5), dtype=bool)
    mask[1, 1:] = False
    padded = reference.copy()
    padded[1, 1:] = 1e6  # only where nobody looks
    found = measure(padded, reference, mask)
    assert found.prompts == 2
    assert found.prompt_cosine == pytest.approx(1.0)
    turned = reference.copy()
    turned[0] *= -1
    assert measure(turned, reference, mask).prompt_cosine == pytest.approx(-1.0)
    assert measure(turned, reference).prompts == 0
    both = pool([found, measure(turned, reference, mask)])
    assert both.prompts == 4
    assert both.prompt_cosine == pytest.approx(-1.0)
    assert both.worst_at is None


def test_each_prompt_that_was_given_has_an_error_of_its_own() -> None:
    reference = sample(2, 5, 8)
    mask = np.ones((2, 5), dtype=bool)
    mask[1, 1:] = False
    outputs = reference.copy()
    outputs[0] *= -1
    outputs[1, 1:] = 1e6  # padding
    found = measure(outputs, reference, mask, given=2)
    assert found.prompt_errors == pytest.approx((2.0, 0.0))
    assert found.prompt_cosines == pytest.approx((-1.0, 1.0))
    outputs[0, 3, 3] = np.inf
    assert measure(outputs, reference, mask, given=2).prompt_errors == (None, 0.0)
    pooled = measure(outputs[:, 0], reference[:, 0], given=2)  # a vector a prompt
    assert pooled.prompt_errors == pytest.approx((2.0, 0.0))
    assert measure(outputs, reference, mask).prompt_errors == ()
