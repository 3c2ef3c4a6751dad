"""The AOTInductor target."""

from typing import Any

from enginecast.exporters.aotinductor.lower import lower_to_aotinductor, lowering
from enginecast.exporters.target import Artifact, LoweringRequest, Target, require_gpu_of_torch


class AOTInductor(Target):
    """Machine code for one kind of CPU or GPU, made ahead of time, that torch runs."""

    name = "aotinductor"
    arithmetic = "inductor"
    products = "aotinductor"
    # Ops of ours are opaque to Inductor, which makes one kernel of a sum and its norm itself.
    fusions = "fuse-gelu,fuse-rms-norm,fuse-attention{to=sdpa}"

    def runs_here(self, precision: str, device: str, *, asked: bool) -> bool:
        require_gpu_of_torch(device, "Inductor compiles and measures GPU kernels on the GPU")
        return True

    def lowering(self, device: str, *, arch: str | None = None, options: Any = None) -> str:
        return lowering(device)

    def lower(self, request: LoweringRequest) -> Artifact:
        return lower_to_aotinductor(request)
