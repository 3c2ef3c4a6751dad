"""Texts that failed or were cut: listed once, by several writers, until they are stored."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cache_shards import entries, entry, made

from enginecast.cache.store.folders import Encodings
from enginecast.cache.store.records import (
    FILES,
    Failure,
    read_failures,
    record,
)
from enginecast.errors import MissingError


@pytest.fixture
def encodings(tmp_path: Path) -> Encodings:
    return made(tmp_path / "cache")


def failure(number: int, reason: str = "it is not finite") -> Failure:
    one = entry(number)
    return Failure(f"{one.text}\nünd mehr", len(one.ids), reason, one.key)


def test_failures_come_back_until_they_are_stored(encodings: Encodings) -> None:
    assert read_failures(encodings) == []
    record(encodings, [failure(0), failure(1), failure(2)])
    record(encodings, [failure(1), failure(0, "it is infinite")])
    assert read_failures(encodings) == [failure(0, "it is infinite"), failure(1), failure(2)]
    assert len((encodings.folder / FILES[Failure]).read_bytes().splitlines()) == 4
    encodings.commit(entries([1]))
    assert read_failures(encodings) == [failure(0, "it is infinite"), failure(2)]


def test_several_writers_mix_no_lines(encodings: Encodings) -> None:
    def write(writer: int) -> None:
        for number in range(20):
            record(encodings, [failure(writer + 8 * number)])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert sorted(one.tokens for one in read_failures(encodings)) == sorted(
        len(entry(number).ids) for number in range(160)
    )


def test_a_full_disk_leaves_no_half_line(
    encodings: Encodings, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(encodings, [failure(0)])
    before = (encodings.folder / FILES[Failure]).read_bytes()
    write = os.write

    def fill_up(descriptor: int, data: bytes) -> int:
        if len(data) < 50:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:50])

    monkeypatch.setattr(os, "write", fill_up)
    with pytest.raises(MissingError, match="the disk is full"):
        record(encodings, [failure(1)])
    assert (encodings.folder / FILES[Failure]).read_bytes() == before
