"""Factories that do not work: one sentence, the exit code, and nothing is published."""

from pathlib import Path

import pytest
import torch
from exports import cast
from torch import nn

from enginecast.capture.sources.factory import FactorySource

Capture = pytest.CaptureFixture[str]

SOURCE = """
import sys
import torch
from torch import nn

X = {"x": torch.randn(3, 4)}

class Branch(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x + 1
        return x - 1

class Shape(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[0] > 5 else x  # shape

class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1  # counter
        return x * self.calls

def gpu(): return nn.Linear(4, 4).cuda(), X
def package(): import no_such_package_anywhere
def exits(): sys.exit(5)
def raises(): raise ValueError("no weights here")
def triple(): return Branch(), X, 3
def kind(): return Branch
def counter(): return Counter(), X
def lazy(): return nn.LazyLinear(3), {"input": X["x"]}
def scripted(): return torch.jit.script(Shape()), X
"""


def line(mark: str) -> str:
    lines = SOURCE.splitlines()
    return f"flow_factories.py:{next(i for i, t in enumerate(lines, 1) if t.endswith(f'# {mark}'))}"


@pytest.mark.parametrize(
    ("factory", "code", "expected"),
    [
        ("gpu", 3, ["needs a CUDA GPU, and this machine has none"]),
        ("package", 3, ["needs the package 'no_such_package_anywhere'"]),
        ("exits", 2, ["raised SystemExit: 5"]),
        ("raises", 2, ["raised ValueError: no weights here"]),
        ("triple", 2, ["returned a tuple, expected a module"]),
        ("lazy", 2, ["the parameter weight has no shape yet"]),
        ("scripted", 2, ["is a TorchScript module"]),
        ("counter", 2, ["calls at ", line("counter"), "was 0, is 3"]),
    ],
)
def test_bad_factories(
    factory: str,
    code: int,
    expected: list[str],
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "flow_factories.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    name, *options = factory.split()
    done = cast(capsys, "export", f"flow_factories:{name}", "-o", tmp_path / "out", *options)
    reported = " ".join(done.err.split())
    assert done.code == code, done.err
    assert done.err.count("error: ") == 1, done.err
    assert "Traceback" not in done.err
    assert all(text in reported for text in expected), reported
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.rejected").exists()


def test_a_compiled_module_is_taken_as_it_was_written() -> None:
    module = nn.Linear(3, 3)
    source = FactorySource("compiled", torch.compile(module), {})  # type: ignore[arg-type]
    assert source.model_class is nn.Linear
    assert sorted(source.weights()) == ["bias", "weight"]
