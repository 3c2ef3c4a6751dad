"""Fills on Ray: the same contents as one process gives, whoever is killed, and nothing left."""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cache_fixtures import short_captions, words_t5
from exports import cast

pytest.importorskip("ray", reason="Ray is not installed")

from ray_runs import RayRun, ray_fill

from enginecast.cache.fill.ray import attached_ray, local_ray
from enginecast.cache.store.folders import open_store
from enginecast.cache.store.index import Index, open_index
from enginecast.cache.store.shard import Entry
from enginecast.errors import MissingError, UsageError
from enginecast.installation import install_command

SMALL = ("--shard-size", "20kB")
"""About 13 of the captions."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return words_t5(tmp_path_factory.mktemp("ray") / "t5")


def write(folder: Path, count: int) -> Path:
    path = folder / f"captions-{count}.txt"
    path.write_text("\n".join(short_captions(count)) + "\n")
    return path


def shards(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("*/shards/*.safetensors"))


def open_filled(cache: Path) -> Index:
    """The index of a cache in which every entry is whole and there once."""
    index = open_index(open_store(cache).encodings())
    assert index.doubles == 0
    assert not index.errors
    for shard in index.shards:
        assert all(shard.is_whole(text) for text in range(len(shard)))
    return index


def entries(index: Index) -> Iterator[Entry]:
    for row in range(len(index)):
        place = index.row(row)
        yield index.shards[place.shard].entry(place.text)


def require_same(cache: Path, wanted: Path) -> None:
    """The same keys and values; a worker may use another number of threads, which rounds."""
    got = {entry.key: entry for entry in entries(open_filled(cache))}
    expected = {entry.key: entry for entry in entries(open_filled(wanted))}
    assert got.keys() == expected.keys()
    for key, entry in expected.items():
        assert got[key].ids.tolist() == entry.ids.tolist()
        for name, values in entry.outputs.items():
            np.testing.assert_allclose(got[key].outputs[name], values, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_two_workers_store_what_one_process_does(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write(tmp_path, 150)  # enough that the plan does not cut them finer for two workers
    alone, cache = tmp_path / "alone", tmp_path / "cache"
    assert cast(capsys, "cache", "fill", model, "--prompts", texts, "-o", alone, *SMALL).code == 0
    with ray_fill(model, "--prompts", texts, "-o", cache, *SMALL, "--json") as run:
        code, out, err = run.end()
        assert (code, err) == (0, "")
        reported = json.loads(out)
        run.require_nothing_left()
    assert (reported["stored"], reported["stored_by_others"], reported["failed"]) == (
        reported["unique"],
        0,
        [],
    )
    assert shards(cache) == shards(alone)
    assert len(shards(cache)) > 8
    require_same(cache, alone)
    ran = cast(capsys, "cache", "fill", model, "--prompts", texts, "-o", cache, "--json")
    assert ran.json["cached_before"] == reported["unique"]


def end(run: RayRun, number: int) -> None:
    """As Ctrl-C does, a signal for the whole group; SIGKILL for the fill alone."""
    if number == signal.SIGINT:
        os.killpg(run.process.pid, number)
    else:
        run.process.send_signal(number)


def test_without_ray_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingError, match="--runner ray needs ray") as caught, local_ray(1, 0):
        raise AssertionError
    assert caught.value.hint == install_command("ray")


def test_an_address_without_a_cluster_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="Ray's client"), attached_ray("ray://head:10001"):
        raise AssertionError
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match=f"{address}: nobody answers"), attached_ray(address):
            raise AssertionError
