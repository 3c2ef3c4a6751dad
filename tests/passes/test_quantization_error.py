"""How far quantized layers are from exact ones, against what theory says, computed by numpy."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from planned_programs import carried_out, plan_for, quantized_by_plan
from programs import captured, outputs, relative_error
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from enginecast.passes.ir.edit import weight_expressions, weight_value
from enginecast.passes.ir.quantization_plan import Format

N, K, ROWS = 512, 1024, 256
WITHIN = 0.05
"""Of the theoretical error; 0.005 was measured."""
Array = np.ndarray[Any, np.dtype[np.float64]]


class One(nn.Module):
    """One layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


def linear(std: float = 0.05, *, bias: bool = False, n: int = N, k: int = K) -> ExportedProgram:
    """A linear with Gaussian weights."""
    torch.manual_seed(0)
    layer = nn.Linear(k, n, bias=bias).requires_grad_(False)
    nn.init.normal_(layer.weight, std=std)
    return captured(One(layer), torch.randn(2, k), dynamic={0: Dim("rows", min=1, max=512)})


def rounded(x: Array, limit: float, scaling: str, *, integers: bool) -> Array:
    """x rounded to a format with scales, and brought back."""
    axis = None if scaling == "tensor" else -1
    scale = np.abs(x).max(axis=axis, keepdims=True) / limit
    grid = x / scale
    if integers:
        found = np.rint(grid)
    else:
        found = grid.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    back: Array = found * scale
    return back


def theory(x: Tensor, weight: Tensor, plan: Any, format_: Format) -> float:
    """Relative error of a product whose factors have independent errors."""
    limit = 127.0 if format_ == "int8" else 448.0
    errors = []
    for value, scaling in ((x, plan.activations), (weight, plan.weights)):
        if scaling is not None:
            exact = value.double().numpy()
            found = rounded(exact, limit, scaling, integers=format_ == "int8")
            errors.append(np.linalg.norm(found - exact) / np.linalg.norm(exact))
    return float(np.sqrt(np.sum(np.square(errors))))


FORMS: tuple[tuple[str, Format, tuple[float, float]], ...] = (
    ("rowwise", "fp8", (0.0345, 0.0385)),
    ("tensorwise", "fp8", (0.0345, 0.0385)),
    ("static", "fp8", (0.0345, 0.0385)),
    ("storage", "fp8", (0.026, 0.027)),
    ("rowwise", "int8", (0.01, 0.013)),
    ("rows by tensor", "int8", (0.01, 0.02)),
    ("storage", "int8", (0.006, 0.009)),
)


@pytest.mark.parametrize(("form", "format_", "range_"), FORMS)
def test_the_error_of_a_linear_is_the_theoretical_one(
    form: str, format_: Format, range_: tuple[float, float]
) -> None:
    program = linear()
    torch.manual_seed(1)
    x = torch.randn(ROWS, K)
    plan = plan_for(program, form, format_)
    found, sites = carried_out(program, plan, x)
    assert [site.rewritten for site in sites] == [True]
    error = relative_error(outputs(found, x)[0], outputs(program, x)[0])
    expected = theory(x, program.state_dict["layer.weight"], plan.layers[0], format_)
    assert abs(error / expected - 1) < WITHIN
    assert range_[0] < error < range_[1]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("block", [32, 128])
def test_blocks_are_rounded_as_matmul_nbits_reads_them(bits: int, block: int) -> None:
    program = linear(bias=True, n=48, k=256)
    x = torch.randn(5, 256)
    plan = plan_for(program, "blocks", "int8", bits=bits, block=block)
    after, (site,) = carried_out(program, plan)
    assert site.note == f"storage, {'4 bits, ' if bits == 4 else ''}blocks of {block}"
    weight = program.state_dict["layer.weight"].double().numpy()
    limit = 2.0 ** (bits - 1) - 1
    blocks = weight.reshape(48, -1, block)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / limit
    wide = (np.rint(blocks / scale) * scale).reshape(48, 256)
    expected = x.double().numpy() @ wide.T + program.state_dict["layer.bias"].double().numpy()
    assert relative_error(outputs(after, x)[0], torch.from_numpy(expected)) < 1e-5
    stored = [weight_value(after, n) for n in weight_expressions(after) if n.users]
    integers = [tensor for tensor in stored if tensor.dtype == torch.int8]
    assert [tuple(tensor.shape) for tensor in integers] == [(48, 256)]
    assert int(integers[0].abs().max()) == limit
    smaller = 0.02 if bits == 8 else 0.2
    assert relative_error(outputs(after, x)[0], outputs(program, x)[0]) < smaller


@pytest.mark.parametrize("kind", ["conv", "embedding"])
@pytest.mark.parametrize("format_", ["fp8", "int8"])
def test_convs_and_tables_are_stored_with_the_error_of_their_format(
    kind: str, format_: Format
) -> None:
    torch.manual_seed(3)
    if kind == "conv":
        conv = nn.Conv2d(64, 48, 3, bias=False).requires_grad_(False)
        nn.init.normal_(conv.weight).mul_(torch.logspace(-3, 3, 48).view(-1, 1, 1, 1))
        x, layer = torch.randn(2, 64, 9, 9), One(conv)
    else:
        table = nn.Embedding(300, 512, padding_idx=0).requires_grad_(False)
        table.weight[1:].mul_(torch.logspace(-3, 3, 299).view(-1, 1))
        x, layer = torch.arange(300).view(3, 100), One(table)
    program = captured(layer, x)
    after = quantized_by_plan(program, "storage", format_)
    found, exact = (outputs(p, x)[0].flatten(2) for p in (after, program))
    rows = found.transpose(0, 1) if kind == "conv" else found.flatten(0, 1)[1:]
    wanted = exact.transpose(0, 1) if kind == "conv" else exact.flatten(0, 1)[1:]
    errors = torch.tensor([relative_error(*pair) for pair in zip(rows, wanted, strict=True)])
    low, high = (0.024, 0.028) if format_ == "fp8" else (0.005, 0.009)
    assert low < errors.mean() < high
    assert errors.max() < 1.5 * errors.mean(), "no row is lost to larger ones"
