"""The TorchScript target."""

from enginecast.errors import UsageError
from enginecast.exporters.target import Artifact, ScriptRequest, Target, require_gpu_of_torch
from enginecast.exporters.torchscript.lower import write_torchscript
from enginecast.passes.presets import QUANTIZED


class TorchScript(Target):
    """The model as it is, scripted where its control flow depends on inputs, else traced."""

    name = "torchscript"
    arithmetic = "torch-cpu"
    takes = ("script",)
    holds_weights = True

    def default_device(self, precision: str, arch: str | None) -> str:
        return "cpu"

    def check_precision(self, precision: str) -> None:
        if precision == "mixed" or precision in QUANTIZED:
            raise UsageError(
                f"--precision {precision} does not fit --target torchscript: it needs passes, and"
                " passes need a program of torch.export",
                hint="Use --precision fp32, fp16 or bf16.",
            )

    def runs_here(self, precision: str, device: str, *, asked: bool) -> bool:
        require_gpu_of_torch(device, "a trace keeps the device that it was made on")
        return True

    def lower_script(self, request: ScriptRequest) -> Artifact:
        return write_torchscript(request.module, request.folder)
