"""The quantization plan: one decision per layer, separate from the rewriting.

A plan is data. A planning pass (`plan-fp8`, `plan-int8`) makes one and attaches it to the program;
`fp8-matmul` and `int8-matmul` carry it out; a user may read it, change it, and pass it back
(`--plan FILE`).
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta, Struct
from torch.export import ExportedProgram

SCHEMA_VERSION = 1
PLAN_KEY = "enginecast_plan"
"""Key of the plan in the `meta` of a program's graph module."""

Format = Literal["fp8", "int8"]
Kind = Literal["linear", "embedding", "conv", "conv-transpose", "lstm", "gru", "rnn"]
Choice = Literal["keep", "storage", "w8a8-static", "w8a8-dynamic"]
Scaling = Literal["tensor", "row", "block"]
Count = Annotated[int, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0)]


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every object in a plan."""


class LayerPlan(Record, frozen=True, kw_only=True):
    """The decision for one layer."""

    module: str
    """Dotted path, as in a `Site`."""
    source: str
    """file:line of the user's model code."""
    ordinal: Count = 0
    """Counts the layers that share module and source."""
    kind: Kind
    weight: str
    """Name of the parameter."""
    shape: tuple[int, ...]
    """Shape of the weight: [N, K] for a linear, [rows, size] for an embedding, [out, in, kernel...]
    for a convolution, [in, out, kernel...] for a transposed one; for a recurrent layer, of its
    first matrix."""
    choice: Choice
    bits: Literal[4, 7, 8] = 8
    """Bits of a weight: 4 or 8 of a stored one.  Of one that is multiplied on a CPU, 7, with which
    any CPU has exact sums: no two values that are added in 16 bits are more than 128 together (any
    two of a convolution, else neighbors along K); with 8, they need one that adds in 32 bits."""
    weights: Scaling = "row"
    """Granularity of the weight's scales."""
    block: Count = 0
    """Block size along K for blockwise scales; 0 otherwise."""
    activations: Scaling | None = None
    """Granularity of the activations' scales; None: activations are not quantized."""
    signed: bool = False
    """Of a convolution that multiplies in int8, whether it reads signed integers and gives floats,
    as TensorRT has it; else both are unsigned integers, as ONNX Runtime's CPU provider has it."""
    given: bool = False
    """Whether values and scales are those of the checkpoint: what is stored is the weight."""
    reason: str = ""
    """Why this choice, in words."""
    error: Fraction | None = None
    """Relative L2 error of this layer's output with this choice, everything else exact."""
    end_to_end: Fraction | None = None
    """Relative L2 error of the worst output row with only this layer quantized. Estimated for forms
    other than the fastest, and by its share if layers of equal blocks were tried together."""
    gain: Fraction | None = None
    """Speedup: time of the unquantized layer over the time as chosen."""
    gain_from: Literal["", "model", "measured"] = ""
    """Whether the gain was measured on this machine or comes from a cost model."""

    @property
    def value_bytes(self) -> float:
        """Bytes that a value of the weight takes."""
        return 0.5 if self.bits == 4 else 1.0

    @property
    def key(self) -> tuple[str, str, int]:
        """Module, source and ordinal, which name the layer."""
        return (self.module, self.source, self.ordinal)


class QuantizationPlan(Record, frozen=True, kw_only=True):
    """The decisions for a model."""

    schema_version: int = SCHEMA_VERSION
    format: Format
    arch: str
    """GPU architecture as in the architecture matrix ("sm90"), or "cpu"."""
    model: dict[str, str] = {}
    """Fingerprint of the model; empty: for any model."""
    max_error: Fraction
    """Largest allowed relative L2 error of a valid output row."""
    predicted_error: Fraction | None = None
    """The largest error of a row with the whole plan, as simulated before the rewriting."""
    errors: dict[str, Fraction] = {}
    """The same for each calibration input, by name: steps of a denoiser differ."""
    notes: tuple[str, ...] = ()
    """How the plan was found, in sentences."""
    layers: tuple[LayerPlan, ...]

    @property
    def rounds(self) -> bool:
        """Whether anything is rounded that the checkpoint does not hold so."""
        return any(layer.choice != "keep" and not layer.given for layer in self.layers)

    def by_site(self) -> Mapping[tuple[str, str, int], LayerPlan]:
        """Layers by key."""
        return {layer.key: layer for layer in self.layers}

    def format_of(self, layer: LayerPlan) -> str:
        """The format of a layer's weight: int8, int4, fp8, nvfp4 or mxfp8."""
        if self.format == "fp8" and layer.block:
            return "nvfp4" if layer.bits == 4 else "mxfp8"
        return "int4" if layer.bits == 4 else self.format

    @property
    def rounding(self) -> str:
        """The formats that weights are rounded to, the narrowest first: "nvfp4+fp8"."""
        found = {self.format_of(layer) for layer in self.layers if layer.choice != "keep"}
        order = ("nvfp4", "int4", "mxfp8", "fp8", "int8")
        return "+".join(name for name in order if name in found) or self.format


def plan_of(program: ExportedProgram) -> QuantizationPlan | None:
    """The plan that is attached to a program."""
    plan = program.graph_module.meta.get(PLAN_KEY)
    assert plan is None or isinstance(plan, QuantizationPlan)
    return plan


def attach_plan(program: ExportedProgram, plan: QuantizationPlan) -> None:
    """Attach a plan to a program; structural copies keep it."""
    program.graph_module.meta[PLAN_KEY] = plan
