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

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

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
from enginecast.cache.spec import EncoderSpec, fingerprint
from enginecast.errors import CacheError
from enginecast.runtime.arrays import Array


class Shard:
    """A shard that is open for reading; the outputs are mapped when they are first asked for.

    Made by `open_shard`.  It may be handed to another process: the mapping stays behind.
    """

    def __init__(
        self, path: Path, spec: EncoderSpec, index: Mapping[str, Array], table: Mapping[str, Tensor]
    ) -> None:
        self.path = path
        self.spec = spec
        self.keys = index["keys"]
        """uint8 [texts, 16]"""
        self.sums = index["sums"]
        """uint64 [texts]"""
        self._index = index
        self._table = table

    def __len__(self) -> int:
        return len(self.keys)

    def key(self, text: int) -> bytes:
        return bytes(self.keys[text])

    def text(self, text: int) -> str:
        begin, end = self._index["text_offsets"][text : text + 2]
        return self._index["texts"][begin:end].tobytes().decode()

    def ids(self, text: int) -> Array:
        """int32 [tokens], without padding."""
        begin, end = self._index["id_offsets"][text : text + 2]
        return self._index["ids"][begin:end]

    def outputs(self, text: int) -> dict[str, Array]:
        """The outputs of a text, as views of the file that nobody may write to: see `Entry`."""
        begin, end = self._index["offsets"][text : text + 2]
        return {
            one.name: self._mapped[one.name][begin:end]
            if one.per == "token"
            else self._mapped[one.name][text]
            for one in self.spec.outputs
        }

    def is_whole(self, text: int) -> bool:
        """Whether the outputs of a text are as they were written."""
        return sum_of(self.spec, self.outputs(text)) == int(self.sums[text])

    def entry(self, text: int) -> Entry:
        return Entry(self.key(text), self.text(text), self.ids(text), self.outputs(text))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_mapped"}

    @cached_property
    def _mapped(self) -> dict[str, Array]:
        mapped = {}
        for one in self.spec.outputs:
            tensor = self._table[tensor_name(one)]
            shape, dtype = tensor.shape, DTYPES[tensor.dtype]
            empty = tensor.end == tensor.begin  # which no system can map
            mapped[one.name] = (
                np.empty(shape, dtype)
                if empty
                else np.memmap(self.path, dtype, "r", offset=tensor.begin, shape=shape).view(
                    np.ndarray
                )
            )
        return mapped


def open_shard(path: Path, spec: EncoderSpec) -> Shard:
    """Open a shard and check all but its outputs.

    Raises:
        CacheError: damaged, of another spec or version, or it cannot be read.
    """
    try:
        with path.open("rb") as file:
            table, metadata, begin = read_header(file.read(8), file.read)
            index = {}
            for name, dtype in INDEX.items():
                tensor = table[name]
                file.seek(tensor.begin)
                data = file.read(tensor.end - tensor.begin)
                index[name] = np.frombuffer(data, DTYPES[dtype]).reshape(tensor.shape)
            file.seek(0, os.SEEK_END)
            size = file.tell()
    except OSError as error:
        raise CacheError(f"{path}: {error.strerror or error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _damaged(path, f"it cannot be read as a shard ({error!r})") from error
    _require_own(path, spec, metadata)
    shapes = {name: [tensor.dtype, list(tensor.shape)] for name, tensor in table.items()}
    if metadata.get("digest") != index_digest(index, shapes):
        raise _damaged(path, "its index differs from its digest")
    if size != max((tensor.end for tensor in table.values()), default=begin):
        raise _damaged(path, f"it ends at byte {size}")
    return Shard(path, spec, index, table)


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


def _damaged(path: Path, what: str) -> CacheError:
    return CacheError(
        f"{path}: damaged: {what}",
        hint="`enginecast cache verify CACHE` takes it out; then `cache fill` fills it again.",
    )
