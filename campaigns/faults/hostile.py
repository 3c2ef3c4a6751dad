"""Hostile bundles: whoever can edit a file can make its digests right again, and is refused."""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bundles
import onnx
from onnx import TensorProto, helper

from enginecast.errors import BundleError
from enginecast.runtime.bundle.manifest_json import seal
from enginecast.runtime.bundle.reader import digest
from enginecast.runtime.load import load
from faults.campaign import Campaign, Sizes, Tally, environment
from faults.damage import MUTATIONS

SEED = 23
BATCH = 50
"""Graphs that a process opens: a crash costs a process."""


def resealed(root: Path, **changes: Any) -> None:
    """Make the digests of a bundle right again, as an attacker would."""
    path = root / "manifest.json"
    content = json.loads(path.read_bytes()) | changes
    content.pop("digest", None)
    for file in content["files"]:
        place = root / str(file["name"])
        if "files" not in changes and place.is_file():
            file |= {"size": place.stat().st_size, "sha256": digest(place)}
    path.write_bytes(seal(content))


NAMES = (
    "..",
    ".",
    "",
    "../weights.safetensors",
    "a/../../b",
    "./engine.onnx",
    "sub/engine.onnx",
    "/etc/passwd",
    "//etc/passwd",
    "/proc/self/environ",
    "~/.ssh/id_rsa",
    "~root",
    "C:\\x",
    "C:x",
    "\\\\server\\share",
    "\\\\?\\C:\\x",
    "a\\b",
    "..\\b",
    ".hidden",
    ".engine.onnx",
    "engine.onnx\0",
    "engine.onnx\n",
    "engine.onnx ",
    " engine.onnx",
    "engine.onnx:stream",
    "file:///etc/passwd",
    "http://host/x",
    "%2e%2e",
    "*",
    "$HOME",
    "`id`",
    "a" * 256,
    "é",
    "\u202eengine",
    "engine\u200b",
    "\ufffd",
    "ENGINE.ONNX",
    "Manifest.json",
    "manifest.json",
    "model.sig",
    "Model.SIG",
)
LOCATIONS = (
    "../weights.safetensors",
    "../../etc/passwd",
    "/etc/passwd",
    "/proc/self/environ",
    "/dev/zero",
    "",
    ".",
    "..",
    "./weights.safetensors",
    "sub/../weights.safetensors",
    "weights.safetensors/",
    "weights.safetensors\0x",
    "manifest.json",
    "tokenizer.json",
    "engine.onnx",
    "model.sig",
    "*/_ORT_MEM_ADDR_/*",
    "C:\\x",
    "missing",
)
NUMBERS: tuple[dict[str, str], ...] = (
    {"offset": "-1"},
    {"offset": "99999999"},
    {"offset": "9" * 30},
    {"offset": "0x10"},
    {"offset": "1e3"},
    {"offset": " 8"},
    {"offset": "٣"},
    {"length": "-4"},
    {"length": "0"},
    {"length": "4"},
    {"length": str(1 << 50)},
    {"length": "9" * 30},
    {"length": ""},
)
SIZES = ((-1,), (-3, -3), (1 << 40, 9, 3), (1 << 62, 4), (1 << 31, 1 << 31, 1 << 31), (9, 4))


def _weight(entries: Mapping[str, str], sizes: tuple[int, ...]) -> TensorProto:
    tensor = TensorProto(name="table", data_type=TensorProto.FLOAT, dims=sizes)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def _at_initializer(model: onnx.ModelProto, tensor: TensorProto) -> None:
    model.graph.initializer[0].CopyFrom(tensor)


def _at_constant(model: onnx.ModelProto, tensor: TensorProto) -> None:
    node = helper.make_node("Constant", [], ["aside"])
    attribute = node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR)
    attribute.t.CopyFrom(tensor)
    model.graph.node.insert(0, node)


def _at_sparse(model: onnx.ModelProto, tensor: TensorProto) -> None:
    model.graph.sparse_initializer.add().values.CopyFrom(tensor)


