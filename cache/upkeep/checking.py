"""Reading every byte of a cache, and taking out what is damaged.

The whole entries of a damaged shard go into a new one; then it is moved to `quarantine/`, with a
`.json` beside it that says why.  The keys that went with it count as missing, so that `cache fill`
fills them again.  A fill that goes on meanwhile is not disturbed: shards that it commits are not
looked at, and one that it puts in place of a damaged one stays.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain, compress, count, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from enginecast.cache.encoders.tokenizing import digest_of
from enginecast.cache.store.disk import disk_error, disk_errors, write_once
from enginecast.cache.store.folders import SPEC_NAME, Encodings, Store
from enginecast.cache.store.index import Index, index_of
from enginecast.cache.store.mapping import FileBytes, FileId, file_id
from enginecast.cache.store.shard import Shard, open_shard, read_table, shard_name
from enginecast.cache.store.spec import Keys
from enginecast.cache.upkeep.rewriting import commit_all, only_keeper
from enginecast.errors import CacheError, CacheVersionError, MissingError

_FILL_AGAIN = "`enginecast cache fill` with the same texts fills in what was lost."
_VERIFY_AGAIN = "Once the cache can be written, run `enginecast cache verify` again."

Watch = Callable[[Path], Any]
"""Called with each shard that has been read."""


@dataclass(frozen=True)
class Damage:
    """A file that is not as it should be.

    Args:
        file: path below the cache.
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


@dataclass(frozen=True)
class Examined:
    """A shard that was read; None: it cannot be opened.  `bad` are its damaged texts."""

    path: Path
    identity: FileId
    size: int
    shard: Shard | None
    problem: str | None = None
    bad: frozenset[int] = frozenset()

    def texts(self) -> list[str]:
        """Its texts; of a shard that cannot be opened as far as they can be read all the same."""
        if self.shard is not None:
            return [self.shard.text(text) for text in range(len(self.shard))]
        try:
            content = FileBytes(self.path)
            table, _ = read_table(content)
            offsets, texts = (
                content.read(table[name].begin, table[name].end)
                for name in ("text_offsets", "texts")
            )
            ends = offsets.view(np.int64).tolist()
            return [texts[begin:end].tobytes().decode() for begin, end in pairwise(ends)]
        except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError):
            return []


def check_store(store: Store, name: str | None = None, watch: Watch | None = None) -> list[Checked]:
    """Check encoders of a cache (None: all), and take damaged shards out of it.

    Raises:
        CacheVersionError: an encoder was written by another version.
        CacheError: no such encoder, none at all, another command is moving shards, or a file cannot
            be read for another reason than that it is damaged.
    """
    names = store.names()
    if name in names:
        names = [name]
    elif name is not None or not names:
        names = [store.encodings(name).name]  # which raises, unless it was made just now
    with disk_errors(store.root):
        return [_check(store, one, watch) for one in names]


def _check(store: Store, name: str, watch: Watch | None) -> Checked:
    try:
        encodings = store.encodings(name)
    except CacheError as error:
        if isinstance(error, CacheVersionError) or isinstance(error.__cause__, OSError):
            raise
        problem = error.message.removeprefix(f"{store.root / name / SPEC_NAME}: ")
        hint = "Put the original back; until then nobody can say what the shards belong to."
        return Checked(name, damages=(Damage(f"{name}/{SPEC_NAME}", problem, hint=hint),))
    with only_keeper(encodings):
        examined, damages = [], []
        for one in examine_all(encodings):
            examined.append(one)
            if watch:
                watch(one.path)
        try:
            require_tokenizer(encodings)
        except CacheError as error:
            path = encodings.tokenizer_file
            problem = error.message.removeprefix(f"{path}: ")
            damages.append(Damage(_below(encodings, path), problem, hint=error.hint))
        whole = index_of([one.shard for one in examined if one.shard and one.problem is None])
        bad = [one for one in examined if one.problem is not None]
        damages += _take_out(encodings, bad, whole)
    return Checked(
        name,
        shards=len(examined),
        texts=sum(len(one.shard) for one in examined if one.shard),
        bytes=sum(one.size for one in examined),
        damages=tuple(damages),
    )


def _below(encodings: Encodings, path: Path) -> str:
    return str(path.relative_to(encodings.folder.parent))


