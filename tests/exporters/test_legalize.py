"""Legalized programs hold what ONNX Runtime's ops take, and compute what they computed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from lowering import error, lower, noise, run
from programs import Function, captured, count, outputs, rewritten
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from enginecast.exporters.target import Artifact
from enginecast.passes.ir.edit import shape_of
from enginecast.passes.ir.match import is_call

HEADS, SIZE = 4, 8
BATCH, TOKENS = Dim("batch", min=1, max=8), Dim("tokens", min=1, max=32)
SIZES = {"one": (1, 1), "example": (2, 7), "largest": (3, 32)}
FORMS = ["S,S", "1,S", "H,S,S", "1,1,S,S", "B,1,1,S", "B,1,S,S", "1,H,1,S", "B,H,S,S"]
"""What scores [batch, heads, tokens, key tokens] can be added to."""


class Linear(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result


def legal(program: ExportedProgram) -> ExportedProgram:
    return rewritten(program, "legalize-onnx,merge-equal")[0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6)])
def test_linear_is_a_matmul(shape: tuple[int, ...], *, bias: bool) -> None:
    program = captured(Linear(bias=bias), x := torch.randn(shape))
    after = legal(program)
    assert count(after, "linear") == 0
    assert (count(after, "matmul"), count(after, "add")) == (1, int(bias))
    wanted = outputs(program, x)[0]
    assert error(outputs(after, x)[0], wanted) <= 4 * noise(wanted, wanted)


def shape_in(form: str, batch: int, tokens: int) -> tuple[int, ...]:
    sizes = {"B": batch, "S": tokens, "H": HEADS, "1": 1}
    return tuple(sizes[size] for size in form.split(","))


def dims_of(form: str) -> dict[int, Dim]:
    return {
        index: {"B": BATCH, "S": TOKENS}[size]
        for index, size in enumerate(form.split(","))
        if size in "BS"
    }


def attend(query: Tensor, *biases: Tensor) -> list[Tensor]:
    """One attention for each bias, over the same tokens."""
    return [
        torch.ops.enginecast.attention(
            query, query * 0.5, query + 1, bias, HEADS, HEADS, SIZE**-0.5, False
        )
        for bias in biases
    ]


def attention_program(dtype: torch.dtype) -> ExportedProgram:
    batch, tokens = SIZES["example"]
    biases = [torch.zeros(shape_in(form, batch, tokens), dtype=dtype) for form in FORMS]
    shapes = ({0: BATCH, 1: TOKENS}, *map(dims_of, FORMS))
    query = torch.randn(batch, tokens, HEADS * SIZE)
    with torch.no_grad():
        return torch.export.export(
            Function(attend), (query, *biases), dynamic_shapes=(shapes,), strict=False
        )


@dataclass(frozen=True)
class Engine:
    folder: Path
    lowered: Artifact


@pytest.fixture(scope="module")
def programs() -> dict[str, ExportedProgram]:
    return {"float": attention_program(torch.float32), "bool": attention_program(torch.bool)}


@pytest.fixture(scope="module")
def engines(
    programs: dict[str, ExportedProgram], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Engine]:
    made = {}
    for kind, program in programs.items():
        folder = tmp_path_factory.mktemp(kind)
        made[kind] = Engine(folder, lower(program, folder, FORMS))
    return made


def mask(shape: tuple[int, ...]) -> Tensor:
    """Visible keys: the first one always, but in the first row none."""
    visible = torch.rand(shape) > 0.5
    visible[..., 0] = True
    visible[..., 0, :] = False
    return visible


def given(kind: str, batch: int, tokens: int) -> list[Tensor]:
    """A query and a bias of every form."""
    shapes = [shape_in(form, batch, tokens) for form in FORMS]
    biases = [mask(shape) if kind != "float" else torch.randn(shape) for shape in shapes]
    if kind == "-inf":
        biases = [torch.where(bias, 0.5, float("-inf")) for bias in biases]
    return [torch.randn(batch, tokens, HEADS * SIZE), *biases]


def errors(engine: Engine, inputs: list[Tensor], rows: slice = slice(None)) -> dict[str, float]:
    """By form: the error in units of rounding noise."""
    found, wanted = run(engine.folder, *inputs), attend(*inputs)
    return {
        form: error(got[:, rows], want[:, rows]) / noise(torch.ones(1), want.new_zeros(()))
        for form, got, want in zip(FORMS, found, wanted, strict=True)
    }


def test_every_bias_becomes_four_dims_with_full_rows(programs: dict[str, ExportedProgram]) -> None:
    after = legal(programs["float"])
    nodes = [n for n in after.graph.nodes if is_call(n, torch.ops.enginecast.attention.default)]
    for node, form in zip(nodes, FORMS, strict=True):
        query, bias = node.args[0], node.args[3]
        assert isinstance(query, torch.fx.Node)
        assert isinstance(bias, torch.fx.Node)
        tokens = shape_of(query)[1]
        assert len(shape_of(bias)) == 4
        assert [str(size) for size in shape_of(bias)[2:]] == [str(tokens)] * 2, form
    assert count(after, "expand") == sum(form.split(",")[-2] == "1" for form in FORMS)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["bool", "-inf"])
def test_rows_that_are_masked_whole_are_zero_as_in_torch(
    engines: dict[str, Engine], kind: str, size: str
) -> None:
    engine = engines["float" if kind == "-inf" else kind]
    found = errors(engine, given(kind, *SIZES[size]))
    assert max(found.values()) <= 24, found


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((5, 8), (7, 8), (7, 4)),
        ((3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
        ((2, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    ],
    ids=["no heads", "two ranks", "one query head"],
)
@pytest.mark.parametrize("mask", ["bool", "causal"])
def test_an_attention_that_onnx_does_not_have_is_spelled_out(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], mask: str, tmp_path: Path
) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = q[..., :1] < k[..., 0].unsqueeze(-2) if mask == "bool" else None
        attention = nn.functional.scaled_dot_product_attention
        return attention(q, k, v, keep, is_causal=mask == "causal")

    inputs = [torch.randn(shape) for shape in (query, key, value)]
    inputs[0][..., 0, 0] = 9.0  # a row without keys
    program, _ = rewritten(captured(Function(attend), *inputs), "canonicalize,fuse-attention")
    lower(program, tmp_path)
    torch.testing.assert_close(run(tmp_path, *inputs)[0], attend(*inputs), atol=2e-6, rtol=1e-5)


SIGMOIDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "attention": lambda x: torch.sigmoid(x @ x.mT - 80) @ x,
    "glu": lambda x: nn.functional.glu(x, 0) * 2,
}


def test_sigmoids_keep_their_small_values(tmp_path: Path) -> None:
    module = Function(lambda x: tuple(form(x) for form in SIGMOIDS.values()))
    x = torch.linspace(-80, 20, 256).reshape(16, 16)
    lower(captured(module, x), tmp_path, list(SIGMOIDS))
    torch.testing.assert_close(run(tmp_path, x), module(x), rtol=1e-6, atol=0)
