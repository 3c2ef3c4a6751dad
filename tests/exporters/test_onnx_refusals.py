"""What ONNX cannot say is refused with the op, the module and the line, and leaves no files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lowering import error, lower, run
from programs import Function, captured, outputs
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional as F

from enginecast.errors import LoweringError


@torch.library.custom_op("enginecast_test::mystery", mutates_args=())
def mystery(x: Tensor) -> Tensor:
    return x.sin()


@mystery.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Strange(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = mystery(x)
        return result


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(16, 64), inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.linear(x))


class Inside(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = Function(function)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def refusal(program: ExportedProgram, folder: Path, names: tuple[str, ...] = ("out",)) -> str:
    with pytest.raises(LoweringError) as caught:
        lower(program, folder, names)
    assert list(folder.iterdir()) == []
    assert caught.value.hint
    return caught.value.message


def test_op_without_onnx_form_is_named_with_its_place(tmp_path: Path) -> None:
    message = refusal(captured(Net(Strange()), torch.randn(3, 16)), tmp_path)
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "Tensor = mystery(x)" in text and "in text" not in text
    )
    assert message == (
        "ONNX has no form for enginecast_test.mystery.default"
        f" (module 'inner', test_onnx_refusals.py:{line})"
    )


X, WHOLE = torch.randn(2, 4, 6, 6), torch.arange(8).reshape(1, 2, 2, 2)
REFUSED: dict[str, tuple[Callable[..., Any], Tensor, str]] = {
    "aten.special_i0e.default": (torch.special.i0e, X, "the plain formula loses digits"),
    "aten.mode.default": (lambda x: x.mode().values, X, ""),
    "aten.index_reduce.default": (
        lambda x: x.index_reduce(0, X[0, 0, 0, :2].long(), x, "mean"),
        X,
        "",
    ),
    "aten.multilabel_margin_loss.default": (
        lambda x: F.multilabel_margin_loss(x[0, 0], x[0, 1].long().abs() % 6),
        X,
        "torch decomposes it into another loss",
    ),
    "aten.grid_sampler.default": (
        lambda x: F.grid_sample(x, x[..., :2], "nearest", "reflection", align_corners=False),
        X,
        "halfway between two pixels ONNX Runtime reflects to another neighbor than torch",
    ),
    "aten.pad.default": (
        lambda x: F.pad(x, (-1, 2), "replicate"),
        X[0],
        "ONNX Runtime crops constant paddings alone; slice the input instead",
    ),
    "aten.pixel_shuffle.default": (
        lambda x: F.pixel_shuffle(x.mT.reshape(1, 4, 1, 2), 2),
        WHOLE,
        "ONNX Runtime has no DepthToSpace of whole numbers",
    ),
    "aten.einsum.default": (
        lambda x: torch.einsum("abij->ab", x.int()),
        WHOLE,
        "ONNX Runtime has no Einsum of such integers",
    ),
    "aten.cummax.default": (lambda x: torch.cummax(x, 0)[0], X, "it keeps no running extremes"),
    "aten.erfc.default": (torch.erfc, X, "the plain formula loses digits"),
}


@pytest.mark.parametrize("op", REFUSED)
def test_what_onnx_says_otherwise_is_refused_with_its_place_and_the_reason(
    op: str, tmp_path: Path
) -> None:
    function, x, reason = REFUSED[op]
    message = refusal(captured(Inside(function), x), tmp_path)
    assert message.startswith(f"ONNX has no form for {op} (module 'inner', captured.py:")
    assert message.endswith(reason or ")")


@pytest.mark.parametrize("draw", [torch.rand_like, torch.randn_like, torch.bernoulli])
def test_noise_is_refused_with_its_place(tmp_path: Path, draw: Callable[[Tensor], Tensor]) -> None:
    program = captured(Net(Function(lambda x: x + draw(x.sigmoid()) * 0)), torch.randn(3, 16))
    message = refusal(program, tmp_path)
    assert f"draws no random numbers for aten.{draw.__name__}.default (module 'inner'" in message
    assert "captured.py:" in message


def test_a_complex_weight_is_stored_as_pairs(tmp_path: Path) -> None:
    weight = torch.randn(400, dtype=torch.complex64)
    program = captured(
        Function(lambda x: torch.view_as_real(torch.view_as_complex(x) * weight)),
        x := torch.randn(400, 2),
    )
    lower(program, tmp_path)
    assert error(run(tmp_path, x)[0], outputs(program, x)[0]) <= 1e-5


def test_no_file_is_left_when_the_weights_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("enginecast.exporters.weights.file._write_one", full)
    with pytest.raises(OSError, match="no space"):
        lower(captured(Net(nn.ReLU()), torch.randn(3, 16)), tmp_path)
    assert list(tmp_path.iterdir()) == []
