"""The ONNX Runtime target."""

from pathlib import Path
from typing import Any

import onnxruntime

from enginecast.errors import LoweringError, MissingError, UsageError
from enginecast.exporters.onnx.fp32_twin import open_twin
from enginecast.exporters.onnx.lower import lower_to_onnx, lowering
from enginecast.exporters.onnx.ops.registry import onnxruntime_on
from enginecast.exporters.onnx.script import lower_script_to_onnx
from enginecast.exporters.target import Artifact, LoweringRequest, ScriptRequest, Target
from enginecast.installation import install_command
from enginecast.passes.presets import QUANTIZED
from enginecast.runtime.sessions.onnxruntime import CUDA_PROVIDER
from enginecast.runtime.sessions.session import PROVIDERS, Session


class OnnxRuntime(Target):
    """An ONNX graph with its weights beside it, for any machine.

    An fp16 engine is judged as CUDA computes it, on whatever device it is made: the CPU provider
    raises it to fp32, and bundles of low precision are for GPUs.
    """

    name = "onnxruntime"
    arithmetic = "ort-cuda"
    takes = ("program", "script")
    products = "onnxruntime"
    multiplies_integers = True
    holds_weights = True
    accepts_second = True
    is_second = True

    def default_device(self, precision: str, arch: str | None) -> str:
        on_gpu = precision == "bf16" or (precision in QUANTIZED and arch is not None)
        return "cuda" if on_gpu else "cpu"

    def quantized_dtype(self, device: str) -> str:
        return "fp32" if device == "cpu" else "fp16"  # the kernels that quantize know no bf16

    def runs_here(self, precision: str, device: str, *, asked: bool) -> bool:
        if asked and precision == "bf16" and device == "cpu":
            raise UsageError(
                "--precision bf16 does not run on --device cpu: ONNX Runtime's CPU provider has no"
                " bf16 kernels",
                hint="Leave --device out to export for a GPU (judged by emulation here), or use"
                " --precision fp32 or fp16, or --target aotinductor.",
            )
        available = onnxruntime.get_available_providers()
        wanted = PROVIDERS[device][0]
        if asked and wanted not in available:
            raise MissingError(
                f"--device {device}: ONNX Runtime has no {wanted} here, only"
                f" {', '.join(available)}",
                hint=f"{install_command('cuda')} on a machine with a GPU, or leave --device out.",
            )
        return wanted in available

    def providers(self, precision: str, device: str) -> tuple[str, ...]:
        return (CUDA_PROVIDER,) if precision == "bf16" else PROVIDERS[device]

    def open_twin(self, path: Path, threads: int | None) -> Session:
        return open_twin(path, threads)

    def lowering(self, device: str, *, arch: str | None = None, options: Any = None) -> str:
        # GemmFloat8 has kernels of one architecture; without a name, the portable form.
        gemm_float8 = device == "cuda" and arch is not None
        return lowering(onnxruntime_on(device), gemm_float8=gemm_float8)

    def lower(self, request: LoweringRequest) -> Artifact:
        return lower_to_onnx(request, onnxruntime_on(request.device))

    def lower_script(self, request: ScriptRequest) -> Artifact:
        if request.precision != "fp32":
            raise LoweringError(
                f"ONNX Runtime's CPU provider does not compute in {request.precision}, and there"
                " is not a program of torch.export to judge in its place"
            )
        return lower_script_to_onnx(request)
