"""What TensorRT reports is kept for the error: with the fake, and with the real bindings."""

from typing import Any

import pytest
from fake_tensorrt import fake_tensorrt

from enginecast.runtime.sessions.tensorrt.errors import Messages, error_logger, error_recorder


@pytest.fixture(params=["fake", "real"])
def trt(request: pytest.FixtureRequest) -> Any:
    if request.param == "fake":
        return fake_tensorrt()
    return pytest.importorskip("tensorrt")


def test_a_recorder_answers_what_was_reported(trt: Any) -> None:
    messages = Messages()
    recorder = error_recorder(trt, messages)
    code = trt.ErrorCodeTRT.INTERNAL_ERROR
    assert recorder.report_error(code, "a reason") is False
    assert recorder.num_errors() == recorder.get_num_errors() == 1
    assert recorder.get_error_desc(0) == "a reason"
    assert recorder.get_error_code(0) == code
    assert recorder.has_overflowed() is False
    recorder.clear()
    assert recorder.num_errors() == 0


def test_tensorrt_finds_every_method_of_the_recorder() -> None:
    """The base class asks C++, which looks the overrides up by their names, as the engine does."""
    trt = pytest.importorskip("tensorrt")
    base = trt.IErrorRecorder
    recorder = error_recorder(trt, Messages())
    assert base.report_error(recorder, trt.ErrorCodeTRT.INVALID_STATE, "a reason") is False
    assert base.num_errors(recorder) == 1
    assert base.get_error_code(recorder, 0) == trt.ErrorCodeTRT.INVALID_STATE
    assert base.get_error_desc(recorder, 0) == "a reason"
    assert base.has_overflowed(recorder) is False
    base.clear(recorder)
    assert base.num_errors(recorder) == 0


def test_the_logger_keeps_errors_and_prints_nothing(
    trt: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    messages = Messages()
    logger = error_logger(trt, messages)
    logger.log(trt.ILogger.INFO, "a remark")
    logger.log(trt.ILogger.WARNING, "a warning")
    assert len(messages) == 0
    logger.log(trt.ILogger.ERROR, "an error")
    logger.log(trt.ILogger.INTERNAL_ERROR, "a worse one")
    assert messages.take() == "an error; a worse one"
    assert capfd.readouterr() == ("", "")
