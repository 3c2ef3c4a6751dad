"""An output is judged by its rows and channels too, integers by how many are wrong."""

from collections.abc import Callable

import numpy as np
import pytest

from enginecast.runtime.bundle.manifest import Verdict, Where
from enginecast.verification.eager.other_kernels import with_losses
from enginecast.verification.floor import Floor
from enginecast.verification.metrics import Array
from enginecast.verification.reference import Reference, ReferenceCase
from enginecast.verification.verdict import judge

WHERE = Where(provider="CPUExecutionProvider", device="x86_64", versions={})
GENERATOR = np.random.default_rng(4)
UNIT = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}


def noisy(wanted: Array, dtype: str) -> Array:
    """As if computed in a dtype."""
    rounded = wanted.astype(np.float64) * (
        1 + 2 * UNIT[dtype] * GENERATOR.standard_normal(wanted.shape)
    )
    return np.asarray(rounded)


def verdict(wanted: Array, eager: Array, found: Array, dtype: str = "fp32") -> Verdict:
    """Of an engine, by the reference, what eager gives and what the engine gives."""
    case = ReferenceCase("only", {}, {"y": eager}, {"y": wanted})
    reference = Reference((case,), Floor(dtype, {}))
    floor = Floor(dtype, {"only": reference.compare(case, {"y": eager})})
    reference = Reference((case,), floor)
    reference = with_losses(reference, {"only": {"y": eager}})
    measured = {"only": reference.compare(reference.cases[0], {"y": found})}
    return judge(measured, floor, where=WHERE, engine_ran=dtype == "fp32")


def boxes(rows: int) -> Array:
    """Four coordinates near 5e6 and a confidence in one row."""
    found = GENERATOR.uniform(1e6, 5e6, (rows, 5))
    found[:, 4] = GENERATOR.uniform(0.1, 1.0, rows)
    return found


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("rows", [1, 40])
def test_a_confidence_beside_boxes_is_judged(rows: int, dtype: str) -> None:
    wanted = boxes(rows)
    eager, found = noisy(wanted, dtype), noisy(wanted, dtype)
    assert verdict(wanted, eager, found, dtype).outcome != "rejected"
    found[:, 4] = 0.0
    judged = verdict(wanted, eager, found, dtype)
    assert judged.outcome == "rejected"
    assert "index 4 of axis 1 has a relative error of 1" in judged.reasons[0]


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 1e-9), ("fp16", 1e-5), ("bf16", 1e-5)])
def test_a_lost_class_among_channels_of_an_image_is_found(dtype: str, size: float) -> None:
    wanted = GENERATOR.standard_normal((2, 6, 9, 9))
    wanted[:, 5] *= size
    eager, found = noisy(wanted, dtype), noisy(wanted, dtype)
    assert verdict(wanted, eager, found, dtype).outcome != "rejected"
    found[:, 5] = 0.0
    assert "index 5 of axis 1" in verdict(wanted, eager, found, dtype).reasons[0]


@pytest.mark.parametrize("flip", [np.logical_not, np.zeros_like, np.ones_like])
def test_booleans_are_counted(flip: Callable[[Array], Array]) -> None:
    wanted = GENERATOR.integers(0, 2, (5, 8)).astype(bool)
    assert verdict(wanted, wanted, wanted, "fp16").outcome != "rejected"
    assert verdict(wanted, wanted, flip(wanted), "fp16").outcome == "rejected"


@pytest.mark.parametrize("rows", [1, 40])
def test_one_element_near_zero_may_be_off_where_eager_is_near_by_luck(rows: int) -> None:
    wanted = GENERATOR.standard_normal((rows, 32))
    wanted[:, 28] = 0.01
    eager = wanted + 0.01 * GENERATOR.standard_normal(wanted.shape)
    eager[:, 28] = wanted[:, 28] * 1.05
    found = wanted.copy()
    found[:, 28] *= -0.2
    assert (verdict(wanted, eager, found, "bf16").outcome == "rejected") == (rows == 40)


@pytest.mark.parametrize(
    ("spread", "outcome"), [(0.0, "verified"), (1e-8, "verified"), (1e-4, "rejected")]
)
def test_equal_elements_are_one_sample(spread: float, outcome: str) -> None:
    """On an image of one color all positions of a channel round alike, and eager may be lucky."""
    wanted = GENERATOR.standard_normal((1, 8, 16, 16))
    wanted[0, 3, 1] = 0.06 * (1 + spread * GENERATOR.standard_normal(16))
    eager, found = noisy(wanted, "fp32"), noisy(wanted, "fp32")
    eager[0, 5, 2] *= 1 + 1e-5  # in another row it was not
    found[0, 3, 1] = wanted[0, 3, 1] * (1 + 1.5e-5)
    assert verdict(wanted, eager, found).outcome == outcome
    found[0, 3, 1] = wanted[0, 3, 1] * (1 + 2e-4)
    assert verdict(wanted, eager, found).outcome == "rejected"
