"""What a target and a precision are for, and whether this machine has it."""

import onnxruntime
import torch

from enginecast.errors import MissingError, UsageError
from enginecast.exporters.tensorrt import require_tensorrt
from enginecast.exporters.tensorrt_options import TensorRTOptions
from enginecast.passes.presets import QUANTIZED
from enginecast.runtime.backends import PROVIDERS

OF_TORCH = ("aotinductor", "torchscript")
"""Targets whose engines torch runs, on the device that they were made for."""
TENSORRT = "tensorrt"


def device_for(target: str, precision: str, arch: str | None) -> str:
    """What an engine is for, when nobody says it."""
    if target == TENSORRT:
        return "cuda"
    if target in OF_TORCH:
        return "cpu" if arch is None else "cuda"
    on_gpu = precision == "bf16" or (precision in QUANTIZED and arch is not None)
    return "cuda" if on_gpu else "cpu"


def require_device_of(target: str, device: str) -> None:
    """Refuse a device that a target has no engines for.

    Raises:
        UsageError: TensorRT and the CPU.
    """
    if target == TENSORRT and device != "cuda":
        raise UsageError(
            f"--device {device} does not fit --target tensorrt: its engines run on NVIDIA GPUs",
            hint="Leave --device out, or use --target onnxruntime.",
        )


def runs_tensorrt() -> bool:
    """Whether this machine can build and run TensorRT engines."""
    try:
        require_tensorrt(TensorRTOptions())
    except MissingError:
        return False
    return True


def runs_on_onnxruntime(precision: str, device: str | None, chosen: str) -> bool:
    """Whether ONNX Runtime has the provider here; one that was asked for has to be."""
    if precision == "bf16" and device == "cpu":
        raise UsageError(
            "--precision bf16 does not run on --device cpu: ONNX Runtime's CPU provider has no bf16"
            " kernels",
            hint="Leave --device out to export for a GPU (judged by emulation here), or use"
            " --precision fp32 or fp16, or --target aotinductor.",
        )
    here = set(PROVIDERS[chosen][:1]) <= set(onnxruntime.get_available_providers())
    if device is not None and not here:
        raise MissingError(
            f"--device {device}: ONNX Runtime has no {PROVIDERS[device][0]} here, only"
            f" {', '.join(onnxruntime.get_available_providers())}",
            hint="pip install 'enginecast[cuda]' on a machine with a GPU, or leave --device out.",
        )
    return here


def require_gpu_of_torch(device: str, why: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise MissingError(
            f"--device cuda: torch sees no CUDA GPU here, and {why}",
            hint="Export on a machine with a GPU, or leave --device and --arch out.",
        )


def arch_of_this_machine(precision: str) -> str:
    if not torch.cuda.is_available():
        raise UsageError(
            f"--precision {precision} for a GPU depends on its architecture",
            hint="Name it: --arch sm90 (H100, H200), sm89 (L4, RTX 4090), sm80 (A100), ...",
        )
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"
