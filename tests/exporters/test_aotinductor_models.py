"""Programs that are compiled and run: forms in which Inductor, or what is left of the weights when
it compiles, might go wrong.  A compilation takes 15 s or more, so all are slow.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from control_flow import ROWS
from exports import Exports
from programs import TOKENS, captured, outputs, rewritten
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.export import ExportedProgram

import enginecast
from enginecast.compiler.export.session import export
from enginecast.compiler.request import ExportRequest
from enginecast.exporters.aotinductor.lower import PACKAGE_FILE, lower_to_aotinductor, lowering
from enginecast.exporters.target import LoweringRequest
from enginecast.exporters.weights.file import WEIGHTS_FILE
from enginecast.runtime.sessions.aotinductor import NAMES

pytestmark = pytest.mark.slow
Engine = Callable[..., list[Tensor]]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    return Exports(tmp_path_factory.mktemp("models"))


def compiled(program: ExportedProgram, folder: Path, count: int = 1) -> Engine:
    """The engine of a program as a function, without a bundle around it."""
    ready, _ = rewritten(program, lowering("cpu"))
    lower_to_aotinductor(LoweringRequest(ready, folder, [f"out{i}" for i in range(count)]))
    model = torch._inductor.aoti_load_package(str(folder / PACKAGE_FILE))
    names = json.loads(model.get_metadata()[NAMES])["weights"]
    stored = load_file(folder / WEIGHTS_FILE) if names else {}
    given = {name: stored[names[name]] for name in model.get_constant_fqns()}
    if given:
        model.load_constants(given, check_full_update=True, user_managed=True)

    def run(*inputs: Tensor) -> list[Tensor]:
        found: list[Tensor] = model.loader.boxed_run([one.clone() for one in inputs])
        return found

    return run


def require_same(engine: Engine, program: ExportedProgram, *inputs: Tensor) -> None:
    for found, wanted in zip(engine(*inputs), outputs(program, *inputs), strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


class Weights(nn.Module):
    """Weights that a compiler which looks at values, or at their absence, would get wrong."""

    counts: Tensor
    flags: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 64)  # larger than what is compiled with its value
        self.same = nn.Linear(64, 64)
        self.same.load_state_dict(self.first.state_dict())
        self.other = nn.Linear(64, 64, bias=False)
        self.ones = nn.Parameter(torch.ones(64, 64))
        self.few = nn.Parameter(torch.randn(8))
        self.one = nn.Parameter(torch.tensor(0.7))
        self.single = nn.Parameter(torch.tensor([[1.3]]))
        self.register_buffer("counts", torch.arange(64))
        self.register_buffer("flags", torch.rand(64) > 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.same(self.first(x)) + self.other(x) * self.one + x @ self.ones
        hidden = torch.where(self.flags, hidden, hidden * self.single[0]) + self.counts
        return hidden, hidden.unflatten(-1, (8, 8)) * self.few, self.few, self.ones * 2, x


def test_weights_have_their_own_values_at_run_time(tmp_path: Path) -> None:
    program = captured(Weights(), torch.randn(3, 7, 64), dynamic=TOKENS)
    engine = compiled(program, tmp_path, 5)
    for shape in ((3, 7), (1, 2), (8, 32)):
        require_same(engine, program, torch.randn(*shape, 64))


@pytest.mark.parametrize("name", ["t5", "bert", "vit", "llama"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_models_are_verified_on_the_cpu(
    exports: Exports, tmp_path: Path, name: str, precision: str
) -> None:
    done = export(ExportRequest(exports.model(name), tmp_path / "out", "aotinductor", precision))
    assert done.bundle is not None, done.report.verdict.reasons
    assert (done.report.verdict.outcome, done.report.verdict.engine) == ("verified", "ran")
    assert all(fusion.missing == () for fusion in done.report.fusions)


@pytest.mark.parametrize("precision", ["fp8-storage", "int8-storage", "int4-storage"])
def test_quantized_weights_stay_quantized(exports: Exports, tmp_path: Path, precision: str) -> None:
    model = exports.model("bert")
    request = ExportRequest(model, tmp_path / "out", "aotinductor", precision, max_error=0.3)
    done = export(request)
    assert done.bundle is not None, done.report.verdict.reasons
    record = done.bundle.manifest.engines[0]
    assert record.quantized == ("fp8" if precision == "fp8-storage" else "int8")
    stored = load_file(done.folder / WEIGHTS_FILE)
    low = torch.float8_e4m3fn if precision == "fp8-storage" else torch.int8
    assert sum(tensor.dtype == low for tensor in stored.values()) >= 2 * 6


BRANCHES = ["IfElse", "EarlyReturn", "WhileNorm"]


@pytest.mark.parametrize("name", BRANCHES)
def test_data_dependent_models_take_both_paths(exports: Exports, tmp_path: Path, name: str) -> None:
    row = next(row for row in ROWS if row.name == name)
    done = export(ExportRequest(row.module(), tmp_path / "out", "aotinductor", example=row.a()))
    assert done.bundle is not None, done.report.verdict.reasons
    with enginecast.load(done.folder, allow_code=True) as engine:
        for inputs in (row.a(), row.b()):
            found = engine.run({key: value.numpy() for key, value in inputs.items()})
            with torch.no_grad():
                wanted = row.module()(**inputs)
            (got,) = found.values()
            torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-5, atol=1e-5)
