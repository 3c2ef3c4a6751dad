"""Which ONNX operators TensorRT's parser accepts: `operators.json`, with its sources."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import msgspec
import onnx_ir as ir
from msgspec import Struct

from enginecast.errors import UsageError

FILE = "operators.json"
SAME = "same"
"""In `Operator.others`: the type of the inputs that `Operator.takes` is of."""
TYPES: Mapping[ir.DataType, str] = {
    ir.DataType.FLOAT: "FP32",
    ir.DataType.FLOAT16: "FP16",
    ir.DataType.BFLOAT16: "BF16",
    ir.DataType.FLOAT8E4M3FN: "FP8",
    ir.DataType.FLOAT4E2M1: "FP4",
    ir.DataType.INT32: "INT32",
    ir.DataType.INT64: "INT64",
    ir.DataType.INT8: "INT8",
    ir.DataType.INT4: "INT4",
    ir.DataType.UINT8: "UINT8",
    ir.DataType.BOOL: "BOOL",
}
"""TensorRT's names of the element types that it has; it narrows float64, and has no others."""
ONNX = ("", "ai.onnx")
"""Names of ONNX's own domain."""
MX = ("trt", "TRT_MXFP8DequantizeLinear")
"""An operator of the parser's own, domain and name: fp8 in blocks of 32, scaled by uint8 that are
exponents (onnxOpImporters.cpp of onnx/onnx-tensorrt)."""


class Version(Struct, frozen=True, forbid_unknown_fields=True):
    """The ONNX opsets that a version of the parser reads."""

    opsets: tuple[int, int]
    """First and last of ONNX's own domain."""
    source: str


class Refused(Struct, frozen=True, forbid_unknown_fields=True):
    """Operators that the parser is documented not to take."""

    source: str
    operators: tuple[str, ...]


class Operator(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The documentation of one operator.  Inputs and outputs are numbers, from 0."""

    takes: str
    """Element types of what `reads` names, with a space between: "float int BOOL"."""
    source: str
    """Keys of the table's sources, with a space between."""
    others: dict[int, str] = {}
    """Inputs that may have another type than the rest, and which: indices, conditions."""
    since: str = ""
    """Version of the parser; empty: all that are known."""
    reads: str = "inputs"
    """What `takes` is of: "inputs" but the others, the first "output", or all "outputs"."""
    gives: str = ""
    """Element types of the first output, where they do not follow from the inputs."""
    apart: bool = False
    """Whether the inputs may be of different types."""
    constant: tuple[int, ...] = ()
    """Inputs that have to be known when the engine is built."""
    wide: tuple[int, ...] = ()
    """Integer inputs where a value outside of int32 has a meaning: "to the end"."""
    below: dict[int, int] = {}
    """Integer inputs whose values, where they are known, have to be below a number."""
    rank: dict[int, tuple[int, int]] = {}
    """Fewest and most dimensions of an input."""
    inputs: int | None = None
    """How many there may be; None: all that ONNX has."""
    outputs: int | None = None
    only: dict[str, list[int | float | str]] = {}
    """Attributes and the values that they may have; none: the attribute must not be there."""
    ones: tuple[str, ...] = ()
    """Attributes that have to be a list of ones, where they are there."""
    rules: tuple[str, ...] = ()
    """What else is asked, by the names in `operator_rules.RULES`."""


class Table(Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    about: str
    sources: dict[str, str]
    versions: dict[str, Version]
    types: dict[str, tuple[str, ...]]
    """Words for several element types."""
    refused: Refused
    operators: dict[str, Operator]

    def expand(self, words: str) -> frozenset[str]:
        """Element types of such words as "float BOOL"; `SAME` stays as it is."""
        return frozenset(name for word in words.split() for name in self.types.get(word, (word,)))


@cache
def table() -> Table:
    """What is known."""
    text = files("enginecast.exporters.tensorrt.gate").joinpath(FILE).read_bytes()
    return msgspec.json.decode(text, type=Table)


def opsets(version: str) -> tuple[int, int]:
    """First and last opset of a version; of a newer one, those of the newest that is known.

    Raises:
        UsageError: older than all that are known, or no version.
    """
    known = {numbers(name): found.opsets for name, found in table().versions.items()}
    older = [name for name in known if name <= numbers(version)]
    if not older:
        raise UsageError(f"TensorRT {version}: expected {next(iter(table().versions))} or newer")
    return known[max(older)]


def unsupported(domain: str, op: str, version: str) -> str:
    """Why this version's parser does not accept an operator; empty if it does."""
    if (domain, op) == MX:
        return ""
    if domain not in ONNX:
        return f"an operator of the domain {domain}"
    found = table().operators.get(op)
    if found is not None:
        is_new = bool(found.since) and numbers(found.since) > numbers(version)
        return f"documented since TensorRT {found.since}" if is_new else ""
    return "documented as not taken" if op in table().refused.operators else "not documented"


def numbers(version: str) -> tuple[int, int]:
    """(11, 0) of "11.0.0.114".

    Raises:
        UsageError: it is not a version.
    """
    parts = version.split("+")[0].split(".")
    if len(parts) < 2 or not all(part.isdecimal() for part in parts[:2]):
        raise UsageError(f"TensorRT '{version}': expected a version such as 11.0")
    return int(parts[0]), int(parts[1])
