"""Metrics: relative, mask-aware, finite in JSON, and not fooled by small outputs."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from enginecast.verification.metrics import (
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


def test_relative_error_and_sqnr_of_a_known_difference() -> None:
    reference = sample(4, 8)
    found = measure(reference * 1.01, reference)
    assert found.relative == pytest.approx(0.01)
    assert found.worst_row == pytest.approx(0.01)
    assert found.sqnr_db == pytest.approx(40.0)


def test_a_row_of_almost_nothing_neither_explodes_nor_hides() -> None:
    reference = sample(10, 8)
    reference[3] = 1e-12
    noisy = reference + 1e-6
    assert measure(noisy, reference).worst_row < 1e-4
    wrong = reference.copy()
    wrong[3] = 1.0
    assert measure(wrong, reference).worst_row > 1.0


def test_a_wrong_valid_row_is_not_taken_for_padding() -> None:
    reference = sample(2, 4, 8)
    mask = row_mask(reference.shape, np.array([[1, 1, 0, 0], [1, 1, 1, 1]]))
    wrong = reference.copy()
    wrong[0, 1] += 5.0
    assert measure(wrong, reference, mask).relative > 0.1


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
