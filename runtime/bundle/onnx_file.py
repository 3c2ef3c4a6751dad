"""Check an ONNX file before a runtime parses it.

Neither ONNX Runtime nor onnx's own checker is a gate: the checker accepts data past the end of a
file and sizes that overflow, and both follow what the graph says about other files.  So the file
is walked here, byte by byte as protobuf's wire format has it, without either library: what may name
a file, a size or code is looked at, in every graph within a graph and in every function.

Fields are those of onnx.proto (IR version 13).  Others are refused, and so is a field of another
wire type or one that comes twice where one is expected: readers skip, merge or take the last of
such, so that the walk and a runtime would see different graphs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from enginecast.errors import BundleError
from enginecast.runtime.bundle.reader import Bundle

MAX_BYTES = (2 << 30) - 1
"""What protobuf can hold."""
SUFFIX = ".onnx"
OTHER_FORMATS = (b"ORTM", b"TFL3")
"""Marks of flatbuffers at byte 4, by which ONNX Runtime and OpenVINO know formats of another kind,
whatever else the same bytes are: ONNX Runtime's own, and TensorFlow Lite."""
MAX_DEPTH = 32
"""Graphs within graphs: a loop in a branch in a loop is 3."""
DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})
"""Whose operators ONNX Runtime brings along.  Others would need a library of their own."""
CODE = frozenset({"EPContext", "PythonOp", "PythonOpGrad", "ATen", "ATenGrad", "TritonOp", "Snpe"})
"""Operators of com.microsoft that hold or call native code."""

_BITS = {1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64}
_BITS |= {14: 64, 15: 128, 16: 16, 17: 8, 18: 8, 19: 8, 20: 8, 21: 4, 22: 4, 23: 4, 24: 8}
_BITS |= {25: 2, 26: 2}
"""Bits of an element by TensorProto.DataType; a string has no size of its own."""
_EXTERNAL = 1
_KEYS = frozenset({"location", "offset", "length", "checksum"})
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_RESERVED = ("ai.onnx", "com.microsoft", "com.ms.")
"""How the domains begin that are not for a model's own functions."""


class _Kind(NamedTuple):
    """A kind of message: its fields by tag, and whether one may come more than once."""

    name: str
    fields: Mapping[int, bool]


KINDS: list[_Kind] = []
"""All kinds that are known."""


def _kind(name: str, once: Mapping[int, int], many: Mapping[int, int]) -> _Kind:
    """A kind of message: for each number the wire type; numbers that repeat may be packed, too."""
    fields = {number << 3 | wire: False for number, wire in once.items()}
    for number, wire in many.items():
        fields |= {number << 3 | wire: True, number << 3 | _BYTES: True}
    KINDS.append(_Kind(name, fields))
    return KINDS[-1]


def _texts(*numbers: int) -> dict[int, int]:
    """Fields with a length: texts, bytes and messages."""
    return dict.fromkeys(numbers, _BYTES)


_V, _F = _VARINT, _FIXED32
MODEL = _kind("ModelProto", {1: _V, 5: _V} | _texts(2, 3, 4, 6, 7), _texts(8, 14, 20, 25, 26))
GRAPH = _kind("GraphProto", _texts(2, 10), _texts(1, 5, 11, 12, 13, 14, 15, 16))
NODE = _kind("NodeProto", _texts(3, 4, 6, 7, 8), _texts(1, 2, 5, 9, 10))
ATTRIBUTE = _kind(
    "AttributeProto",
    {2: _F, 3: _V, 20: _V} | _texts(1, 4, 5, 6, 13, 14, 21, 22),
    {7: _F, 8: _V} | _texts(9, 10, 11, 15, 23),
)
FUNCTION = _kind("FunctionProto", _texts(1, 8, 10, 13), _texts(4, 5, 6, 7, 9, 11, 12, 14))
SPARSE = _kind("SparseTensorProto", _texts(1, 2), {3: _V})
TENSOR = _kind(
    "TensorProto",
    {2: _V, 14: _V} | _texts(3, 8, 9, 12),
    {1: _V, 4: _F, 5: _V, 7: _V, 10: _FIXED64, 11: _V} | _texts(6, 13, 16),
)
ENTRY = _kind("StringStringEntryProto", _texts(1, 2), {})
VALUE = _kind("ValueInfoProto", _texts(1, 2, 3), _texts(4))
TYPE = _kind("TypeProto", _texts(1, 4, 5, 6, 7, 8, 9), {})
TENSOR_TYPE = _kind("TypeProto.Tensor", {1: _V} | _texts(2), {})
SHAPE = _kind("TensorShapeProto", {}, _texts(1))
DIMENSION = _kind("TensorShapeProto.Dimension", {1: _V} | _texts(2, 3), {})


