"""Named pipelines: the spec text behind each precision."""

from enginecast.errors import UsageError

FUSIONS = "fuse-gelu,fuse-rms-norm,fuse-attention,fuse-skip-norm"

_CLEAN = "canonicalize,exact-position-buckets"

_PIPELINES = {
    "fp32": f"{_CLEAN},{FUSIONS}",
    "fp16": f"rescale-residual,unify-dtype{{to=fp16}},{_CLEAN},{FUSIONS}",
    "bf16": f"unify-dtype{{to=bf16}},{_CLEAN},{FUSIONS}",
    "mixed": f"unify-dtype{{to=fp16 residual=fp32}},{_CLEAN},{FUSIONS}",
}
_PLANNED = ("int8", "fp8")
_TARGETS = ("onnxruntime", "torchscript")
_PLANNED_TARGETS = ("tensorrt", "aotinductor")
_WITHOUT_PASSES = "torchscript"
"""The target that runs the model as it is, in the dtype of the precision."""


def preset(precision: str, target: str = "onnxruntime", *, device: str = "cpu") -> str:
    """The pipeline that an export with this precision runs, as text.

    `merge-linears` is on for cuda only: on CPU one wide matrix product was measured 3 to 6 % slower
    than the three narrow ones it replaces.

    Raises:
        UsageError: a precision or target that is unknown or not built yet.
    """
    if target not in _TARGETS:
        state = "is not built yet" if target in _PLANNED_TARGETS else "is not known"
        raise UsageError(f"target '{target}' {state}", hint=f"Available: {', '.join(_TARGETS)}.")
    if precision not in _PIPELINES:
        state = "is not built yet" if precision in _PLANNED else "is not a precision"
        raise UsageError(f"'{precision}' {state}", hint=f"Available: {', '.join(_PIPELINES)}.")
    if target == _WITHOUT_PASSES:
        if precision == "mixed":
            raise UsageError(
                "--precision mixed does not fit --target torchscript: a pass makes it, and passes"
                " need a program of torch.export",
                hint="Use --precision fp32, fp16 or bf16.",
            )
        return ""
    pipeline = _PIPELINES[precision]
    return f"{pipeline},merge-linears" if device == "cuda" else pipeline
