"""What an engine lacks is said everywhere, and needs consent where it was asked for."""

import json
from pathlib import Path

import pytest
from exports import cast

from enginecast.capture.inputs.downgraded import Downgraded
from enginecast.compiler.publication.downgrades import downgrades_of
from enginecast.compiler.request import ExportRequest, ModelOptions
from enginecast.verification.report.files import read_report
from enginecast.verification.report.page import page_of

SOURCE = '''
import torch
from torch import nn


class Rows(nn.Module):
    """Goes through the rows one by one, and gives half precision."""

    def forward(self, x):
        return {"low": torch.stack([row * 2 for row in x]).half()}


def make():
    return Rows(), {"x": torch.randn(3, 5)}
'''

SCRIPT = Downgraded("a TorchScript engine", "engine", "--fallback torchscript", is_asked=True)
PATH = Downgraded("one path", "branch", "--allow-unverified-branches", is_asked=True)
SIZE = Downgraded("x_1 takes 2..9", "sizes", "--dynamic x:1=2..9")
FEWER = Downgraded("x_1 is fixed at 4", "sizes", "--dynamic x:1=4")
ALLOWED = ModelOptions(allow_unverified_branches=True)


@pytest.mark.parametrize(
    ("options", "is_allowed", "consents"),
    [
        (ModelOptions(), False, ["missing", "missing", "not needed"]),
        (ModelOptions(), True, ["given", "given", "not needed"]),
        (ModelOptions(fallback="torchscript"), False, ["given", "missing", "not needed"]),
        (ModelOptions(fallback="rewrite"), False, ["missing", "missing", "not needed"]),
        (ALLOWED, False, ["missing", "given", "not needed"]),
    ],
)
def test_what_was_asked_for_needs_consent(
    options: ModelOptions, is_allowed: bool, consents: list[str]
) -> None:
    request = ExportRequest("model", options=options, allow_fallback=is_allowed)
    found = downgrades_of(["a note", SCRIPT, PATH, SIZE, FEWER], request)
    assert [each.consent for each in found] == consents
    assert [each.text for each in found] == [SCRIPT, PATH, FEWER]  # a size has one line


def test_what_nobody_asked_for_is_said_and_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacking_model.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    plain = ("export", "lacking_model:make", "-o", "bundle", "--fallback", "none", "--no-speed")
    done = cast(capsys, *plain, "-q")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[1].startswith("sizes: batch is fixed at 3: ")
    assert lines[2] == "precision: output 'low' is float16 in the model, and float32 in the engine"
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text("utf-8"))
    report = read_report(tmp_path / "bundle")
    assert [each["consent"] for each in manifest["downgrades"]] == ["not needed"] * 2
    assert [each.text for each in report.downgrades] == [
        each["text"] for each in manifest["downgrades"]
    ]
    assert manifest["downgrades"][0]["option"] == "--dynamic x:0=3"
    head, _, rest = page_of(report).partition("</header>")
    assert "sizes: batch is fixed at 3" in head
    assert "batch is fixed at 3" not in rest
    assert "sizes: batch is fixed at 3" in cast(capsys, "inspect", "bundle").out
    fixed = cast(capsys, *plain, "--overwrite", "--json", "--dynamic", "x:0=3")
    assert [each["kind"] for each in fixed.json["downgrades"]] == ["precision"]


def test_what_was_asked_for_stays_so_where_it_is_narrowed_again() -> None:
    asked = Downgraded("x:0 is 1..8", "sizes", "--dynamic x:0=1..8", is_asked=True)
    again = Downgraded("x:0 is 1..4", "sizes", "--dynamic x:0=1..4")
    (found,) = downgrades_of([asked, again], ExportRequest("m", Path("out")))
    assert (found.text, found.consent) == (str(again), "missing")