class _Field(NamedTuple):
    number: int
    wire: int
    value: int
    """Of a varint; of bytes where they begin."""
    end: int
    """Of bytes."""


class _Node(NamedTuple):
    """What was seen of a node."""

    domain: str
    operator: str
    overload: str
    place: str


@dataclass
class _Walk:
    """A file on its way through the check."""

    data: bytes
    file: str
    files: Mapping[str, int]
    nodes: list[_Node] = field(default_factory=list)
    functions: set[tuple[str, str, str]] = field(default_factory=set)

    def refuse(self, what: str) -> BundleError:
        return BundleError(
            f"{self.file}: {what}", hint="Use bundles from sources you trust, or export again."
        )


def weight_files(bundle: Bundle, *names: str | None) -> dict[str, int]:
    """The bytes of those files of a bundle that an engine's weights lie in, by name."""
    return {name: bundle.size(name) for name in names if name is not None}


def check_onnx(data: bytes, file: str, files: Mapping[str, int]) -> frozenset[str]:
    """Refuse an ONNX file that is malformed, reaches outside its bundle, or holds code.

    Args:
        data: its bytes.
        file: its name, for messages.
        files: the bytes of each file of the bundle that weights may lie in, by name.

    Returns:
        The operators of its nodes, without their domains.

    Raises:
        BundleError: names the file, the tensor or node, what was expected and what was got.
    """
    walk = _Walk(data, file, files)
    if not file.endswith(SUFFIX):  # OpenVINO chooses by the name what a file is
        raise walk.refuse(f"expected an ONNX file to be called NAME{SUFFIX}")
    if len(data) > MAX_BYTES:
        raise walk.refuse(f"expected at most {MAX_BYTES} bytes, got {len(data)}")
    if data[4:8] in OTHER_FORMATS:
        raise walk.refuse(f"expected ONNX, got the mark of another format, {data[4:8]!r}")
    graphs = 0
    for one in _fields(walk, 0, len(data), MODEL, "the model"):
        if one.number == 7:
            graphs += 1
            _graph(walk, one, "", 1)
        elif one.number == 20:
            raise walk.refuse("expected a model for inference, got training_info")
        elif one.number == 25:
            _function(walk, one)
    if graphs != 1:
        raise walk.refuse(f"expected one graph, got {graphs}")
    for domain, operator, overload, place in walk.nodes:
        if (domain, operator, overload) in walk.functions:
            continue
        if domain not in DOMAINS:
            known = ", ".join(sorted(filter(None, DOMAINS)))
            raise walk.refuse(f"{place}: expected an operator of {known}, got {domain}::{operator}")
        if domain == "com.microsoft" and operator in CODE:
            raise walk.refuse(f"{place}: expected an operator that holds no code, got {operator}")
    return frozenset(node.operator for node in walk.nodes)


def _fields(walk: _Walk, begin: int, end: int, kind: _Kind, what: str) -> Iterator[_Field]:
    """The fields of a message, in order."""
    place, known, seen = begin, kind.fields, 0
    while place < end:
        tag, place = _varint(walk, place, end, what)
        repeats, number, wire = known.get(tag), tag >> 3, tag & 7
        if repeats is None:
            wires = " or ".join(str(w) for w in range(8) if number << 3 | w in known)
            if wires:
                raise walk.refuse(
                    f"{what}: field {number} of {kind.name}: expected wire type {wires}, got {wire}"
                    f" at byte {place}"
                )
            raise walk.refuse(
                f"{what}: expected a field of {kind.name} (ONNX IR version 13), got field {number},"
                f" wire type {wire}, at byte {place}"
            )
        if not repeats:
            if seen & 1 << number:
                raise walk.refuse(
                    f"{what}: expected field {number} of {kind.name} once, got it again at byte"
                    f" {place}"
                )
            seen |= 1 << number
        if wire == _VARINT:
            value, place = _varint(walk, place, end, what)
            yield _Field(number, wire, value, place)
            continue
        if wire == _BYTES:
            length, place = _varint(walk, place, end, what)
        else:
            length = 8 if wire == _FIXED64 else 4
        if length > end - place:
            raise walk.refuse(f"{what}: {length} bytes at byte {place}, past the end at {end}")
        yield _Field(number, wire, place, place + length)
        place += length


