"""`enginecast bench`: times in turns, with accuracy beside each."""

import sys

import pytest
from exports import Exports, cast

from enginecast.bench.timing import interleaved, ratio


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
