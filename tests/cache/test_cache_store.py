"""Caches on disk: one commit is all or nothing, whatever the disk and other writers do."""

import errno
import json
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from threading import Barrier
from typing import TypeVar

import ml_dtypes
import numpy as np
import pytest
from cache_shards import ABOUT, NAME, SPEC, entries, entry, made, open_folder, read_only

from enginecast.cache.store.claims import sweep
from enginecast.cache.store.folders import Encodings, create_store, find_store, open_store
from enginecast.cache.store.index import open_index
from enginecast.cache.store.records import Failure, read_failures, record
from enginecast.cache.store.shard import Entry, open_shard
from enginecast.cache.upkeep.checking import check_store
from enginecast.cache.upkeep.merging import merge
from enginecast.errors import CacheError, MissingError

_Result = TypeVar("_Result")
ROWS = SPEC.__replace__(outputs=(SPEC.outputs[0].__replace__(width=4096),))


@pytest.fixture
def encodings(tmp_path: Path) -> Encodings:
    return made(tmp_path / "cache")


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A disk of one megabyte."""
    with open_folder() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount a small disk: {done.stderr.strip()}")
        try:
            yield folder
        finally:
            subprocess.run(["umount", str(folder)], check=True)


def wide_entries(begin: int, count: int) -> list[Entry]:
    """64 kB each, no two alike."""
    values = {"last_hidden_state": np.ones((8, 4096), ml_dtypes.bfloat16)}
    numbers = range(begin, begin + count)
    return [Entry(entry(n).key, f"text {n}", entry(n).ids, values) for n in numbers]


def at_once(count: int, work: Callable[[int], _Result]) -> list[_Result | Exception]:
    """What calls on several threads gave that began at the same moment."""
    barrier = Barrier(count)

    def run(number: int) -> _Result | Exception:
        barrier.wait()
        try:
            return work(number)
        except CacheError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def fill_up(file: FileIO) -> None:
    while True:
        file.write(bytes(512))


def files_of(encodings: Encodings) -> list[str]:
    return sorted(path.name for path in encodings.folder.rglob("*") if path.is_file())


def test_a_full_disk_loses_nothing(small_disk: Path) -> None:
    encodings = made(small_disk / "cache", ROWS)
    first = encodings.commit(wide_entries(0, 4))
    before = files_of(encodings)
    with pytest.raises(MissingError, match="the disk is full; what was committed") as caught:
        encodings.commit(wide_entries(4, 40))
    assert caught.value.exit_code == 3
    assert "run the same command again" in caught.value.hint
    assert files_of(encodings) == before
    assert open_shard(first, ROWS).is_whole(3)
    encodings.commit(wide_entries(4, 4))
    assert len(open_index(encodings)) == 8


def test_a_disk_that_is_full_from_the_start(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space left"), ballast.open("wb", buffering=0) as file:
        fill_up(file)
    with pytest.raises(MissingError, match="the disk is full"):
        made(small_disk / "cache")
    ballast.unlink()
    assert len(open_index(made(small_disk / "cache"))) == 0


def test_a_file_that_may_not_grow_is_not_committed(tmp_path: Path) -> None:
    encodings = made(tmp_path / "cache", ROWS)
    before = files_of(encodings)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CacheError, match=r"shards/\w+\.safetensors: File too large"):
            encodings.commit(wide_entries(0, 4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files_of(encodings) == before
    encodings.commit(wide_entries(0, 4))


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_disk_that_fills_up_at_the_end(
    encodings: Encodings, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    before = files_of(encodings)

    def refuse(*given: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(MissingError, match="the disk is full"):
        encodings.commit(entries(range(3)))
    monkeypatch.undo()
    assert files_of(encodings) == before


def test_a_read_only_cache_says_so() -> None:
    with open_folder() as folder:
        encodings = made(folder / "cache")
        with read_only(folder):
            with pytest.raises(CacheError, match="Permission denied"):
                encodings.commit(entries(range(3)))
            with pytest.raises(CacheError, match="Permission denied"):
                create_store(folder / "cache").add("another", SPEC, ABOUT, b"{}")
            with pytest.raises(CacheError, match="Permission denied"):
                create_store(folder / "other")
            assert made(folder / "cache").spec == SPEC


def test_rows_of_a_batch_do_not_store_the_batch(tmp_path: Path) -> None:
    encodings = made(tmp_path / "cache", ROWS)
    batch = np.ones((64, 100, 4096), ml_dtypes.bfloat16)
    rows = [batch[number, : number + 1] for number in range(3)]
    path = encodings.commit(
        [
            Entry(one.key, one.text, one.ids, {"last_hidden_state": row})
            for one, row in zip(entries(range(3)), rows, strict=True)
        ]
    )
    assert path.stat().st_size < sum(row.nbytes for row in rows) + 4096


def test_a_repeated_commit_replaces_itself(encodings: Encodings) -> None:
    wanted = entries(range(6))
    done = at_once(4, lambda number: encodings.commit(wanted if number % 2 else wanted[::-1]))
    assert len(set(map(str, done))) == len(encodings.shard_paths()) == 1
    index = open_index(encodings)
    assert (len(index), index.doubles) == (6, 0)
    assert all(index.shards[0].is_whole(number) for number in range(6))
    assert list(encodings.staging_folder.iterdir()) == []


def test_of_several_that_add_an_encoder_one_wins(tmp_path: Path) -> None:
    specs = [SPEC.__replace__(max_length=8 + number % 2) for number in range(4)]
    for attempt in range(20):
        root = tmp_path / str(attempt)

        def add(number: int, root: Path = root) -> Encodings:
            return create_store(root).add(NAME, specs[number], ABOUT, b"%d" % (number % 2))

        done = at_once(4, add)
        won = open_store(root).encodings()
        assert won.tokenizer_file.read_bytes() == b"%d" % (won.spec.max_length - 8)
        for spec, one in zip(specs, done, strict=True):
            if spec == won.spec:
                assert isinstance(one, Encodings)
            else:
                assert "made for another encoder; here and asked for: max_length:" in str(one)
        assert sorted(path.name for path in root.iterdir()) == [".staging", "cache.json", NAME]


def test_a_name_that_is_taken_by_something_else(tmp_path: Path) -> None:
    store = create_store(tmp_path / "cache")
    (store.root / "notes").mkdir()
    (store.root / "notes" / "a.txt").touch()
    (store.root / "file").touch()
    for name in ("notes", "file"):
        with pytest.raises(CacheError, match=f"{name}: expected the folder of an encoder"):
            store.add(name, SPEC, ABOUT, b"{}")
    for name in ("", ".hidden", "a/b", "a b", "-x"):
        with pytest.raises(CacheError, match="expected letters, digits"):
            store.add(name, SPEC, ABOUT, b"{}")
    assert store.names() == []


def test_encoders_are_asked_for_by_name(tmp_path: Path) -> None:
    store = create_store(tmp_path / "cache")
    with pytest.raises(CacheError, match="no encoder yet"):
        store.encodings()
    store.add("clip", SPEC, ABOUT, b"{}")
    assert store.encodings().name == "clip"
    store.add("t5", SPEC.__replace__(max_length=9), ABOUT, b"{}")
    assert open_store(store.root).encodings("t5").spec.max_length == 9
    with pytest.raises(CacheError, match="several encoders; name one: it holds clip, t5"):
        store.encodings()
    with pytest.raises(CacheError, match="no encoder 'vae': it holds clip, t5"):
        store.encodings("vae")


def test_what_is_not_a_cache_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="but it does not exist"):
        open_store(tmp_path / "missing")
    with pytest.raises(CacheError, match=r"it has no cache\.json"):
        open_store(tmp_path)
    (tmp_path / "photo.png").touch()
    with pytest.raises(CacheError, match=r"or an empty folder, got one with photo\.png"):
        create_store(tmp_path)
    with pytest.raises(CacheError, match="Not a directory"):
        create_store(tmp_path / "photo.png")
    assert [path.name for path in tmp_path.iterdir()] == ["photo.png"]


def test_a_path_that_cannot_be_looked_at(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 300)
    for open_it in (open_store, find_store, create_store):
        with pytest.raises(CacheError, match="File name too long"):
            open_it(long / "cache")
    made(tmp_path / "other")
    with pytest.raises(CacheError, match="File name too long"):
        merge([tmp_path / "other"], long)
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for open_it in (open_store, find_store, create_store):
        with pytest.raises(CacheError, match="Too many levels of symbolic links"):
            open_it(tmp_path / "circle")
    with pytest.raises(CacheError, match="Too many levels of symbolic links"):
        merge([tmp_path / "other"], tmp_path / "circle")


def test_a_cache_that_others_may_not_look_into() -> None:
    with open_folder() as folder:
        encodings = made(folder / "cache")
        encodings.commit(entries(range(3)))
        store = open_store(folder / "cache")
        with closed(encodings.shard_folder), pytest.raises(CacheError, match="Permission denied"):
            encodings.shard_paths()
        record(encodings, [Failure("a", 1, "refused", bytes(16))])
        for place, read in (
            (encodings.staging_folder, lambda: sweep(encodings)),
            (encodings.folder / "failed.jsonl", lambda: read_failures(encodings)),
            (encodings.folder / "spec.json", lambda: check_store(store)),  # which is not damage
        ):
            with closed(place), pytest.raises(CacheError, match=f"{place}: Permission denied"):
                read()
        with closed(encodings.folder):
            for use in (store.names, lambda: store.add(NAME, SPEC, ABOUT, b"{}")):
                with pytest.raises(CacheError, match="Permission denied"):
                    use()
        with closed(store.root):
            for open_it in (open_store, find_store, create_store):
                with pytest.raises(CacheError, match=r"cache\.json: Permission denied"):
                    open_it(store.root)
            with pytest.raises(CacheError, match="Permission denied"):
                store.names()


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    """Only root may look into a folder or file, and nobody is root."""
    mode = folder.stat().st_mode
    folder.chmod(0o700)
    root = os.geteuid() == 0
    if not root:
        pytest.skip("takes root, who can be somebody else")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        folder.chmod(mode)


def test_what_a_killed_writer_left_of_a_cache_is_not_a_hindrance(tmp_path: Path) -> None:
    (tmp_path / ".cache.json.0123").write_bytes(b"{")
    assert create_store(tmp_path).names() == []


def test_a_cache_of_another_version_is_refused(encodings: Encodings) -> None:
    mark = encodings.folder.parent / "cache.json"
    content = json.loads(mark.read_text())
    mark.write_text(json.dumps({**content, "version": 2}))
    for open_it in (open_store, create_store):
        with pytest.raises(CacheError, match=r"expected version 1 of enginecast-cache, got 2"):
            open_it(encodings.folder.parent)
    mark.write_text("{")
    with pytest.raises(CacheError, match=r"cache\.json: Input data was truncated"):
        open_store(encodings.folder.parent)


def test_fields_of_another_version_are_not_what_is_reported(encodings: Encodings) -> None:
    mark = encodings.folder.parent / "cache.json"
    content = json.loads(mark.read_text())
    mark.write_text(json.dumps({**content, "version": 2, "created": "today"}))
    with pytest.raises(CacheError, match=r"expected version 1 .* got 2 .*\nRead it with"):
        open_store(encodings.folder.parent)


def test_an_edited_spec_is_refused(encodings: Encodings) -> None:
    file = encodings.folder / "spec.json"
    text = file.read_text()
    file.write_text(text.replace('"max_length": 8', '"max_length": 9'))
    store = open_store(encodings.folder.parent)
    with pytest.raises(CacheError, match="it was edited or damaged\nPut the original back"):
        store.encodings()
    file.write_text(text.replace('"max_length": 8', '"max_length": 0'))
    with pytest.raises(CacheError, match=r"spec\.json: .*max_length"):
        store.encodings()
    file.write_text(text)
    assert store.encodings().spec == SPEC


def test_disks_without_hard_links_hold_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    ident = create_store(tmp_path / "cache").id
    assert create_store(tmp_path / "cache").id == ident