def _varint(walk: _Walk, place: int, end: int, what: str) -> tuple[int, int]:
    data, value = walk.data, 0
    for shift in range(0, 70, 7):
        if place >= end:
            break
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, place
    raise walk.refuse(f"{what}: a number that does not end at byte {place}")


def _message(walk: _Walk, one: _Field, kind: _Kind, what: str) -> Iterator[_Field]:
    return _fields(walk, one.value, one.end, kind, what)


def _text(walk: _Walk, one: _Field, what: str) -> str:
    try:
        return walk.data[one.value : one.end].decode()
    except UnicodeDecodeError as error:
        raise walk.refuse(f"{what}: expected UTF-8: {error}") from error


def _graph(walk: _Walk, message: _Field, inside: str, depth: int) -> None:
    where = f"the graph{inside and f' of {inside}'}"
    if depth > MAX_DEPTH:
        raise walk.refuse(f"{where}: expected at most {MAX_DEPTH} graphs within one another")
    for one in _message(walk, message, GRAPH, where):
        if one.number == 1:
            _node(walk, one, depth)
        elif one.number == 5:
            _tensor(walk, one, "an initializer")
        elif one.number in (11, 12, 13):
            _value(walk, one)
        elif one.number == 15:
            _sparse(walk, one)


_PARAMETER = ((VALUE, 2), (TYPE, 1), (TENSOR_TYPE, 2), (SHAPE, 1), (DIMENSION, 0))
"""ValueInfoProto's type, its tensor_type, its shape, its dim: where a dimension's name is."""


def _value(walk: _Walk, message: _Field, depth: int = 0) -> None:
    """An input, output or value: its names are texts, which ONNX Runtime does not look at."""
    kind, inner = _PARAMETER[depth]
    for one in _message(walk, message, kind, "a value"):
        if one.number == inner:
            _value(walk, one, depth + 1)
        elif (kind is VALUE and one.number == 1) or (kind is DIMENSION and one.number == 2):
            _text(walk, one, "a value's name")


def _node(walk: _Walk, message: _Field, depth: int) -> None:
    operator = domain = overload = name = ""
    attributes = []
    for one in _message(walk, message, NODE, "a node"):
        if one.number in (1, 2):
            _text(walk, one, "a node's inputs and outputs")
        elif one.number == 3:
            name = _text(walk, one, "a node's name")
        elif one.number == 4:
            operator = _text(walk, one, "a node's operator")
        elif one.number == 5:
            attributes.append(one)
        elif one.number == 7:
            domain = _text(walk, one, "a node's domain")
        elif one.number == 8:
            overload = _text(walk, one, "a node's overload")
    place = f"node {name!r} ({operator})"
    walk.nodes.append(_Node(domain, operator, overload, place))
    for one in attributes:
        _attribute(walk, one, place, depth)


def _attribute(walk: _Walk, message: _Field, place: str, depth: int) -> None:
    for one in _message(walk, message, ATTRIBUTE, f"{place}: an attribute"):
        if one.number in (5, 10):
            _tensor(walk, one, place)
        elif one.number in (6, 11):
            _graph(walk, one, place, depth + 1)
        elif one.number in (22, 23):
            _sparse(walk, one)


