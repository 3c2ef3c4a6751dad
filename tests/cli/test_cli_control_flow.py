"""The command line on models with control flow: what is printed and reported."""

import json
from pathlib import Path

import pytest
from exports import cast

Capture = pytest.CaptureFixture[str]

SOURCE = """
import torch
from torch import nn

print("a library that talks")

X = {"x": torch.linspace(-1, 2, 12).reshape(3, 4)}

class Talks(nn.Module):
    def forward(self, x):
        print("mean", x.mean().item())
        return x * 2

class Tries(nn.Module):
    def forward(self, x):
        try:
            if x.sum() > 0:  # tries
                return x + 1
            return x - 1
        except ValueError:
            return x

class Grows(nn.Module):
    def forward(self, x):
        parts = [x]
        if x.sum() > 0:  # grows
            parts.append(x * 2)
        return torch.cat(parts)

class Secret(nn.Module):
    def forward(self, x):
        if x[0, 0] == 0.123456:  # secret
            return x * 2
        return x + 1

class Both(nn.Module):
    def forward(self, x):
        if x.sum() > 0:  # both
            return x * 2
        return x + 1

class Divides(nn.Module):
    def forward(self, x):
        try:
            scale = 12 // int((x > 0).sum())  # divides
        except ZeroDivisionError:
            scale = 0
        return x + scale

class Deep(nn.Module):
    def forward(self, x):
        return x if x.sum() < -1e9 else self.forward(x + 1)  # deep

hidden = {}
exec(
    "from torch import nn\\n"
    "class Hidden(nn.Module):\\n"
    "    def forward(self, x):\\n"
    "        return x + 1 if x.sum() > 0 else x\\n",
    hidden,
)

def talks(): return Talks(), X
def tries(): return Tries(), X
def grows(): return Grows(), X
def secret(): return Secret(), X
def both(): return Both(), X
def divides(): return Divides(), X
def deep(): return Deep(), X
def exec_ed(): return hidden["Hidden"](), X
"""


def place(mark: str) -> str:
    lines = SOURCE.splitlines()
    return f"flow_cli.py:{next(i for i, t in enumerate(lines, 1) if t.endswith(f'# {mark}'))}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "flow_cli.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *__import__("sys").path])
    monkeypatch.delitem(__import__("sys").modules, "flow_cli", raising=False)
    return tmp_path


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name not in ("__pycache__", "flow_cli.py"))


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "flow_cli:talks", "--json"),
        ("export", "flow_cli:talks", "-o", "bundle", "--json"),
        ("opt", "flow_cli:talks", "--pipeline", "canonicalize", "--json"),
        ("bisect", "flow_cli:talks", "--pipeline", "canonicalize", "--json"),
    ],
    ids=lambda command: command[0],
)
def test_what_a_model_prints_is_not_a_result(
    folder: Path, command: tuple[str, ...], capsys: Capture
) -> None:
    ran = cast(capsys, *command)
    assert ran.code == 0
    assert ran.json
    assert "a library that talks" in ran.err
    assert "\nmean -0.09" in ran.err


def test_an_export_tells_how_it_was_captured(folder: Path, capsys: Capture) -> None:
    ran = cast(
        capsys, "export", "flow_cli:grows", "-o", "bundle", "--fallback", "specialise", "--json"
    )
    assert ran.code == 0
    assert [rung["name"] for rung in ran.json["capture"]] == [
        "export",
        "strict",
        "rewrite",
        "specialise",
    ]
    assert ran.json["guards"][0]["place"].endswith(place("grows"))
    shown = cast(capsys, "inspect", "bundle").out
    assert "capture: rewrite refused" in shown
    assert "capture: specialise taken: takes one path" in shown
    assert "refuses inputs for which `if x.sum() > 0:" in shown


def test_a_plan_says_that_torchscript_comes_next(folder: Path, capsys: Capture) -> None:
    ran = cast(capsys, "inspect", "flow_cli:grows", "--json")
    assert ran.code == 2
    assert "An export goes on with TorchScript" in ran.err
    (found,) = ran.json["control_flow"]
    assert found["action"] == "refused by torch.export; an export tries TorchScript"
    ran = cast(capsys, "inspect", "flow_cli:grows", "--json", "--fallback", "rewrite")
    assert ran.code == 2
    assert "TorchScript" not in ran.err
    assert ran.json["control_flow"][0]["action"] == "refused"
    assert cast(capsys, "inspect", "flow_cli:grows", "--fallback", "all").code == 2


def test_unverified_branches(folder: Path, capsys: Capture) -> None:
    ran = cast(capsys, "export", "flow_cli:secret", "-o", "bundle")
    assert ran.code == 1
    assert f"{place('secret')}: `x[0, 0] == 0.123456` was always False" in ran.out
    assert "--allow-unverified-branches" in ran.out
    assert left(folder) == ["bundle.rejected"]
    ran = cast(
        capsys, "export", "flow_cli:secret", "-o", "bundle", "--allow-unverified-branches", "-q"
    )
    assert ran.code == 0
    manifest = json.loads((folder / "bundle" / "manifest.json").read_text(encoding="utf-8"))
    [lacking] = manifest["downgrades"]
    assert lacking["text"] in manifest["notes"]
    assert "unverified branch" in lacking["text"]
    assert place("secret") in lacking["text"]
    assert (lacking["kind"], lacking["consent"]) == ("branch", "given")
    assert "unverified branch" in cast(capsys, "inspect", "bundle").out
