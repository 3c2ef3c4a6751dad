"""Places that only other functions of a package, or rewritten code, come to; and when it ends."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from enginecast.capture.inputs.specs import from_example
from enginecast.capture.outputs.flatten import ALL
from enginecast.capture.sources.factory import take_module
from enginecast.capture.tracing import ladder
from enginecast.capture.tracing.attempt import Attempt, RefusedError
from enginecast.capture.tracing.ladder import Search
from enginecast.capture.tracing.torch_export import Traced

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SOURCE = """\
import torch
from torch import nn


def first(found):
    if found.numel() == 0:
        return torch.zeros((0,))
    return found * 2


def second(found):
    count = len(found)
    if count > 2:
        return found + 1
    return found - 1


class Model(nn.Module):
    def forward(self, x):
        return second(first(x[x > 0])).sum() + x.sum()
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[nn.Module]:
    """Two functions that branch on how many values there are: the trace of the second begins when
    the first is rewritten.
    """
    (tmp_path / "two_places.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    import two_places  # type: ignore[import-not-found]

    yield two_places.Model()
    del sys.modules["two_places"]


def climb(module: nn.Module) -> Traced:
    example = {"x": torch.tensor([1.0, -2.0, 3.0, 4.0])}
    specs = from_example(example)
    source = take_module(module, example)
    search = Search(source, Attempt(specs, example), ALL, lambda: [example], "rewrite")
    return ladder.climb(search)


def test_places_behind_rewritten_code_are_rewritten_too(model: nn.Module) -> None:
    found = climb(model)
    assert found.attempt.name == "rewrite"
    program = found.program.module()
    for x in ([1.0, -2.0, 3.0, 4.0], [1.0, -1.0, 1.0, -1.0], [-1.0, -1.0, -1.0, -1.0]):
        [given] = program(x=torch.tensor(x)).values()
        torch.testing.assert_close(given, model(torch.tensor(x)))


@pytest.mark.parametrize(("name", "value"), [("MOST_REWRITES", 1), ("LONGEST_SEARCH", -1.0)])
def test_the_search_ends_and_says_what_was_not_looked_at(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    monkeypatch.setattr(ladder, name, value)
    with pytest.raises(RefusedError, match="what lies behind was not looked at") as error:
        climb(model)
    assert "two_places.py:12" in str(error.value)
    assert "rewritten 1 time," in str(error.value)


@torch.jit.script_if_tracing  # type: ignore[untyped-decorator]
def compiled(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x + 1
    return x - 1