def _function(walk: _Walk, message: _Field) -> None:
    name = domain = overload = ""
    for one in _message(walk, message, FUNCTION, "a function"):
        if one.number == 1:
            name = _text(walk, one, "a function's name")
        elif one.number == 10:
            domain = _text(walk, one, "a function's domain")
        elif one.number == 7:
            _node(walk, one, 1)
        elif one.number == 11:
            _attribute(walk, one, "a function", 1)
        elif one.number == 12:
            _value(walk, one)
        elif one.number == 13:
            overload = _text(walk, one, "a function's overload")
    if not domain or domain.startswith(_RESERVED):
        raise walk.refuse(
            f"function {name!r}: expected a domain of its own, got {domain or 'ai.onnx'}"
        )
    walk.functions.add((domain, name, overload))


def _sparse(walk: _Walk, message: _Field) -> None:
    for one in _message(walk, message, SPARSE, "a sparse tensor"):
        if one.number in (1, 2):
            _tensor(walk, one, "a sparse tensor")


def _tensor(walk: _Walk, message: _Field, place: str) -> None:
    """Its data is in the file, or in a file of the bundle, and is as long as its sizes say."""
    name, kind, is_external, sizes = "", 0, False, list[int]()
    raw: int | None = None
    entries: dict[str, str] = {}
    for one in _message(walk, message, TENSOR, place):
        if one.number == 1:
            at = one.value
            if one.wire == _VARINT:
                sizes.append(_signed(at))
            while one.wire != _VARINT and at < one.end:
                value, at = _varint(walk, at, one.end, place)
                sizes.append(_signed(value))
        elif one.number == 2:
            kind = _enum(walk, one, f"{place}: data_type")
        elif one.number == 8:
            name = _text(walk, one, place)
        elif one.number == 9:
            raw = one.end - one.value
        elif one.number == 13:
            entry = {1: "", 2: ""}
            entry |= {e.number: _text(walk, e, place) for e in _message(walk, one, ENTRY, place)}
            if entry[1] in entries or entry[1] not in _KEYS:
                raise walk.refuse(f"{place}: {entry[1]!r}: expected each of {sorted(_KEYS)} once")
            entries[entry[1]] = entry[2]
        elif one.number == 14:
            is_external = _enum(walk, one, f"{place}: data_location", 1) == _EXTERNAL
    what = f"tensor {name!r}" if name else f"a tensor of {place}"
    if min(sizes, default=0) < 0:
        raise walk.refuse(f"{what}: expected sizes of 0 and more, got {sizes}")
    needed = (prod(sizes) * _BITS.get(kind, 0) + 7) // 8
    if needed >= 1 << 62:
        raise walk.refuse(f"{what}: {sizes} is more than any memory holds")
    if is_external or entries:
        _external(walk, what, entries, sizes, needed if kind in _BITS else None)
    elif raw is not None and kind in _BITS and raw != needed:
        raise walk.refuse(f"{what}: {sizes} needs {needed} bytes, got {raw}")


def _enum(walk: _Walk, one: _Field, what: str, most: int = 99) -> int:
    """One of a few numbers; of a larger one readers keep 32 bits, or nothing."""
    if one.value > most:
        raise walk.refuse(f"{what}: expected 0 to {most}, got {one.value}")
    return one.value


def _external(
    walk: _Walk, what: str, entries: dict[str, str], sizes: list[int], needed: int | None
) -> None:
    """Weights lie in a file of the bundle, within it, and are as long as their sizes say."""
    location = entries.get("location", "")
    if location not in walk.files:
        listed = ", ".join(sorted(walk.files)) or "no file"
        raise walk.refuse(f"{what}: expected its data in {listed}, got {location!r}")
    numbers = {"offset": "0", "length": str(needed)} | entries
    for key in ("offset", "length"):
        if not (numbers[key].isascii() and numbers[key].isdigit() and len(numbers[key]) < 20):
            raise walk.refuse(f"{what}: {key}: expected a number of bytes, got {numbers[key]!r}")
    offset, length = int(numbers["offset"]), int(numbers["length"])
    if needed is None or length != needed:
        raise walk.refuse(f"{what}: {sizes} needs {needed} bytes, got {length} in {location}")
    if offset + length > walk.files[location]:
        raise walk.refuse(
            f"{what}: bytes {offset} to {offset + length} of {location},"
            f" which has {walk.files[location]}"
        )


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
