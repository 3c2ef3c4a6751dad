"""The base classes of passes, and the sites they report."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor
from torch.export import ExportedProgram, ExportGraphSignature
from torch.fx import Graph, GraphModule

from enginecast.passes.ir.quantization_plan import QuantizationPlan

Promise = Literal["exact", "reordered", "precision"]
"""What a pass promises: `exact` outputs are bit-equal; `reordered` keeps every fp32 step but may
move roundings; `precision` changes the compute dtype, so the error of eager in that dtype is the
measure."""


class ProgramView(Protocol):
    """The part of a program that passes and edits need.  An ExportedProgram implements it, and so
    does a `BlockView` of a graph within its graph.
    """

    @property
    def graph(self) -> Graph: ...
    @property
    def graph_module(self) -> GraphModule: ...
    @property
    def graph_signature(self) -> ExportGraphSignature:
        """Its input specs say which placeholders are weights; edits keep them in step."""

    @property
    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers by name."""

    @property
    def constants(self) -> dict[str, Any]:
        """Lifted constant tensors by name."""


@dataclass(frozen=True, order=True)
class SiteKey:
    """Names a site from run to run, which FX node names do not.

    Args:
        module: dotted module path, e.g. "encoder.block.3.layer.1".
        source: "file.py:line" of the user's model code.
        ordinal: counts the sites of one pass that share module and source.
    """

    module: str
    source: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.module or '<root>'} {self.source} #{self.ordinal}"


@dataclass(frozen=True)
class Site:
    """A place a pass looked at: rewritten, or left alone for a reason."""

    node: str
    """FX node name."""
    module: str
    """Dotted module path, e.g. encoder.block.3.layer.1.DenseReluDense.wo."""
    source: str
    """file:line of the user's model code."""
    reason: str = ""
    """Why the site was left alone; empty when it was rewritten."""
    note: str = ""
    """What a reader should know of the rewrite, such as a rounding that moved."""
    ordinal: int = 0
    """Counts the sites of one pass that share module and source; the runner fills it in."""

    @property
    def rewritten(self) -> bool:
        return not self.reason

    @property
    def key(self) -> SiteKey:
        return SiteKey(self.module, self.source, self.ordinal)


@dataclass(frozen=True)
class PassContext:
    """The information that a pass gets besides the program."""

    calibration: Sequence[Mapping[str, Tensor]] = ()
    """The verification inputs of an export by name, for passes that look at real values."""
    names: Sequence[str] = ()
    """Of the calibration inputs: "recorded call 14 of 28"; empty: they have none."""
    skip: frozenset[SiteKey] = field(default_factory=frozenset)
    """Sites that a pass must leave alone, as to find the one that does harm."""
    earlier: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """How many sites of a module and line the pass has found in graphs that it saw before."""
    plan: QuantizationPlan | None = None
    """What the user wants quantized; a planning pass checks it and makes none of its own."""
    mask_input: str | None = None
    """The calibration input that marks valid rows; None: every row counts."""


@dataclass(frozen=True)
class Pass(ABC):
    """One rewrite of a program.  Its dataclass fields are its options in a pipeline spec."""

    name: ClassVar[str]
    """Spelling in a spec: "fuse-rms-norm"."""
    after: ClassVar[frozenset[str]] = frozenset()
    """Passes that must come earlier, when present; checked when a pipeline is built."""
    promise: ClassVar[Promise] = "exact"
    carries_out_plan: ClassVar[bool] = False
    """Whether it quantizes what the plan of the program says, so that the plan's error is not an
    error of its own."""
    covers_blocks: ClassVar[bool] = False
    """Whether it looks itself into the graphs within the graph (of cond, while_loop, scan); else
    each op that runs graphs is a site left alone, unless it is a `GraphPass`."""

    def requires(self, program: ExportedProgram) -> None:  # noqa: B027 - optional hook
        """Raise PassError when the pass does not apply to this program at all."""

    def ensures(self, program: ExportedProgram) -> None:  # noqa: B027 - optional hook
        """Raise PassError when what the pass established does not hold after the whole pipeline."""

    @abstractmethod
    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        """Edit the program in place; return every site looked at, rewritten or left alone."""


class GraphPass(Pass):
    """A pass that needs one graph alone: it runs on the program's and on every graph within."""

    @abstractmethod
    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        """Edit the graph in place; return every site looked at, rewritten or left alone."""
