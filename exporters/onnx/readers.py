"""Who will read an ONNX graph, which decides in which form several things are said in it."""

from typing import Literal, get_args

Reader = Literal["onnxruntime-cpu", "onnxruntime-cuda", "tensorrt", "openvino"]
READERS: tuple[Reader, ...] = get_args(Reader)


def onnxruntime_on(device: str) -> Reader:
    """ONNX Runtime with the provider for a device, "cpu" or "cuda"."""
    return "onnxruntime-cpu" if device == "cpu" else "onnxruntime-cuda"
