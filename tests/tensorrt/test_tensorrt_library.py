"""The real library: the names that are called of it, what is said where it is not, its messages."""

import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rtx import trt

from enginecast.errors import MissingError
from enginecast.exporters.registry import target_of
from enginecast.installation import install_command
from enginecast.runtime.sessions.tensorrt.errors import Messages, error_logger, heard_by
from enginecast.runtime.sessions.tensorrt.library import RTX, import_tensorrt, names_for

ROOT = Path(__file__).parents[2]
SOURCE = "\n".join(
    path.read_text(encoding="utf-8")
    for folder in ("exporters/tensorrt", "runtime/sessions/tensorrt")
    for path in (ROOT / folder).glob("*.py")
)
WHY = "--target tensorrt-rtx"


def test_names_that_are_called_are_listed_and_listed_ones_are_called() -> None:
    used = set(re.findall(r"\btrt\.([A-Z]\w+)", SOURCE))
    names = names_for(RTX.like)
    assert {name for name in used if not hasattr(trt, name)} == set()
    # TensorRT has none of these.
    only = {"ComputeCapability", "EngineInvalidityDiagnostics", "EngineValidity"}
    assert used - names.keys() == only
    assert names == names_for("10.15")
    members = {member for listed in names.values() for member in listed}
    assert {member for member in members if not re.search(rf"\b{member}\b", SOURCE)} == set()
    assert import_tensorrt("this test", RTX) is trt


@pytest.mark.parametrize("version", ["1.6.0.60", "1.0"])
def test_an_older_library_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt, "__version__", version)
    with pytest.raises(MissingError) as caught:
        target_of(RTX.name).require(None)
    assert caught.value.message == f"{WHY}: TensorRT-RTX {version}: expected at least 1.7"
    assert caught.value.hint == install_command("tensorrt-rtx")


def test_a_library_that_lacks_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(trt, "OnnxParserRefitter")
    monkeypatch.delattr(trt.BuilderFlag, "TF32")
    with pytest.raises(MissingError, match=r"lacks BuilderFlag\.TF32, OnnxParserRefitter\n"):
        import_tensorrt(WHY, RTX)


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, RTX.module, None)
    with pytest.raises(MissingError, match="needs tensorrt-rtx, which is not installed") as caught:
        target_of(RTX.name).require(None)
    assert caught.value.hint == install_command("tensorrt-rtx")
    assert caught.value.exit_code == 3
    assert not target_of(RTX.name).runs_here("fp16", "cuda", asked=True)


def test_the_logger_keeps_errors_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    first, second = Messages(), Messages()
    assert error_logger(trt, first) is error_logger(trt, second)
    log: Any = error_logger(trt, second).log
    for severity in ("VERBOSE", "INFO", "WARNING", "ERROR", "INTERNAL_ERROR"):
        log(getattr(trt.ILogger, severity), f"{severity} said")
    with heard_by(first):
        log(trt.ILogger.ERROR, "of this thread")
        other = threading.Thread(target=log, args=(trt.ILogger.ERROR, "of another"))
        other.start()
        other.join()
    assert second.take() == "ERROR said; INTERNAL_ERROR said; of another"
    assert [*second.warnings] == ["WARNING said"]
    assert first.take() == "of this thread"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "it gave no reason"),
        (["a\n b", "a\n b", "c"], "a b; c"),
        (["no form", "In catchCudaError (cudaError 35: too old)"], "no form"),
        (
            ["In catchCudaError (cudaError 35: too old)"],
            "In catchCudaError (cudaError 35: too old)",
        ),
        (
            ["no form", "In catchCudaError (cudaError 2: memory)"],
            "; In catchCudaError (cudaError 2",
        ),
        ([f"reason {number}" for number in range(30)], "; reason 19; and more"),
    ],
)
def test_messages_are_one_line(given: list[str], said: str) -> None:
    messages = Messages()
    for text in given:
        messages.add(text)
    assert said in messages.take()
    assert messages.take() == "it gave no reason"
