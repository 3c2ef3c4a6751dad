"""Which architecture can do what in fp8, and in TensorRT: `architectures.json`, a source for every
cell.  No torch.

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
Column = Literal[
    "storage",
    "tensorwise",
    "rowwise",
    "blockwise",
    "tensorrt",
    "onnxruntime",
    "tensorrt_int8",
    "tensorrt_int4",
    "tensorrt_nvfp4",
    "tensorrt_mxfp8",
]
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
    """fp8 in TensorRT, weights alone included."""
    onnxruntime: Cell
    """Products in fp8 in ONNX Runtime."""
    tensorrt_int8: Cell
    """Products of int8 in TensorRT, and weights alone."""
    tensorrt_int4: Cell
    """Weights in int4 with a scale for each block."""
    tensorrt_nvfp4: Cell
    """Weights in E2M1 with an fp8 scale for each 16."""
    tensorrt_mxfp8: Cell
    """Weights in fp8 with a power of two for each 32."""

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
    able = [
        c
        for c in COLUMNS
        if architecture(arch).cell(c).supported == "yes"
        and c.startswith("tensorrt") == column.startswith("tensorrt")
    ]
    named = [WORDS[c] if c.startswith("tensorrt") else c for c in able]
    way_out = " Use mode=storage (--precision fp8-storage)." if "storage" in able else ""
    raise PassError(
        f"{arch} ({architecture(arch).name}) has no {WORDS[column]}: {cell.note}"
        f" ({matrix().sources[cell.source]})",
        hint=f"It can do: {', '.join(named) or 'nothing in fp8'}.{way_out}",
    )


def tensorrt_column(quantized: str, bits: int, block: int = 0) -> Column:
    """What weights of a format ask of TensorRT.

    Args:
        quantized: "int8" or "fp8".
        bits: of a value.
        block: values along K that share a scale; 0: a whole row.
    """
    if quantized == "int8":
        return "tensorrt_int4" if bits == 4 else "tensorrt_int8"
    if bits == 4:
        return "tensorrt_nvfp4"
    return "tensorrt_mxfp8" if block else "tensorrt"


WORDS: dict[Column, str] = {
    "storage": "fp8 weights",
    "tensorwise": "fp8 products with one scale for each tensor",
    "rowwise": "fp8 products with a scale for each row",
    "blockwise": "fp8 products with a scale for each block",
    "tensorrt": "fp8 in TensorRT",
    "onnxruntime": "fp8 products in ONNX Runtime",
    "tensorrt_int8": "int8 in TensorRT",
    "tensorrt_int4": "int4 weights in TensorRT",
    "tensorrt_nvfp4": "NVFP4 weights in TensorRT",
    "tensorrt_mxfp8": "MXFP8 weights in TensorRT",
}
