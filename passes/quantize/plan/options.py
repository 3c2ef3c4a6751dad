"""What may be asked of a plan, whatever its format."""

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from enginecast.errors import SpecError
from enginecast.passes.ir.base import Pass
from enginecast.passes.ir.quantization_plan import Format
from enginecast.passes.quantize.plan.architectures import CPU

Mode = Literal["w8a8", "storage"]
Target = Literal["aotinductor", "onnxruntime", "tensorrt"]
DEFAULT_TARGET: Target = "aotinductor"
BEFORE = frozenset(
    {"rescale-residual", "unify-dtype", "canonicalize", "fuse-gelu", "fuse-rms-norm"}
    | {"fuse-attention", "fuse-skip-norm", "merge-linears", "smooth-outliers", "fold-batch-norm"}
)
"""Passes that replace or merge linears, or change their weights."""


@dataclass(frozen=True)
class PlanOptions:
    """The options of `plan-fp8` and `plan-int8`, as `make_plan` takes them."""

    format: Format
    mode: Mode = "w8a8"
    """w8a8: products of quantized values where it pays; storage: weights alone, products as now."""
    arch: str = "cpu"
    """A row of the architecture matrix: "sm90", "cpu"."""
    target: Target = DEFAULT_TARGET
    """What will run it: decides which products of quantized values there are, and for TensorRT
    which blocks."""
    integers: bool = False
    """Whether what runs it on a CPU multiplies convolutions and LSTMs in int8, too."""
    bits: Literal[4, 8] = 8
    """Of a stored weight; 4 for storage only: int4, or NVFP4 on TensorRT."""
    block: Literal[0, 32] = 0
    """Values along K of a stored fp8 weight that share a power of two: MXFP8, on TensorRT; 0: a
    scale for each row."""
    max_error: float | None = None
    """Largest relative L2 error of a row of an output; None: the default of format, mode and
    bits."""
    any_cpu: bool = True
    """Whether a CPU multiplies weights of 7 bits in int8, whose sums are exact without VNNI, too;
    with 8 an engine runs only where they are exact."""
    min_gain: float | None = None
    """A layer takes a form if it is this much faster; 0: for its size alone; None: 1, or 0 of plans
    that store weights alone."""
    static: bool = False
    """Scales of activations from the calibration inputs, not from each value as it comes."""
    skip_modules: tuple[str, ...] = ()
    """Dotted paths of modules to keep."""
    include_modules: tuple[str, ...] = ()
    """Dotted paths of modules to quantize although a pattern, a class or a default skips them."""
    skip_modules_pattern: tuple[str, ...] = ()
    """Regular expressions (re.search) on module paths to keep."""
    skip_modules_classes: tuple[str, ...] = ()
    """Class names of modules to keep, with all that is inside of them."""
    heads: bool = False
    """Whether linears that make an output of the program are quantized."""
    sensitive: bool = False
    """Whether layers are quantized that the model's class keeps from low precision."""
    measure: bool = True
    """Whether errors are measured on the calibration inputs; otherwise max_error bounds nothing."""

    def __post_init__(self) -> None:
        narrow = "bits=4" if self.bits == 4 else f"block={self.block}" if self.block else ""
        if narrow and self.mode != "storage":
            raise SpecError(f"{narrow} is for mode=storage only")
        if narrow and self.format == "fp8" and not self.on_tensorrt:
            raise SpecError(f"plan-fp8{{{narrow}}} is for target=tensorrt and the arch of a GPU")
        if self.bits == 4 and self.block:
            raise SpecError("bits=4 has blocks of its own: leave block out")
        for name in ("max_error", "min_gain"):
            given = getattr(self, name)
            if given is not None and given < 0:
                raise SpecError(f"{name}: expected 0 or more, got {given:g}")

    @property
    def on_tensorrt(self) -> bool:
        """Whether TensorRT will run it, which is for GPUs alone."""
        return self.target == "tensorrt" and self.arch != CPU


@dataclass(frozen=True)
class QuantizingPass(Pass):
    """A pass that makes a plan where there is none; its fields are those of `PlanOptions`."""

    format: ClassVar[Format]

    mode: Mode = "w8a8"
    arch: str = "cpu"
    max_error: float | None = None
    static: bool = False
    skip_modules_pattern: tuple[str, ...] = ()
    skip_modules_classes: tuple[str, ...] = ()

    @property
    def options(self) -> PlanOptions:
        """What is asked for.

        Raises:
            SpecError: values that do not fit.
        """
        own = {field.name for field in fields(self)} | {"format"}
        given = {f.name: getattr(self, f.name) for f in fields(PlanOptions) if f.name in own}
        return PlanOptions(**given)
