"""What builds on a machine leave for later ones: the timing cache.

TensorRT is a fake here: the caches that it refuses are those of another version of the fake.
"""

from pathlib import Path

import pytest
from fake_tensorrt_base import pack_cache, unpack_cache
from tensorrt_orders import Rig, make_rig

from enginecast.exporters.tensorrt import timing as timing
from enginecast.exporters.tensorrt.lower import PLAN_FILE, lower_to_tensorrt
from enginecast.exporters.tensorrt.timing import HEAD, default_folder
from enginecast.exporters.tensorrt.timing import cache_of as path_of

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
    other = path_of(Path("x"), MACHINE | {change: "sm89"})
    assert other != path_of(Path("x"), MACHINE)
    assert other.parent == Path("x")


def test_a_name_cannot_leave_the_folder() -> None:
    found = path_of(Path("x"), MACHINE | {"gpu_name": "../../NVIDIA/H200"})
    assert found.parent == Path("x")
    assert "/" not in found.name


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
    assert len(reported) == 1


def test_the_default_folder_is_that_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert default_folder() == Path("/elsewhere/enginecast/tensorrt")
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_folder() == Path.home() / ".cache/enginecast/tensorrt"
