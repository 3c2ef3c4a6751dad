"""A writer that dies before each single step on the disk, one after the other."""

import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from cache_shards import entries, entry, made

from enginecast.cache.store.claims import sweep
from enginecast.cache.store.folders import STAGING_NAME
from enginecast.cache.store.index import open_index
from enginecast.cache.store.shard import SUFFIX

STEPS = {
    "fcntl.flock",
    "open",
    "os.chmod",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
}
"""Events of `sys.addaudithook`, raised before the step."""


def dies_at(number: int, work: Callable[[], None]) -> bool:
    """Run work in a process that kills itself before a step; whether it came to that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks, from Python 3.12
        child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL)
        return status != 0
    done, code = 0, 1

    def step(event: str, arguments: object) -> None:
        nonlocal done
        if event in STEPS:
            done += 1
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(step)
        work()
        code = 0
    finally:
        os._exit(code)


@pytest.mark.slow
def test_a_writer_may_die_at_any_step(tmp_path: Path) -> None:
    reported = tmp_path / "reported"
    states = set()
    for number in range(1, 200):
        root = tmp_path / str(number)

        def work(root: Path = root) -> None:
            encodings = made(root)
            report = os.open(reported, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for begin in (0, 5):
                encodings.commit(entries(range(begin, begin + 5)))
                os.write(report, b".")

        reported.write_bytes(b"")
        died = dies_at(number, work)
        encodings = made(root)
        index = open_index(encodings)
        assert index.errors == ()
        assert index.doubles == 0
        assert len(index) >= 5 * len(reported.read_bytes())
        for one in range(len(index)):
            place = index.find(entry(one).key)
            assert place is not None
            assert index.shards[place.shard].is_whole(place.text)
        assert {path.suffix for path in encodings.shard_folder.iterdir()} <= {SUFFIX}
        states.add(len(index))
        sweep(encodings)
        for staging in (root / STAGING_NAME, encodings.staging_folder):
            assert not staging.exists() or list(staging.iterdir()) == []
        if not died:
            break
    assert number > 40
    assert states == {0, 5, 10}
