"""Metrics: relative, mask-aware, finite in JSON, and not fooled by small outputs."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from enginecast.verification.metrics import (
    SQNR_CAP,
    measure,
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


def test_a_row_of_almost_nothing_neither_explodes_nor_hides() -> None:
    reference = sample(10, 8)
    reference[3] = 1e-12
    noisy = reference + 1e-6
    assert measure(noisy, reference).worst_row < 1e-4
    wrong = reference.copy()
    wrong[3] = 1.0
    assert measure(wrong, reference).worst_row > 1.0


def test_non_finite_values_are_counted_and_located_and_the_rest_stays_finite() -> None:
    reference = sample(2, 3)
    broken = reference.copy()
    broken[1, 0], broken[1, 2] = np.nan, np.inf
    found = measure(broken, reference)
    assert found.nonfinite == 2
    assert found.first_nonfinite == (1, 0)
    json.dumps(asdict(found), allow_nan=False)
