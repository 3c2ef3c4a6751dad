"""What an export is asked for: target, precision, pipeline, device, and what of it this machine can
run.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from enginecast.devices import (
    OF_TORCH,
    TENSORRT,
    arch_of_this_machine,
    device_for,
    require_device_of,
    require_gpu_of_torch,
    runs_on_onnxruntime,
    runs_tensorrt,
)
from enginecast.errors import SpecError, UsageError
from enginecast.exporters.tensorrt_options import TensorRTOptions
from enginecast.passes.base import Pass
from enginecast.passes.pipeline import build
from enginecast.passes.plan_file import read_plan
from enginecast.passes.plan_pass import PlanPass
from enginecast.passes.planning import check_arch
from enginecast.passes.presets import QUANTIZED, computes, preset
from enginecast.passes.quantization_plan import QuantizationPlan
from enginecast.passes.unify_dtype import UnifyDtype
from enginecast.runtime.backends import PROVIDERS
from enginecast.runtime.manifest import Precision
from enginecast.runtime.ort_session import CUDA_PROVIDER
from enginecast.skip_modules import keeping

_ARCH = re.compile(r"sm\d{2,3}a?|gfx\d{3,4}[a-z]?")
FALLBACKS = ("none", "rewrite", "specialise", "torchscript")
"""How far down the control-flow ladder a capture may go."""


@dataclass(frozen=True)
class Plan:
    """A decided export."""

    target: str
    precision: Precision
    """What the engine computes in, and eager beside it: fp32, fp16 or bf16."""
    pipeline: str
    device: str
    """What the engine is for."""
    runs_here: bool
    """Whether this machine has a provider that runs it."""
    arch: str | None = None
    """GPU architecture that the user named, such as sm90; goes into the manifest."""
    quantized: str = ""
    """The precision as it was asked for, when it quantises, such as "int8-storage"; else empty."""
    file: Path | None = None
    """A quantisation plan that was given."""
    tensorrt: TensorRTOptions = field(default_factory=TensorRTOptions)
    """Of the build, when that is the target."""
    also: tuple[str, ...] = ()
    """Targets of further engines in the bundle, made from the same program."""

    @property
    def engines(self) -> tuple["Plan", ...]:
        """A plan for each engine of the bundle, this one first."""
        return (self, *(_beside(self, target) for target in self.also))

    @property
    def name(self) -> str:
        """The precision as a user calls it."""
        return self.quantized or self.precision

    @property
    def providers(self) -> tuple[str, ...]:
        return PROVIDERS[self.device]

    @property
    def engine_providers(self) -> tuple[str, ...]:
        """Providers that the engine is known to suit."""
        if self.target in OF_TORCH:
            return (f"torch-{self.device}",)
        if self.target == TENSORRT:
            return (TENSORRT,)
        if self.precision == "bf16":
            return (CUDA_PROVIDER,)
        return self.providers


def make_plan(
    target: str = "onnxruntime",
    precision: str | None = None,
    pipeline: str | None = None,
    device: str | None = None,
    keep: tuple[str, ...] = (),
    keep_classes: tuple[str, ...] = (),
    *,
    arch: str | None = None,
    max_error: float | None = None,
    file: Path | None = None,
    tensorrt: TensorRTOptions | None = None,
    also: tuple[str, ...] = (),
) -> Plan:
    """Decide an export, or say why it cannot be.

    Args:
        target: "onnxruntime", "tensorrt", "aotinductor", or "torchscript", which runs no passes.
        precision: None: fp32, or what the pipeline's unify-dtype says, or the plan of `file`.
            "mixed" computes in fp16 with the residual stream in fp32; "int8" and the like compute
            in what `presets.computes` says.
        pipeline: None: the precision's preset.
        device: None: the CPU, or a GPU for a precision that the CPU provider lacks, for a
            quantised one with `arch`, and for machine code with `arch`.
        keep: patterns of modules that stay in fp32, or are not quantised.
        keep_classes: likewise, class names.
        arch: GPU architecture such as "sm90".
        max_error: the largest relative L2 error of an output that a quantisation plan may have.
        file: a quantisation plan to carry out.
        tensorrt: options of a TensorRT build; None: the defaults.
        also: targets of further engines in the bundle: "onnxruntime", beside "tensorrt".

    Raises:
        UsageError: a target, precision or device that does not exist, is not built, or does not
            fit.
        SpecError: the pipeline cannot be read.
        InputError: the file is no plan.
        PassError: a GPU architecture lacks what is planned.
        MissingError: a device that was asked for and is not there.
    """
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"--device {device}: expected cpu or cuda")
    if arch is not None and not _ARCH.fullmatch(arch):
        raise UsageError(f"--arch {arch}: expected a GPU architecture such as sm90 or gfx942")
    _check_engines(target, tensorrt, also)
    if target == "torchscript":
        return _torchscript_plan(precision or "fp32", pipeline, device, keep or keep_classes, arch)
    given = read_plan(file) if file is not None else None
    computed = _dtype_of_pipeline(pipeline) if pipeline is not None else None
    if precision is not None and computed is not None and computed != precision:
        raise UsageError(
            f"--precision {precision} does not fit the pipeline, which computes in {computed}",
            hint="Leave --precision out, or change the pipeline's unify-dtype.",
        )
    name = precision or computed or (given.format if given is not None else "fp32")
    arch = arch or (given.arch if given is not None and given.arch != "cpu" else None)
    chosen = device or device_for(target, name, arch)
    require_device_of(target, chosen)
    quantized = name if name in QUANTIZED else _quantized_by(pipeline)
    _check_quantized(quantized, given, max_error, pipeline)
    if quantized and chosen == "cuda" and pipeline is None:
        preset(name, target, device=chosen)  # what does not go together does so on no GPU
        arch = arch or arch_of_this_machine(name)
    text = preset(
        name, target, device=chosen, arch=arch if chosen == "cuda" else None, max_error=max_error
    )
    precision = computes(name, target, device=chosen)
    text = keeping(pipeline if pipeline is not None else text, keep, keep_classes)
    for pass_ in build(text):
        if isinstance(pass_, PlanPass):
            check_arch(pass_.options)  # before the work, and not after the capture
    here = True
    if target in OF_TORCH:
        require_gpu_of_torch(chosen, "Inductor compiles and measures GPU kernels on the GPU")
    elif target == TENSORRT:
        here = runs_tensorrt()
    else:
        here = runs_on_onnxruntime(precision, device, chosen)
    # `preset` refused any other.
    kind = cast(Precision, precision)
    options = tensorrt or TensorRTOptions()
    return Plan(target, kind, text, chosen, here, arch, quantized, file, options, also)


def _beside(plan: Plan, target: str) -> Plan:
    """A second engine is what runs where the first does not: on any GPU, and on the CPU where its
    precision can be.
    """
    here = runs_on_onnxruntime(plan.precision, None, "cuda")
    device = "cuda" if here or plan.precision == "bf16" else "cpu"
    here = here or device == "cpu"
    return replace(plan, target=target, device=device, runs_here=here, arch=None, also=())


def _check_engines(target: str, tensorrt: TensorRTOptions | None, also: tuple[str, ...]) -> None:
    """Refuse what goes with a TensorRT engine where there is none."""
    if tensorrt is not None and target != TENSORRT:
        raise UsageError(
            f"--target {target} takes no options of a TensorRT build",
            hint="--opt-shape and --trt-... go with --target tensorrt.",
        )
    if len(set(also)) < len(also):
        raise UsageError(f"--also {also[-1]}: given twice")
    for other in also:
        if other != "onnxruntime":
            raise UsageError(f"--also {other}: expected onnxruntime")
        if target != TENSORRT:
            raise UsageError(
                f"--also {other} does not fit --target {target}",
                hint="It puts a second engine beside that of --target tensorrt.",
            )


def _quantized_by(pipeline: str | None) -> str:
    """What a pipeline quantises to; empty when it does not."""
    names = {pass_.name for pass_ in build(pipeline or "")}
    found = [kind.format for kind in QUANTIZED.values() if kind.rewrites in names]
    return found[0] if found else ""


def _check_quantized(
    quantized: str,
    given: QuantizationPlan | None,
    max_error: float | None,
    pipeline: str | None,
) -> None:
    """Refuse options of a plan where there is none."""
    if max_error is not None and (not quantized or pipeline is not None):
        raise UsageError(
            "--max-error is the limit of a quantisation plan, and there is none here",
            hint=f"It goes with --precision {', '.join(QUANTIZED)}; in a pipeline, write"
            " plan-int8{max_error=0.05}.",
        )
    if max_error is not None and not 0 < max_error < 1:
        raise UsageError(f"--max-error {max_error:g}: expected a number between 0 and 1")
    formats = {QUANTIZED[quantized].format} if quantized else set()
    if given is not None and given.format not in formats:
        raise UsageError(
            f"--plan: a plan of {given.format} does not fit "
            + (f"--precision {quantized}" if quantized else "a pipeline that does not quantise"),
            hint=f"Use --precision {given.format}, or leave --precision out.",
        )


def _torchscript_plan(
    precision: str,
    pipeline: str | None,
    device: str | None,
    kept: tuple[str, ...],
    arch: str | None,
) -> Plan:
    """The model as it is: passes rewrite programs of torch.export, and here there is none."""
    text = preset(precision, "torchscript")
    unfit = "--pipeline" if pipeline is not None else "--skip-modules-..." if kept else ""
    if unfit:
        raise UsageError(
            f"{unfit} does not fit --target torchscript: passes rewrite programs of torch.export,"
            " and TorchScript is made of the model itself",
            hint="Leave it out, or use --target onnxruntime.",
        )
    chosen = device or "cpu"
    require_gpu_of_torch(chosen, "a trace keeps the device that it was made on")
    return Plan("torchscript", cast(Precision, precision), text, chosen, True, arch)


def computed_dtype(passes: Sequence[Pass]) -> str:
    """What a program computes in after these passes: "fp16", "bf16", or else "fp32"."""
    found = [pass_.to for pass_ in passes if isinstance(pass_, UnifyDtype)]
    return found[-1] if found and found[-1] != "fp64" else "fp32"


def _dtype_of_pipeline(pipeline: str) -> str:
    passes = build(pipeline)
    if any(isinstance(pass_, UnifyDtype) and pass_.to == "fp64" for pass_ in passes):
        raise SpecError("unify-dtype{to=fp64} is for references, not for engines")
    return computed_dtype(passes)
