"""What a user reads when torch.export refuses a model."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils.rnn import pack_padded_sequence

from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.inputs.given import apply_dynamic, parse_dynamic
from enginecast.capture.outputs.flatten import Wanted
from enginecast.capture.refusals.explain import Kind, Refusal, explain
from enginecast.capture.sources.factory import FactorySource
from enginecast.capture.tracing.attempt import Attempt
from enginecast.capture.tracing.torch_export import trace
from enginecast.errors import CaptureError


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # culprit
            return x + 1
        return x


class Helper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return shifted(x)


def shifted(x: Tensor) -> Tensor:
    while x.norm() > 1:  # culprit
        x = x / 2
    return x


class Slice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, : int(x.argmax())]  # culprit


class Numpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy()) + 1  # culprit


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("weights")  # culprit


class Mismatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x  # culprit


class ShapeBranch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.shape[0] > 5 else x  # culprit


class ShapeLoop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = x[0]
        for row in range(x.shape[0]):  # culprit
            total = total + x[row]
        return total


class Gradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.func.grad(lambda y: self.linear(y).tanh().sum())(x)  # culprit
        return found


class Narrows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.narrow(x, 0, x.argmax() % 2, 2)  # culprit


class Chooses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        number = x.argmax().item()
        torch._check(number >= 0)  # following torch's own advice does not help
        torch._check(number < 2)
        return [x, x + 1][number]  # type: ignore[index]  # culprit


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x[None], x.argmax()[None].cpu(), batch_first=True)
        state: Tensor = self.layer(packed)[1]  # culprit
        return state


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        spread = torch.distributions.Categorical(logits=x, validate_args=True)  # culprit
        entropy: Tensor = spread.entropy()
        return entropy


def casting() -> nn.Module:
    """Weights in bf16 but for the time of a call, as diffusers' layerwise casting holds them."""
    model = Held()
    layer = model.layer

    def widen(module: nn.Module, _: object) -> None:
        module.to(torch.float32)

    def narrow(module: nn.Module, *_: object) -> None:
        module.to(torch.bfloat16)  # culprit

    layer.register_forward_pre_hook(widen)
    layer.register_forward_hook(narrow)
    return model


def refused(module: nn.Module, *dynamic: str) -> CaptureError:
    source = FactorySource("test:factory", module, {"x": torch.randn(3, 6)})
    specs = apply_dynamic(source.inputs(), [parse_dynamic(text) for text in dynamic])
    with pytest.raises(CaptureError) as caught:
        trace(source, Attempt(specs, sample(specs, example_sizes(specs), 0)), Wanted())
    return caught.value


def explained(module: nn.Module, *dynamic: str) -> Refusal:
    cause = refused(module, *dynamic).__cause__
    assert cause is not None
    return explain(cause)


def culprit(code: Any) -> int:
    lines, first = inspect.getsourcelines(code)
    return next(first + index for index, line in enumerate(lines) if "# culprit" in line)


@pytest.mark.parametrize(
    ("module", "code", "kind"),
    [
        (Branch, Branch, "data-dependent-branch"),
        (Helper, shifted, "data-dependent-branch"),
        (Slice, Slice, "data-dependent-size"),
        (Numpy, Numpy, "data-leaves-torch"),
        (Raises, Raises, "model-error"),
        (Mismatch, Mismatch, "model-error"),
        (Gradient, Gradient, "derivative"),
    ],
)
def test_the_line_and_the_reason(module: Callable[[], nn.Module], code: object, kind: Kind) -> None:
    refusal = explained(module())
    assert refusal.kind == kind
    assert refusal.place == f"{__file__}:{culprit(code)}"
    assert refusal.code.endswith("# culprit")


@pytest.mark.parametrize(
    ("module", "reported"),
    [
        (ShapeBranch, "not every batch satisfies 2 <= batch and batch <= 5"),
        (ShapeLoop, "batch is always 3"),
    ],
)
def test_the_line_that_fixes_a_dimension(module: type[nn.Module], reported: str) -> None:
    before = vars(ShapeEnv)["_get_user_frame"]
    refusal = explained(module(), "x:0=1..64")
    assert refusal.place == f"{__file__}:{culprit(module)}"
    assert reported in refusal.reason
    assert vars(ShapeEnv)["_get_user_frame"] is before


@pytest.mark.parametrize(
    ("module", "code", "reason", "hint"),
    [
        (Narrows, Narrows, "torch.narrow reads a size or index out of a tensor", "tensor.item()"),
        (Chooses, Chooses, "Python needs a plain number here", "as an int"),
        (Packs, Packs, "a recurrent layer runs on packed sequences", "lengths - 1"),
        (Draws, Draws, "torch.distributions checks the values", "validate_args=False"),
        (casting, casting, "the model casts weights of its modules", "Give it without that"),
    ],
)
def test_the_reason_is_not_what_torch_says_of_itself(
    module: Callable[[], nn.Module], code: object, reason: str, hint: str
) -> None:
    refusal = explained(module())
    assert refusal.place == f"{__file__}:{culprit(code)}"
    assert refusal.in_full.startswith(reason)
    assert hint in refusal.hint
    assert not {"torch._check", "Example", "--inputs"} & {*refusal.hint.split()}
    for internal in ("Symbol", "symbol", "u0", "swap", "Fake"):
        assert internal not in refusal.in_full


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Dynamic control flow is not supported at the moment.", "data-dependent-branch"),
        ("Data-dependent branching\n  Explanation: ...", "data-dependent-branch"),
        ("Found DynamicCache in output, which is not a known type", "unsupported-output"),
        ("Constraints violated (s0)!", "specialized-dimension"),
        ("parameter j.weight is not an instance of torch.nn.Parameter.", "scripted-part"),
        ("aten._nested_tensor_from_tensor_list.default", "other-tensors"),
        ("Creating a new Tensor subclass Sub but the raw Tensor object", "other-tensors"),
        ('"type must be tuple of ints,but got FakeTensor"', "data-dependent-size"),
    ],
)
def test_messages_of_other_releases(text: str, kind: Kind) -> None:
    assert explain(RuntimeError(text)).kind == kind
