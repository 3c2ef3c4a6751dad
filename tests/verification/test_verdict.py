"""Verdicts: judged by the noise floor, with floors that are not a measure refused."""

from collections.abc import Mapping

import numpy as np
import pytest

from enginecast.runtime.bundle.manifest import Verdict, Where
from enginecast.verification.floor import Floor
from enginecast.verification.metrics import Array, Comparison, measure, times
from enginecast.verification.verdict import judge, verdict_line

WHERE = Where(provider="CPUExecutionProvider", device="x86_64", versions={"onnxruntime": "1.31.1"})
GENERATOR = np.random.default_rng(11)
REFERENCE = {case: GENERATOR.standard_normal((4, 7, 16)) for case in ("short", "long")}
NOISE = {case: GENERATOR.standard_normal((4, 7, 16)) for case in REFERENCE}


def off_by(error: float, sign: float = 1.0) -> Comparison:
    """The reference with noise of a relative size."""
    return {
        case: {"y": measure(wanted + sign * error * NOISE[case], wanted)}
        for case, wanted in REFERENCE.items()
    }


def of(outputs: Mapping[str, Array]) -> Comparison:
    return {case: {"y": measure(outputs[case], wanted)} for case, wanted in REFERENCE.items()}


def rejected(verdict: Verdict) -> str:
    assert verdict.outcome == "rejected"
    return "\n".join(verdict.reasons)


def test_an_engine_as_good_as_eager_is_verified() -> None:
    floor = Floor("bf16", off_by(5e-3))
    verdict = judge(off_by(5.5e-3, -1.0), floor, where=WHERE, engine_ran=True)
    assert (verdict.outcome, verdict.engine, verdict.reasons) == ("verified", "ran", ())
    assert verdict_line(verdict, "bf16") == "verified: 1.1x the error of eager bf16"
    assert verdict.cases == ("short", "long")
    assert verdict.outputs[0].ratio == pytest.approx(1.1, abs=0.05)


def test_more_than_the_limit_is_rejected_in_floor_units() -> None:
    verdict = judge(off_by(2e-2), Floor("bf16", off_by(5e-3)), where=WHERE, engine_ran=True)
    assert "'y' has 4.0x the error of eager bf16" in rejected(verdict)


def test_booleans_that_differ_have_no_cosine() -> None:
    wanted = np.arange(4096).reshape(64, 64) % 2 == 0
    found = wanted.copy()
    found[3, 5] ^= True  # as eager itself may
    compared = {"short": {"mask": measure(found, wanted)}}
    verdict = judge(compared, Floor("fp32", compared), where=WHERE, engine_ran=True)
    (output,) = verdict.outputs
    assert verdict.outcome == "verified"
    assert (output.error, output.cosine, output.sqnr_db) == (1 / 4096, None, None)


def test_one_wrong_row_is_rejected_though_the_pooled_error_is_small() -> None:
    outputs = {case: wanted + 1e-7 * NOISE[case] for case, wanted in REFERENCE.items()}
    outputs["long"][2, 3] += 4e-6
    verdict = judge(of(outputs), Floor("fp32", off_by(2e-7)), where=WHERE, engine_ran=True)
    assert "case 'long': its worst row" in rejected(verdict)


def test_a_row_of_zeros_is_rejected_whatever_the_floor() -> None:
    loose = {case: wanted + 1e-2 * NOISE[case] for case, wanted in REFERENCE.items()}
    loose["short"][0, 0] *= 1.2
    floor = Floor("bf16", of(loose))
    outputs = {case: wanted.copy() for case, wanted in REFERENCE.items()}
    outputs["long"][2, 3] = 0.0
    verdict = judge(of(outputs), floor, where=WHERE, engine_ran=True)
    assert "relative 1, floor 0.2, limit 0.9" in rejected(verdict)


def test_an_fp16_floor_that_lost_range_is_not_a_tolerance() -> None:
    culprit = "values leave fp16's range at block.3 (max 1.4e+05 > 65504)"
    floor = Floor("fp16", off_by(0.047), wider=off_by(8e-3), culprit=culprit)
    reason = rejected(judge(off_by(1e-3), floor, where=WHERE, engine_ran=True))
    assert "eager fp16 is 47x worse than fp16's precision allows" in reason
    assert culprit in reason


def test_an_fp16_floor_within_its_precision_is_used() -> None:
    floor = Floor("fp16", off_by(1.2e-3), wider=off_by(8e-3))
    assert judge(off_by(1e-3), floor, where=WHERE, engine_ran=True).outcome == "verified"


def test_a_floor_that_is_not_finite_or_useless_rejects() -> None:
    broken = {case: {"y": measure(np.full_like(w, np.nan), w)} for case, w in REFERENCE.items()}
    verdict = judge(off_by(1e-3), Floor("bf16", broken), where=WHERE, engine_ran=True)
    assert "eager bf16 gives values that are not finite" in rejected(verdict)
    verdict = judge(off_by(1e-3), Floor("bf16", off_by(0.4)), where=WHERE, engine_ran=True)
    assert "off by 0.4, and past 0.25" in rejected(verdict)


def test_a_non_finite_output_is_rejected_with_its_place() -> None:
    outputs = {case: wanted.copy() for case, wanted in REFERENCE.items()}
    outputs["short"][1, 2, 3] = np.inf
    verdict = judge(of(outputs), Floor("fp32", off_by(1e-7)), where=WHERE, engine_ran=True)
    assert "case 'short': 1 values are not finite, first at [1, 2, 3]" in rejected(verdict)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.zeros((2, 3)), "the reference is all zero in every case, which proves little"),
        (np.full((2, 3), np.nan), "the reference is not finite in every case"),
        (np.zeros((0, 3)), "is empty in every case: only its sizes were compared"),
    ],
)
def test_a_reference_without_numbers_proves_little_and_says_so(values: Array, said: str) -> None:
    nothing = {"only": {"y": measure(values, values)}}
    verdict = judge(nothing, Floor("fp32", nothing), where=WHERE, engine_ran=True)
    assert verdict.outcome == "verified"
    assert said in verdict.reasons[0]


def test_emulation_must_pass_too_and_says_so() -> None:
    floor = Floor("fp16", off_by(1e-3), wider=off_by(8e-3))
    good = judge(off_by(1e-4), floor, where=WHERE, engine_ran=False, emulated=off_by(1.2e-3))
    assert (good.outcome, good.engine) == ("verified-by-emulation", "not run on target")
    assert good.outputs[0].ratio == pytest.approx(1.2, abs=0.05)
    assert good.reasons == (
        "the engine ran on CPUExecutionProvider, which does not compute in fp16",
        "the program was judged in true fp16 arithmetic",
    )
    assert "has not run on its target" in verdict_line(good, "fp16")
    alone = judge(None, floor, where=WHERE, engine_ran=False, emulated=off_by(1.2e-3))
    assert alone.outcome == "verified-by-emulation"
    assert alone.reasons[0] == "the engine has not run"
    bad = judge(off_by(1e-4), floor, where=WHERE, engine_ran=False, emulated=off_by(0.5))
    assert "in true fp16 arithmetic: output 'y'" in rejected(bad)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0x"), (0.042, "0.04x"), (1.14, "1.1x"), (47.2, "47x"), (123456.0, "1.2e+05x")],
)
def test_ratios_read_well(value: float, text: str) -> None:
    assert times(value) == text
