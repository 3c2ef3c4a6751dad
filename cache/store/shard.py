"""A shard: the outputs of some texts in one safetensors file that never changes.

    rows.NAME   [rows of all texts, width]  an output with a row per token
    text.NAME   [texts, width]              an output with a row per text
    keys        u8 [texts, 16]
    offsets     i64 [texts + 1]             where each text's rows begin
    ids         i32 [tokens of all texts]   without padding
    id_offsets  i64 [texts + 1]
    texts       u8 [bytes], UTF-8           for people, reports and comparisons
    text_offsets i64 [texts + 1]
    sums        u64 [texts]                 xxh3 of each text's outputs
    metadata: format, version, spec (fingerprint), digest

The digest covers the table of tensors and all but the outputs, each text's sum covers its outputs:
one flipped bit anywhere is found, and costs one text where it lies in the outputs.  No weight
format notices damage by itself.  The name is a hash of the keys, so a repeated commit of the same
texts replaces itself.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
import xxhash

from enginecast.cache.store.mapping import FileBytes
from enginecast.cache.store.spec import KEY_BYTES, EncoderSpec, OutputSpec, fingerprint
from enginecast.errors import CacheError
from enginecast.public import described, some
from enginecast.runtime.bundle.tensor_files import MAX_HEADER
from enginecast.runtime.values.arrays import BFLOAT16, Array

FORMAT = "enginecast-cache"
VERSION = 1
SUFFIX = ".safetensors"
DTYPES = {
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "BF16": BFLOAT16,
    "F16": np.dtype(np.float16),
    "U8": np.dtype(np.uint8),
}
"""In the order in which safetensors writes tensors, which `shard_size` counts on."""
_STORED = {dtype: stored for stored, dtype in DTYPES.items()}
_INDEX = ("keys", "offsets", "ids", "id_offsets", "texts", "text_offsets", "sums")
"""The tensors besides the outputs, in the order in which they are hashed."""
TAKE_OUT = "`enginecast cache verify CACHE` takes it out; then `cache fill` fills it again."


@dataclass(frozen=True)
class Entry:
    """The outputs of one text.

    Args:
        key: see `spec.Keys`.
        text: one that has these ids, cleaned and put into the template by whoever tokenized it.
        ids: int32 [tokens], without padding.
        outputs: [rows, width] by name for an output per token, [width] for one per text.
    """

    key: bytes
    text: str
    ids: Array
    outputs: Mapping[str, Array]

    def __repr__(self) -> str:
        """The text, how many tokens it has, and the outputs."""
        outputs = some(f"{name} {described(array)}" for name, array in self.outputs.items())
        return f"Entry({shortened(self.text)}: {len(self.ids)} tokens; {outputs})"


class Tensor(NamedTuple):
    """Where a tensor lies in its file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class _Content:
    """A shard's file, all but its outputs checked."""

    bytes: FileBytes
    index: Mapping[str, Array]
    rows: Mapping[str, tuple[int, int, np.dtype[Any]]]
    """Output -> where its rows begin in the file, bytes of a row, dtype."""


class Shard:
    """A shard, mapped when it is first asked for something.

    Everything but its length may raise a `CacheError`: it is damaged, or it was removed or replaced
    since it was listed.  It may be handed to another process: the mapping stays behind.

    Args:
        texts: how many there are.
        keys_sum: of its keys; see `sum_of_keys`.
    """

    def __init__(self, path: Path, spec: EncoderSpec, texts: int, keys_sum: int) -> None:
        self.path, self.spec = path, spec
        self.keys_sum, self._texts = keys_sum, texts

    def __len__(self) -> int:
        return self._texts

    @property
    def keys(self) -> Array:
        """uint8 [texts, 16]"""
        return self._content.index["keys"]

    @property
    def tokens(self) -> Array:
        """How many tokens each text has: int64 [texts]."""
        return np.diff(self._content.index["id_offsets"])

    @property
    def rows(self) -> Array:
        """How many rows each text has: int64 [texts]."""
        return np.diff(self._content.index["offsets"])

    def key(self, text: int) -> bytes:
        return bytes(self.keys[text])

    def text(self, text: int) -> str:
        return bytes(self._slice("texts", "text_offsets", text)).decode()

    def ids(self, text: int) -> Array:
        """int32 [tokens], without padding."""
        return self._slice("ids", "id_offsets", text)

    def outputs(self, text: int) -> dict[str, Array]:
        """The outputs of a text, as views of the file that nobody may write to: see `Entry`."""
        begin, end = self._content.index["offsets"][text : text + 2].tolist()
        return {
            one.name: self._rows(one, begin, end)
            if one.per == "token"
            else self._rows(one, text, text + 1)[0]
            for one in self.spec.outputs
        }

    def is_whole(self, text: int) -> bool:
        """Whether the outputs of a text are as they were written."""
        return _sum_of(self.spec, self.outputs(text)) == int(self._content.index["sums"][text])

    def require_whole(self, text: int) -> None:
        """Refuse a text whose outputs are not as they were written."""
        if not self.is_whole(text):
            what = f"the outputs of {shortened(self.text(text))} differ from their sum"
            raise _damaged(self.path, what)

    def entry(self, text: int) -> Entry:
        return Entry(self.key(text), self.text(text), self.ids(text), self.outputs(text))

    def closed(self) -> "Shard":
        """The same shard, mapped when it is asked for something again."""
        return Shard(self.path, self.spec, self._texts, self.keys_sum)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_content"}

    @cached_property
    def _content(self) -> _Content:
        content = _read(self.path, self.spec)
        keys = content.index["keys"]
        if (len(keys), sum_of_keys(keys)) != (self._texts, self.keys_sum):
            raise CacheError(
                f"{self.path}: it was replaced since the cache was opened",
                hint="Open the cache again.",
            )
        return content

    def _slice(self, name: str, offsets: str, text: int) -> Array:
        # As Python's numbers: slicing with numpy's takes several times as long.
        begin, end = self._content.index[offsets][text : text + 2].tolist()
        part: Array = self._content.index[name][begin:end]
        return part

    def _rows(self, output: OutputSpec, begin: int, end: int) -> Array:
        first, step, dtype = self._content.rows[output.name]
        try:
            raw = self._content.bytes.read(first + begin * step, first + end * step)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        rows: Array = raw.view(dtype).reshape(end - begin, output.width)
        return rows