def require_tokenizer(encodings: Encodings) -> None:
    """Refuse an encoder's tokenizer.json that is not the spec's."""
    file, wanted = encodings.tokenizer_file, encodings.spec.tokenizer
    hint = "Put the original back: the tokenizer.json of the encoder's folder."
    try:
        found = digest_of(encodings.read_tokenizer())
    except CacheError as error:
        problem = error.message.removeprefix("tokenizer.json: ").removeprefix(f"{file}: ")
        raise CacheError(f"{file}: {problem}", hint=hint) from error
    if found != wanted:
        raise CacheError(f"{file}: expected the tokenizer {wanted}, got {found}", hint=hint)


def examine_all(encodings: Encodings) -> Iterable[Examined]:
    """Read every byte of every shard that is there now."""
    keys = Keys(encodings.spec)
    for path in encodings.shard_paths():
        try:
            identity, size = file_id(path.stat()), path.stat().st_size
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
    bad = {text: problem for text, problem in found.items() if problem is not None}
    problems = sorted(set(bad.values()))
    if shard_name([shard.key(text) for text in range(len(shard))]) != path.name:
        problems.append("its name is not the hash of its keys")
    return Examined(path, identity, size, shard, "; ".join(problems) or None, frozenset(bad))


def _problem(shard: Shard, text: int, keys: Keys) -> str | None:
    """What is wrong with an entry, if anything."""
    ids = shard.ids(text)
    per_token = any(one.per == "token" for one in keys.spec.outputs)
    if per_token and int(shard.rows[text]) != len(range(*keys.spec.span(len(ids)))):
        return "a text has another number of rows than its spec says"
    if keys.of_tokens(ids) != shard.key(text):
        return "a key is not the hash of its token ids"
    if not shard.is_whole(text):
        return "outputs differ from their sum"
    if not all(np.isfinite(values).all() for values in shard.outputs(text).values()):
        return "outputs are not finite"
    return None


def _take_out(encodings: Encodings, bad: list[Examined], whole: Index) -> list[Damage]:
    """Save what is whole of damaged shards, and move them to the quarantine."""
    saved: dict[bytes, tuple[Shard, int]] = {}
    for shard, lost in ((one.shard, one.bad) for one in bad if one.shard):
        for text in range(len(shard)):
            if text not in lost and whole.find(shard.key(text)) is None:
                saved[shard.key(text)] = (shard, text)
    entries = (shard.entry(text) for shard, text in saved.values())
    unsaved, damages = "", []
    try:
        commit_all(encodings, entries, occupied={one.path.name for one in bad})
    except (CacheError, MissingError) as error:  # they stay, with all that is whole in them
        unsaved = error.message
    for one in bad:
        damage = Damage(_below(encodings, one.path), one.problem or "", stays=unsaved)
        if not unsaved:
            texts, salvaged = one.texts(), 0
            if one.shard is not None:
                keys = [one.shard.key(number) for number in range(len(texts))]
                texts = list(
                    compress(texts, (k not in saved and whole.find(k) is None for k in keys))
                )
                salvaged = len(keys) - len(texts)
            damage = replace(damage, salvaged=salvaged, lost=tuple(texts))
            try:
                if moved := _move(encodings, one, texts):
                    damage = replace(damage, quarantine=_below(encodings, moved))
            except (CacheError, MissingError) as error:
                damage = replace(damage, stays=error.message)
        damages.append(replace(damage, hint=_VERIFY_AGAIN if damage.stays else _FILL_AGAIN))
    return damages


def _move(encodings: Encodings, one: Examined, lost: list[str]) -> Path | None:
    """Move a shard to the quarantine; None: a writer has put a new one in its place already.

    Where the disk does not allow it (CacheError, MissingError), the shard is where it was.
    """
    place = encodings.folder / "quarantine" / one.path.name
    try:
        place.parent.mkdir(exist_ok=True)
        # The same texts may have been damaged before.
        others = (f"{place.stem}-{number}{place.suffix}" for number in count(2))
        names = chain([place], map(place.with_name, others))
        place = next(name for name in names if not name.exists())
        if file_id(one.path.stat()) != one.identity:
            return None
        note = {"file": one.path.name, "problem": one.problem, "lost": lost}
        note["found"] = datetime.now(UTC).isoformat(timespec="seconds")
        write_once(place.with_suffix(".json"), msgspec.json.format(msgspec.json.encode(note)))
        try:
            one.path.rename(place)
        except OSError:
            place.with_suffix(".json").unlink(missing_ok=True)
            raise
        if file_id(place.stat()) != one.identity:  # replaced at this very moment
            os.link(place, one.path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise disk_error(place, error) from error
    return place
