"""manifest.json: the same bytes for the same content, and strict reading."""

import json
from typing import Any

import bundles
import msgspec
import pytest

from enginecast.errors import BundleError
from enginecast.runtime.bundle.manifest import (
    FileRecord,
    Fusion,
    Manifest,
    OutputVerdict,
    PassRecord,
    Site,
    is_file_name,
)
from enginecast.runtime.bundle.manifest_json import decode, encode, seal

FILES = tuple(
    FileRecord(name=name, size=3, sha256="0" * 64)
    for name in ("engine.onnx", "weights.safetensors", "tokenizer.json")
)


def full() -> Manifest:
    """A manifest with something in every field."""
    judged = OutputVerdict(name="hidden", error=1e-7, floor=2e-7, ratio=0.5, limit=4.0)
    outcome = msgspec.structs.replace(
        bundles.verdict(), outputs=(judged,), cases=("one",), reasons=("agrees",)
    )
    return bundles.manifest(
        passes=(
            PassRecord(
                name="unify-dtype",
                spec="unify-dtype{to=fp16}",
                rewritten=1,
                sites=(Site(module="a.b", source="model.py:3", ordinal=0, note="moved"),),
            ),
        ),
        fusion=(Fusion(kind="rms-norm", expected=2, program=2, engine=1, missing=("b",)),),
        engines=(bundles.engine(verdict=outcome, domains={"com.microsoft": 1}),),
        files=FILES,
    )


def edited(**changes: Any) -> bytes:
    content = json.loads(encode(full()))
    del content["digest"]
    return seal(content | changes)


def test_round_trip_keeps_everything() -> None:
    assert decode(encode(full())) == full()


def test_newer_schema_is_refused_with_both_versions() -> None:
    data = edited(schema_version=3, field_of_the_future=1)
    with pytest.raises(BundleError, match="bundle schema 3, this build reads 1") as caught:
        decode(data)
    assert caught.value.hint == "Upgrade enginecast."


@pytest.mark.parametrize("version", [0, -1])
def test_older_schema_is_refused(version: int) -> None:
    with pytest.raises(BundleError, match=f"bundle schema {version}") as caught:
        decode(edited(schema_version=version))
    assert "Export" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"surprise": 1}, "unknown field `surprise`"),
        ({"inputs": 3}, r"\$\.inputs"),
        ({"precision": True}, r"\$\.precision"),
        ({"symbols": {"batch": [1]}}, r"\$\.symbols"),
        ({"symbols": {"batch": [4, 1], "sequence": [2, 6]}}, r"\$\.symbols\.batch"),
        ({"symbols": {"batch": [1, 4]}}, r"\$\.inputs\[0\]\.shape\[1\].*'sequence'"),
        ({"files": [{"name": "a", "size": -1, "sha256": "0" * 64}]}, r"\$\.files\[0\]\.size"),
        ({"files": [{"name": "a", "size": True, "sha256": "0" * 64}]}, r"\$\.files\[0\]\.size"),
        ({"files": [{"name": "a", "size": 1, "sha256": "0" * 63}]}, r"\$\.files\[0\]\.sha256"),
        ({"files": [{"name": "a", "size": 1, "sha256": "0" * 64}]}, r"\$\.engines\[0\]\.file"),
    ],
)
def test_faults_name_the_json_path(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(BundleError, match=f"manifest.json: .*{path}"):
        decode(edited(**changes))


@pytest.mark.parametrize(
    "name",
    ["..", ".hidden", "a/b", "/etc/passwd", "a\\b", "C:\\x", "", "a\0b", "a\n", "é", "x" * 256],
)
def test_file_names_stay_inside_the_folder(name: str) -> None:
    assert not is_file_name(name)
    record = {"name": name, "size": 1, "sha256": "0" * 64}
    with pytest.raises(BundleError, match=r"\$\.files\[0\]\.name") as caught:
        decode(edited(files=[record]))
    assert repr(name) in caught.value.message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{",
        b"\xef\xbb\xbf" + edited(),
        edited()[:-10],
        b"[" * 200_000,
        b'{"schema_version": 1' + b"0" * 5000 + b"}",
        edited().replace(b'"size": 3', b'"size": 1e999'),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_not_a_manifest_is_a_bundle_error(data: bytes) -> None:
    with pytest.raises(BundleError, match=r"manifest\.json"):
        decode(data)


def test_any_changed_byte_is_found() -> None:
    data = encode(full())
    decode(data)
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(BundleError, match=r"manifest\.json"):
            decode(bytes(damaged))


@pytest.mark.parametrize("text", ["\x1b]0;title\x07", "\x9b31m", "a\rb", "\u202egnp.exe", "\x00"])
def test_no_text_acts_on_a_terminal(text: str) -> None:
    with pytest.raises(BundleError, match=r"\$\.notes\[1\]: expected text without control"):
        decode(edited(notes=["fine\n\ttoo", text]))
    model = {"name": "tiny", "fingerprint": {text: "1"}}
    with pytest.raises(BundleError, match=r"\$\.model\.fingerprint: expected text without control"):
        decode(edited(model=model))
    written = encode(bundles.manifest(notes=(text,)))  # such as what a compiler said, in color
    assert decode(written).notes == (ascii(text)[1:-1],)
