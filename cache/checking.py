"""Reading every byte of a cache, and taking out what is damaged.

The whole entries of a damaged shard go into a new one; then it is moved to `quarantine/`, with a
`.json` beside it that says why.  The keys that went with it count as missing, so that `cache fill`
fills them again.  A fill that goes on meanwhile is not disturbed: shards that it commits are not
looked at, and one that it puts in place of a damaged one stays.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from enginecast.cache.disk import disk_error, write_once
from enginecast.cache.index import Index, index_of
from enginecast.cache.keys import Keys
from enginecast.cache.rewriting import FileId, commit_all, file_id, only_keeper
from enginecast.cache.shard import Shard, open_shard
from enginecast.cache.shard_format import read_header
from enginecast.cache.shard_writing import shard_name
from enginecast.cache.store import SPEC_NAME, Encodings, Store
from enginecast.cache.tokenizing import digest_of
from enginecast.errors import CacheError

Watch = Callable[[Path], Any]
"""Told of each shard that has been read."""


@dataclass(frozen=True)
class Damage:
    """A file that is not as it should be.

    Args:
        file: path below the cache.
        problem: what is wrong with it.
        salvaged: entries that went into a new shard.
        lost: texts of the others, where they could be read.
        quarantine: where the file is now, below the cache; None: it is where it was.
        hint: what to do.
    """

    file: str
    problem: str
    salvaged: int = 0
    lost: tuple[str, ...] = ()
    quarantine: str | None = None
    hint: str = ""


@dataclass(frozen=True)
class Checked:
    """What was read of one encoder, and what was damaged."""

    name: str
    shards: int = 0
    texts: int = 0
    bytes: int = 0
    damages: tuple[Damage, ...] = ()


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


def check_store(store: Store, name: str | None = None, watch: Watch | None = None) -> list[Checked]:
    """Check encoders of a cache, and take damaged shards out of it.

    Args:
        name: of the encoder; None: all.

    Raises:
        CacheError: no such encoder, none at all, another command is moving shards, or a file cannot
            be read for another reason than that it is damaged.
    """
    names = [name] if name else store.names()
    if name not in (None, *store.names()) or not names:
        store.encodings(name)  # which raises
    return [_check_named(store, one, watch or (lambda _: None)) for one in names]


def _check_named(store: Store, name: str, watch: Watch) -> Checked:
    try:
        encodings = store.encodings(name)
    except CacheError as error:
        problem = error.message.removeprefix(f"{store.root / name / SPEC_NAME}: ")
        hint = "Put the original back; until then nobody can say what the shards belong to."
        return Checked(name, damages=(Damage(f"{name}/{SPEC_NAME}", problem, hint=hint),))
    with only_keeper(encodings):
        return check_encodings(encodings, watch)


def check_encodings(encodings: Encodings, watch: Watch) -> Checked:
    """Check one encoder's entries; who calls it holds `only_keeper`."""
    examined = []
    for one in examine_all(encodings):
        examined.append(one)
        watch(one.path)
    whole = [one.shard for one in examined if one.shard and not one.problem]
    bad = [one for one in examined if one.problem]
    moved = _take_out(encodings, bad, index_of(whole))
    return Checked(
        encodings.name,
        shards=len(examined),
        texts=sum(len(one.shard) for one in examined if one.shard),
        bytes=sum(one.size for one in examined),
        damages=(*_check_tokenizer(encodings), *moved),
    )


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


def _take_out(encodings: Encodings, bad: list[Examined], whole: Index) -> list[Damage]:
    saved: dict[bytes, tuple[Shard, int]] = {}
    for one in bad:
        for shard, text in one.whole_entries():
            if whole.find(shard.key(text)) is None:
                saved[shard.key(text)] = (shard, text)
    entries = (shard.entry(text) for shard, text in saved.values())
    commit_all(encodings, entries, occupied={one.path.name for one in bad})
    return [_quarantine(encodings, one, whole, saved) for one in bad]


def _quarantine(
    encodings: Encodings, one: Examined, whole: Index, saved: dict[bytes, tuple[Shard, int]]
) -> Damage:
    lost = one.texts()
    salvaged = 0
    if one.shard is not None:
        keys = [one.shard.key(number) for number in range(len(lost))]
        gone = [key not in saved and whole.find(key) is None for key in keys]
        lost = list(compress(lost, gone))
        salvaged = len(keys) - len(lost)
    place = _move(encodings, one, lost)
    root = encodings.folder.parent
    return Damage(
        file=str(one.path.relative_to(root)),
        problem=one.problem,
        salvaged=salvaged,
        lost=tuple(lost),
        quarantine=str(place.relative_to(root)) if place else None,
        hint="`enginecast cache fill` with the same texts fills in what was lost.",
    )


def _move(encodings: Encodings, one: Examined, lost: list[str]) -> Path | None:
    """Move a shard to the quarantine; None: a writer has put a new one in its place already."""
    folder = encodings.folder / "quarantine"
    folder.mkdir(exist_ok=True)
    place, number = folder / one.path.name, 1
    while place.exists():  # the same texts were damaged before
        number += 1
        place = folder / f"{one.path.stem}-{number}{one.path.suffix}"
    try:
        if file_id(one.path) != one.identity:
            return None
        note = {"file": one.path.name, "problem": one.problem, "lost": lost}
        note["found"] = datetime.now(UTC).isoformat(timespec="seconds")
        write_once(place.with_suffix(".json"), msgspec.json.format(msgspec.json.encode(note)))
        one.path.rename(place)
        if file_id(place) != one.identity:  # replaced at this very moment
            os.link(place, one.path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise disk_error(place, error) from error
    return place


def tokenizer_problem(encodings: Encodings) -> str:
    """What is wrong with an encoder's tokenizer.json; empty: nothing."""
    try:
        found = digest_of(encodings.tokenizer_file.read_bytes())
    except OSError as error:
        return str(error.strerror)
    except CacheError as error:
        return error.message.removeprefix("tokenizer.json: ")
    wanted = encodings.spec.tokenizer
    return "" if found == wanted else f"expected the tokenizer {wanted}, got {found}"


def _check_tokenizer(encodings: Encodings) -> list[Damage]:
    problem = tokenizer_problem(encodings)
    hint = "Put the original back: the tokenizer.json of the encoder's folder."
    path = str(encodings.tokenizer_file.relative_to(encodings.folder.parent))
    return [Damage(path, problem, hint=hint)] if problem else []
