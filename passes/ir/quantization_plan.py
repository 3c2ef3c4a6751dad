"""The quantization plan: one decision per layer, separate from the rewriting.

A plan is data.  A planning pass (`plan-fp8`, `plan-int8`) makes one and leaves it on the program;
`fp8-matmul` and `int8-matmul` carry it out; a user may read it, change it, and hand it in again
(`--plan FILE`).
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta, Struct
from torch.export import ExportedProgram

SCHEMA_VERSION = 1
PLAN_KEY = "enginecast_plan"
"""Where a program carries its plan: in the metadata of its graph module."""

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
    """Of the weight: [N, K] for a linear, [rows, size] for an embedding, [out, in, kernel...] for a
    convolution and [in, out, kernel...] for a transposed one; of a recurrence, that
    of its first matrix."""
    choice: Choice
    bits: Literal[4, 8] = 8
    """Of a stored weight."""
    weights: Scaling = "row"
    """What shares one scale in the weight."""
    block: Count = 0
    """Values along K that share one scale, where that is a block; 0 elsewhere."""
    activations: Scaling | None = None
    """What shares one scale in what the layer reads; None: that is not quantized."""
    reason: str = ""
    """Why this choice, in words."""
    error: Fraction | None = None
    """Relative L2 error of this layer's output with this choice, all else exact."""
    end_to_end: Fraction | None = None
    """Relative L2 error of the worst row of an output with this layer alone quantized so; estimated
    for other forms than the fastest, and by its share where layers of equal blocks were tried
    together."""
    gain: Fraction | None = None
    """Time of the layer as it is over the time as chosen; above 1 is faster."""
    gain_from: Literal["", "model", "measured"] = ""
    """Whether the gain was measured on this machine or comes from a cost model."""

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
    """Fingerprint of the model; empty: of none in particular."""
    max_error: Fraction
    """Largest relative L2 error of a valid row of an output that was allowed."""
    predicted_error: Fraction | None = None
    """The largest error of a row with the whole plan, as simulated before the rewriting."""
    errors: dict[str, Fraction] = {}
    """The same in each of the calibration inputs, by their names: steps of a denoiser differ."""
    notes: tuple[str, ...] = ()
    """How the plan was found, in sentences."""
    layers: tuple[LayerPlan, ...]

    def by_site(self) -> Mapping[tuple[str, str, int], LayerPlan]:
        """Layers by key."""
        return {layer.key: layer for layer in self.layers}


def plan_of(program: ExportedProgram) -> QuantizationPlan | None:
    """The plan that a program carries."""
    found = program.graph_module.meta.get(PLAN_KEY)
    assert found is None or isinstance(found, QuantizationPlan)
    return found


def attach_plan(program: ExportedProgram, plan: QuantizationPlan) -> None:
    """Leave a plan on a program; structural copies carry it along."""
    program.graph_module.meta[PLAN_KEY] = plan
