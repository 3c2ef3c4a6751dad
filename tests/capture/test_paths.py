"""Forwards that are traced whole, once for each answer to a test of values."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from enginecast.capture.control_flow.operators.sites import RewriteRefused
from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.inputs.specs import from_example
from enginecast.capture.outputs.flatten import ALL
from enginecast.capture.sources.factory import FactorySource
from enginecast.capture.tracing.captured import Captured, capture

ONES = torch.ones(4, 5, dtype=torch.int64)
RAGGED = torch.tensor([[1, 1, 0, 0, 1]] * 4)


def unless_full(mask: Tensor) -> Tensor | None:
    if mask.all():
        return None
    return mask


class Dropped(nn.Module):
    """Without a mask it does something else than with one of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = unless_full(attention_mask)
        x: Tensor = self.table(input_ids)
        return x.cumsum(1) if mask is None else x * 2 - mask.unsqueeze(-1)


class Asking(Dropped):
    """As libraries do: where it is traced, it always takes the mask."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        is_fake = isinstance(attention_mask, torch._subclasses.FakeTensor)
        is_traced = torch.compiler.is_exporting() or is_fake
        x: Tensor = self.table(input_ids)
        if not is_traced and unless_full(attention_mask) is None:
            return x.cumsum(1)
        return x * 2 - attention_mask.unsqueeze(-1)


class Noting(nn.Module):
    """Leaves what it finds in an object that it is given, or has."""

    def __init__(self, notes: SimpleNamespace) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, x: Tensor, mask: Tensor, given: SimpleNamespace | None = None) -> Tensor:
        if unless_full(mask) is None:
            (given or self.notes).is_full = True
            return x.cumsum(1)
        return x * 2


class Passed(Dropped):
    """A module writes into an object that each call makes anew, and that is read later."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Noting(SimpleNamespace())

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        notes = SimpleNamespace(is_full=False)
        x: Tensor = self.inner(self.table(input_ids), attention_mask, notes)
        return x * 5 if notes.is_full else x


class Kept(Passed):
    """The object is the model's."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.inner.notes.is_full = False
        x: Tensor = self.inner(self.table(input_ids), attention_mask)
        return x * 5 if self.inner.notes.is_full else x


SHARED = [False]


class Global(Passed):
    """A variable of the file."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        SHARED[0] = False
        if unless_full(attention_mask) is None:
            SHARED[0] = True
        x: Tensor = self.table(input_ids)
        return x * 5 if SHARED[0] else x


class Refusing(Dropped):
    """Has no code for a full mask."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        if unless_full(attention_mask) is None:
            raise RuntimeError("the mask is full")
        x: Tensor = self.table(input_ids)
        return x * 2 - attention_mask.unsqueeze(-1)


class Trying(Refusing):
    """Catches the error of a submodule, and goes on in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Refusing()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        try:
            x: Tensor = self.inner(input_ids, attention_mask)
        except RuntimeError:
            x = self.table(input_ids).cumsum(1)
        return x


def captured(module: nn.Module, hidden: bool = True) -> Captured:
    example = {"input_ids": torch.arange(15).view(3, 5) % 9, "attention_mask": ONES[:3]}
    specs = from_example(example, None)
    source = FactorySource("dropped", module.eval(), example)
    inputs = sample(specs, example_sizes(specs), 0)
    return capture(source, specs, inputs, ALL, is_hidden=hidden)


def assert_the_same(found: Captured, module: nn.Module) -> None:
    program = found.program.module()
    for mask in (ONES, RAGGED):
        ids = torch.randint(0, 9, (4, 5))
        [given] = program(input_ids=ids, attention_mask=mask).values()
        torch.testing.assert_close(given, module(ids, mask))


@pytest.mark.parametrize("kind", [Kept, Global])
def test_what_a_path_leaves_in_an_object_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(RewriteRefused, match=r"writes into a \w+ that it has from outside"):
        captured(kind())


def test_code_that_asks_whether_it_is_traced_is_captured_as_eager_runs_it() -> None:
    module = Asking()
    with pytest.raises(AssertionError):
        assert_the_same(captured(module, hidden=False), module)
    plain = torch._subclasses.FakeTensor
    assert_the_same(captured(module), module)
    assert torch._subclasses.FakeTensor is plain


def test_an_error_of_a_submodule_that_the_model_catches_decides_the_path() -> None:
    module = Trying()
    assert_the_same(captured(module), module)
