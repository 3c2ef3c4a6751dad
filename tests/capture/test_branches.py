"""Both paths of a branch are found, or it is said which was not."""

import pytest
import torch
from control_flow import BRANCHES, Row
from slow_cases import some_slow
from torch import Tensor, nn

from enginecast.capture.control_flow.cover.branches import Branches, cover, find_predicates
from enginecast.capture.inputs.examples import Case
from enginecast.capture.inputs.specs import from_example
from enginecast.capture.python.locations import SourceLocation


def place(row: Row) -> SourceLocation:
    return SourceLocation(row.file, row.line).resolved


def covered(module: nn.Module, example: dict[str, Tensor], *lines: SourceLocation) -> Branches:
    specs = from_example(example, None)
    return cover(module.eval(), specs, [Case("example", example)], lines, 0)


@pytest.mark.parametrize("row", BRANCHES[::3], ids=lambda row: row.name)
def test_the_two_inputs_of_a_row_take_two_paths(row: Row) -> None:
    module = row.module()
    before = type(module).forward.__code__
    found = find_predicates(module, row.a(), [place(row)])
    with found.watched() as paths, torch.no_grad():
        plain = module(**row.a())
        module(**row.b())
    assert [predicate.place.line for predicate in paths.seen] == [row.line]
    assert paths.open() == []
    assert type(module).forward.__code__ is before
    assert torch.equal(plain, module(**row.a()))


@pytest.mark.parametrize(
    "row",
    some_slow(
        BRANCHES,
        [
            "AppendStack",
            "EarlyExit",
            "EarlyReturn",
            "ForRangeTensor",
            "ForShape",
            "IfWithoutElse",
            "InfClamp",
            "Ternary",
        ],
        lambda row: row.name,
    ),
)
def test_the_other_path_is_found(row: Row) -> None:
    found = covered(row.module(), row.a(), place(row))
    assert found.unverified == ()
    assert found.verified == (f"{place(row)[0]}:{row.line}",)
    names = [case.name for case in found.cases]
    # The three experts of one run take both paths already.
    assert names == ([] if row.name == "MoeLoop" else [f"other path at control_flow.py:{row.line}"])


class Rare(nn.Module):
    """A path that no search can guess."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() == 0.123456:  # HERE
            x = x + 1
        return x


class Hidden(nn.Module):
    """A predicate behind a path that is never taken."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() == 0.123456:
            if x.max() > 0:  # HERE
                x = x + 1
            x = x + 1
        return x


@pytest.mark.parametrize(
    ("make", "reported"),
    [(Rare, "`x.sum() == 0.123456` was always False"), (Hidden, "never reached")],
)
def test_a_path_that_is_not_found_is_reported(make: type[nn.Module], reported: str) -> None:
    row = Row(make, dict, dict, "if")
    found = covered(make(), {"x": torch.ones(3, 2)}, place(row))
    assert found.cases == ()
    [line] = found.unverified
    assert line.place == str(place(row))
    assert reported in line.seen


class Raises(nn.Module):
    """What no input can take without an error is not a path to compare."""

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():  # HERE
            raise ValueError("not a number")
        return x + 1


class RaisesBehind(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.isfinite().all():  # HERE
            return x + 1
        where = x.isnan().nonzero()
        raise ValueError(f"not finite at {where}")


@pytest.mark.parametrize("make", [Raises, RaisesBehind])
def test_paths_that_cannot_be_taken_are_not_asked_for(make: type[nn.Module]) -> None:
    row = Row(make, dict, dict, "if")
    found = covered(make(), {"x": torch.ones(3, 2)}, place(row))
    assert (found.unverified, found.cases) == ((), ())
