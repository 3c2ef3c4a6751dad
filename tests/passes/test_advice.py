"""inspect's advice: which precision holds a model, where it does not, and what to do."""

from collections.abc import Callable
from pathlib import Path

import models
import pytest
import torch
from programs import rewritten
from test_mixed import Deep
from torch import Tensor, nn
from transformers import T5EncoderModel

import enginecast.compiler.inspection.precision as advice_module
from enginecast.capture.sources.open_source import open_source
from enginecast.compiler.inspection.precision import Advice, PrecisionOption, advise
from enginecast.compiler.prepare.program import Prepared, prepare
from enginecast.compiler.request import ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.passes.ir.interpret import interpret

NONE = ModelOptions()
WO = "^encoder[.]block[.][0-9]+[.]layer[.][0-9]+[.]DenseReluDense[.]wo([.]|$)"


def by_name(advice: Advice) -> dict[str, PrecisionOption]:
    return {option.precision: option for option in advice.options}


def prepared_module(module: nn.Module, *shape: int) -> Prepared:
    options = ModelOptions()
    torch.manual_seed(0)
    return prepare(open_source(module, example={"x": torch.randn(*shape)}), options, Steps())


def loud_t5(folder: Path) -> Path:
    """A T5 whose feed-forwards write far more than fp16 holds."""
    models.tiny_t5(folder)
    model = T5EncoderModel.from_pretrained(folder)
    with torch.no_grad():
        for block in model.encoder.block:
            block.layer[1].DenseReluDense.wo.weight.mul_(4000.0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_t5(tmp_path_factory.mktemp("loud"))


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 is a mere conversion, without the pass that its preset has in front."""
    split = advice_module._split
    monkeypatch.setattr(advice_module, "_split", lambda name: ((), *split(name)[1:]))


def test_what_is_rescaled_is_safe_in_fp16() -> None:
    found = advise(prepared_module(Deep(), 2, 5, 16))
    fp16 = by_name(found)["fp16"]
    assert fp16.sentence.startswith("safe with rescale-streams, which is in its pipeline: ")
    assert fp16.error is not None
    assert fp16.error < 2e-3
    assert found.recommended == "fp16"


@pytest.mark.usefixtures("converted")
@pytest.mark.slow
def test_overflow_is_named_with_its_module_and_the_way_out_holds(loud: Path) -> None:
    options = ModelOptions()
    prepared = prepare(open_source(str(loud)), options, Steps())
    found = advise(prepared)
    reported = by_name(found)
    assert [reported[name].safe for name in ("fp16", "mixed", "bf16", "fp32")] == [0, 0, 1, 1]
    assert found.recommended == "bf16"
    fp16 = reported["fp16"]
    assert fp16.largest is not None
    assert fp16.largest.largest > 65504
    assert fp16.headroom_bits is not None
    assert fp16.headroom_bits < 0
    assert fp16.sentence.startswith(f"not safe as it is: {fp16.largest.module} reaches ")
    assert f"at {fp16.largest.source} (limit 65504)" in fp16.sentence
    assert fp16.largest.source.startswith("modeling_t5.py:")
    assert reported["mixed"].keep == WO
    program, case = prepared.captured.program, prepared.cases[1].inputs
    results = {}
    for keep, spec in (("", "to=fp16"), ("", "to=fp16 residual=fp32"), (WO, "residual=fp32")):
        policy = f'unify-dtype{{to=fp16 residual=fp32 keep="{keep}"}}'
        after, _ = rewritten(program, policy if keep else f"unify-dtype{{{spec}}}")
        results[keep, spec] = bool(next(iter(interpret(after, case).values())).isfinite().all())
    assert list(results.values()) == [False, False, True], results


class Scaled(nn.Module):
    """Two linears, with a large factor between them that is taken back at the end."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.b(torch.tanh(self.a(x)) * self.scale)
        return hidden * 2.0**-16


def test_little_headroom_is_close_and_no_stream_is_no_mixed() -> None:
    reported = by_name(advise(prepared_module(Scaled(5e4), 4, 8)))
    assert reported["fp16"].safe
    assert reported["fp16"].sentence.startswith("close: ")
    assert reported["fp16"].sentence.endswith("other inputs may pass it")
    assert reported["mixed"].sentence.startswith("not possible: ")
    assert "finds no residual sum" in reported["mixed"].refusal


def test_result_that_is_finite_and_wrong_is_not_safe() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 1e-3 + 64.0) - 64.0

    reported = by_name(advise(prepared_module(Wrong(), 4, 8)))
    assert reported["fp16"].left == ()
    assert reported["fp16"].sentence.startswith("not safe: its outputs are finite, and off by ")
    assert reported["fp16"].sentence.endswith("use --precision fp32")


class Projected(nn.Module):
    """A function of a projection with one large feature."""

    def __init__(self, function: Callable[[Tensor], Tensor], large: float) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(16, 32), function
        self.linear.bias.data[3] = large

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def by_hand(exponents: Tensor) -> Tensor:
    return exponents / exponents.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("function", "large"),
    [
        (lambda h: h / torch.sqrt((h * h).sum(-1, keepdim=True)), 700.0),
        (lambda h: by_hand(h.exp()), 20.0),
    ],
    ids=["unit", "softmax"],
)
def test_an_overflow_within_a_module_is_safe_because_it_stays_in_fp32(
    function: Callable[[Tensor], Tensor], large: float
) -> None:
    torch.manual_seed(0)
    module = Projected(function, large)
    prepared = prepare(open_source(module, example={"x": torch.randn(4, 16)}), NONE, Steps())
    fp16 = by_name(advise(prepared))["fp16"]
    assert fp16.safe, fp16.sentence
