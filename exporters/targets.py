"""What an export can be made for: how a program gets there, and what can be seen of its engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.export import ExportedProgram

from enginecast.errors import UsageError
from enginecast.exporters.aotinductor import lower_to_aotinductor
from enginecast.exporters.onnx import Lowered, lower_to_onnx
from enginecast.exporters.tensorrt_options import TensorRTOptions
from enginecast.runtime.manifest import Input


@dataclass(frozen=True)
class Order:
    """What is to be lowered, and how it is called."""

    program: ExportedProgram
    """After the passes; left as it is."""
    folder: Path
    """Where the files go; it exists."""
    outputs: Sequence[str]
    """Names for the outputs, in the program's order."""
    symbols: Mapping[str, str]
    """torch's symbol names to the ones that users see: {"s43": "batch"}."""
    shapes: Sequence[Sequence[int | str]]
    """Of the outputs, in names that users see."""
    device: str
    """"cpu" or "cuda"."""
    arch: str | None = None
    """The GPU architecture asked for, such as "sm90"."""
    inputs: Sequence[Input] = ()
    """As the manifest has them."""
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Least and greatest size of each symbolic dimension, by the name that users see."""
    tensorrt: TensorRTOptions = field(default_factory=TensorRTOptions)
    tell: Callable[[str, int, int], None] = lambda phase, done, total: None
    """Gets the progress of a long build: what is done, and how many steps of how many."""
    say: Callable[[str], None] = lambda line: None
    """Gets what a user should read before the build, and after it."""


@dataclass(frozen=True)
class Target:
    """One way to an engine."""

    lower: Callable[[Order], Lowered]
    tells_ops: bool
    """Whether the runtime says which ops it executes."""
    require: Callable[[TensorRTOptions], None] = lambda options: None
    """Raises MissingError where this machine cannot make the engine, before any work is done."""


def _onnx(order: Order) -> Lowered:
    return lower_to_onnx(
        order.program,
        order.folder,
        outputs=order.outputs,
        symbols=order.symbols,
        shapes=order.shapes,
        device=order.device,
        # Its kernels are those of one architecture; without a name, the portable form.
        gemm_float8=order.device == "cuda" and order.arch is not None,
    )


def _aotinductor(order: Order) -> Lowered:
    return lower_to_aotinductor(
        order.program,
        order.folder,
        outputs=order.outputs,
        device=order.device,
        arch=order.arch,
    )


TARGETS: Mapping[str, Target] = {
    "onnxruntime": Target(_onnx, tells_ops=True),
    "aotinductor": Target(_aotinductor, tells_ops=False),
}
"""Targets that take a program of torch.export."""


def target_of(name: str) -> Target:
    """The target of this name.

    Raises:
        UsageError: none takes a program by it.
    """
    if name not in TARGETS:
        raise UsageError(f"target '{name}' takes no program; {', '.join(TARGETS)} do")
    return TARGETS[name]
