"""`enginecast bench`: times in turns, with accuracy beside each."""

import sys
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from exports import Exports, cast
from models import tiny_t5

from enginecast.bench import contenders
from enginecast.bench.timing import Times, interleaved, ratio
from enginecast.capture.outputs.flatten import parse_wanted
from enginecast.capture.sources.open_source import open_source
from enginecast.capture.sources.weights.widened import widen


class Slow:
    """Calls that take the seconds that they are told, on a clock of their own."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.called: list[str] = []

    def calls(self) -> dict[str, object]:
        return {name: (lambda name=name: self.called.append(name)) for name in self.seconds}

    def clock(self, call: object, times: int) -> float:
        assert callable(call)
        for _ in range(times):
            call()
        return self.seconds[self.called[-1]] * times


def test_each_is_timed_once_a_round_and_the_order_turns() -> None:
    slow = Slow(one=0.004, two=0.002)
    found = interleaved(slow.calls(), rounds=4, clock=slow.clock)  # type: ignore[arg-type]
    assert slow.called[-8:] == ["one", "two", "two", "one", "one", "two", "two", "one"]
    assert found["one"].wall == pytest.approx([4.0] * 4)
    assert found["two"].median == pytest.approx(2.0)
    assert ratio(found["one"], found["two"]) == pytest.approx(2.0)


def test_a_short_call_is_repeated_within_a_sample() -> None:
    slow = Slow(short=1e-4)
    found = interleaved(slow.calls(), rounds=3, clock=slow.clock)  # type: ignore[arg-type]
    assert found["short"].calls == 20
    assert found["short"].median == pytest.approx(0.1)


def test_the_time_is_kept_after_the_fewest_rounds() -> None:
    slow = Slow(one=0.01)
    found = interleaved(slow.calls(), rounds=50, seconds=0.0, clock=slow.clock)  # type: ignore[arg-type]
    assert len(found["one"].wall) == 3


def test_a_ratio_is_that_of_samples_side_by_side() -> None:
    """A machine that slows down by half in one round does not move it."""
    one, two = Times((2.0, 20.0, 2.0), (1.0,) * 3, 1), Times((1.0, 10.0, 1.0), (1.0,) * 3, 1)
    assert ratio(one, two) == 2.0
    assert one.spread == (2.0, 11.0)


def test_an_engine_beside_its_peers(exports: Exports, capsys: pytest.CaptureFixture[str]) -> None:
    folder = exports("bert").folder
    model = exports.model("bert")
    given = ["--model", model, "--against", "eager,onnx", "--rounds", 3, "--threads", 1]
    ran = cast(capsys, "bench", folder, *given, "--json")
    assert ran.code == 0, ran.err
    found = ran.json
    assert list(found["rows"]) == ["eager", "engine", "onnx"]  # sorted, as all our JSON
    assert found["base"] == "eager"
    assert found["rows"]["eager"]["speed"] == 1.0
    assert found["compared_with"] == "fp64"
    for row in found["rows"].values():
        assert len(row["samples_ms"]) == 3
        assert 0 < row["relative_error"] < 1e-5
        assert row["cosine"] > 0.999999
    assert found["machine"]["versions"]["torch"]


def test_an_engine_alone_needs_no_torch(
    exports: Exports, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exports("bert").folder
    monkeypatch.setitem(sys.modules, "torch", None)
    ran = cast(capsys, "bench", folder, "--rounds", 3)
    assert ran.code == 0, ran.err
    assert "engine" in ran.out
    assert "against fp64" in ran.out
    assert "3 rounds in turns" in ran.out


@pytest.mark.slow
def test_a_peer_that_fails_is_absent_and_not_slow(
    exports: Exports, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object) -> None:
        raise RuntimeError("no such operator\nand more")

    monkeypatch.setattr(contenders, "_plain_onnx", fails)
    folder, model = exports("bert").folder, exports.model("bert")
    given = ["--model", model, "--against", "onnx,eager", "--rounds", 3]
    ran = cast(capsys, "bench", folder, *given)
    assert ran.code == 0, ran.err
    assert "not timed: onnx: RuntimeError: no such operator\n" in ran.out
    assert "eager" in ran.out


def test_eager_is_timed_with_weights_as_a_user_has_them(tmp_path: Path) -> None:
    """Eager of an export widens 16-bit weights in every call: it would be timed too slow."""
    source = open_source(str(tiny_t5(tmp_path / "t5", dtype=torch.float16)))
    feeds = [{"input_ids": np.ones((1, 4), np.int64), "attention_mask": np.ones((1, 4), np.int64)}]
    with patch("enginecast.capture.sources.weights.widened.widen", side_effect=widen) as widened:
        given = source, parse_wanted((), ()), feeds
        contenders.peer("eager", *given, device="cpu", dtype=torch.float32, threads=1)
    weights = dict(widened.call_args.args[0].named_parameters())
    assert {type(weight) for weight in weights.values()} == {torch.nn.Parameter}
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_threads_that_spin_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a call its pool spins for some tens of milliseconds, on the next one's cores."""
    spins = iter([1.0, 1.0, 0.0])
    spent = [0.0]

    def sleep(seconds: float) -> None:
        spent[0] += seconds * next(spins, 0.0)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "process_time", lambda: spent[0])
    slow = Slow(one=0.01)
    found = interleaved(slow.calls(), rounds=1, clock=slow.clock)  # type: ignore[arg-type]
    assert next(spins, None) is None
    assert found["one"].cpu == (0.0,)


@pytest.mark.slow
def test_without_a_gpu_or_another_model_it_says_so(
    exports: Exports, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = exports("plain").folder
    if not torch.cuda.is_available():
        refused = cast(capsys, "bench", folder, "--device", "cuda")
        assert refused.code == 3
        assert "CUDAExecutionProvider: not in this ONNX Runtime" in refused.err
    given = ["--against", "eager", "--rounds", 3]
    other = cast(capsys, "bench", folder, "--model", exports.model("bert"), *given)
    assert other.code == 0, other.err
    assert "is not the model that the bundle was made from\n" in other.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "eager"], "--model and --against go together"),
        (["--model", "M"], "--model and --against go together"),
        (["--model", "M", "--against", "eagre"], "expected some of eager, compile, onnx"),
        (["--threads", 4096], "--threads 4096: expected at most"),
        (["--inputs", "a", "--prompts", "b"], "give either --inputs"),
        (["--prompts", "nowhere.txt"], "nowhere.txt: No such file"),
    ],
)
def test_what_does_not_fit_is_refused(
    exports: Exports,
    capsys: pytest.CaptureFixture[str],
    arguments: list[object],
    message: str,
) -> None:
    ran = cast(capsys, "bench", exports("bert").folder, *arguments)
    assert ran.code == 2
    assert message in ran.err
