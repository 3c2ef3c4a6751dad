"""What is asked of a target: a program, and how its engine will be called."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.export import ExportedProgram

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
