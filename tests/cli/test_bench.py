"""`enginecast bench`: times in turns, with accuracy beside each."""

import sys

import pytest
from exports import Exports, cast


def test_an_engine_beside_its_peers(
    exports: Exports, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exports("plain").folder
    model = exports.model("plain")
    monkeypatch.chdir(exports.root)
    given = ["--model", model, "--against", "eager", "--rounds", 3, "--threads", 1]
    ran = cast(capsys, "bench", folder, *given, "--json")
    assert ran.code == 0, ran.err
    found = ran.json
    assert list(found["rows"]) == ["eager", "engine"]  # sorted, as all our JSON
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
    folder = exports("plain").folder
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
    ran = cast(capsys, "bench", exports("plain").folder, *arguments)
    assert ran.code == 2
    assert message in ran.err
