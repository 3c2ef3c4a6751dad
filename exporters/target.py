"""The base class of targets: everything that the compiler knows about one kind of engine.

The other half is its `runtime.sessions.session.Session`, by the same name, which runs the engines
and knows neither torch nor this folder.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.export import ExportedProgram

from enginecast.errors import LoweringError, MissingError, UsageError
from enginecast.passes.presets import FUSIONS, QUANTIZED, computed_dtype, preset
from enginecast.public import listing
from enginecast.runtime.bundle.manifest import Input, QuantizedFormat
from enginecast.runtime.sessions.registry import session_class
from enginecast.runtime.sessions.session import PROVIDERS, Session

__all__ = [
    "Artifact",
    "LoweringRequest",
    "ScriptRequest",
    "Target",
]
__dir__ = listing(__all__)


@dataclass(frozen=True)
class LoweringRequest:
    """What is to be lowered, and how the engine will be called."""

    program: ExportedProgram = field(repr=False)
    """After the passes of `Target.lowering`; left as it is."""
    folder: Path
    """Where the files go; it exists."""
    outputs: Sequence[str]
    """Names for the outputs, in the program's order."""
    symbols: Mapping[str, str] = field(default_factory=dict)
    """torch's symbol names to the ones that users see: {"s43": "batch", "s7": "height/8"}."""
    shapes: Sequence[Sequence[int | str]] = ()
    """Of the outputs, in names that users see."""
    device: str = "cpu"
    """"cpu" or "cuda"."""
    arch: str | None = None
    """The GPU architecture asked for, such as "sm90"."""
    inputs: Sequence[Input] = ()
    """As the manifest has them."""
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Least and greatest size of each symbolic dimension, by the name that users see."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """Dimension in `ranges` -> its sizes are multiples of this; sums of others have none."""
    sums: Mapping[str, Sequence[tuple[str, int]]] = field(default_factory=dict)
    """The parts of each dimension that is a sum of others, with the size of one that is fixed."""
    options: Any = None
    """An instance of the target's own `options`; None: their defaults."""
    tell: Callable[[str, int, int], None] = lambda phase, done, total: None
    """Gets the progress of a long build: what is done, and how many steps of how many."""
    say: Callable[[str], None] = lambda line: None
    """Gets what a user should read before the build, and after it."""


@dataclass(frozen=True)
class ScriptRequest:
    """A hybrid of script and trace that is to be lowered: what torch.export refused."""

    module: torch.jit.ScriptModule = field(repr=False)
    """As `capture.torchscript.script.hybrid` made it."""
    folder: Path
    """Where the files go; it exists."""
    example: Mapping[str, Tensor] = field(repr=False)
    """Inputs by name, in order."""
    outputs: Sequence[str]
    """Names of the outputs, in order."""
    input_dims: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Input -> dimension -> symbol, for the dimensions that vary."""
    output_dims: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Likewise of the outputs."""
    precision: str = "fp32"
    """Of the weights and inputs."""


