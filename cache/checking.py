"""Reading every byte of a cache, and taking out what is damaged.

The whole entries of a damaged shard go into a new one; then it is moved to `quarantine/`, with a
`.json` beside it that says why.  The keys that went with it count as missing, so that `cache fill`
fills them again.  A fill that goes on meanwhile is not disturbed: shards that it commits are not
looked at, and one that it puts in place of a damaged one stays.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, compress, count
from pathlib import Path
from typing import Any

import msgspec

from enginecast.cache.disk import disk_error, write_once
from enginecast.cache.examining import Examined, examine_all
from enginecast.cache.index import Index, index_of
from enginecast.cache.rewriting import commit_all, file_id, only_keeper
from enginecast.cache.shard import Shard
from enginecast.cache.store import SPEC_NAME, Encodings, Store
from enginecast.cache.tokenizing import digest_of
from enginecast.errors import CacheError, CacheVersionError, MissingError

_FILL_AGAIN = "`enginecast cache fill` with the same texts fills in what was lost."
_VERIFY_AGAIN = "Once the cache can be written, run `enginecast cache verify` again."

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
        stays: why it could not be moved there; empty: it was, or need not be.
        hint: what to do.
    """

    file: str
    problem: str
    salvaged: int = 0
    lost: tuple[str, ...] = ()
    quarantine: str | None = None
    stays: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Checked:
    """What was read of one encoder, and what was damaged."""

    name: str
    shards: int = 0
    texts: int = 0
    bytes: int = 0
    damages: tuple[Damage, ...] = ()


def check_store(store: Store, name: str | None = None, watch: Watch | None = None) -> list[Checked]:
    """Check encoders of a cache, and take damaged shards out of it.

    Args:
        name: of the encoder; None: all.

    Raises:
        CacheVersionError: an encoder was written by another version.
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
        if isinstance(error, CacheVersionError) or isinstance(error.__cause__, OSError):
            raise
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


def _take_out(encodings: Encodings, bad: list[Examined], whole: Index) -> list[Damage]:
    saved: dict[bytes, tuple[Shard, int]] = {}
    for one in bad:
        for shard, text in one.whole_entries():
            if whole.find(shard.key(text)) is None:
                saved[shard.key(text)] = (shard, text)
    entries = (shard.entry(text) for shard, text in saved.values())
    try:
        commit_all(encodings, entries, occupied={one.path.name for one in bad})
    except (CacheError, MissingError) as error:
        return [_left(encodings, one, error.message) for one in bad]
    return [_quarantine(encodings, one, whole, saved) for one in bad]


def _left(encodings: Encodings, one: Examined, why: str) -> Damage:
    """A shard of which nothing could be saved: it stays, with all that is whole in it."""
    file = str(one.path.relative_to(encodings.folder.parent))
    return Damage(file, one.problem, stays=why, hint=_VERIFY_AGAIN)


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
    place, stays = None, ""
    try:
        place = _move(encodings, one, lost)
    except (CacheError, MissingError) as error:
        stays = error.message
    root = encodings.folder.parent
    return Damage(
        file=str(one.path.relative_to(root)),
        problem=one.problem,
        salvaged=salvaged,
        lost=tuple(lost),
        quarantine=str(place.relative_to(root)) if place else None,
        stays=stays,
        hint=_VERIFY_AGAIN if stays else _FILL_AGAIN,
    )


def _move(encodings: Encodings, one: Examined, lost: list[str]) -> Path | None:
    """Move a shard to the quarantine; None: a writer has put a new one in its place already.

    Raises:
        CacheError: the disk does not allow it; the shard is where it was.
        MissingError: the disk is full.
    """
    place = encodings.folder / "quarantine" / one.path.name
    try:
        place.parent.mkdir(exist_ok=True)
        place = _free(place)
        if file_id(one.path) != one.identity:
            return None
        note = {"file": one.path.name, "problem": one.problem, "lost": lost}
        note["found"] = datetime.now(UTC).isoformat(timespec="seconds")
        write_once(place.with_suffix(".json"), msgspec.json.format(msgspec.json.encode(note)))
        _rename(one.path, place)
        if file_id(place) != one.identity:  # replaced at this very moment
            os.link(place, one.path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise disk_error(place, error) from error
    return place


def _free(place: Path) -> Path:
    """A name that is not taken: the same texts may have been damaged before."""
    names = (f"{place.stem}-{number}{place.suffix}" for number in count(2))
    return next(one for one in chain([place], map(place.with_name, names)) if not one.exists())


def _rename(path: Path, place: Path) -> None:
    try:
        path.rename(place)
    except OSError:
        place.with_suffix(".json").unlink(missing_ok=True)
        raise


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
