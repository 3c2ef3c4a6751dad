"""Quantized ops in torch's own: equal values, a clamp before every cast, calls that CUDA takes."""

import functools
from collections.abc import Callable

import pytest
import torch
from planned_programs import quantized_by_plan
from programs import TOKENS, captured, outputs, relative_error, rewritten, targets
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from enginecast.passes.ir.quantization_plan import Format
from enginecast.verification.emulate.profiles import get_profile
from enginecast.verification.emulate.run import emulate

Quantized = Callable[[str, Format], ExportedProgram]
FORMS: dict[str, Format] = {
    "storage": "fp8",
    "static": "fp8",
    "tensorwise": "fp8",
    "rowwise": "fp8",
    "rows by tensor": "int8",
    "blocks": "int8",
    "blocks of 4 bits": "int8",
    "both by blocks": "int8",
}


class Layers(nn.Module):
    """A table, linears with and without bias that share what they read, and a conv."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 64)
        self.a, self.b = nn.Linear(64, 32), nn.Linear(64, 32, bias=False)
        self.conv = nn.Conv1d(32, 32, 3, padding=1)
        self.last = nn.Linear(32, 48)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        both = torch.tanh(self.a(x)) * self.b(x)
        found: Tensor = self.last(self.conv(both.transpose(1, 2)).transpose(1, 2))
        return found


def ids(batch: int, tokens: int) -> Tensor:
    return torch.arange(batch * tokens).view(batch, tokens) * 7 % 40


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    torch.manual_seed(0)
    module = Layers().requires_grad_(False)
    return captured(module, ids(2, 5), dynamic={0: Dim("batch", min=1, max=8), 1: TOKENS[1]})


@pytest.fixture(scope="module")
def low(program: ExportedProgram) -> Quantized:
    """The program in bf16, with all layers in a form: made when it is first asked for."""
    narrow = rewritten(program, "unify-dtype{to=bf16},canonicalize")[0]
    return functools.cache(lambda *form: quantized_by_plan(narrow, *form, ids(2, 5)))


def lowered(program: ExportedProgram, device: str = "cpu") -> ExportedProgram:
    return rewritten(program, f"decompose-quantized{{device={device}}}")[0]


@pytest.mark.parametrize("form", ["storage", "rowwise"])
def test_values_are_those_of_our_ops(program: ExportedProgram, form: str) -> None:
    ours = quantized_by_plan(program, form, FORMS[form], ids(2, 5))
    for device in ("cpu", "cuda"):
        plain = lowered(ours, device)
        assert not [t for t in targets(plain) if t.startswith("enginecast")]
        for batch, tokens in ((1, 2), (3, 7)):
            given = ids(batch, tokens)
            found, expected = outputs(plain, given)[0], outputs(ours, given)[0]
            assert relative_error(found, expected) < 1e-6


@pytest.mark.parametrize(
    ("device", "form"),
    [("cpu", "storage"), ("cpu", "rowwise"), ("cuda", "rowwise")],
)
def test_a_lowered_program_is_emulated_like_the_one_before(
    low: Quantized, form: str, device: str
) -> None:
    ours = low(form, FORMS[form])
    plain, _ = rewritten(ours, f"hoist-weights,decompose-quantized{{device={device}}}")
    cases = {"a": {"ids": ids(2, 5)}}
    profile = get_profile("inductor")
    (expected,), (found,) = (emulate(p, cases, profile)[0] for p in (ours, plain))
    # A rounding of bf16 more or less.
    assert relative_error(found["output_0"], expected["output_0"]) < 2e-2
