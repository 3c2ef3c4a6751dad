"""What builds on a machine leave for later ones: the timing cache, and times for the estimate.

TensorRT is a fake here: the caches that it refuses are those of another version of the fake.
"""

import json
from pathlib import Path

import pytest
from fake_tensorrt_base import unpack_cache
from tensorrt_orders import Rig, make_rig

from enginecast.exporters.tensorrt import timing as timing
from enginecast.exporters.tensorrt.lower import PLAN_FILE, lower_to_tensorrt
from enginecast.exporters.tensorrt.timing import HEAD

VERSION = "11.0.0.114+fake"


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