def open_shard(path: Path, spec: EncoderSpec) -> Shard:
    """Open a shard; a CacheError where anything but its outputs is damaged, or of another spec."""
    content = _read(path, spec)
    keys = content.index["keys"]
    shard = Shard(path, spec, len(keys), sum_of_keys(keys))
    vars(shard)["_content"] = content
    return shard


def sum_of_keys(keys: Array) -> int:
    """What tells apart files of one name: the xxh3 (64 bits) of keys [texts, 16] in their order."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(keys).data)


def shortened(text: str) -> str:
    """A text in quotes, cut where it is long."""
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def read_table(content: FileBytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The table of a safetensors file with places in the file, and its metadata."""
    first = content.read(0, 8).tobytes()
    size = int.from_bytes(first, "little")
    if len(first) < 8 or size > MAX_HEADER:
        raise ValueError("no safetensors header")
    raw = json.loads(content.read(8, 8 + size).tobytes())
    metadata = raw.pop("__metadata__", {})
    table = {}
    for name, one in raw.items():
        begin, end = (8 + size + int(offset) for offset in one["data_offsets"])
        table[name] = Tensor(str(one["dtype"]), tuple(map(int, one["shape"])), begin, end)
    end = 8 + size
    for tensor in sorted(table.values(), key=lambda one: (one.begin, one.end)):
        length = prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
        if min(tensor.shape, default=0) < 0 or (tensor.begin, tensor.end) != (end, end + length):
            raise ValueError("a tensor has another size than its shape, or another place")
        end = tensor.end
    return table, metadata


def read_tensor(content: FileBytes, tensor: Tensor) -> Array:
    """A tensor, as a view of a file that is mapped."""
    raw = content.read(tensor.begin, tensor.end)
    found: Array = raw.view(DTYPES[tensor.dtype]).reshape(tensor.shape)
    return found


def _read(path: Path, spec: EncoderSpec) -> _Content:
    try:
        content = FileBytes(path)
        table, metadata = read_table(content)
        index = {name: read_tensor(content, table[name]) for name in _INDEX}
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _damaged(path, f"it cannot be read as a shard ({error!r})") from error
    if metadata.get("format") != FORMAT:
        raise _damaged(path, "it is not a shard of an embedding cache")
    if metadata.get("version") != str(VERSION):
        raise CacheError(
            f"{path}: expected version {VERSION} of the format, got {metadata.get('version')}",
            hint="Read it with the enginecast that wrote it, or fill a new cache.",
        )
    if metadata.get("spec") != fingerprint(spec):
        raise CacheError(
            f"{path}: expected a shard of spec {fingerprint(spec)}, got {metadata.get('spec')}",
            hint="It was copied from another cache; move it away.",
        )
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in table.items()}
    if metadata.get("digest") != _index_digest(index, shapes):
        raise _damaged(path, "its index differs from its digest")
    if content.size != max(tensor.end for tensor in table.values()):
        raise _damaged(path, f"it ends at byte {content.size}")
    rows = {}
    for one in spec.outputs:
        tensor = table[_tensor_name(one)]
        dtype = DTYPES[tensor.dtype]
        rows[one.name] = (tensor.begin, one.width * dtype.itemsize, dtype)
    return _Content(content, index, rows)


