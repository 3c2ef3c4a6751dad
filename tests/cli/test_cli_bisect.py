"""`enginecast bisect`, culprits in rejected exports, and `export --drop-guilty`."""

from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from exports import Exports, Ran, cast
from harmful_passes import NAMES

import enginecast
from enginecast import plugins
from enginecast.passes import registry
from enginecast.runtime.bundle.manifest_json import decode

Capture = pytest.CaptureFixture[str]
LATE = "encoder.block.1.layer.1.DenseReluDense.wo"
ONE = f"canonicalize,touch-linears{{wrong={LATE}}},fuse-rms-norm"
TWO = f"canonicalize,touch-linears{{wrong=block.0.layer.0.SelfAttention.o,{LATE}}}"
LINEARS = 14
"""Of a gated T5 with two layers."""


@pytest.fixture(autouse=True)
def _harmful_package(monkeypatch: pytest.MonkeyPatch, exports: Exports) -> None:
    """Pretend that another package with harmful passes is installed."""
    found = [EntryPoint(name, value, registry.REGISTRY.group) for name, value in NAMES.items()]

    def installed(group: str) -> list[EntryPoint]:
        return [entry for entry in found if entry.group == group]

    monkeypatch.setattr(plugins, "entry_points", installed)
    monkeypatch.chdir(exports.root)


@pytest.fixture(scope="module")
def t5(exports: Exports) -> str:
    return exports.model("t5")


def test_a_culprit_is_named_on_stdout_and_the_exit_code_is_1(t5: str, capsys: Capture) -> None:
    done = cast(capsys, "bisect", t5, "--pipeline", ONE)
    assert done.code == 1
    (line,) = done.out.splitlines()
    assert line.startswith(f"pass touch-linears, site {LATE}, modeling_t5.py:")
    assert "x the noise floor; isolated error " in line
    assert line.endswith("(arises here)")
    assert "'touch-linears' promises 'reordered'" in done.err
    assert f"--drop-guilty would leave 1 of {LINEARS} sites out" in done.err


def test_a_model_that_is_fine_is_said_to_be(exports: Exports, capsys: Capture) -> None:
    model = exports.model("plain")
    done = cast(capsys, "bisect", model, "--precision", "fp32")
    assert done.code == 0
    assert done.out.startswith("nothing is guilty: canonicalize, ")
    reported = cast(capsys, "bisect", model, "--pipeline", "canonicalize", "--json")
    assert (reported.code, reported.json["guilty"], reported.json["culprits"]) == (0, False, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --pipeline SPEC, or --precision NAME"),
        (("--pipeline", "fuse-rms-nrom"), "unknown pass 'fuse-rms-nrom'"),
        (("--pipeline", "fuse-rms-norm,canonicalize"), "must come after 'canonicalize'"),
        (("--pipeline", "canonicalize", "--precision", "fp16"), "does not fit the pipeline"),
        (("--precision", "int12"), "is not a precision"),
    ],
)
def test_what_cannot_be_built_is_refused(
    t5: str, capsys: Capture, arguments: tuple[str, ...], message: str
) -> None:
    done = cast(capsys, "bisect", t5, *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_the_module_that_needs_fp32_is_named_with_the_option_that_keeps_it(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager fp16 raises one module to fp32, which the program captured in fp32 does not show."""
    (tmp_path / "loud_model.py").write_text(LOUD, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    done = cast(capsys, "bisect", "loud_model:make", "--pipeline", "unify-dtype{to=fp16}")
    assert done.code == 1
    (line,) = done.out.splitlines()
    assert line.startswith("pass unify-dtype, module inner, loud_model.py:")
    assert "error not finite" in line
    assert line.endswith(
        r"--skip-modules-pattern '^inner(\.|$)' keeps it in fp32, which was found to be enough"
    )
    for kept in (
        ("--pipeline", 'unify-dtype{to=fp16 keep="^inner"}'),
        ("--precision", "fp16"),  # it finds by itself what has to be fp32
    ):
        done = cast(capsys, "bisect", "loud_model:make", *kept)
        assert done.code == 0, done.out + done.err


LOUD = '''
import torch
from torch import nn


class Inner(nn.Module):
    """Leaves the range of fp16, and in eager fp16 does so in fp32."""

    def forward(self, x):
        if x.dtype == torch.float16:
            return torch.asinh(x.float() * 1e6).half()
        return torch.asinh(x * 1e6)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(16, 16), Inner(), nn.Linear(16, 16)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


def make():
    torch.manual_seed(0)
    return Model(), {"x": torch.randn(3, 7, 16)}
'''


def export(capsys: Capture, t5: str, output: Path, *arguments: str) -> Ran:
    return cast(capsys, "export", t5, "-o", output, *arguments)


@pytest.mark.slow
def test_drop_guilty_publishes_without_the_guilty_sites_and_says_so(
    t5: str, tmp_path: Path, capsys: Capture
) -> None:
    bundle = tmp_path / "b"
    done = export(capsys, t5, bundle, "--pipeline", TWO, "--drop-guilty", "--json")
    assert done.code == 0, done.err
    assert done.json["outcome"] == "verified"
    (dropped,) = done.json["dropped"]
    wanted = ["encoder.block.0.layer.0.SelfAttention.o", LATE]
    assert [site["module"] for site in dropped["sites"]] == wanted
    assert sum("dropped 2 of 14 sites: pass touch-linears" in n for n in done.json["notes"]) == 2
    manifest = decode((bundle / "manifest.json").read_bytes())
    (record,) = [p for p in manifest.passes if p.name == "touch-linears"]
    left = [site for site in record.sites if site.reason]
    assert [site.module for site in left] == wanted
    assert all(site.reason.startswith("dropped as guilty: error ") for site in left)
    assert record.rewritten == len(record.sites) - 2 == LINEARS - 2
    assert "dropped 2 of 14 sites" in (bundle / "report.html").read_text()
    ids = np.array([[3, 4, 5, 1]])
    with enginecast.load(bundle) as engine:
        found = engine.run({"input_ids": ids, "attention_mask": np.ones_like(ids)})
    assert np.isfinite(np.asarray(found["last_hidden_state"])).all()
