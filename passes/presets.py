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
_TARGETS = ("onnxruntime",)
_PLANNED_TARGETS = ("tensorrt", "aotinductor", "torchscript")


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
    pipeline = _PIPELINES[precision]
    return f"{pipeline},merge-linears" if device == "cuda" else pipeline
