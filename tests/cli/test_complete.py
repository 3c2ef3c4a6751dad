"""`verify` completes a verdict by emulation where the engine runs, on all that it was judged by."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from enginecast.api import compile as export
from enginecast.compiler.verify.bundle import _complete, verify_bundle
from enginecast.runtime.bundle.manifest import MANIFEST_NAME, Part, Verdict
from enginecast.runtime.bundle.manifest_json import encode
from enginecast.runtime.bundle.reader import digest, open_bundle
from enginecast.runtime.load import load
from enginecast.verification import reference as reference_module


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
    assert any("does not include: " in note for note in check.notes)
    [record] = open_bundle(tmp_path / "bundle").manifest.engines
    assert record.verdict.outcome == "verified-by-emulation"


@pytest.fixture
def around(tmp_path: Path) -> Path:
    """A bundle with another one in it; both have a verdict by emulation."""
    folder = emulated(tmp_path / "bundle")
    inner = shutil.copytree(folder, tmp_path / "copy").rename(folder / "inner")
    part = Part(name="inner", sha256=digest(inner / MANIFEST_NAME))
    manifest = msgspec.structs.replace(open_bundle(inner).manifest, parts=(part,))
    (folder / MANIFEST_NAME).write_bytes(encode(manifest))
    return folder


def outcomes(folder: Path) -> tuple[str, str]:
    """Of the bundle and of the one within it."""
    bundle = open_bundle(folder)
    both = (bundle.manifest, bundle.parts["inner"].manifest)
    outer, inner = (manifest.engines[0].verdict.outcome for manifest in both)
    return outer, inner


def _killing(left: int) -> Any:
    """`Path.replace` that ends the process before it renames once more than `left` times."""
    plain = Path.replace

    def replace(self: Path, target: Any) -> Path:
        nonlocal left
        if not left:
            os._exit(9)
        left -= 1
        return plain(self, target)

    return replace


def killed_while_completing(folder: Path) -> Iterator[int]:
    """Complete the verdicts in processes that end right before a rename, each before the next one;
    the last is not killed.
    """
    with ExitStack() as stack:
        engine = stack.enter_context(load(folder, require="verified-by-emulation"))
        verdict: Verdict = msgspec.structs.replace(engine.verdict, outcome="verified")
        renames = 0
        while True:
            if not (child := os.fork()):
                Path.replace = _killing(renames)  # type: ignore[method-assign]
                os._exit(0 if _complete(engine, verdict, {"inner": verdict}) else 1)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code in (0, 9)
            yield code
            if not code:
                return
            renames += 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_bundle_loads_wherever_its_completion_is_killed(around: Path) -> None:
    emulation = "verified-by-emulation"
    found = [(code, outcomes(around)) for code in killed_while_completing(around)]
    assert [code for code, _ in found] == [9, 9, 9, 0]
    # Each process begins anew, so that the first one's work is found by the next.
    assert [states for _, states in found] == [
        (emulation, emulation),
        (emulation, emulation),
        (emulation, "verified"),
        ("verified", "verified"),
    ]
    assert "becomes" not in (around / MANIFEST_NAME).read_text()
