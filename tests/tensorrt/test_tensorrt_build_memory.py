"""What builds on a machine leave for later ones: the timing cache, and times for the estimate.

TensorRT is a fake here: the caches that it refuses are those of another version of the fake.
"""

import json
from pathlib import Path

import pytest
from fake_tensorrt_base import pack_cache, unpack_cache
from tensorrt_orders import MadeUpGpu, Rig, make_rig

from enginecast.exporters.tensorrt import timing as timing
from enginecast.exporters.tensorrt.lower import PLAN_FILE, lower_to_tensorrt
from enginecast.exporters.tensorrt.timing import HEAD, Build, default_folder, estimate, memory_of
from enginecast.runtime.device import gpu as gpus

VERSION = "11.0.0.114+fake"
MACHINE = {
    "gpu_name": "NVIDIA H200",
    "gpu": "sm90",
    "tensorrt": VERSION,
    "cuda": "13",
    "driver": "580.95.05",
}


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rig:
    return make_rig(monkeypatch, tmp_path, VERSION)


def cache_of(rig: Rig) -> Path:
    (found,) = rig.cache.glob("*.cache")
    return found


def content(path: Path) -> bytes:
    """Behind the head and the digest."""
    return path.read_bytes().removeprefix(HEAD).partition(b"\n")[2]


def test_a_timing_cache_is_kept_and_read_again(rig: Rig) -> None:
    lower_to_tensorrt(rig.order())
    kept = cache_of(rig)
    assert kept.name == "NVIDIA-H200_sm90_tensorrt-11.0.0.114+fake_cuda-13_driver-580.95.05.cache"
    assert "MatMul" in unpack_cache(content(kept))[1]
    assert rig.cache.stat().st_mode & 0o077 == 0
    lower_to_tensorrt(rig.order())
    first, second = rig.fake.called("IBuilderConfig.create_timing_cache")
    assert first["serialized_timing_cache"] == b""
    assert second["serialized_timing_cache"] == content(kept)
    assert [call["ignore_mismatch"] for call in rig.fake.called("IBuilderConfig.set_timing_cache")]
    assert not any(
        call["ignore_mismatch"] for call in rig.fake.called("IBuilderConfig.set_timing_cache")
    )
    assert not [line for line in rig.said if "cache" in line]


@pytest.mark.parametrize("change", ["gpu_name", "gpu", "tensorrt", "cuda", "driver"])
def test_each_machine_has_its_own(change: str) -> None:
    other = memory_of(Path("x"), MACHINE | {change: "sm89"})
    assert other.cache != memory_of(Path("x"), MACHINE).cache
    assert other.history != memory_of(Path("x"), MACHINE).history
    assert other.cache.parent == Path("x")


def test_a_name_cannot_leave_the_folder() -> None:
    found = memory_of(Path("x"), MACHINE | {"gpu_name": "../../NVIDIA/H200"})
    assert found.cache.parent == Path("x")
    assert "/" not in found.cache.name


@pytest.mark.parametrize("damage", ["flip", "cut", "foreign", "empty"])
def test_a_damaged_cache_is_reported_and_replaced(rig: Rig, damage: str) -> None:
    lower_to_tensorrt(rig.order())
    path = cache_of(rig)
    good = path.read_bytes()
    damaged = {
        "flip": good[:-3] + bytes([good[-3] ^ 1]) + good[-2:],
        "cut": good[:-5],
        "foreign": b"something else\n" * 9,
        "empty": b"",
    }
    path.write_bytes(damaged[damage])
    lower_to_tensorrt(rig.order())
    given = rig.fake.called("IBuilderConfig.create_timing_cache")[1:]
    assert [call["serialized_timing_cache"] for call in given] == [b""]  # TensorRT never saw it
    assert [line for line in rig.said if line.startswith(f"{path}: this timing cache is damaged")]
    assert path.read_bytes() == good
    assert (rig.folder / PLAN_FILE).exists()


