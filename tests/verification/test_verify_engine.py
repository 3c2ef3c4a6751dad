"""Judging a loaded engine: its cases, the declared dtypes, the provider's arithmetic."""

from dataclasses import replace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

from enginecast.runtime.bundle.manifest import Input
from enginecast.runtime.engine import Engine
from enginecast.verification.engine import verify_engine
from enginecast.verification.floor import Floor
from enginecast.verification.metrics import Array, compare
from enginecast.verification.reference import Reference, ReferenceCase

GENERATOR = np.random.default_rng(2)


def case(name: str, batch: int) -> ReferenceCase:
    x = GENERATOR.standard_normal((batch, 5, 8)).astype(np.float32)
    mask = (np.arange(5)[None] < np.arange(5, 5 - batch, -1)[:, None]).astype(np.int64)
    exact = np.tanh(x.astype(np.float64))
    return ReferenceCase(name, {"x": x, "mask": mask}, {"y": np.tanh(x)}, {"y": exact})


def reference(dtype: str = "fp32") -> Reference:
    cases = (case("one", 1), case("three", 3))
    low = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}[dtype]
    floor = {c.name: compare({"y": np.tanh(c.inputs["x"].astype(low))}, c.reference) for c in cases}
    return Reference(cases, Floor(dtype, floor), "mask", frozenset({"y"}))


class FakeEngine:
    """Computes tanh as an engine would, or does something wrong."""

    def __init__(self, provider: str = "CPUExecutionProvider", dtype: str = "float32") -> None:
        self.provider = provider
        self.inputs = tuple(
            Input(name=name, kind="tensor", dtype=cast(Any, declared), shape=("b", 5, 8))
            for name, declared in (("x", dtype), ("mask", "int64"))
        )
        self.fed: list[np.dtype[Any]] = []

    def versions(self) -> dict[str, str]:
        return {}

    def run(
        self, feeds: dict[str, Array], *, check_finite: bool = True, pad_rows: str = "exact"
    ) -> dict[str, Array]:
        assert pad_rows == "exact"
        assert not check_finite
        self.fed.append(feeds["x"].dtype)
        return {"y": self.compute(feeds["x"], feeds["mask"])}

    def compute(self, x: Array, mask: Array) -> Array:
        result: Array = np.tanh(x)
        return result


def verify(engine: FakeEngine, against: Reference, **options: Any) -> Any:
    return verify_engine(cast(Engine, engine), against, **options)


def test_a_right_engine_is_verified_on_this_machine() -> None:
    verdict = verify(FakeEngine(), reference())
    assert (verdict.outcome, verdict.engine) == ("verified", "ran")
    assert verdict.cases == ("one", "three")
    assert verdict.where.provider == "CPUExecutionProvider"
    assert "enginecast" in verdict.where.versions


def test_an_fp16_engine_on_the_cpu_provider_has_not_run_on_its_target() -> None:
    against = reference("fp16")
    verdict = verify(FakeEngine(), against)
    assert (verdict.outcome, verdict.engine) == ("verified-by-emulation", "not run on target")
    verdict = verify(FakeEngine("CUDAExecutionProvider"), against)
    assert (verdict.outcome, verdict.engine) == ("verified", "ran")


@pytest.mark.parametrize("declared", ["float16", "bfloat16"])
def test_inputs_are_fed_in_the_declared_dtype(declared: str) -> None:
    engine = FakeEngine(dtype=declared)
    verify(engine, reference("bf16"))
    assert {str(dtype) for dtype in engine.fed} == {declared}


def test_a_wrong_pad_row_is_reported_and_a_wrong_valid_row_rejected() -> None:
    class Pads(FakeEngine):
        def compute(self, x: Array, mask: Array) -> Array:
            return np.where(mask[..., None] == 0, 7.0, np.tanh(x))

    verdict = verify(Pads(), reference())
    assert verdict.outcome == "verified"
    assert verdict.outputs[0].pad_error > 1.0
    verdict = verify(Pads(), replace(reference(), masked=frozenset()))
    assert verdict.outcome == "rejected"


def test_another_shape_is_a_rejection_in_words() -> None:
    class Flat(FakeEngine):
        def compute(self, x: Array, mask: Array) -> Array:
            return np.tanh(x).reshape(-1, 8)

    verdict = verify(Flat(), reference())
    assert verdict.outcome == "rejected"
    assert verdict.reasons[0].startswith("case 'one': output 'y': the output has shape [5, 8]")