def _unreadable(path: Path, error: OSError) -> CacheError:
    if not isinstance(error, FileNotFoundError):
        return CacheError(f"{path}: {error.strerror or error}")
    return CacheError(
        f"{path}: the shard no longer exists",
        hint="Another process removed or replaced it; open the cache again.",
    )


def _damaged(path: Path, what: str) -> CacheError:
    return CacheError(f"{path}: damaged: {what}", hint=TAKE_OUT)


def _sum_of(spec: EncoderSpec, outputs: Mapping[str, Array]) -> int:
    """The xxh3 (64 bits) of the outputs of a text, in the spec's order."""
    digest = xxhash.xxh3_64()
    for one in spec.outputs:
        digest.update(np.ascontiguousarray(outputs[one.name]).view(np.uint8).data)
    return digest.intdigest()


def _tensor_name(output: OutputSpec) -> str:
    """What a shard calls an output."""
    return f"{'rows' if output.per == 'token' else 'text'}.{output.name}"


def _index_digest(
    index: Mapping[str, Array], shapes: Mapping[str, tuple[str, Sequence[int]]]
) -> str:
    """Hash the table of tensors, and all of them but the outputs."""
    digest = xxhash.xxh3_128(json.dumps(shapes, sort_keys=True).encode())
    for name in _INDEX:
        digest.update(np.ascontiguousarray(index[name]).view(np.uint8).data)
    return digest.hexdigest()


def metadata_of(form: str, spec: EncoderSpec, digest: str) -> dict[str, str]:
    own = {"format": form, "version": str(VERSION)}
    return {**own, "spec": fingerprint(spec), "digest": digest}


def shard_name(keys: Sequence[bytes]) -> str:
    """The file name of a shard with these keys."""
    return hashlib.blake2b(b"".join(sorted(keys)), digest_size=16).hexdigest() + SUFFIX


def write_shard(path: Path, spec: EncoderSpec, entries: Sequence[Entry]) -> None:
    """Write entries, no key twice, to a file and flush it; the caller gives it its final name."""
    texts = [entry.text.encode() for entry in entries]
    keys = b"".join(entry.key for entry in entries)
    per_token = [one.name for one in spec.outputs if one.per == "token"][:1]
    rows = [sum(len(entry.outputs[name]) for name in per_token) for entry in entries]
    index: dict[str, Array] = {
        "keys": np.frombuffer(keys, np.uint8).reshape(len(entries), KEY_BYTES),
        "offsets": _offsets(rows),
        "ids": np.concatenate([np.asarray(entry.ids, np.int32) for entry in entries]),
        "id_offsets": _offsets([len(entry.ids) for entry in entries]),
        "texts": np.frombuffer(b"".join(texts), np.uint8),
        "text_offsets": _offsets([len(text) for text in texts]),
        "sums": np.array([_sum_of(spec, entry.outputs) for entry in entries], np.uint64),
    }
    tensors = dict(index)
    for one in spec.outputs:
        join = np.concatenate if one.per == "token" else np.stack
        tensors[_tensor_name(one)] = joined = join([entry.outputs[one.name] for entry in entries])
        assert joined.dtype.name == one.dtype, (one, joined.dtype)
    shapes = {name: (_STORED[array.dtype], array.shape) for name, array in tensors.items()}
    metadata = metadata_of(FORMAT, spec, _index_digest(index, shapes))
    safetensors.numpy.save_file(tensors, path, metadata)
    path.chmod(0o644)  # safetensors writes 0600, which no other user could read
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _offsets(sizes: Sequence[int]) -> Array:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)


def shard_size(spec: EncoderSpec, tokens: Sequence[int], text_bytes: int) -> int:
    """Bytes of the file that `write_shard` makes of texts with so many tokens each."""
    count = len(tokens)
    rows = sum(len(range(*spec.span(length))) * many for length, many in Counter(tokens).items())
    shapes = {
        "keys": ("U8", [count, KEY_BYTES]),
        "offsets": ("I64", [count + 1]),
        "ids": ("I32", [sum(tokens)]),
        "id_offsets": ("I64", [count + 1]),
        "texts": ("U8", [text_bytes]),
        "text_offsets": ("I64", [count + 1]),
        "sums": ("U64", [count]),
    }
    for one in spec.outputs:
        shape = [rows if one.per == "token" else count, one.width]
        shapes[_tensor_name(one)] = (_STORED[np.dtype(one.dtype)], shape)
    order = list(DTYPES)
    header: dict[str, Any] = {"__metadata__": metadata_of(FORMAT, spec, digest="0" * 32)}
    begin = 0
    for name in sorted(shapes, key=lambda name: (order.index(shapes[name][0]), name)):
        stored, shape = shapes[name]
        end = begin + DTYPES[stored].itemsize * prod(shape)
        header[name] = {"dtype": stored, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    size = len(json.dumps(header, separators=(",", ":")).encode())
    return 8 + -(-size // 8) * 8 + begin
