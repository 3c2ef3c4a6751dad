"""Named pipelines: the spec text behind each precision."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from enginecast.errors import UsageError
from enginecast.passes.spec import PassSpec, Value

FUSIONS = "fuse-gelu,fuse-rms-norm,fuse-attention,fuse-skip-norm"

_CLEAN = "canonicalize,exact-position-buckets"

_PIPELINES = {
    "fp32": f"{_CLEAN},{FUSIONS}",
    "fp16": f"rescale-residual,unify-dtype{{to=fp16}},{_CLEAN},{FUSIONS}",
    "bf16": f"unify-dtype{{to=bf16}},{_CLEAN},{FUSIONS}",
    "mixed": f"unify-dtype{{to=fp16 residual=fp32}},{_CLEAN},{FUSIONS}",
}
_COMPUTES: Mapping[str, str] = {"mixed": "fp16"}
"""What a preset computes in, where it is not called so."""
_TARGETS = ("onnxruntime", "tensorrt", "aotinductor", "torchscript")
_TENSORRT = "tensorrt"
"""The target that is for GPUs alone, and quantises to fp8 alone."""
_WITHOUT_PASSES = "torchscript"
"""The target that runs the model as it is, in the dtype of the precision."""


@dataclass(frozen=True)
class Quantized:
    """A precision that plans what is quantised, and carries the plan out."""

    format: str
    options: Mapping[str, Value] = field(default_factory=dict)
    """Of the planning pass."""

    @property
    def rewrites(self) -> str:
        """The pass that carries the plan out."""
        return f"{self.format}-matmul"

    @property
    def smooths(self) -> bool:
        """Whether outlier channels matter: to integers that share a scale with them, and are
        multiplied.
        """
        return self.format == "int8" and self.options.get("mode") != "storage"

    def passes(self, *, scales: str = "fp32", **more: Value | None) -> list[PassSpec]:
        """The last ones of the pipeline, with more options for the planning pass.

        Args:
            scales: dtype that holds the scales exactly.
        """
        given = {name: value for name, value in more.items() if value is not None}
        options = tuple((name, (value,)) for name, value in {**self.options, **given}.items())
        exact = () if scales == "fp32" else (("scale_dtype", (scales,)),)
        return [PassSpec(f"plan-{self.format}", options), PassSpec(self.rewrites, exact)]


QUANTIZED: Mapping[str, Quantized] = {
    "fp8": Quantized("fp8"),
    "fp8-storage": Quantized("fp8", {"mode": "storage"}),
    "int8": Quantized("int8"),
    "int8-storage": Quantized("int8", {"mode": "storage"}),
    "int4-storage": Quantized("int8", {"mode": "storage", "bits": 4}),
}
"""By the name of the precision."""


def computes(precision: str, target: str = "onnxruntime", *, device: str = "cpu") -> str:
    """The dtype that all else is computed in: fp32, fp16 or bf16.

    A quantised engine for a GPU computes in fp16 on ONNX Runtime, whose kernels that quantise know
    no bf16, and on TensorRT, so that one program makes an engine for both; and in bf16 elsewhere.
    """
    if precision not in QUANTIZED:
        return _COMPUTES.get(precision, precision)
    if target == _TENSORRT:
        return "fp16"
    if device == "cpu":
        return "fp32"
    return "fp16" if target == "onnxruntime" else "bf16"


def preset(
    precision: str,
    target: str = "onnxruntime",
    *,
    device: str = "cpu",
    arch: str | None = None,
    max_error: float | None = None,
) -> str:
    """The pipeline that an export with this precision runs, as text.

    `merge-linears` is on for cuda only: on CPU one wide matrix product was measured 3 to 6 % slower
    than the three narrow ones it replaces.

    Args:
        precision: a name such as "fp16" or "int8".
        target: "onnxruntime", "tensorrt", "aotinductor", or "torchscript", which runs no passes.
        device: "cpu" or "cuda"; TensorRT is for "cuda", whatever is said here.
        arch: GPU architecture, for a precision that plans; None: the CPU.
        max_error: the largest relative L2 error of an output that a plan may have; None: its
            default.

    Raises:
        UsageError: a precision or target that is unknown, or that do not fit together.
    """
    _check(precision, target)
    if target == _WITHOUT_PASSES:
        return ""
    device = "cuda" if target == _TENSORRT else device
    name = computes(precision, target, device=device) if precision in QUANTIZED else precision
    passes = [_PIPELINES[name], *(["merge-linears"] if device == "cuda" else [])]
    if precision in QUANTIZED:
        kind = QUANTIZED[precision]
        if kind.smooths:  # first: powers of two are exact in fp32, and not at the ends of fp16
            passes.insert(0, "smooth-outliers")
        # Which native fp8 products there are depends on what runs them.
        runs = target if kind.format == "fp8" and device == "cuda" else None
        # TensorRT holds a scale in the dtype of what it scales.
        scales = name if target == _TENSORRT else "fp32"
        planned = kind.passes(scales=scales, arch=arch, target=runs, max_error=max_error)
        passes += map(str, planned)
    return ",".join(passes)


def _check(precision: str, target: str) -> None:
    if target not in _TARGETS:
        raise UsageError(
            f"target '{target}' is not known", hint=f"Available: {', '.join(_TARGETS)}."
        )
    if precision not in (*_PIPELINES, *QUANTIZED):
        known = ", ".join((*_PIPELINES, *QUANTIZED))
        raise UsageError(f"'{precision}' is not a precision", hint=f"Available: {known}.")
    if target == _WITHOUT_PASSES and (precision == "mixed" or precision in QUANTIZED):
        raise UsageError(
            f"--precision {precision} does not fit --target torchscript: a pass makes it, and"
            " passes need a program of torch.export",
            hint="Use --precision fp32, fp16 or bf16.",
        )
    if target == _TENSORRT and precision in QUANTIZED and QUANTIZED[precision].format != "fp8":
        raise UsageError(
            f"--precision {precision} does not fit --target tensorrt: its scales are computed from"
            " each row as it comes, or lie in packed blocks of integers, and the engine has"
            " neither",
            hint="Use --precision fp8, fp8-storage, fp16, bf16 or fp32.",
        )