def _at_branch(model: onnx.ModelProto, tensor: TensorProto) -> None:
    branch = helper.make_graph([], "branch", [], [], [tensor])
    node = helper.make_node("If", ["last"], ["aside"], then_branch=branch, else_branch=branch)
    model.graph.node.append(node)


def _at_function(model: onnx.ModelProto, tensor: TensorProto) -> None:
    node = helper.make_node("Constant", [], ["aside"])
    node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(tensor)
    opset = helper.make_opsetid("", 20)
    model.functions.append(helper.make_function("own", "F", [], ["aside"], [node], [opset]))


PLACES = (_at_initializer, _at_constant, _at_sparse, _at_branch, _at_function)


def _code(operator: str, domain: str, model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node(operator, ["rows"], ["aside"], domain=domain))
    model.opset_import.append(helper.make_opsetid(domain, 1))


def _function_of(domain: str, model: onnx.ModelProto) -> None:
    opset = helper.make_opsetid("", 20)
    model.functions.append(helper.make_function(domain, "Conv", [], [], [], [opset]))


def _nested(root: Path) -> None:
    """Graphs in graphs, as bytes: protobuf's own library refuses to write that many."""
    graph = b""
    for _ in range(60):
        loop = message(1, message(4, b"Loop") + message(5, message(6, graph)))
        graph = loop
    path = root / "engine.onnx"
    path.write_bytes(path.read_bytes() + message(7, graph))  # protobuf merges both
    resealed(root)


