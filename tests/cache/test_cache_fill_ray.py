"""Fills on Ray: the same contents as one process gives, whoever is killed, and nothing left."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_fixtures import short_captions, words_t5
from cache_shards import open_folder
from exports import cast

pytest.importorskip("ray", reason="Ray is not installed")

from ray_runs import PATIENCE, RayRun, ray_fill

from enginecast.cache.encoders.open_encoder import open_encoder
from enginecast.cache.encoders.request import EncoderRequest
from enginecast.cache.fill.ray import Job, attached_ray, divide, local_ray, open_here
from enginecast.cache.store.folders import create_store, open_store
from enginecast.cache.store.index import Index, open_index
from enginecast.cache.store.shard import Entry
from enginecast.errors import CacheError, MissingError, UsageError
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
    assert cast(capsys, "cache", "fill", model, "--texts", texts, "-o", alone, *SMALL).code == 0
    with ray_fill(model, "--texts", texts, "-o", cache, *SMALL, "--json") as run:
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
    ran = cast(capsys, "cache", "fill", model, "--texts", texts, "-o", cache, "--json")
    assert ran.json["cached_before"] == reported["unique"]


@pytest.mark.slow
def test_killed_workers_lose_nothing_and_double_nothing(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write(tmp_path, 4000)
    alone, cache = tmp_path / "alone", tmp_path / "cache"
    assert cast(capsys, "cache", "fill", model, "--texts", texts, "-o", alone, *SMALL).code == 0
    with ray_fill(model, "--texts", texts, "-o", cache, *SMALL, "--json") as run:
        for _ in range(3):
            before = len(shards(cache))
            run.until(lambda before=before: len(shards(cache)) >= before + 10)  # type: ignore[misc]
            run.workers()[0].kill()
        code, out, err = run.end()
        assert (code, err) == (0, "")
        assert json.loads(out)["failed"] == []
        run.require_nothing_left()
    assert shards(cache) == shards(alone)
    require_same(cache, alone)


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A disk that one fill fits on."""
    with open_folder() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount a small disk: {done.stderr.strip()}")
        try:
            yield folder
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_in_a_worker_is_one_error_and_the_next_fill_goes_on(
    tmp_path: Path, model: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write(tmp_path, 4000)
    cache = small_disk / "cache"
    rest = model, "--texts", texts, "-o", cache, *SMALL, "--max-disk", "100MB"
    with ray_fill(*rest) as run:
        # It would be refused before it began: another process fills the disk meanwhile.
        run.until(lambda: len(shards(cache)) >= 5)
        with (small_disk / "other").open("wb", buffering=0) as other, suppress(OSError):
            while True:
                other.write(bytes(4096))
        code, _, err = run.end()
        assert code == 3, err
        assert err.count("error: ") == 1
        assert "the disk is full; what was committed before is safe" in err
        assert "Traceback" not in err
        run.require_nothing_left()
    before = shards(cache)
    assert len(before) >= 5
    assert len(open_filled(cache)) > 0
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    done = cast(capsys, "cache", "fill", *rest, "--json")
    assert done.code == 0, done.err
    assert set(before) <= set(shards(cache))
    assert len(open_filled(cache)) == done.json["unique"]


CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
node = cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
sys.stdin.readline()
cluster.remove_node(node, allow_graceful=False)
print("removed", flush=True)
sys.stdin.readline()
cluster.shutdown()
"""


@pytest.mark.slow
def test_a_node_that_is_lost_in_the_middle_of_a_fill(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write(tmp_path, 4000)
    alone, cache = tmp_path / "alone", tmp_path / "cache"
    assert cast(capsys, "cache", "fill", model, "--texts", texts, "-o", alone, *SMALL).code == 0
    folder = Path(tempfile.mkdtemp(prefix="ec-", dir="/tmp"))  # Ray's sockets want a short path
    environment = {**os.environ, "TMPDIR": str(folder), "HOME": str(folder)}
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "env": environment}
    cluster = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CLUSTER], stdin=subprocess.PIPE, **piped
    )
    assert cluster.stdin is not None
    assert cluster.stdout is not None
    try:
        address = cluster.stdout.readline().strip()
        command = [sys.executable, "-m", "enginecast", "cache", "fill", model, "--texts", texts]
        command += ["-o", cache, *SMALL, "--engine", "ray", "--ray-address", address, "--json"]
        with subprocess.Popen(
            [*map(str, command), "--workers", "2"], stderr=subprocess.PIPE, **piped
        ) as fill:
            until = time.monotonic() + PATIENCE
            while len(shards(cache)) < 10 and fill.poll() is None:
                assert time.monotonic() < until
                time.sleep(0.05)
            assert fill.poll() is None, fill.communicate()
            cluster.stdin.write("remove\n")
            cluster.stdin.flush()
            assert cluster.stdout.readline() == "removed\n"
            out, err = fill.communicate(timeout=4 * PATIENCE)
        assert (fill.returncode, err) == (0, "")
        assert json.loads(out)["failed"] == []
        require_same(cache, alone)
    finally:
        cluster.communicate("end\n", timeout=PATIENCE)
        shutil.rmtree(folder, ignore_errors=True)


ENDS = {"SIGKILL": -signal.SIGKILL, "SIGINT": 130, "SIGTERM": 128 + signal.SIGTERM}


@pytest.mark.slow
def test_a_killed_fill_leaves_no_process_and_the_next_goes_on(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write(tmp_path, 4000)
    alone, cache = tmp_path / "alone", tmp_path / "cache"
    assert cast(capsys, "cache", "fill", model, "--texts", texts, "-o", alone, *SMALL).code == 0
    arguments = (model, "--texts", texts, "-o", cache, *SMALL)
    for name, wanted in ENDS.items():
        before = shards(cache)
        with ray_fill(*arguments) as run:
            run.until(lambda before=before: len(shards(cache)) >= len(before) + 10)  # type: ignore[misc]
            end(run, signal.Signals[name])
            code, _, err = run.end()
            assert code == wanted, (name, err)
            assert "Traceback" not in err
            run.require_nothing_left()
        assert set(shards(cache)) > set(before)
    with ray_fill(*arguments, "--json") as run:
        code, out, err = run.end()
        assert (code, err) == (0, "")
        assert 30 <= json.loads(out)["cached_before"] < 4000
        run.require_nothing_left()
    assert shards(cache) == shards(alone)
    require_same(cache, alone)


def end(run: RayRun, number: int) -> None:
    """As Ctrl-C does, a signal for the whole group; SIGKILL for the fill alone."""
    if number == signal.SIGINT:
        os.killpg(run.process.pid, number)
    else:
        run.process.send_signal(number)


@pytest.mark.slow
def test_another_model_on_the_workers_is_one_clear_error(tmp_path: Path, model: Path) -> None:
    swapped = words_t5(tmp_path / "t5")
    other = words_t5(tmp_path / "other", seed=1) / "model.safetensors"
    cache = tmp_path / "cache"
    with ray_fill(swapped, "--texts", write(tmp_path, 40), "-o", cache) as run:
        run.until(lambda: any(run.folder.glob("enginecast-ray-*")))  # the plan is made by now
        other.replace(swapped / "model.safetensors")
        code, _, err = run.end()
        run.require_nothing_left()
    assert code == 2
    assert "another encoder than where the fill was started" in err
    assert "model:" in err
    assert "Traceback" not in err
    assert shards(cache) == []


def job(cache: Path, model: Path, **changes: Any) -> Job:
    request = EncoderRequest(str(model))
    encoder = open_encoder(request)
    encoder.close()
    store = create_store(cache)
    store.add("t5", encoder.spec, encoder.about, encoder.tokenizer)
    made = Job("a", str(cache), store.id, "t5", encoder.spec, request, 512, abroad=True)
    return replace(made, **changes)


def test_a_worker_needs_the_same_cache_and_the_same_model(tmp_path: Path, model: Path) -> None:
    made = job(tmp_path / "cache", model)
    _, encoder = open_here(made)
    assert encoder.spec == made.spec
    encoder.close()
    with pytest.raises(CacheError, match="another folder"):
        open_here(replace(made, store="0123"))
    half = replace(made.request, precision="bf16")
    with pytest.raises(CacheError, match=f"{model}: another encoder .* precision: 'fp32', 'bf16'"):
        open_here(replace(made, request=half))


def nodes(*resources: dict[str, float]) -> list[dict[str, Any]]:
    return [{"Alive": True, "Resources": one} for one in resources]


def test_workers_share_what_there_is() -> None:
    cpu, cuda = EncoderRequest("m"), EncoderRequest("m", device="cuda")
    two = nodes({"CPU": 8.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 1.0}, {"memory": 1.0})
    dead = [*two, {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}]

    def shared(request: EncoderRequest, workers: int | None) -> tuple[int, int, int]:
        share = divide(request, workers, dead)
        return share.workers, share.cpus, share.gpus

    assert shared(cpu, None) == (2, 4, 0)
    assert shared(cpu, 3) == (3, 2, 0)
    assert shared(cpu, 12) == (12, 1, 0)
    assert shared(replace(cpu, threads=3), None) == (2, 3, 0)
    assert shared(cuda, None) == (3, 1, 1)
    assert shared(cuda, 2) == (2, 1, 1)
    with pytest.raises(UsageError, match="--workers 13: expected at most 12, one for each CPU"):
        shared(cpu, 13)
    with pytest.raises(UsageError, match="--workers 4: expected at most 3, one for each GPU"):
        shared(cuda, 4)
    with pytest.raises(MissingError, match="Ray has no GPU"):
        divide(cuda, None, nodes({"CPU": 8.0}))


def test_without_ray_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingError, match="--engine ray needs ray") as caught, local_ray(1, 0):
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
