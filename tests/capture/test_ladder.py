"""What torch.export refuses is tried in other ways, in order, and each is reported."""

import inspect
import os
import warnings

import pytest
import torch
from control_flow import BRANCHES, ROWS, Row
from torch import Tensor, nn

from enginecast.capture.control_flow.detect import recorder
from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.inputs.specs import from_example, ranges_of
from enginecast.capture.refusals.explain import Refusal
from enginecast.capture.sources.factory import FactorySource
from enginecast.capture.tracing.attempt import Fallback, RefusedError, Rung
from enginecast.capture.tracing.captured import Captured, capture
from enginecast.errors import CaptureError


def captured(
    module: nn.Module, example: dict[str, Tensor], fallback: Fallback = "none"
) -> Captured:
    specs = from_example(example, None)
    source = FactorySource(type(module).__name__, module.eval(), example)
    return capture(source, specs, sample(specs, example_sizes(specs), 0), fallback=fallback)


def taken(found: Captured) -> list[tuple[str, str]]:
    return [(rung.name, rung.outcome) for rung in found.rungs]


def row(name: str) -> Captured:
    [found] = [row for row in ROWS if row.name == name]
    return captured(found.module(), found.a())


class Flags(nn.Module):
    """As EoMT: which layers do what is written in a buffer."""

    flags: Tensor

    def __init__(self, flags: tuple[float, ...] = (1.0, 0.0, 0.5)) -> None:
        super().__init__()
        self.register_buffer("flags", torch.tensor(flags))
        self.register_buffer("many", torch.ones(100))

    def forward(self, x: Tensor) -> Tensor:
        for flag in self.flags:
            if flag > 0:
                x = x * 2
            if flag.item() == 0:
                x = x + 1
        return x


class Parts(nn.Module):
    """As vision towers: lists of sizes, read from tensors whose own size values decide."""

    def forward(self, x: Tensor) -> Tensor:
        grid = torch.tensor([[2, 3], [1, 1]])
        lengths = torch.repeat_interleave(grid[:, 0], grid[:, 1])
        rows = [rows * columns for rows, columns in grid.tolist()]
        parts = torch.split(x, lengths.tolist(), dim=0)
        return torch.cat([part.cumsum(0) for part in parts]) * int(rows[0])


def test_lists_of_constants_are_answered_whole() -> None:
    found = captured(Parts(), {"x": torch.ones(7, 2)})
    assert taken(found) == [("export", "refused"), ("bake", "taken")]
    result = found.program.module()(x=torch.ones(7, 2))["output_0"]
    assert result[:, 0].tolist() == [6.0, 12.0, 6.0, 12.0, 6.0, 12.0, 6.0]


@pytest.mark.parametrize(("flags", "expected"), [((1.0, 0.0, 0.5), 6.0), ((0.0, 0.0, 0.0), 4.0)])
def test_predicates_on_weights_are_answered(flags: tuple[float, ...], expected: float) -> None:
    found = captured(Flags(flags), {"x": torch.ones(3, 2)})
    assert taken(found) == [("export", "refused"), ("bake", "taken")]
    assert "weights alone" in found.rungs[1].reason
    assert "test_ladder.py" in found.rungs[1].reason
    result = found.program.module()(x=torch.ones(5, 2))["output_0"]
    assert result.eq(expected).all()


class Both(Flags):
    """A predicate on weights, then one on inputs."""

    def forward(self, x: Tensor) -> Tensor:
        if self.flags[0] > 0:
            x = x * 2
        if x.sum() > 0:
            x = x + 1
        return x


def test_the_refusal_tells_what_was_tried() -> None:
    with pytest.raises(RefusedError) as caught:
        captured(Both(), {"x": torch.ones(3, 2)})
    error = caught.value
    assert [(rung.name, rung.outcome) for rung in error.rungs] == [
        ("export", "refused"),
        ("bake", "refused"),
        ("strict", "refused"),
    ]
    # The bake got past the first predicate: what stops it is the second.
    assert error.rungs[0].place != error.rungs[1].place
    assert "then bake refused at" in error.message
    assert "then strict refused at" in error.message