def message(number: int, content: bytes) -> bytes:
    """A field with bytes in it."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])


def other_format(graph: bytes) -> bytes:
    """The same graph with the mark of ONNX Runtime's own format, which stands at byte 4.

    The first four bytes say where such a file begins: a whole other graph would fit there, behind
    168 MB, which was loaded in place of the one that was walked.
    """
    return b"\x12\x86\x80\x00ORTM\0\0" + graph


def _prefixed(prefix: bytes) -> Callable[[bytes], bytes]:
    return lambda graph: prefix + graph


_TENSOR = TensorProto(data_type=1, dims=[9, 3], raw_data=bytes(108)).SerializeToString()
_MORE = TensorProto(dims=[1 << 40]).SerializeToString()
BYTES: Mapping[str, Callable[[bytes], bytes]] = {
    "another format": other_format,
    "TensorFlow Lite": _prefixed(b"\x12\x86\x80\x00TFL3\0\0"),
    "a graph of TensorFlow": _prefixed(message(1, message(2, b"ReadFile"))),
    "an unknown field": _prefixed(message(99, b"?")),
    "a group": _prefixed(b"\x0b\x0c"),
    "two names": _prefixed(message(6, b"one") + message(6, b"two")),
    **{
        f"a tensor {what}": _prefixed(message(7, message(5, content)))
        for what, content in {
            "of two types": b"\x10\x01\x10\x07",
            "of a type of 33 bits": b"\x10\x81\x80\x80\x80\x10",
            "with a type as bytes": b"\x12\x01\x01",
            "in an unknown place": b"\x70\x07",
            "that is external by 33 bits": b"\x70\x81\x80\x80\x80\x10",
            "with data as a number": b"\x48\x08",
            "with two data": message(9, bytes(4)) + message(9, bytes(8)),
        }.items()
    },
    **{
        f"{what} that is merged": _prefixed(message(7, message(1, message(5, content))))
        for what, content in {
            "a tensor": message(5, _TENSOR) + message(5, _MORE),
            "a graph": message(6, b"") + message(6, b""),
            "a sparse tensor": message(22, message(1, _TENSOR)) + message(22, message(1, _MORE)),
            "a sparse tensor's values": message(22, message(1, _TENSOR) + message(1, _MORE)),
        }.items()
    },
}
"""Files that readers of protobuf skip, merge or cut parts of, or that are of two formats."""


Edit = Callable[[Path], None]


def _bytes_edit(change: Callable[[bytes], bytes]) -> Edit:
    def edit(root: Path) -> None:
        path = root / "engine.onnx"
        path.write_bytes(change(path.read_bytes()))
        resealed(root)

    return edit


def _engine_called(name: str) -> Edit:
    """A graph by a name that readers take for another format."""

    def edit(root: Path) -> None:
        (root / "engine.onnx").rename(root / name)
        content = json.loads((root / "manifest.json").read_bytes())
        files = [
            one | ({"name": name} if one["name"] == "engine.onnx" else {})
            for one in content["files"]
        ]
        resealed(root, files=files, engines=[content["engines"][0] | {"file": name}])

    return edit


def _graph_edit(change: Callable[[onnx.ModelProto], None]) -> Edit:
    def edit(root: Path) -> None:
        path = root / "engine.onnx"
        model = onnx.load(path, load_external_data=False)
        change(model)
        path.write_bytes(model.SerializeToString())
        resealed(root)

    return edit


def _tensor_edit(place: Any, entries: dict[str, str], sizes: tuple[int, ...]) -> Edit:
    tensor = _weight(entries, sizes)
    return _graph_edit(lambda model: place(model, tensor))


def _named(name: str, *, instead: bool) -> Edit:
    def edit(root: Path) -> None:
        files = json.loads((root / "manifest.json").read_bytes())["files"]
        listed = {**files[0], "name": name}
        resealed(root, files=[listed, *files[1:]] if instead else [*files, listed])

    return edit


def _replaced(name: str, make: Callable[[Path], object]) -> Edit:
    def edit(root: Path) -> None:
        (root / name).rename(root.parent / f"aside-{name}")
        make(root / name)

    return edit


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's name is short
        try:
            one.bind(path.name)
        finally:
            os.chdir(here)


KINDS: Mapping[str, Callable[[Path], object]] = {
    "link to the file": lambda path: path.symlink_to(path.parent.parent / f"aside-{path.name}"),
    "link within": lambda path: path.symlink_to("tokenizer.json"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "socket": _socket,
    "nothing": lambda path: None,
    "empty file": Path.touch,
}


def attacks() -> Iterator[tuple[str, Edit]]:
    """All of them, by what they are."""
    for name in NAMES:
        yield f"file {name!r}", _named(name, instead=True)
        yield f"file {name!r} besides", _named(name, instead=False)
    yield from _on_weights()
    yield from _on_graphs()
    for file in ("engine.onnx", "weights.safetensors", "manifest.json"):
        for kind, make in KINDS.items():
            yield f"{kind} for {file}", _replaced(file, make)


def _on_weights() -> Iterator[tuple[str, Edit]]:
    whole = {"location": "weights.safetensors", "offset": "8", "length": "108"}
    for place in PLACES:
        for location in LOCATIONS:
            entries = whole | {"location": location}
            yield f"{place.__name__} {entries}", _tensor_edit(place, entries, (9, 3))
        for numbers in NUMBERS:
            yield f"{place.__name__} {numbers}", _tensor_edit(place, whole | numbers, (9, 3))
        for sizes in SIZES:
            yield f"{place.__name__} {sizes}", _tensor_edit(place, whole, sizes)
        unknown = whole | {"basepath": "/etc"}
        yield f"{place.__name__} {unknown}", _tensor_edit(place, unknown, (9, 3))


def _on_graphs() -> Iterator[tuple[str, Edit]]:
    for operator, domain in (
        ("EPContext", "com.microsoft"),
        ("PythonOp", "com.microsoft"),
        ("ATen", "com.microsoft"),
        ("Anything", "ai.onnx.contrib"),
        ("Anything", "attacker"),
        ("TRT_EngineOp", "trt"),
    ):
        yield f"{domain}::{operator}", _graph_edit(partial(_code, operator, domain))
    for name in ("engine.pb", "engine.xml", "engine.tflite", "engine.ort"):
        yield f"engine called {name}", _engine_called(name)
    for what, change in BYTES.items():
        yield what, _bytes_edit(change)
    for domain in ("com.microsoft.nchwc", "com.ms.internal.nhwc", "ai.onnx.training"):
        yield f"function of {domain}", _graph_edit(partial(_function_of, domain))
    yield "nested graphs", _nested
    yield "training", _graph_edit(lambda m: m.training_info.add().SetInParent())


def _require_control(root: Path) -> None:
    """Without an attack the same bundle loads: what is refused is refused for the attack."""
    resealed(root)
    load(root).close()


def paths(count: int, folder: Path) -> Tally:
    """Carry out each attack on a bundle of its own; no library may see anything of it."""
    tally, chosen = Tally(), [*attacks()]
    random.Random(SEED).shuffle(chosen)
    pristine = bundles.make_bundle(folder / "pristine")
    _require_control(pristine)
    seen: list[str] = []

    def opened(*_: Any, **__: Any) -> None:
        seen.append("opened")
        raise RuntimeError("ONNX Runtime was called")

    with patch("onnxruntime.InferenceSession", opened):
        for number, (what, edit) in enumerate(chosen[:count]):
            root = folder / str(number) / "bundle"
            shutil.copytree(pristine, root)
            edit(root)
            try:
                load(root).close()
                tally.defect(f"{what}: loaded")
            except BundleError as error:
                if seen:
                    tally.defect(f"{what}: ONNX Runtime was called")
                elif not error.message:
                    tally.defect(f"{what}: no reason")
                else:
                    tally.add("refused before a library saw them")
            seen.clear()
            shutil.rmtree(root.parent)
    shutil.rmtree(pristine)
    return tally


OPENER = """
import sys
from pathlib import Path
from enginecast.errors import EnginecastError
from enginecast.runtime.load import load
import bundles
for name in sys.stdin.read().split():
    try:
        with load(name) as engine:
            engine.run(bundles.feeds())
        said = "ran"
    except EnginecastError as error:
        said = "refused" if error.message else "silent"
    print(Path(name).name, said, flush=True)