@dataclass(frozen=True)
class Artifact:
    """The files of an engine, and what is known of them."""

    files: tuple[str, ...]
    """Names in the folder; the one that is opened first."""
    ops: Mapping[str, int]
    """How often each op stands in the engine, as "domain::Op" outside ONNX's own domain."""
    minimum_runtime: str
    """Oldest runtime that is known to run this engine right, as a requirement:
    "onnxruntime>=1.28".
    """
    opset: int = 0
    """0: the engine is not an ONNX graph."""
    domains: Mapping[str, int] = field(default_factory=dict)
    quantized: QuantizedFormat = ""
    """As in `EngineRecord`."""
    requires: Mapping[str, str] = field(default_factory=dict)
    """What machine code asks of the machine that runs it; see `runtime.device.fitness`."""
    only_here: tuple[str, ...] = ()
    """Names of files in the folder that the check of the engine reads, and that no bundle has."""
    log: tuple[str, ...] = ()
    """What was done, for build.log."""
    notes: tuple[str, ...] = ()
    """What a user should know of the engine."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the engine's `EngineRecord`, by name."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """The module that each node was made for, by the node's name; empty: the engine has no such
    names."""

    @property
    def nodes(self) -> int:
        return sum(self.ops.values())


class Target:
    """One kind of engine: how a program becomes one, and what it is judged by."""

    name: ClassVar[str]
    """As users and manifests name it; that of its session, too."""
    arithmetic: ClassVar[str]
    """The profile of `verify.emulate.profiles` for what its kernels compute in low precision."""
    architectures: ClassVar[str] = "sm90 (H100, H200), sm89 (L4, RTX 4090), sm80 (A100)"
    """GPUs that its engines run on, as examples."""
    has_skip_norm: ClassVar[bool] = True
    """Whether its engines have one op for a residual sum and its norm."""
    only_device: ClassVar[str | None] = None
    """The one device that there are engines for: "cpu" or "cuda"; None: both."""
    scales_as_computed: ClassVar[bool] = False
    """Whether an engine holds a scale in the dtype of what it scales, and not in fp32."""
    options: ClassVar[type | None] = None
    """The dataclass of its own options, whose defaults are those of a build; None: it has none."""
    takes: ClassVar[Sequence[Literal["program", "script"]]] = ("program",)
    """A program of torch.export after its passes (`lower`); a model that was scripted and traced,
    which runs no passes (`lower_script`); or the first, and where torch.export refuses a model for
    its control flow, the second.
    """
    fusions: ClassVar[str] = FUSIONS
    """The passes of its presets that make one op of several, as text."""
    products: ClassVar[str | None] = None
    """What plan-fp8 calls it (`target=`): which native fp8 products there are on a GPU."""
    explicit_quantization: ClassVar[bool] = False
    """Whether Q/DQ says what is quantized, with scales that are known beforehand, as TensorRT calls
    it: then plan-int8 asks for its products, too, and there are weights in NVFP4 and MXFP8."""
    multiplies_integers: ClassVar[bool] = False
    """Whether convolutions and LSTMs, too, are faster in int8 on a CPU (`plan-int8{integers}`)."""
    copies: ClassVar[int] = 1
    """Times that the weights are on disk at once while an engine is built."""
    holds_weights: ClassVar[bool] = False
    """Whether an engine has a copy of its weights in memory, besides the mapped file."""
    accepts_second: ClassVar[bool] = False
    """Whether a bundle of it may hold a second engine, made from the same program (`--also`)."""
    is_second: ClassVar[bool] = False
    """Whether an engine of it may stand beside another target's, and run where that does not."""

    def default_device(self, precision: str, arch: str | None) -> str:
        """The device that an engine is for, when nobody says it: "cpu" or "cuda"."""
        return self.only_device or ("cpu" if arch is None else "cuda")

    def check_device(self, device: str) -> None:
        """Refuse a device that the target does not support.

        Raises:
            UsageError: with what to use instead.
        """
        if self.only_device not in (None, device):
            raise UsageError(
                f"--device {device} does not fit --target {self.name}: its engines run on"
                f" {self.only_device} alone",
                hint="Leave --device out, or use another --target.",
            )

    def check_precision(self, precision: str) -> None:
        """Refuse a precision that the target does not have.

        Raises:
            UsageError: with those that fit.
        """
        if precision in QUANTIZED and QUANTIZED[precision].explicit > self.explicit_quantization:
            fitting = [name for name, kind in QUANTIZED.items() if not kind.explicit]
            raise UsageError(
                f"--precision {precision} does not fit --target {self.name}: only TensorRT has"
                " weights whose block scales are quantized",
                hint=f"Use --precision {', '.join(fitting)}.",
            )

    def arch_of(self, options: Any) -> str | None:
        """The oldest GPU architecture that the target's own options ask for; None: they do not.

        Args:
            options: an instance of `options`, or None.
        """
        return None

    def quantized_dtype(self, device: str) -> str:
        """What a quantized engine computes in, where it is not quantized: fp32, fp16 or bf16."""
        return "fp32" if device == "cpu" else "bf16"

    def computes(self, precision: str, device: str) -> str:
        """The dtype that all is computed in that is not quantized: fp32, fp16 or bf16."""
        return self.quantized_dtype(device) if precision in QUANTIZED else computed_dtype(precision)

    def pipeline(
        self,
        precision: str,
        *,
        device: str = "cpu",
        arch: str | None = None,
        max_error: float | None = None,
    ) -> str:
        """The passes that an export with this precision runs, as text; none for a scripted model.

        Args:
            precision: a name such as "fp16" or "int8".
            device: "cpu" or "cuda".
            arch: GPU architecture, for a precision that plans; None: the CPU.
            max_error: the largest relative L2 error of a row of an output that a plan may have;
                None: its default.

        Raises:
            UsageError: a precision that is unknown, or that the target does not have.
        """
        self.check_precision(precision)
        device = self.only_device or device
        dtype = self.quantized_dtype(device)
        text = preset(
            precision,
            dtype=dtype,
            device=device,
            arch=arch,
            max_error=max_error,
            products=self.products,
            explicit=self.explicit_quantization,
            integers=self.multiplies_integers,
            scales=dtype if self.scales_as_computed else "fp32",
            fusions=self.fusions,
        )
        return text if "program" in self.takes else ""

    def lowering(self, device: str, *, arch: str | None = None, options: Any = None) -> str:
        """The passes that end every pipeline, as text: they make a program one that `lower` can
        translate, rule by rule.  What runs after the last of them is what is judged.

        Args:
            device: "cpu" or "cuda".
            arch: the GPU architecture asked for.
            options: an instance of `options`, or None.
        """
        return ""

    def lower(self, request: LoweringRequest) -> Artifact:
        """Write the files of an engine of a program.

        Raises:
            LoweringError: an op has no form in this target.  No file is left then.
            MissingError: what is needed to build the engine is not here.
        """
        raise LoweringError(f"target '{self.name}' does not support programs of torch.export")

    def lower_script(self, request: ScriptRequest) -> Artifact:
        """Write the files of an engine of a scripted model.

        Raises:
            LoweringError: an op has no form in this target.  No file is left then.
            MissingError: what is needed to build the engine is not here.
        """
        raise LoweringError(f"target '{self.name}' does not support TorchScript")

    def require(self, options: Any) -> None:
        """Ask for all that a build needs of this machine, before any work is done.

        Args:
            options: an instance of `options`, or None.

        Raises:
            MissingError: it is not here.
        """

    def require_arch(self, arch: str, options: Any) -> None:
        """Refuse a GPU architecture that no engine can be built for here, after `require`.

        Args:
            arch: such as "sm90".
            options: an instance of `options`, or None.

        Raises:
            MissingError: it takes another machine.
            UsageError: there are none.
        """

    def check_shapes(self, request: LoweringRequest) -> None:
        """Refuse options that do not fit a model's inputs, before any other work is done with it.

        Raises:
            UsageError: names the option.
        """

    def runs_here(self, precision: str, device: str, *, asked: bool) -> bool:
        """Whether this machine can run the engine; else it is judged by emulation alone.

        Args:
            precision: what the engine computes in.
            device: what it is for.
            asked: whether the user named the device.

        Raises:
            MissingError: a device that was asked for is not here, or no engine can be built for it.
            UsageError: the device does not compute in this precision.
        """
        return True

    def open_twin(self, path: Path, threads: int | None) -> Session | None:
        """Open what runs an engine file in fp32 that this machine cannot run as it is.

        Args:
            path: of the file.
            threads: within one operator; None: as many as the runtime takes.

        Returns:
            None: there is no such thing.

        Raises:
            VerificationError, BundleError: something is wrong with the file.
            MissingError: this machine cannot run it in fp32, either.
        """
        return None

    def providers(self, precision: str, device: str) -> tuple[str, ...]:
        """What an engine is known to suit, as its session names it."""
        return (session_class(self.name).provider_for(PROVIDERS[device][0]),)


def require_gpu_of_torch(device: str, why: str) -> None:
    """Refuse "cuda" where torch sees no GPU.

    Args:
        why: a GPU is needed to make the engine.

    Raises:
        MissingError: there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise MissingError(
            f"--device cuda: torch sees no CUDA GPU here, and {why}",
            hint="Export on a machine with a GPU, or leave --device and --arch out.",
        )
