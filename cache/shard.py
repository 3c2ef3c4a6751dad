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

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from enginecast.cache.mapping import FileBytes
from enginecast.cache.shard_format import (
    DTYPES,
    FORMAT,
    INDEX,
    VERSION,
    Tensor,
    index_digest,
    read_header,
    sum_of,
    tensor_name,
)
from enginecast.cache.shard_writing import Entry
from enginecast.cache.spec import EncoderSpec, OutputSpec, fingerprint
from enginecast.errors import CacheError
from enginecast.runtime.arrays import Array


@dataclass(frozen=True)
class _Content:
    """A shard's file, all but its outputs checked."""

    bytes: FileBytes
    index: Mapping[str, Array]
    places: Mapping[str, tuple[int, int, np.dtype[Any]]]
    """Output -> where its rows begin in the file, bytes of a row, dtype."""


class Shard:
    """A shard, mapped when it is first asked for something.

    Everything but its length may raise a `CacheError`: it is damaged, or it was removed or replaced
    since it was listed.  It may be handed to another process: the mapping stays behind.

    Args:
        path: of the file.
        spec: of its entries.
        texts: how many there are.
        keys_sum: of its keys; see `sum_of_keys`.
    """

    def __init__(self, path: Path, spec: EncoderSpec, texts: int, keys_sum: int) -> None:
        self.path = path
        self.spec = spec
        self.keys_sum = keys_sum
        self._texts = texts

    def __len__(self) -> int:
        return self._texts

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._content.bytes.size

    @property
    def keys(self) -> Array:
        """uint8 [texts, 16]"""
        return self._content.index["keys"]

    @property
    def sums(self) -> Array:
        """uint64 [texts]"""
        return self._content.index["sums"]

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
        return sum_of(self.spec, self.outputs(text)) == int(self.sums[text])

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
        first, step, dtype = self._content.places[output.name]
        try:
            raw = self._content.bytes.read(first + begin * step, first + end * step)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        rows: Array = raw.view(dtype).reshape(end - begin, output.width)
        return rows


def open_shard(path: Path, spec: EncoderSpec) -> Shard:
    """Open a shard and check all but its outputs.

    Raises:
        CacheError: damaged, of another spec or version, or it cannot be read.
    """
    content = _read(path, spec)
    keys = content.index["keys"]
    shard = Shard(path, spec, len(keys), sum_of_keys(keys))
    vars(shard)["_content"] = content
    return shard


def sum_of_keys(keys: Array) -> int:
    """What tells apart files of one name: the xxh3 (64 bits) of keys [texts, 16] in their order."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(keys).data)


def _read(path: Path, spec: EncoderSpec) -> _Content:
    try:
        content = FileBytes(path)
        table, metadata, begin = _header(content)
        index = {name: _tensor(content, table[name], dtype) for name, dtype in INDEX.items()}
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _damaged(path, f"it cannot be read as a shard ({error!r})") from error
    _require_own(path, spec, metadata)
    shapes = {name: [tensor.dtype, list(tensor.shape)] for name, tensor in table.items()}
    if metadata.get("digest") != index_digest(index, shapes):
        raise _damaged(path, "its index differs from its digest")
    if content.size != max((tensor.end for tensor in table.values()), default=begin):
        raise _damaged(path, f"it ends at byte {content.size}")
    return _Content(content, index, {one.name: _place(one, table) for one in spec.outputs})


def _place(output: OutputSpec, table: Mapping[str, Tensor]) -> tuple[int, int, np.dtype[Any]]:
    tensor = table[tensor_name(output)]
    dtype = DTYPES[tensor.dtype]
    return tensor.begin, output.width * dtype.itemsize, dtype


def _header(content: FileBytes) -> tuple[dict[str, Tensor], dict[str, str], int]:
    first = content.read(0, 8).tobytes()
    return read_header(first, lambda size: content.read(8, 8 + size).tobytes())


def _tensor(content: FileBytes, tensor: Tensor, dtype: str) -> Array:
    raw = content.read(tensor.begin, tensor.end)
    found: Array = raw.view(DTYPES[dtype]).reshape(tensor.shape)
    return found


def _require_own(path: Path, spec: EncoderSpec, metadata: Mapping[str, str]) -> None:
    version = metadata.get("version")
    if metadata.get("format") != FORMAT:
        raise _damaged(path, "it is no shard of an embedding cache")
    if version != str(VERSION):
        raise CacheError(
            f"{path}: expected version {VERSION} of the format, got {version}",
            hint="Read it with the enginecast that wrote it, or fill a new cache.",
        )
    if metadata.get("spec") != fingerprint(spec):
        raise CacheError(
            f"{path}: expected a shard of spec {fingerprint(spec)}, got {metadata.get('spec')}",
            hint="It was copied from another cache; move it away.",
        )


def _unreadable(path: Path, error: OSError) -> CacheError:
    if not isinstance(error, FileNotFoundError):
        return CacheError(f"{path}: {error.strerror or error}")
    return CacheError(
        f"{path}: there is no such shard any more",
        hint="Another process took it out or replaced it; open the cache again.",
    )


def _damaged(path: Path, what: str) -> CacheError:
    return CacheError(
        f"{path}: damaged: {what}",
        hint="`enginecast cache verify CACHE` takes it out; then `cache fill` fills it again.",
    )
