"""Which architecture can do what in fp8: `architectures.json`, a source for every cell.  No torch.

The architecture is that of the machine an engine is for, which need not be the one it is made on.
"""

import difflib
from functools import cache
from importlib.resources import files
from typing import Literal, get_args

import msgspec
from msgspec import Struct

from enginecast.errors import PassError

FILE = "architectures.json"
Column = Literal["storage", "tensorwise", "rowwise", "blockwise", "tensorrt", "onnxruntime"]
COLUMNS: tuple[Column, ...] = get_args(Column)
Supported = Literal["yes", "no", "emulated", "unverified"]
CPU = "cpu"


class Cell(Struct, frozen=True, forbid_unknown_fields=True):
    """What one architecture can do in one way."""

    supported: Supported
    """unverified: documented, and run by nobody that we know of; emulated: right, and slow."""
    note: str
    source: str
    """Key of `Matrix.sources`."""


class Source(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a cell can be read."""

    name: str
    url: str

    def __str__(self) -> str:
        return f"{self.name}, {self.url}"


class Architecture(Struct, frozen=True, forbid_unknown_fields=True):
    """A row."""

    name: str
    storage: Cell
    """fp8 weights, brought back to the compute dtype where they are used."""
    tensorwise: Cell
    """torch._scaled_mm with one scale for each tensor."""
    rowwise: Cell
    """torch._scaled_mm with a scale for each row of x and of the weight."""
    blockwise: Cell
    """torch._scaled_mm with a scale for each 1 x 128 of x and 128 x 128 of the weight."""
    tensorrt: Cell
    onnxruntime: Cell
    """Products in fp8 in ONNX Runtime."""

    def cell(self, column: Column) -> Cell:
        found = getattr(self, column)
        assert isinstance(found, Cell)
        return found


class Matrix(Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    sources: dict[str, Source]
    architectures: dict[str, Architecture]


@cache
def matrix() -> Matrix:
    """The matrix as it is packaged."""
    content = files("enginecast.passes.quantize.plan").joinpath(FILE).read_bytes()
    return msgspec.json.decode(content, type=Matrix)


def architecture(name: str) -> Architecture:
    """A row by name.

    Raises:
        PassError: there is none; lists those there are.
    """
    known = matrix().architectures
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        meant = f"Did you mean {close[0]!r}?  " if close else ""
        raise PassError(f"arch={name!r} is not known", hint=f"{meant}Known: {', '.join(known)}.")
    return known[name]


def require(arch: str, column: Column) -> Cell:
    """What an architecture can do in one way.

    Raises:
        PassError: it cannot, or it is not known; names the architecture, where that can be read,
            and what it can do.
    """
    cell = architecture(arch).cell(column)
    if cell.supported != "no":
        return cell
    able = [c for c in COLUMNS if architecture(arch).cell(c).supported == "yes"]
    way_out = " Use mode=storage (--precision fp8-storage)." if "storage" in able else ""
    raise PassError(
        f"{arch} ({architecture(arch).name}) has no fp8 products {WORDS[column]}: {cell.note}"
        f" ({matrix().sources[cell.source]})",
        hint=f"It can do: {', '.join(able) or 'nothing in fp8'}.{way_out}",
    )


WORDS: dict[Column, str] = {
    "storage": "and no fp8 weights",
    "tensorwise": "with one scale for each tensor",
    "rowwise": "with a scale for each row",
    "blockwise": "with a scale for each block",
    "tensorrt": "in TensorRT",
    "onnxruntime": "in ONNX Runtime",
}
