"""What builds on a machine leave for later ones: the file of a timing cache, and build times."""

from pathlib import Path

import pytest

from enginecast.exporters.tensorrt import timing
from enginecast.exporters.tensorrt.timing import Build

HERE = {
    "gpu_name": "NVIDIA H200",
    "gpu": "sm90",
    "tensorrt": "11.0.0.114",
    "cuda": "13",
    "driver": "580.95.05",
}
STEM = "NVIDIA-H200_sm90_tensorrt-11.0.0.114_cuda-13_driver-580.95.05"
GOOD = timing.HEAD + timing._digest(b"measured") + b"\nmeasured"


@pytest.mark.parametrize("base", ["absolute", "relative", ""])
def test_files_are_of_one_machine(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / base) if base == "absolute" else base)
    found = timing.memory_of(None, HERE)
    root = tmp_path / ("absolute" if base == "absolute" else "home/.cache")
    assert found.cache == root / "enginecast/tensorrt" / f"{STEM}.cache"
    assert timing.memory_of(tmp_path, HERE).history == tmp_path / f"{STEM}.history.json"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (GOOD, ""),
        (GOOD[:-1] + b"!", "is damaged; a new one takes its place"),
        (GOOD[:-5], "is damaged"),
        (b"something else\n" * 9, "is damaged"),
        (b"", "is damaged"),
        (None, ""),
    ],
)
def test_a_timing_cache_lies_behind_its_digest(
    content: bytes | None, said: str, tmp_path: Path
) -> None:
    path, heard = tmp_path / "a.cache", list[str]()
    if content is not None:
        path.write_bytes(content)
    assert timing._read_cache(path, heard.append) == (b"measured" if content == GOOD else b"")
    assert len(heard) == bool(said)
    assert said in "".join(heard)


def test_the_last_builds_are_remembered(tmp_path: Path) -> None:
    path, heard = tmp_path / "folder" / "a.history.json", list[str]()
    for number in range(40):
        earlier = timing.read_history(path, heard.append)
        timing.keep_build(path, Build(number + 1, 5, 3, 1.0), earlier, heard.append)
    kept = timing.read_history(path, heard.append)
    assert [one.layers for one in kept] == list(range(9, 41))
    assert heard == []
    assert path.parent.stat().st_mode & 0o077 == 0
    for text in ("{", "[]", '{"builds": [{}]}', '{"builds": [{"layers": 0}]}'):
        path.write_text(text)
        assert timing.read_history(path, heard.append) == ()
        assert "so earlier builds are forgotten" in heard.pop()
    (tmp_path / "file").touch()
    timing.keep_build(tmp_path / "file" / "a.json", kept[0], (), heard.append)
    assert "cannot be written, so the next build starts anew" in heard[0]


@pytest.mark.parametrize(
    ("earlier", "said"),
    [
        ([], "TensorRT builds 100 layers. How long is not known: no build at level 3 was timed"),
        ([(50, 5, 9.0)], "no build at level 3"),
        ([(50, 3, 9.0)], "in about 18 s by 1 earlier build on this GPU. Ctrl-C stops it."),
        (
            [(50, 3, 9.0), (100, 3, 600.0), (10, 3, 2.0)],
            "in about 20 s by 3 earlier builds on this GPU, 18 s to 10 min.",
        ),
    ],
)
def test_estimates_are_scaled_by_layers(earlier: list[tuple[int, int, float]], said: str) -> None:
    builds = tuple(Build(layers, 0, level, seconds) for layers, level, seconds in earlier)
    assert said in timing.estimate(100, 3, builds)
