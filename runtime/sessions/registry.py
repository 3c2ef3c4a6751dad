"""The registry of sessions: ours by target, those of other packages by entry point."""

from enginecast.errors import MissingError
from enginecast.plugins import Registry
from enginecast.runtime.sessions.session import Session

SESSIONS = {
    "tensorrt": "enginecast.runtime.sessions.tensorrt.session:TensorRTSession",
    "tensorrt-rtx": "enginecast.runtime.sessions.tensorrt.session:TensorRTRTXSession",
    "onnxruntime": "enginecast.runtime.sessions.onnxruntime:OrtSession",
    "aotinductor": "enginecast.runtime.sessions.aotinductor:AOTInductorSession",
    "openvino": "enginecast.runtime.sessions.openvino:OpenVINOSession",
    "torchscript": "enginecast.runtime.sessions.torchscript:TorchScriptSession",
}
REGISTRY = Registry("session", "enginecast.sessions", SESSIONS, MissingError)


def session_class(target: str) -> type[Session]:
    """The session class that opens a target's engines; a MissingError where nothing does."""
    return REGISTRY.load(target, Session)  # type: ignore[type-abstract]