def test_a_reason_of_sizes_is_told_once() -> None:
    reason = "the code does not take all sizes: not every n satisfies n == 2*(n // 2)"
    refusal = Refusal("specialized-dimension", "m.py", 3, "x", reason, "Ask for others.", "")
    rungs = [Rung(name, "refused", reason, "m.py:3") for name in ("export", "strict")]
    assert (found := RefusedError(refusal, rungs).message).count(reason) == 1
    assert "then strict refused at m.py:3: for the same reason" in found


class FreesItems(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        kept = [x, x + 1]
        if x.sum() > 0:
            del kept[0]  # HERE
        return kept[0]


def test_the_refusal_says_why_a_place_was_not_rewritten() -> None:
    with pytest.raises(RefusedError) as caught:
        captured(FreesItems(), {"x": torch.ones(3, 2)}, "rewrite")
    lines, first = inspect.getsourcelines(FreesItems)
    [line] = [first + i for i, text in enumerate(lines) if "HERE" in text]
    rung = caught.value.rungs[-1]
    assert (rung.name, rung.place.rpartition(":")[2]) == ("rewrite", str(line - 1))
    assert f"line {line} cannot stand in a function of its own" in rung.reason


@pytest.mark.parametrize("row", BRANCHES[::3], ids=lambda row: row.name)
def test_branches_are_rewritten_and_both_paths_are_exact(row: Row) -> None:
    module = row.module()
    found = captured(module, row.a(), "rewrite")
    assert taken(found)[0] == ("export", "refused")
    assert taken(found)[-1] == ("rewrite", "taken")
    assert (os.path.realpath(row.file), row.line) in found.branches
    program = found.program.module()
    for inputs in (row.a(), row.b()):
        assert torch.equal(program(**inputs)["output_0"], module(**inputs))


def test_a_branch_on_sizes_is_rewritten_for_all_of_them() -> None:
    [row] = [row for row in ROWS if row.name == "IfShape"]
    assert ranges_of(captured(row.module(), row.a()).inputs) == {"batch": (1, 5)}
    found = captured(row.module(), row.a(), "rewrite")
    assert taken(found) == [("export", "refused"), ("rewrite", "taken")]
    assert ranges_of(found.inputs) == {"batch": (1, 64)}
    assert found.notes == ()


@pytest.mark.parametrize("name", ["AssertValue", "NumpyHop"])
def test_strict_takes_what_else_is_refused(name: str) -> None:
    assert taken(row(name)) == [("export", "refused"), ("strict", "taken")]


class Endless(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        while x.sum() > -1e9:
            x = x * 0.5
        return x


def test_a_loop_without_end_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_READS", 500)
    with pytest.raises(CaptureError, match=r"(?s)test_ladder.py:\d+.*while x.sum.*no end"):
        captured(Endless(), {"x": torch.ones(3, 2)})


class Named(Tensor):
    """A tensor of a class of its own."""


class Subclassed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.as_subclass(Named).square() + 1


class Caught(nn.Module):
    """Asks for a shape that no row has."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return x.view(-1, 7)
        except RuntimeError:
            return x * 2


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.part = torch.jit.trace(nn.Linear(8, 8), torch.zeros(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.part(x) * 2
        return result


@pytest.mark.parametrize(
    ("module", "rung"), [(Subclassed(), "strict"), (Caught(), "export"), (Traced(), "export")]
)
def test_what_else_a_trace_takes(module: nn.Module, rung: str) -> None:
    x = torch.randn(3, 8)
    found = captured(module, {"x": x})
    assert taken(found)[-1] == (rung, "taken")
    [result] = found.program.module()(x=x).values()
    torch.testing.assert_close(result, torch.as_tensor(module(x)).as_subclass(Tensor))
