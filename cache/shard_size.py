"""How large a shard will be, to the byte, before anything is encoded."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from enginecast.cache.keys import KEY_BYTES
from enginecast.cache.shard_format import DTYPES, FORMAT, INDEX, VERSION, tensor_name
from enginecast.cache.spec import EncoderSpec, fingerprint

WRITTEN_ORDER = ("U64", "I64", "F64", "F32", "I32", "BF16", "F16", "U8")
"""The order in which safetensors writes tensors: it decides how many digits their places take."""
_STORED = {DTYPES[stored].name: stored for stored in DTYPES}


def shard_size(spec: EncoderSpec, tokens: Sequence[int], text_bytes: int) -> int:
    """Bytes of the file that `shard_writing.write_shard` writes.

    Args:
        tokens: of each text.
        text_bytes: of all texts, as UTF-8.
    """
    shapes = _shapes(spec, tokens, text_bytes)
    begin = 0
    header: dict[str, Any] = {"__metadata__": _metadata(spec)}
    for name, (stored, shape) in sorted(
        shapes.items(), key=lambda one: (WRITTEN_ORDER.index(one[1][0]), one[0])
    ):
        end = begin + DTYPES[stored].itemsize * _product(shape)
        header[name] = {"dtype": stored, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    size = len(json.dumps(header, separators=(",", ":")).encode())
    return 8 + -(-size // 8) * 8 + begin


def _shapes(
    spec: EncoderSpec, tokens: Sequence[int], text_bytes: int
) -> dict[str, tuple[str, list[int]]]:
    count = len(tokens)
    sizes = {
        "keys": [count, KEY_BYTES],
        "offsets": [count + 1],
        "ids": [sum(tokens)],
        "id_offsets": [count + 1],
        "texts": [text_bytes],
        "text_offsets": [count + 1],
        "sums": [count],
    }
    shapes = {name: (INDEX[name], size) for name, size in sizes.items()}
    rows = sum(_rows(spec, length) * many for length, many in Counter(tokens).items())
    for one in spec.outputs:
        size = [rows if one.per == "token" else count, one.width]
        shapes[tensor_name(one)] = (_STORED[one.dtype], size)
    return shapes


def _rows(spec: EncoderSpec, tokens: int) -> int:
    begin, end = spec.span(tokens)
    return max(0, end - begin)


def _metadata(spec: EncoderSpec) -> dict[str, str]:
    made = fingerprint(spec)
    return {"format": FORMAT, "version": str(VERSION), "spec": made, "digest": "0" * 32}


def _product(shape: Sequence[int]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product