"""


def graphs(count: int, folder: Path) -> Tally:
    """Change a few bytes of a graph, make its digests right, and load and run it in a child."""
    chooser, tally = random.Random(SEED), Tally()
    pristine = bundles.make_bundle(folder / "pristine")
    _require_control(pristine)
    whole = (pristine / "engine.onnx").read_bytes()
    while tally.injected < count:
        roots = []
        for number in range(min(BATCH, count - tally.injected)):
            root = folder / f"{tally.injected + number}"
            shutil.copytree(pristine, root)
            data = bytearray(whole)
            while data == whole:
                for _ in range(chooser.randrange(1, 4)):
                    MUTATIONS[chooser.randrange(len(MUTATIONS))](data, chooser)
            (root / "engine.onnx").write_bytes(data)
            resealed(root)
            roots.append(root)
        said = _opened(roots)
        for root in roots:
            outcome = said.get(root.name, "crashed")
            if outcome in ("ran", "refused"):
                tally.add(outcome)
            else:
                tally.defect(f"seed {SEED}, graph {root.name}: {outcome}")
            shutil.rmtree(root)
    return tally


def _opened(roots: list[Path]) -> dict[str, str]:
    """What a child said of each; those after a crash are given to another child."""
    said: dict[str, str] = {}
    while left := [root for root in roots if root.name not in said]:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", OPENER],
            input="\n".join(map(str, left)),
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        said |= dict(line.split() for line in done.stdout.splitlines())
        if done.returncode:
            first = next(root for root in left if root.name not in said)
            said[first.name] = f"the process ended with {done.returncode}"
    return said


CAMPAIGNS = (
    Campaign(
        "hostile paths",
        "Names, links, external data and operators that reach outside a bundle are refused before"
        " a library sees them, wherever they are in a graph.",
        Sizes(quick=60, full=len([*attacks()])),
        paths,
    ),
    Campaign(
        "malformed graphs",
        "A graph with changed bytes and right digests is refused or runs; it crashes nothing.",
        Sizes(quick=BATCH, full=2000),
        graphs,
    ),
)
