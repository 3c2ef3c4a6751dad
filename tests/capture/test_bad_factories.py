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

class OnGpu(nn.Module):
    def forward(self, x):
        return (x.cuda() * 2).cpu()  # on_gpu

class Endless(nn.Module):
    def forward(self, x):
        while x.abs().sum() >= 0:  # endless
            x = x + 1
        return x

class Deep(nn.Module):
    def forward(self, x):
        return self.forward(x + 1)  # deep

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

@torch.library.custom_op("enginecast_flow_test::mystery", mutates_args=())
def mystery(x: torch.Tensor) -> torch.Tensor:
    return x.sin()

@mystery.register_fake
def _(x):
    return torch.empty_like(x)

class Custom(nn.Module):
    def forward(self, x):
        return mystery(x)  # custom

hidden = {}
exec(
    "from torch import nn\\n"
    "class Hidden(nn.Module):\\n"
    "    def forward(self, x):\\n"
    "        return int(x.argmax()) * x if bool(x.sum() > 0) else x\\n",
    hidden,
)

def gpu(): return nn.Linear(4, 4).cuda(), X
def on_gpu(): return OnGpu(), X
def package(): import no_such_package_anywhere
def exits(): sys.exit(5)
def raises(): raise ValueError("no weights here")
def triple(): return Branch(), X, 3
def kind(): return Branch
def number(): return Branch(), {"x": 3}
def endless(): return Endless(), X
def deep(): return Deep(), X
def shape(): return Shape(), X
def counter(): return Counter(), X
def custom(): return nn.Sequential(nn.Linear(4, 4), Custom()), {"input": X["x"]}
def lazy(): return nn.LazyLinear(3), {"input": X["x"]}
def scripted(): return torch.jit.script(Shape()), X
def exec_ed(): return hidden["Hidden"](), X
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
        ("custom", 2, ["enginecast_flow_test.mystery.default", "module '1'", line("custom")]),
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
