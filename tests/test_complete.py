"""`verify` completes a verdict by emulation where the engine runs, on all that it was judged by."""

from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from enginecast.api import compile as export
from enginecast.compiler.verify_bundle import verify_bundle
from enginecast.runtime.bundle.manifest import MANIFEST_NAME
from enginecast.runtime.bundle.manifest_json import encode
from enginecast.runtime.bundle.reader import open_bundle
from enginecast.verify import reference as reference_module


def emulated(folder: Path) -> Path:
    """A bundle whose engine, as its manifest says, has not run on its target."""
    bundle = export(nn.Linear(64, 64).eval(), folder, example={"input": torch.randn(2, 64)})
    [record] = bundle.manifest.engines
    verdict = msgspec.structs.replace(record.verdict, outcome="verified-by-emulation")
    engines = (msgspec.structs.replace(record, verdict=verdict),)
    manifest = msgspec.structs.replace(bundle.manifest, engines=engines)
    (folder / MANIFEST_NAME).write_bytes(encode(manifest))
    return folder


def test_a_verdict_by_emulation_is_completed(tmp_path: Path) -> None:
    assert verify_bundle(emulated(tmp_path / "bundle")).completed
    [record] = open_bundle(tmp_path / "bundle").manifest.engines
    assert record.verdict.outcome == "verified"


def test_a_verdict_is_not_completed_without_the_cases_that_were_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_module.write_reference, "__kwdefaults__", {"budget": 3000})
    check = verify_bundle(emulated(tmp_path / "bundle"))
    assert (check.verdict.outcome, check.completed) == ("verified", False)
    assert any("no room for: " in note for note in check.notes)
    [record] = open_bundle(tmp_path / "bundle").manifest.engines
    assert record.verdict.outcome == "verified-by-emulation"
