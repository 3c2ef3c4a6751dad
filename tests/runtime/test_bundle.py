"""Opening a bundle: every kind of damage is named."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import bundles
import pytest

from enginecast.errors import BundleError
from enginecast.runtime.bundle import reader
from enginecast.runtime.bundle.directory import Directory, State
from enginecast.runtime.bundle.reader import open_bundle
from enginecast.runtime.load import load
from enginecast.runtime.sessions.onnxruntime import OrtSession


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return bundles.make_bundle(tmp_path / "out")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def link(path: Path) -> None:
    moved = path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(moved)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = {
    "missing": (Path.unlink, r"engine\.onnx is missing"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), r"engine\.onnx has \d+ b"),
    "empty": (lambda path: path.write_bytes(b""), r"engine\.onnx has 0 bytes, expected \d+"),
    "flipped": (flip, r"engine\.onnx has sha256 [0-9a-f]{64}, expected [0-9a-f]{64}"),
    "link": (link, r"engine\.onnx is a symbolic link"),
    "pipe": (pipe, r"engine\.onnx is a special file"),
    "folder": (folder, r"engine\.onnx is a folder"),
    "renamed": (lambda path: path.rename(path.with_name("e.onnx")), r"'e\.onnx' is not listed"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named(root: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(root / "engine.onnx")
    with pytest.raises(BundleError, match=message):
        open_bundle(root)


def test_every_byte_of_every_file_is_covered(root: Path) -> None:
    for path in sorted(set(root.iterdir()) - {root / "manifest.json"}):
        original = path.read_bytes()
        for position in range(0, len(original), max(1, len(original) // 20)):
            data = bytearray(original)
            data[position] ^= 0x10
            path.write_bytes(data)
            with pytest.raises(BundleError, match=path.name):
                open_bundle(root)
        path.write_bytes(original)
    open_bundle(root)


@pytest.mark.parametrize("kind", [link, pipe, folder])
def test_the_manifest_is_a_plain_file(root: Path, kind: Callable[[Path], None]) -> None:
    kind(root / "manifest.json")
    with pytest.raises(BundleError, match=r"it has no manifest\.json"):
        open_bundle(root)


def test_what_is_opened_while_digests_are_computed_is_what_they_are_of(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad weights are in place until the runtime has opened them, and good ones when they are
    read."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    shutil.copy(root / "weights.safetensors", good)
    shutil.copy(good, bad)
    flip(bad)
    bad.replace(root / "weights.safetensors")
    begin = Event()

    def late(directory: Directory, name: str) -> tuple[str, State]:
        if name == "weights.safetensors":
            begin.wait(10)
        return digested(directory, name)

    def swapped(*arguments: Any, **options: Any) -> Any:
        session = opened(*arguments, **options)
        good.replace(root / "weights.safetensors")
        begin.set()
        return session

    digested, opened = Directory.digest, OrtSession.open
    monkeypatch.setattr(reader, "LARGE", 1)
    monkeypatch.setattr(Directory, "digest", late)
    monkeypatch.setattr(OrtSession, "open", swapped)
    with pytest.raises(BundleError, match=r"weights\.safetensors was changed while"):
        load(root)
