"""The base classes of passes, and the sites they report."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor
from torch.export import ExportedProgram, ExportGraphSignature
from torch.fx import Graph, GraphModule

from enginecast.passes.ir.quantization_plan import QuantizationPlan
from enginecast.public import listing

__all__ = [
    "GraphPass",
    "Pass",
    "PassContext",
    "ProgramView",
    "Promise",
    "Site",
    "SiteKey",
]
__dir__ = listing(__all__)

Promise = Literal["exact", "reordered", "precision"]
"""The accuracy that a pass promises: `exact`: bit-equal outputs; `reordered`: the same fp32
computation with other rounding; `precision`: another compute dtype, judged by eager's error in that
dtype."""


class ProgramView(Protocol):
    """The interface of a program that passes and edits need.

    An ExportedProgram implements it, and so does a `BlockView` of a control-flow subgraph.
    """

    @property
    def graph(self) -> Graph: ...
    @property
    def graph_module(self) -> GraphModule: ...
    @property
    def graph_signature(self) -> ExportGraphSignature:
        """Its input specs say which placeholders are weights; edits keep them in sync."""

    @property
    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers by name."""

    @property
    def constants(self) -> dict[str, Any]:
        """Lifted constant tensors by name."""


@dataclass(frozen=True, order=True)
class SiteKey:
    """A key for a site that is stable between runs, unlike FX node names.

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
    """A remark on the rewrite, such as a rounding that moved."""
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
    """Names of the calibration inputs, such as "recorded call 14 of 28"; empty: unnamed."""
    skip: frozenset[SiteKey] = field(default_factory=frozenset)
    """Sites that a pass must leave alone, for example during a bisection."""
    earlier: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Number of sites that the pass found in earlier graphs, by module and source line."""
    plan: QuantizationPlan | None = None
    """The user's quantization plan; a planning pass checks it instead of making its own."""
    mask_input: str | None = None
    """The calibration input that marks valid rows; None: every row counts."""
    scales: Mapping[str, Tensor] = field(default_factory=dict)
    """Scales of weights that stay in fp8 as they were given, by name: fp32, [] or [N, 1]; NaN of
    those that cannot."""
    weights: Mapping[str, Tensor] | None = None
    """Those of a program that was traced without them; None: the program has its own."""

    @property
    def given(self) -> Set[str]:
        """The weights that stay in fp8 as they were given."""
        planned = () if self.plan is None else self.plan.layers
        return {*self.scales, *(layer.weight for layer in planned if layer.given)}

    def __repr__(self) -> str:
        """How much there is of each."""
        plan = "" if self.plan is None else f", a plan of {self.plan.format}"
        return f"PassContext({len(self.calibration)} inputs, {len(self.skip)} skipped{plan})"


@dataclass(frozen=True)
class Pass(ABC):
    """One rewrite of a program.  Its dataclass fields are its options in a pipeline spec."""

    name: ClassVar[str]
    """Spelling in a spec: "fuse-rms-norm"."""
    after: ClassVar[frozenset[str]] = frozenset()
    """Passes that must come earlier, when present; checked when a pipeline is built."""
    promise: ClassVar[Promise] = "exact"
    carries_out_plan: ClassVar[bool] = False
    """Whether it carries out the program's quantization plan, whose error is then not counted as
    the pass's own."""
    covers_blocks: ClassVar[bool] = False
    """Whether it handles the subgraphs of cond, while_loop and scan itself. If not, and it is no
    `GraphPass`, each such op is a site left alone."""

    def requires(self, program: ExportedProgram) -> None:  # noqa: B027 - optional hook
        """Raise PassError if the pass cannot apply to this program at all."""

    def ensures(self, program: ExportedProgram) -> None:  # noqa: B027 - optional hook
        """Raise PassError if what the pass established no longer holds after the whole pipeline."""

    @abstractmethod
    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        """Edit the program in place; return every site looked at, rewritten or left alone."""


class CapturePass(Pass):
    """A pass of every capture: ops may write in place before it, and it looks into blocks."""

    covers_blocks: ClassVar[bool] = True


class GraphPass(Pass):
    """A pass that runs on one graph at a time: the program's, and every subgraph."""

    @abstractmethod
    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        """Edit the graph in place; return every site looked at, rewritten or left alone."""
