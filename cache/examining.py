"""Reading every byte of shards: what is wrong with each, and which of its entries are whole."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from enginecast.cache.keys import Keys
from enginecast.cache.rewriting import FileId, file_id
from enginecast.cache.shard import Shard, open_shard
from enginecast.cache.shard_format import read_header
from enginecast.cache.shard_writing import shard_name
from enginecast.cache.store import Encodings
from enginecast.errors import CacheError


@dataclass(frozen=True)
class Examined:
    """A shard that was read.

    Args:
        identity: of the file that was read.
        size: its bytes.
        shard: None: it cannot be opened.
        problem: what is wrong with it; empty: nothing.
        bad: numbers of the texts whose entries are damaged.
    """

    path: Path
    identity: FileId
    size: int
    shard: Shard | None
    problem: str = ""
    bad: frozenset[int] = frozenset()

    def whole_entries(self) -> list[tuple[Shard, int]]:
        """Shard and number of each text whose entry is as it was written."""
        if self.shard is None:
            return []
        return [(self.shard, text) for text in range(len(self.shard)) if text not in self.bad]

    def texts(self) -> list[str]:
        """Its texts; of a shard that cannot be opened as far as they can be read all the same."""
        if self.shard is None:
            return _read_texts(self.path)
        return [self.shard.text(text) for text in range(len(self.shard))]


def examine_all(encodings: Encodings) -> Iterable[Examined]:
    """Read every byte of every shard that is there now."""
    keys = Keys(encodings.spec)
    for path in encodings.shard_paths():
        try:
            identity, size = file_id(path), path.stat().st_size
            yield _examine(path, identity, size, keys)
        except FileNotFoundError:  # removed since the folder was listed
            continue
        except CacheError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise


def _examine(path: Path, identity: FileId, size: int, keys: Keys) -> Examined:
    try:
        shard = open_shard(path, keys.spec)
    except CacheError as error:
        if isinstance(error.__cause__, OSError):
            raise
        problem = error.message.removeprefix(f"{path}: ").removeprefix("damaged: ")
        return Examined(path, identity, size, None, problem)
    found = {text: _problem(shard, text, keys) for text in range(len(shard))}
    bad = {text: problem for text, problem in found.items() if problem}
    problems = sorted(set(bad.values()))
    if shard_name([shard.key(text) for text in range(len(shard))]) != path.name:
        problems.append("its name is not the hash of its keys")
    return Examined(path, identity, size, shard, "; ".join(problems), frozenset(bad))


def _read_texts(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            table, _, _ = read_header(file.read(8), file.read)
            parts = []
            for name in ("text_offsets", "texts"):
                file.seek(table[name].begin)
                parts.append(file.read(table[name].end - table[name].begin))
        ends = np.frombuffer(parts[0], np.int64).tolist()
        return [parts[1][begin:end].decode() for begin, end in pairwise(ends)]
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError):
        return []


def _problem(shard: Shard, text: int, keys: Keys) -> str:
    """What is wrong with an entry; empty: nothing."""
    ids = shard.ids(text)
    begin, end = keys.spec.span(len(ids))
    per_token = any(one.per == "token" for one in keys.spec.outputs)
    if per_token and int(shard.rows[text]) != max(0, end - begin):
        return "a text has another number of rows than its spec says"
    if keys.of_tokens(ids) != shard.key(text):
        return "a key is not the hash of its token ids"
    if not shard.is_whole(text):
        return "outputs differ from their sum"
    if not all(np.isfinite(values).all() for values in shard.outputs(text).values()):
        return "outputs are not finite"
    return ""
