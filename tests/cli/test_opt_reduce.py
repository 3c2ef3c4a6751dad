"""`opt --reduce`: what is left fails in the same way, in a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from exports import cast
from plugin_passes import RIGHT, SOURCE, install
from torch import Tensor, nn

from enginecast.passes.ir.base import Pass
from enginecast.passes.registry import pass_class
from enginecast.plugins import forget
from enginecast.reduce.script import SCRIPT
from enginecast.reduce.shrink import reduce
from enginecast.testing import capture

Capture = pytest.CaptureFixture[str]
DONE = "            log.done(node)\n"
FAULTS = {
    "raises": (DONE, DONE + "            {}['missing']\n", "KeyError: 'missing' at "),
    "lint": ("inserting_before(node)", "inserting_after(node.next)", "before it has been defined"),
    "promise": (RIGHT, "(node.args[0], 2.01)", "'double' promises 'exact', but at output"),
    "finite": (RIGHT, "(node.args[0], float('inf'))", "are not finite"),
    "sizes": (
        DONE,
        DONE + "            [int][any(type(d) is not int for d in node.meta['val'].shape)]\n",
        "IndexError",
    ),
}


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "site"
    folder.mkdir()
    file = install(folder, monkeypatch)
    monkeypatch.chdir(tmp_path)
    forget("enginecast_double")
    yield file
    forget("enginecast_double")
    forget("double_model")


def run_script(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def wrong(file: Path, kind: str) -> str:
    old, new, message = FAULTS[kind]
    assert old in SOURCE
    file.write_text(SOURCE.replace(old, new), encoding="utf-8")
    return message


@pytest.mark.slow
def test_a_broken_promise_becomes_a_script_that_fails_until_the_pass_is_right(
    plugin: Path, tmp_path: Path, capsys: Capture
) -> None:
    message = wrong(plugin, "promise")
    out = tmp_path / "out"
    options = ("--pipeline", "canonicalize,double", "--reduce", "-o", out, "--json")
    done = cast(capsys, "opt", "double_model:make", *options)
    assert done.code == 0, done.err
    assert (done.json["pass"], done.json["left"], done.json["finished"]) == ("double", 1, True)
    assert done.json["nodes"] >= 7
    assert "nodes left after" in done.err
    shown = run_script(out)
    assert shown.returncode == 1, shown.stderr
    assert message in shown.stdout
    assert 'PIPELINE = "double"' in (out / SCRIPT).read_text("utf-8")
    plugin.write_text(SOURCE, encoding="utf-8")
    assert run_script(out).returncode == 0


@pytest.mark.parametrize("kind", list(FAULTS)[:2])
def test_every_kind_of_failure_is_reduced(kind: str, plugin: Path) -> None:
    message = wrong(plugin, kind)

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = (x * 3.0).exp()
            return torch.relu(h + h)

    module = Net()
    program = capture(module, torch.randn(3, 4), dynamic={0: torch.export.Dim("batch", max=8)})
    double: Pass = pass_class("double")()
    given = [program.named(program.inputs)]
    found = reduce(program.program, [double], given, seconds=60, say=lambda line: None)
    assert found is not None
    assert message in found.failure.message
    assert found.specimen.dynamic == (kind == "sizes")
    assert len(found.specimen.calls) == 1


def test_nothing_fails(plugin: Path, tmp_path: Path, capsys: Capture) -> None:
    options = ("--pipeline", "double", "--reduce", "-o", tmp_path / "out")
    done = cast(capsys, "opt", "double_model:make", *options)
    assert done.code == 2
    assert "nothing to reduce: double ran and kept the promises" in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--reduce", "--watch"), "--watch cannot be combined with --reduce"),
        (("--watch", "--json"), "cannot be combined with --json"),
        (("--watch", "-o", "x.pt2"), "cannot be combined with -o"),
        (("--reduce", "--print-ir"), "--reduce prints no program"),
        (("--seconds", "3"), "--seconds limits --reduce"),
        (("--reduce", "-o", "site"), "site: exists already"),
        (("--reduce", "-o", "no/out"), "there is no folder no"),
    ],
)
def test_options_that_do_not_go_together(
    options: tuple[str, ...], message: str, plugin: Path, capsys: Capture
) -> None:
    done = cast(capsys, "opt", "double_model:make", "--pipeline", "double", *options)
    assert done.code == 2
    assert message in " ".join(done.err.split())
