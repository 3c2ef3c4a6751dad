"""What an export is asked for: target, precision, pipeline, device, and what of it this machine can
run.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import onnxruntime
import torch

from enginecast.errors import MissingError, SpecError, UsageError
from enginecast.passes.base import Pass
from enginecast.passes.options import spec_from_pass
from enginecast.passes.pipeline import build
from enginecast.passes.presets import preset
from enginecast.passes.spec import render
from enginecast.passes.unify_dtype import UnifyDtype
from enginecast.runtime.load import PROVIDERS
from enginecast.runtime.manifest import Precision
from enginecast.runtime.ort_session import CUDA_PROVIDER

FALLBACKS = ("none", "rewrite", "specialise", "torchscript")
"""How far down the control-flow ladder a capture may go."""
COMPUTES: Mapping[str, str] = {"mixed": "fp16"}
"""What a preset computes in, where it is not called so."""


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

    @property
    def providers(self) -> tuple[str, ...]:
        return PROVIDERS[self.device]

    @property
    def engine_providers(self) -> tuple[str, ...]:
        """Providers that the engine is known to suit."""
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
) -> Plan:
    """Decide an export, or say why it cannot be.

    Args:
        target: "onnxruntime", or "torchscript", which runs no passes.
        precision: None: fp32, or what the pipeline's unify-dtype says. "mixed" computes in fp16
            with the residual stream in fp32.
        pipeline: None: the precision's preset.
        device: None: the CPU, or a GPU for a precision that the CPU provider lacks.
        keep: patterns of modules that stay in fp32: options of the pipeline's unify-dtype.
        keep_classes: likewise, class names.

    Raises:
        UsageError: a target, precision or device that does not exist, is not built, or does not
            fit.
        SpecError: the pipeline cannot be read.
        MissingError: a device that was asked for and is not there.
    """
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"--device {device}: expected cpu or cuda")
    if target == "torchscript":
        return _torchscript_plan(precision or "fp32", pipeline, device, keep or keep_classes)
    computes = _dtype_of_pipeline(pipeline) if pipeline is not None else None
    if precision is not None and computes is not None and computes != precision:
        raise UsageError(
            f"--precision {precision} does not fit the pipeline, which computes in {computes}",
            hint="Leave --precision out, or change the pipeline's unify-dtype.",
        )
    name = precision or computes or "fp32"
    chosen = device or ("cuda" if name == "bf16" else "cpu")
    text = preset(name, target, device=chosen)
    precision = COMPUTES.get(name, name)
    text = _keeping(pipeline if pipeline is not None else text, keep, keep_classes)
    if precision == "bf16" and device == "cpu":
        raise UsageError(
            "--precision bf16 does not run on --device cpu: ONNX Runtime's CPU provider has no bf16"
            " kernels",
            hint="Leave --device out to export for a GPU (judged by emulation here), or use"
            " --precision fp32 or fp16.",
        )
    here = set(PROVIDERS[chosen][:1]) <= set(onnxruntime.get_available_providers())
    if device is not None and not here:
        raise MissingError(
            f"--device {device}: ONNX Runtime has no {PROVIDERS[device][0]} here, only"
            f" {', '.join(onnxruntime.get_available_providers())}",
            hint="pip install 'enginecast[cuda]' on a machine with a GPU, or leave --device out.",
        )
    # `preset` refused any other.
    return Plan(target, cast(Precision, precision), text, chosen, here)


def _torchscript_plan(
    precision: str, pipeline: str | None, device: str | None, kept: tuple[str, ...]
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
    if chosen == "cuda" and not torch.cuda.is_available():
        raise MissingError(
            "--device cuda: torch sees no CUDA GPU here, and a trace keeps the device that it was"
            " made on",
            hint="Export on a machine with a GPU, or leave --device out.",
        )
    return Plan("torchscript", cast(Precision, precision), text, chosen, runs_here=True)


def _keeping(text: str, keep: tuple[str, ...], keep_classes: tuple[str, ...]) -> str:
    """The pipeline with --skip-modules-pattern and --skip-modules-classes in its unify-dtype."""
    if not keep and not keep_classes:
        return text
    for pattern in keep:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(
                f"--skip-modules-pattern {pattern}: not a regular expression: {error}"
            ) from error
    passes = [
        replace(p, keep=(*p.keep, *keep), keep_classes=(*p.keep_classes, *keep_classes))
        if isinstance(p, UnifyDtype)
        else p
        for p in build(text)
    ]
    if not any(isinstance(p, UnifyDtype) for p in passes):
        raise UsageError(
            "--skip-modules-pattern and --skip-modules-classes keep modules in fp32, and nothing"
            " else is computed in this pipeline",
            hint="They go with --precision fp16, bf16 or mixed.",
        )
    return render([spec_from_pass(p) for p in passes])


def computed_dtype(passes: Sequence[Pass]) -> str:
    """What a program computes in after these passes: "fp16", "bf16", or else "fp32"."""
    found = [pass_.to for pass_ in passes if isinstance(pass_, UnifyDtype)]
    return found[-1] if found and found[-1] != "fp64" else "fp32"


def _dtype_of_pipeline(pipeline: str) -> str:
    passes = build(pipeline)
    if any(isinstance(pass_, UnifyDtype) and pass_.to == "fp64" for pass_ in passes):
        raise SpecError("unify-dtype{to=fp64} is for references, not for engines")
    return computed_dtype(passes)