@pytest.mark.parametrize("data", [b"not a cache", pack_cache("10.0", {"MatMul": 1.0})])
def test_a_cache_that_tensorrt_refuses_is_reported_and_replaced(rig: Rig, data: bytes) -> None:
    lower_to_tensorrt(rig.order())
    path = cache_of(rig)
    good = path.read_bytes()
    path.write_bytes(HEAD + timing._digest(data) + b"\n" + data)
    lower_to_tensorrt(rig.order())
    assert [line for line in rig.said if line.startswith(f"{path}: TensorRT refuses")]
    assert path.read_bytes() == good


def test_the_complaint_about_a_cache_is_not_the_reason_of_a_build_that_fails(rig: Rig) -> None:
    lower_to_tensorrt(rig.order())
    data = b"not a cache"
    cache_of(rig).write_bytes(HEAD + timing._digest(data) + b"\n" + data)
    rig.fake.failures.build_silently = True
    with pytest.raises(Exception, match="it gave no reason"):
        lower_to_tensorrt(rig.order())


def test_a_folder_that_cannot_be_written_costs_no_engine(rig: Rig) -> None:
    rig.cache.write_text("a file")
    assert lower_to_tensorrt(rig.order()).files == (PLAN_FILE,)
    reported = [line for line in rig.said if "cannot be written, so the next build" in line]
    assert len(reported) == 2  # the cache, and the history


def test_the_default_folder_is_that_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert default_folder() == Path("/elsewhere/enginecast/tensorrt")
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_folder() == Path.home() / ".cache/enginecast/tensorrt"


def test_the_estimate_is_reported_before_the_build(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    rig.fake.failures.during_step = lambda step: seen.append(len(rig.said))
    lower_to_tensorrt(rig.order())
    assert rig.said[0].startswith("TensorRT builds 5 layers. How long is not known: no build at")
    assert seen[0] == 1
    lower_to_tensorrt(rig.order())
    assert rig.said[1].startswith("TensorRT builds 5 layers, in about 1 s by 1 earlier build")
    lower_to_tensorrt(rig.order(level=1))  # of which nothing is known
    assert "no build at level 1 was timed" in rig.said[2]
    monkeypatch.setattr(gpus, "Gpu", lambda torch: MadeUpGpu(name="NVIDIA L4"))
    lower_to_tensorrt(rig.order())
    assert "How long is not known" in rig.said[3]


def test_what_is_remembered_of_a_build(rig: Rig) -> None:
    lower_to_tensorrt(rig.order())
    (path,) = rig.cache.glob("*.history.json")
    (build,) = json.loads(path.read_text())["builds"]
    assert build["layers"] == 5
    assert build["level"] == 3
    assert build["weights"] > 24 * 48 * 4  # the large weight, and the file's head
    assert 0 < build["seconds"] < 60


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"builds": [{}]}', '{"builds": [{"layers": 0, "weights": 1,', "\xff"]
)
def test_a_damaged_history_is_reported_and_replaced(rig: Rig, text: str) -> None:
    lower_to_tensorrt(rig.order())
    (path,) = rig.cache.glob("*.history.json")
    path.write_text(text, encoding="latin-1")
    lower_to_tensorrt(rig.order())
    assert [line for line in rig.said if "earlier builds are forgotten" in line]
    assert len(json.loads(path.read_text())["builds"]) == 1


def test_only_the_last_builds_are_remembered(tmp_path: Path) -> None:
    path = tmp_path / "h.json"
    many = tuple(Build(10, 0, 3, float(index)) for index in range(40))
    timing.keep_build(path, Build(10, 0, 3, 99.0), many, print)
    found = timing.read_history(path, print)
    assert len(found) == timing.KEPT
    assert found[-1].seconds == 99.0
    assert found[0].seconds == 40 - timing.KEPT + 1


def test_an_estimate_grows_with_the_layers_and_gives_the_span() -> None:
    earlier = (Build(100, 0, 3, 60.0), Build(200, 0, 3, 240.0), Build(100, 0, 5, 6000.0))
    assert estimate(400, 3, earlier) == (
        "TensorRT builds 400 layers, in about 6 min by 2 earlier builds on this GPU,"
        " 4 min to 8 min. Ctrl-C stops it."
    )
    assert "in about 30 s by 1" in estimate(50, 3, earlier[:1])
