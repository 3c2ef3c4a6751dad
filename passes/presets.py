"""Named pipelines: the spec text behind each precision."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from enginecast.errors import UsageError
from enginecast.passes.ir.spec import PassSpec, Value

JUDGED = "canonicalize-writes"
"""What every capture begins with; then writes are judged and sizes swept, without weights."""
CAPTURED = "drop-idle-draws,bind-weights,functionalize,lift-constants"
"""What every capture ends with.  `keep-outputs` and `widen-halves` follow where they are needed."""

PrecisionName = Literal[
    "fp32",
    "fp16",
    "bf16",
    "mixed",
    "int8",
    "fp8",
    "int8-storage",
    "int4-storage",
    "fp8-storage",
    "nvfp4-storage",
    "mxfp8-storage",
]
"""What a preset is called."""
FUSIONS = "fuse-gelu,fuse-rms-norm,fuse-attention,fuse-skip-norm"

_CLEAN = "canonicalize,exact-position-buckets"

_PIPELINES = {
    "fp32": _CLEAN,
    "fp16": f"rescale-residual,unify-dtype{{to=fp16}},{_CLEAN}",
    "bf16": f"unify-dtype{{to=bf16}},{_CLEAN}",
    "mixed": f"unify-dtype{{to=fp16 residual=fp32}},{_CLEAN}",
}
"""Without the fusions, which come next."""
_COMPUTES: Mapping[str, str] = {"mixed": "fp16"}
"""What a preset computes in, where it is not called so."""


@dataclass(frozen=True)
class Quantized:
    """A precision that plans what is quantized, and carries the plan out."""

    format: str
    options: Mapping[str, Value] = field(default_factory=dict)
    """Of the planning pass."""
    explicit: bool = False
    """Whether only a target that Q/DQ says what is quantized has it."""

    @property
    def rewrites(self) -> str:
        """The pass that carries the plan out."""
        return f"{self.format}-matmul"

    @property
    def smooths(self) -> bool:
        """Whether outlier channels matter: to integers that share a scale and are multiplied."""
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
    "nvfp4-storage": Quantized("fp8", {"mode": "storage", "bits": 4}, explicit=True),
    "mxfp8-storage": Quantized("fp8", {"mode": "storage", "block": 32}, explicit=True),
}
"""By the name of the precision."""


def computed_dtype(precision: str) -> str:
    """What a precision that does not quantize computes in: fp32, fp16 or bf16."""
    return _COMPUTES.get(precision, precision)


def require_precision(precision: str) -> None:
    """Refuse a name that is not a precision.

    Raises:
        UsageError: lists them.
    """
    known = (*_PIPELINES, *QUANTIZED)
    if precision not in known:
        raise UsageError(
            f"'{precision}' is not a precision", hint=f"Available: {', '.join(known)}."
        )


def preset(
    precision: str,
    *,
    dtype: str = "fp32",
    device: str = "cpu",
    arch: str | None = None,
    max_error: float | None = None,
    products: str | None = None,
    explicit: bool = False,
    integers: bool = False,
    scales: str = "fp32",
    fusions: str = FUSIONS,
) -> str:
    """The pipeline that an export with this precision runs, as text.

    `merge-linears` is on for cuda only: on CPU one wide matrix product was measured 3 to 6 % slower
    than the three narrow ones it replaces.

    Args:
        precision: a name such as "fp16" or "int8".
        dtype: fp32, fp16 or bf16: what is not quantized of a precision that quantizes.
        device: "cpu" or "cuda".
        arch: GPU architecture, for a precision that plans; None: the CPU.
        max_error: the largest relative L2 error of a row of an output that a plan may have; None:
            its default.
        products: whose products there are on a GPU, as plan-fp8 calls it.
        explicit: whether those are of int8, too, convolutions among them.
        integers: whether there are convolutions and LSTMs in int8 on a CPU.
        scales: dtype that holds the scales of a plan exactly.
        fusions: the passes that fuse, as text.

    Raises:
        UsageError: the precision is unknown.
    """
    require_precision(precision)
    name = dtype if precision in QUANTIZED else precision
    passes = [_PIPELINES[name], fusions, *(["merge-linears"] if device == "cuda" else [])]
    if precision in QUANTIZED:
        kind = QUANTIZED[precision]
        if kind.smooths:  # first: powers of two are exact in fp32, and not at the ends of fp16
            passes.insert(0, "smooth-outliers")
        runs = products if device == "cuda" and (kind.format == "fp8" or explicit) else None
        more = {"integers": True} if kind.smooths and device == "cpu" and integers else {}
        if more or (kind.smooths and explicit):
            passes.insert(2, "fold-batch-norm")  # convolutions in int8 have no norm behind them
        planned = kind.passes(scales=scales, arch=arch, target=runs, max_error=max_error, **more)
        passes += map(str, planned)
    return ",".join(passes)
